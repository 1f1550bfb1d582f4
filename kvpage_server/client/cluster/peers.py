"""The servers of a plan: the connections to each, and which servers are left alone for a while.

An errand fails when none of its bytes has moved for some time; the others go on. Its node is then not asked again for
a while, so that not every call waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from kvpage_server.client.cluster.plan import Failed
from kvpage_server.client.errors import Closed, DeadlineExceeded, Disconnected, PageClientError
from kvpage_server.client.wire.connection import PageConnection, PagePool, page_pool
from kvpage_server.client.wire.deadline import Deadline

SILENCE = 2.0  # seconds
_LEFT_ALONE = (0.5, 8.0)  # seconds for which a node is not asked, at first and at most


class Peers:
    """Can be shared between threads."""

    def __init__(
        self, url_of: Callable[[Any], str], options: dict[str, Any], silence: float, known: Iterable[Hashable]
    ) -> None:
        """`options` are for each node's connections, as redis-py's ConnectionPool takes them; some nodes are `known`.

        Raises ValueError for a URL or an option that isn't one."""
        Deadline(silence)
        self._url_of, self._options, self._silence = url_of, options, silence
        self._pools: dict[tuple[Hashable, bool], PagePool] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._left_alone: dict[Hashable, tuple[float, float, str]] = {}  # until when, for how long, and why
        self.round_trips = 0  # that were begun
        for node in known:
            self.pool(node, replica=False)

    def close(self) -> None:
        """Close the connections. What is under way ends with Closed."""
        with self._lock:
            self._closed = True
            for pool in self._pools.values():
                pool.close()

    def unless_closed(self, outcomes: list[Any]) -> list[Any]:
        """The outcomes of a round. Raises Closed if errands failed because the client was closed."""
        if self._closed and any(isinstance(outcome, Failed) for outcome in outcomes):
            raise Closed
        return outcomes

    def silence(self, end: Deadline) -> float:
        """The seconds for which a node may be silent in a call. They leave time to ask another."""
        return min(self._silence, end.left() / 2)

    def pool(self, node: Hashable, replica: bool) -> PagePool:
        """Connections to a node. Those to a `replica` ask it to answer reads. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed
            pool = self._pools.get((node, replica))
            if pool is None:
                more = {"redis_connect_func": _as_replica} if replica else {}
                pool = self._pools[node, replica] = page_pool(self._url_of(node), {**self._options, **more})
            return pool

    def check(self, node: Hashable) -> None:
        """Raises Disconnected if the node is left alone."""
        until, _, why = self._left_alone.get(node, (0.0, 0.0, ""))
        if until > time.monotonic():
            raise Disconnected(f"{node} is left alone for a while: {why}")

    def remember(self, node: Hashable, failure: PageClientError | None) -> None:
        """Note whether an errand to a node failed."""
        if not isinstance(failure, DeadlineExceeded | Disconnected):
            self._left_alone.pop(node, None)
            return
        until, pause, _ = self._left_alone.get(node, (0.0, 0.0, ""))
        if until < time.monotonic() and isinstance(failure, DeadlineExceeded):
            pause = min(max(2 * pause, _LEFT_ALONE[0]), _LEFT_ALONE[1])
            why, _, _ = str(failure).partition(";")  # how much time that call had left is of no interest to others
            self._left_alone[node] = time.monotonic() + pause, pause, why


def _as_replica(connection: PageConnection) -> None:
    """Prepare a new connection for reads from a replica."""
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_packed_command(connection._command_packer.pack("READONLY"))
    connection.read_response()
