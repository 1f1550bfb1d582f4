"""Execution of plans on threads: the calling thread sends and receives all requests of a round at the same time."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, TypeVar

from kvpage_server.client.cluster.plan import Failed, NodeRequest, Plan, Round
from kvpage_server.client.errors import Closed, DeadlineExceeded, Disconnected, PageClientError
from kvpage_server.client.wire.connection import Deadline, PageConnection, PagePool, page_pool
from kvpage_server.client.wire.exchange import Conversation

# -- peers -------------------------------------------------------------------------------------------------------------
#
# Connections to each server of a plan, and the servers that get no requests for a while.
#
# A request to a node fails when no byte of it was sent or received for some time; requests to other nodes continue.
# Its node then gets no requests for a while, so that not every call waits for it.

SILENCE = 2.0  # default of `node_deadline`, in seconds
_LEFT_ALONE = (0.5, 8.0)  # seconds for which a silent node gets no requests, at first and at most


class Peers:
    """Pools of connections to several servers, and the recent failures of each server. Threads can share the object."""

    def __init__(
        self, url_of: Callable[[Any], str], options: dict[str, Any], silence: float, known: Iterable[Hashable]
    ) -> None:
        """Create a pool for each of the `known` nodes. Other nodes get theirs at their first use.

        `url_of` returns the URL of a node. `options` are options of redis-py's ConnectionPool. `silence` is the time in
        seconds for which a node may send and receive no byte before its request fails. Raises ValueError for an invalid
        URL or option.
        """
        Deadline(silence)
        self._url_of, self._options, self._silence = url_of, options, silence
        self._pools: dict[tuple[Hashable, bool], PagePool] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._left_alone: dict[Hashable, tuple[float, float, str]] = {}  # end and length of the pause, and the reason
        self.round_trips = 0  # number of requests to nodes that were started
        for node in known:
            self.pool(node, replica=False)

    def close(self) -> None:
        """Close the connections. Calls in progress end with Closed."""
        with self._lock:
            self._closed = True
            for pool in self._pools.values():
                pool.close()

    def unless_closed(self, outcomes: list[Any]) -> list[Any]:
        """Return the outcomes of a round unchanged. Raises Closed if requests failed because the client was closed."""
        if self._closed and any(isinstance(outcome, Failed) for outcome in outcomes):
            raise Closed
        return outcomes

    def silence(self, end: Deadline) -> float:
        """Return the seconds for which a node may send and receive no byte in a call with the deadline `end`.

        It is at most half of the time left, so that time is left for another node.
        """
        return min(self._silence, end.left() / 2)

    def pool(self, node: Hashable, replica: bool) -> PagePool:
        """Return the pool of connections to a node. With `replica`, its connections send READONLY first.

        Raises Closed after `close`, and ValueError for an invalid URL or option.
        """
        with self._lock:
            if self._closed:
                raise Closed
            pool = self._pools.get((node, replica))
            if pool is None:
                more = {"redis_connect_func": _as_replica} if replica else {}
                pool = self._pools[node, replica] = page_pool(self._url_of(node), {**self._options, **more})
            return pool

    def check(self, node: Hashable) -> None:
        """Raise Disconnected if a node gets no requests for some seconds, because its last request exceeded its
        deadline.
        """
        until, _, why = self._left_alone.get(node, (0.0, 0.0, ""))
        if until > time.monotonic():
            raise Disconnected(f"{node} is left alone for a while: {why}")

    def remember(self, node: Hashable, failure: PageClientError | None) -> None:
        """Note the outcome of a request to a node: `failure` is None if it succeeded.

        After a DeadlineExceeded, the node gets no requests for _LEFT_ALONE[0] to _LEFT_ALONE[1] seconds, twice as long
        each time. A reply ends that.
        """
        if not isinstance(failure, DeadlineExceeded | Disconnected):
            self._left_alone.pop(node, None)
            return
        until, pause, _ = self._left_alone.get(node, (0.0, 0.0, ""))
        if until < time.monotonic() and isinstance(failure, DeadlineExceeded):
            pause = min(max(2 * pause, _LEFT_ALONE[0]), _LEFT_ALONE[1])
            why, _, _ = str(failure).partition(";")  # without the remaining time of that call
            self._left_alone[node] = time.monotonic() + pause, pause, why


def _as_replica(connection: PageConnection) -> None:
    """Prepare a new connection for reads from a replica: do redis-py's handshake, and send READONLY."""
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_packed_command(connection._command_packer.pack("READONLY"))
    connection.read_response()


