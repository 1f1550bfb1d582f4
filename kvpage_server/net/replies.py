"""The replies of one client in the order of its commands, and push messages between them.

A *streamed* reply (`Stream`) is created step by step. Most streamed replies run in the client's turns, and its next
commands wait. A *background* reply (`Stream.aside`) runs while the next commands run; only their replies wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic_ns

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import Paused, Postponed, is_unqueued
from kvpage_server.commands.dispatch.execute import execute
from kvpage_server.commands.dispatch.run import caller_of, finish_call
from kvpage_server.core import Callee, Command, Parser
from kvpage_server.core.pieces import Piece, borrowed_bytes
from kvpage_server.net.connection_memory import ConnectionMemory
from kvpage_server.net.transport import HIGH_WATER
from kvpage_server.resp import QUEUED, Raw, Reply, Stream, Wait, encode

_SHORT = 64  # estimated bytes of a value in a push message that is not encoded yet
_FEW = 4  # a reply with more pieces is sent before the next command runs
_STEPS = 16  # steps of a streamed reply before its output so far is sent
_END = object()

log = logging.getLogger("kvpage")


class Replies:
    """The replies of one client that were not passed to its transport yet. `pieces` are sent next."""

    __slots__ = (
        "_background",
        "_borrowed",
        "_client",
        "_is_one",
        "_is_whole",
        "_on_added",
        "_steps",
        "_waiting",
        "broken",
        "pieces",
        "pushed",
        "under_way",
    )

    def __init__(self, client: Client, on_added: Callable[[], None]) -> None:
        """Begin without replies. `on_added()` is called after background replies were appended to `pieces`."""
        self._client = client
        self._on_added = on_added
        self._background = deque[_BackgroundReply]()  # background replies, and all replies that follow the first one
        self.pieces: list[Piece] = []
        self.under_way = False  # whether a streamed reply is not complete
        self.broken = False  # whether `pieces` begin within a reply, the start of which was sent
        self._borrowed = 0  # bytes of `pieces` in borrowed memory
        self._steps: Iterator[Reply] | None = None  # the remaining steps of the streamed reply
        self._is_one = False  # whether the steps create a single reply, and not the items of an array
        self._is_whole = False  # whether the steps have to be completed even if the client disconnects
        self.pushed: list[Reply] = []  # push messages that wait for the end of the streamed reply
        self._waiting = 0  # bytes of push messages since `pieces` and `pushed` were last empty

    def add(self, reply: Reply) -> bool:
        """Add the reply of the next command. Return whether the session should send `pieces` before another command."""
        silent, much = self._client.silence, False
        if not self.pieces:
            self._borrowed = 0
        if self._background or (type(reply) is Stream and reply.aside):
            self._start_background_reply(reply, silent != 0)
            self._count_silenced(silent)
            return False
        if type(reply) is Stream:
            self._begin(reply, silent != 0)
        if silent:
            self._count_silenced(silent)
        elif type(reply) is Raw:
            self.pieces.append(reply)
        elif type(reply) is tuple:
            self.pieces += reply
            for piece in reply[:_FEW]:
                if not isinstance(piece, bytes):
                    self._borrowed += piece.size
            much = self._borrowed > HIGH_WATER or len(reply) > _FEW
        elif type(reply) is not Stream:
            before = len(self.pieces)
            encode(reply, self._client.protocol, self.pieces)
            if len(self.pieces) > before + 1:
                self._borrowed += borrowed_bytes(self.pieces[before:])
                much = self._borrowed > HIGH_WATER
        if self.pushed and self._steps is None:
            self._encode_pushed()
        return much

    def _count_silenced(self, silent: int) -> None:
        if silent > 0:
            self._client.silence -= 1
            self._client.update_fast_path()

    def _begin(self, reply: Stream, silent: bool) -> None:
        if reply.length is not None and not silent:
            self.pieces.append(b"*%d\r\n" % reply.length)
        self._steps, self.under_way = _silenced(reply.items) if silent else reply.items, True
        self._is_one, self._is_whole = reply.length is None, bool(reply.whole)

    def _start_background_reply(self, reply: Reply, silent: bool) -> None:
        steps = reply.items if type(reply) is Stream else iter((reply,))
        self._background.append(
            _BackgroundReply(self._client, _silenced(steps) if silent else steps, self._collect_background)
        )
        self._background[-1].go_on()

    def _collect_background(self) -> None:
        """Append completed background replies to `pieces`, up to the first incomplete one."""
        while self._background and self._background[0].is_over:
            self.pieces += self._background.popleft().pieces
        self._on_added()

    @property
    def is_behind(self) -> bool:
        """Whether background replies are incomplete, so that later replies wait."""
        return bool(self._background)

    def end_with(self, last_words: bytes) -> None:
        """Add an error behind all replies: the last output before the connection is closed."""
        if self._background:
            self._start_background_reply(Raw(last_words), False)
        else:
            self.pieces.append(last_words)

    def step(self, deadline: int) -> Wait | bool:
        """Run up to _STEPS steps of the streamed reply, until `deadline` in monotonic nanoseconds.

        Return a Wait if the reply has to wait for an event. Otherwise return whether time is left: then the reply is
        complete, or its output should be sent before the next steps. Raises the exception of a step, which ends the
        reply.
        """
        steps = self._steps
        assert steps is not None
        for _ in range(_STEPS):
            step = next(steps, _END)
            if self._steps is not steps:  # the connection was closed in this step
                return False
            if step is _END:
                self._steps, self.under_way = None, False
                self.broken = self.broken and bool(self.pieces)
                self._encode_pushed()
                break
            if type(step) is Wait:
                return step
            encode(step, self._client.protocol, self.pieces)
            if monotonic_ns() >= deadline:
                return False
            if self._is_one and self.pieces:  # send before the next step frees the borrowed memory
                break
        return True

    def push(self, message: Reply, *, now: bool) -> None:
        """Queue a push message. With `now`, it is sent before the next reply; otherwise after the streamed reply."""
        self.pushed.append(message)
        self._waiting = self.waiting + _size_of(message)
        if now:
            self._encode_pushed()

    @property
    def waiting(self) -> int:
        """Estimated bytes of push messages that were not passed to the transport yet.

        They wait for the end of a streamed reply, or until writes are on disk.
        """
        if not (self.pushed or self.pieces):
            self._waiting = 0
        return self._waiting

    def _encode_pushed(self) -> None:
        for message in self.pushed:
            encode(message, self._client.protocol, self.pieces)
        self.pushed.clear()

    def drop(self) -> Iterator[Reply] | None:
        """Drop all output of a closed connection. Return remaining steps as `break_off` does."""
        self._background.clear()
        self.pushed.clear()
        self.pieces.clear()
        return self.break_off()

    def break_off(self) -> Iterator[Reply] | None:
        """End the streamed reply. Return its remaining steps if they have to run (`Stream.whole`), otherwise None.

        The caller has to complete these steps.
        """
        steps = self._steps if self._is_whole else None
        self._steps, self.under_way = None, False
        return steps


class _BackgroundReply:
    """A reply whose steps run as callbacks of the event loop while the client's next commands run."""

    __slots__ = ("_client", "_steps", "_then", "is_over", "pieces")

    def __init__(self, client: Client, steps: Iterator[Reply], then: Callable[[], None]) -> None:
        self._client = client
        self._steps = steps
        self._then = then
        self.pieces: list[Piece] = []
        self.is_over = False

    def go_on(self) -> None:
        """Run steps until one waits for an event, or ends a turn, or until the reply is complete."""
        try:
            for step in self._steps:
                if type(step) is Wait:
                    step.start(self.go_on)
                    return
                if step == ():
                    asyncio.get_running_loop().call_soon(self.go_on)
                    return
                encode(step, self._client.protocol, self.pieces)
        except Exception:
            log.exception("a reply broke off; so does the connection of %s", self._client.address)
            if not self._client.gone:
                self._client.connection.abort()
            return
        self.is_over = True
        self._then()


