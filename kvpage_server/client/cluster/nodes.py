"""The servers of a plan, and the waiting for them: for threads. All errands of a round are done at once, by one thread.

A node has a deadline of its own, for a silence: when no byte of an errand has moved for so long it has failed, and the
others go on. A node that failed so, or could not be reached, is not asked again for a while, so that not every call
waits for it.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, TypeVar

from redis.connection import ConnectionPool

from kvpage_server.client.cluster.plan import Errand, Failed, Plan, Round
from kvpage_server.client.connection import PageConnection, lend, page_pool
from kvpage_server.client.deadline import Deadline
from kvpage_server.client.errors import DeadlineExceeded, Disconnected, PageClientError
from kvpage_server.client.exchange import Conversation

T = TypeVar("T")
SILENCE = 2.0  # seconds
_SHUNNED = (0.5, 8.0)  # seconds for which a node is not asked, at first and at most


class Nodes:
    """Connections to every node of a store that has several. Can be shared between threads."""

    def __init__(
        self, url_of: Callable[[Any], str], options: dict[str, Any], silence: float, known: Iterable[Hashable]
    ) -> None:
        """`options` are for each node's connections, as redis-py's ConnectionPool takes them; some nodes are `known`.

        Raises ValueError for a URL or an option that isn't one."""
        Deadline(silence)
        self._url_of, self._options, self._silence = url_of, options, silence
        self._pools: dict[tuple[Hashable, bool], ConnectionPool] = {}
        self._lock = threading.Lock()
        self._shunned: dict[Hashable, tuple[float, float, str]] = {}  # until when, for how long, and why
        self.round_trips = 0  # that were begun
        for node in known:
            self._pool(node, replica=False)

    def close(self) -> None:
        """Close the connections."""
        for pool in self._pools.values():
            pool.disconnect()

    def do(self, plan: Plan[T], end: Deadline) -> T:
        """Carry out a plan. Raises what it raises."""
        silence = min(self._silence, end.left() / 2)  # which leaves time to ask another
        try:
            asked = next(plan)
            while True:
                if asked.pause:
                    time.sleep(min(asked.pause, end.left()))
                asked = plan.send(self._done(asked, end, silence))
        except StopIteration as over:
            result: T = over.value
            return result

    def _done(self, asked: Round, end: Deadline, silence: float) -> list[Any]:
        talks = [_Talk(errand) for errand in asked.errands]
        self.round_trips += len(talks)
        try:
            for talk in talks:
                self._begin(talk, end, silence)
            self._wait_for(talks, end, silence)
        finally:
            for talk in talks:
                talk.close()
        for talk in talks:
            self._remember(talk)
        return [talk.outcome for talk in talks]

    def _begin(self, talk: _Talk, end: Deadline, silence: float) -> None:
        """Connect, if need be, and send what can be sent without waiting."""
        node = talk.errand.node
        until, _, why = self._shunned.get(node, (0.0, 0.0, ""))
        if until > time.monotonic():
            talk.fail(Disconnected(f"{node} is left alone for a while: {why}"))
            return
        try:
            pool = self._pool(node, talk.errand.replica)
            talk.take(lend(pool), pool, Deadline(min(silence, end.left())))
        except PageClientError as error:
            talk.fail(error)

    def _wait_for(self, talks: list[_Talk], end: Deadline, silence: float) -> None:
        """Go on with them until all are over."""
        poller = select.poll()
        by_fd = {}
        for talk in talks:
            if not talk.over:
                by_fd[talk.fileno] = talk
                poller.register(talk.fileno, talk.events)
        while by_fd:
            left = end.seconds_left()
            if left <= 0:
                for talk in by_fd.values():
                    talk.fail(end.exceeded())
                return
            busy = not all(talk.events for talk in by_fd.values())
            for fd, ready in poller.poll(0 if busy else math.ceil(1000 * min(left, silence / 4))):
                by_fd[fd].go_on(ready)
            now = time.monotonic()
            for fd, talk in list(by_fd.items()):
                if not talk.events and not talk.over:
                    talk.go_on(0)
                if not talk.over and now - talk.moved > silence:
                    talk.fail(DeadlineExceeded(f"{talk.errand.node} was silent for {silence:g} s"))
                if talk.over:
                    poller.unregister(fd)
                    del by_fd[fd]
                else:
                    poller.modify(fd, talk.events)

    def _pool(self, node: Hashable, replica: bool) -> ConnectionPool:
        with self._lock:
            pool = self._pools.get((node, replica))
            if pool is None:
                more = {"redis_connect_func": _as_replica} if replica else {}
                pool = self._pools[node, replica] = page_pool(self._url_of(node), {**self._options, **more})
            return pool

    def _remember(self, talk: _Talk) -> None:
        """Whether a node is to be left alone for a while."""
        node = talk.errand.node
        failure = talk.outcome.error if isinstance(talk.outcome, Failed) else None
        if not isinstance(failure, DeadlineExceeded | Disconnected):
            self._shunned.pop(node, None)
            return
        until, pause, _ = self._shunned.get(node, (0.0, 0.0, ""))
        if until < time.monotonic() and isinstance(failure, DeadlineExceeded):
            pause = min(max(2 * pause, _SHUNNED[0]), _SHUNNED[1])
            self._shunned[node] = time.monotonic() + pause, pause, str(failure)


def _as_replica(connection: PageConnection) -> None:
    """What a new connection begins with that reads from a replica."""
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_packed_command(connection._command_packer.pack("READONLY"))
    connection.read_response()


class _Talk:
    """An errand and its connection."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.outcome: Any = None
        self.over = False
        self.events = 0  # to wait for
        self.moved = 0.0  # when the last byte did
        self._pool: ConnectionPool | None = None

    def take(self, connection: PageConnection, pool: ConnectionPool, deadline: Deadline) -> None:
        """Begin on a connection. Raises what connecting can raise."""
        self._pool, self._connection = pool, connection
        connection.open(deadline)
        self._conversation: Conversation[Any] = connection.conversation(self.errand.request)
        self._steps: Generator[int, int | None, None] = self._conversation.steps()
        self.fileno = self._conversation.sock.fileno()
        self.go_on(None)

    def go_on(self, ready: int | None) -> None:
        """As far as that is possible without waiting."""
        self.moved = time.monotonic()
        try:
            self.events = self._steps.send(ready)
        except StopIteration:
            self.over = True
            try:
                self.outcome = self._conversation.result()
            except PageClientError as error:
                self.outcome = Failed(error)
        except PageClientError as error:
            self.fail(error)

    def fail(self, error: PageClientError) -> None:
        """It came to nothing."""
        self.over, self.outcome = True, Failed(error)

    def close(self) -> None:
        """Give the connection back: for others to use if nothing is left of this errand on it."""
        if self._pool is None:
            return
        if hasattr(self, "_conversation"):
            self._connection.close_unless(self._conversation.over)
        self._pool.release(self._connection)  # type: ignore[arg-type]
        self._pool = None