T = TypeVar("T")


class Nodes:
    """Executor of plans on several servers, for threads. Threads can share it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def do(self, plan: Plan[T], end: Deadline) -> T:
        """Execute a plan until `end`, and return its result or raise its exception."""
        silence = self._peers.silence(end)
        try:
            asked = next(plan)
            while True:
                if asked.pause:
                    time.sleep(min(asked.pause, end.left()))
                asked = plan.send(self._peers.unless_closed(self._done(asked, end, silence)))
        except StopIteration as over:
            result: T = over.value
            return result

    def _done(self, asked: Round, end: Deadline, silence: float) -> list[Any]:
        talks = [_NodeRequestRun(node_request) for node_request in asked.requests]
        self._peers.round_trips += len(talks)
        try:
            for talk in talks:
                self._begin(talk, end, silence)
            self._wait_for(talks, end, silence)
        finally:
            for talk in talks:
                talk.close()
        for talk in talks:
            failure = talk.outcome.error if isinstance(talk.outcome, Failed) else None
            self._peers.remember(talk.node_request.node, failure)
        return [talk.outcome for talk in talks]

    def _begin(self, talk: _NodeRequestRun, end: Deadline, silence: float) -> None:
        """Connect the connection of a request if necessary, and send as much of the request as possible without
        waiting.
        """
        try:
            self._peers.check(talk.node_request.node)
            pool = self._peers.pool(talk.node_request.node, talk.node_request.replica)
            talk.take(pool, end.part(talk.node_request.node, silence))
        except PageClientError as error:
            talk.fail(error)

    def _wait_for(self, talks: list[_NodeRequestRun], end: Deadline, silence: float) -> None:
        """Send and receive until all talks are over. A talk fails after `silence` seconds without a byte, and at the
        deadline `end`.
        """
        poller, began = select.poll(), time.monotonic()
        by_fd = {}
        for talk in talks:
            if not talk.over:
                by_fd[talk.fileno] = talk
                poller.register(talk.fileno, talk.events)
        while by_fd:
            left = end.seconds_left()
            if left <= 0:
                for talk in by_fd.values():
                    talk.fail(end.late(talk.node_request.node, f"was not done after {time.monotonic() - began:.3g} s"))
                return
            busy = not all(talk.events for talk in by_fd.values())
            for fd, ready in poller.poll(0 if busy else math.ceil(1000 * min(left, silence / 4))):
                by_fd[fd].go_on(ready)
            now = time.monotonic()
            for fd, talk in list(by_fd.items()):
                if not talk.events and not talk.over:
                    talk.go_on(0)
                if not talk.over and now - talk.moved > silence:
                    talk.fail(end.late(talk.node_request.node, f"was silent for {silence:.3g} s"))
                if talk.over:
                    poller.unregister(fd)
                    del by_fd[fd]
                else:
                    poller.modify(fd, talk.events)


class _NodeRequestRun:
    """The execution of one request to a node, on its connection."""

    def __init__(self, node_request: NodeRequest) -> None:
        self.node_request = node_request
        self.outcome: Any = None
        self.over = False
        self.events = 0  # poll events to wait for
        self.moved = 0.0  # time of the last sent or received byte, in monotonic seconds
        self._pool: PagePool | None = None

    def take(self, pool: PagePool, deadline: Deadline) -> None:
        """Take a connection from the pool, connect it, and begin to send the request. Raises PageClientError."""
        self._connection = pool.lend()
        self._pool = pool
        self._connection.open(deadline)
        self._conversation: Conversation[Any] = self._connection.conversation(self.node_request.request)
        self._steps: Generator[int, int | None, None] = self._conversation.steps()
        self.fileno = self._conversation.sock.fileno()
        self.go_on(None)

    def go_on(self, ready: int | None) -> None:
        """Send and receive as far as possible without waiting. `ready` has the poll events that occurred, None at the
        start.
        """
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
        self.over, self.outcome = True, Failed(error)

    def close(self) -> None:
        """Release the connection. Close it if the exchange is not over."""
        if self._pool is None:
            return
        if hasattr(self, "_conversation"):
            self._connection.close_unless(self._conversation.over)
        self._pool.release(self._connection)
        self._pool = None