def _size_of(message: Reply) -> int:
    """Return the bytes of a push message. A part that is not encoded yet counts as `_SHORT` bytes."""
    if isinstance(message, bytes):
        return len(message)
    return sum(map(_size_of, message)) if isinstance(message, tuple) else _SHORT


def _silenced(steps: Iterator[Reply]) -> Iterator[Reply]:
    """Yield the steps without their output, for a client with CLIENT REPLY OFF or SKIP. A Wait stays as it is."""
    return (step if type(step) is Wait else () for step in steps)


# -- From commands to replies: the core calls fast-path commands, all others go through `execute` ----------------------


class CommandRunner:
    """Runner of one client's received commands. It adds their replies to `replies`.

    It calls `send()` when so many bytes of replies wait that they should be sent before the next command.
    """

    def __init__(
        self, client: Client, parser: Parser, replies: Replies, memory: ConnectionMemory, send: Callable[[], None]
    ) -> None:
        self._client = client
        self._server = client.server
        self._parser = parser
        self._replies = replies
        self._memory = memory
        self._send = send
        self._caller = caller_of(client, parser)
        self._postponed: Command | None = None  # a command that waits for the end of a pause, or for its values
        self._hold: object = None  # keeps the values of the postponed command in memory until it has run
        self._room: object = None  # keeps space for the postponed command until it is called again
        self.is_busy = False  # whether a command is running

    @property
    def is_waiting(self) -> bool:
        """Whether a postponed command waits until it can run."""
        return self._postponed is not None

    def run_pending(self, left: int, deadline: int) -> int | None:
        """Run up to `left` received commands, until `deadline` in monotonic nanoseconds.

        Return how many commands may still run before the deadline, or None if no complete command is left. Raises
        Paused and Postponed for a command that has to wait, ProtocolError, MemoryError.
        """
        client, server, memory = self._client, self._server, self._memory
        if client.fast_path_ok and self._postponed is None and not server.monitors:
            first = None
            if not memory.is_empty:
                first = self._parser.next()
                memory.settle()  # its bytes belong to the store now
            self.is_busy, client.unanswered = True, False
            try:
                made = self._caller.make(
                    self._replies.pieces,
                    self._replies.pushed,
                    server.stats.calls,
                    first=first,
                    ask=server.tiered is not None,
                    slow_from=server.slow_from,
                    left=left,
                    deadline=deadline,
                )
            finally:
                self.is_busy = False
            if made is None:
                return None
            left, command, row, reply, error = made
            if command is None:
                self._send()
                return left
            if row is not None:
                self._finish_fast_path(command, row, reply, error)
                return left
        else:
            command = self._parser.next() if self._postponed is None else self._postponed
            if command is None:
                return None
        self._answer(command)
        return left - 1 if client.finished <= deadline else 0

    def _finish_fast_path(self, command: Command, row: Callee, reply: Reply, error: Exception | None) -> None:
        """Finish a fast-path call that needs a decision, and add its reply.

        Raises Postponed if its values have to be loaded first.
        """
        try:
            finished = finish_call(self._client, row.spec, command, reply, error)
        except Postponed as postponed:
            self._postpone(command, self._parser.received, postponed)
            raise
        if self._replies.add(finished):
            self._send()

    def _answer(self, command: Command) -> None:
        client, memory = self._client, self._memory
        size = self._parser.received if self._postponed is None else memory.postponed
        self._postponed, memory.postponed = None, 0
        queued = 0
        if not memory.is_empty:
            memory.settle()  # its bytes belong to the store now, unless it waits for EXEC
            queued = memory.unqueue() if is_unqueued(command) else 0
        self.is_busy = True
        client.unanswered = client.silence != 0
        self._room = None  # the command takes the space that was reserved for it, or claims it again
        try:
            reply = execute(client, command)
        except (Postponed, Paused) as error:
            self._postpone(command, size, error)
            memory.queue(queued)
            raise
        finally:
            self.is_busy = False
        self._hold = None
        if reply is QUEUED:
            memory.queue(size)
        if self._replies.add(reply) or client in client.server.events.tracking.due:
            self._send()  # with the client's own message before the next reply, as in Redis

    def _postpone(self, command: Command, size: int, why: Postponed | Paused) -> None:
        """Keep a command until it can run. `why` is the reason; its words have `size` bytes in the arena."""
        self._postponed, self._memory.postponed = command, size
        self._hold, self._room = (why.hold or self._hold, why.room) if isinstance(why, Postponed) else (None, None)
        self._memory.settle()

    def drop(self) -> None:
        """Drop the command of a closed connection that has not run yet."""
        self._postponed = self._hold = self._room = None
