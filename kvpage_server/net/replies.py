"""The replies of a client in their order: complete ones, streamed ones, and pushes between them."""

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
from kvpage_server.core.pieces import Piece, lent
from kvpage_server.net.connection_memory import ConnectionMemory
from kvpage_server.net.transport import HIGH_WATER
from kvpage_server.resp import QUEUED, Raw, Reply, Stream, Wait, encode

_SHORT = 64  # estimated bytes of a value in a message that is not encoded yet
_FEW = 4  # pieces: a reply with no more waits for the next one, and both are sent together
_STEPS = 16  # steps of a reply before its output so far is sent
_END = object()

log = logging.getLogger("kvpage")


class Replies:
    """Replies of one client. `pieces` are sent next."""

    __slots__ = (
        "_aside",
        "_borrowed",
        "_came",
        "_client",
        "_is_one",
        "_is_whole",
        "_steps",
        "_waiting",
        "broken",
        "pieces",
        "pushed",
        "under_way",
    )

    def __init__(self, client: Client, came: Callable[[], None]) -> None:
        """Begin without replies. `came` is called after a background reply has added to `pieces`."""
        self._client = client
        self._came = came
        self._aside = deque[_BackgroundReply]()  # background replies, and the replies behind them
        self.pieces: list[Piece] = []
        self.under_way = False  # a streamed reply is not complete
        self.broken = False  # `pieces` begin within a reply, and the part before them was sent
        self._borrowed = 0  # bytes of `pieces` in borrowed memory
        self._steps: Iterator[Reply] | None = None  # the remaining steps of the streamed reply
        self._is_one = False  # the steps make a single reply, not the items of an array
        self._is_whole = False  # complete the steps even if the client disconnects
        self.pushed: list[Reply] = []  # messages that wait for the end of the streamed reply
        self._waiting = 0  # bytes of messages since `pieces` and `pushed` were last empty

    def add(self, reply: Reply) -> bool:
        """Add a command's reply. Return whether so much waits that it should be sent now."""
        silent, much = self._client.silence, False
        if not self.pieces:
            self._borrowed = 0
        if self._aside or (type(reply) is Stream and reply.aside):
            self._start_background_reply(reply, silent != 0)
            self._hush(silent)
            return False
        if type(reply) is Stream:
            self._begin(reply, silent != 0)
        if silent:
            self._hush(silent)
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
                self._borrowed += lent(self.pieces[before:])
                much = self._borrowed > HIGH_WATER
        if self.pushed and self._steps is None:
            self._encode_pushed()
        return much

    def _hush(self, silent: int) -> None:
        if silent > 0:
            self._client.silence -= 1
            self._client.update_fast_path()

    def _begin(self, reply: Stream, silent: bool) -> None:
        if reply.length is not None and not silent:
            self.pieces.append(b"*%d\r\n" % reply.length)
        self._steps, self.under_way = _silenced(reply.items) if silent else reply.items, True
        self._is_one, self._is_whole = reply.length is None, reply.whole

    def _start_background_reply(self, reply: Reply, silent: bool) -> None:
        steps = reply.items if type(reply) is Stream else iter((reply,))
        self._aside.append(_BackgroundReply(self._client, _silenced(steps) if silent else steps, self._gather))
        self._aside[-1].go_on()

    def _gather(self) -> None:
        """Append the completed background replies, in order."""
        while self._aside and self._aside[0].is_over:
            self.pieces += self._aside.popleft().pieces
        self._came()

    @property
    def is_behind(self) -> bool:
        """Whether background replies must be sent first."""
        return bool(self._aside)

    def end_with(self, last_words: bytes) -> None:
        """Add the last error of a connection, which is not the reply to a command."""
        if self._aside:
            self._start_background_reply(Raw(last_words), False)
        else:
            self.pieces.append(last_words)

    def step(self, deadline: int) -> Wait | bool:
        """Run steps of the current reply. Return a Wait, or whether time is left.

        Raises the exception of a step, which ends the reply.
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
        """Queue a push: now, or after the reply that is in progress."""
        self.pushed.append(message)
        self._waiting = self.waiting + _size_of(message)
        if now:
            self._encode_pushed()

    @property
    def waiting(self) -> int:
        """Bytes of messages that wait for a reply to end, or for the disk."""
        if not (self.pushed or self.pieces):
            self._waiting = 0
        return self._waiting

    def _encode_pushed(self) -> None:
        for message in self.pushed:
            encode(message, self._client.protocol, self.pieces)
        self.pushed.clear()

    def drop(self) -> Iterator[Reply] | None:
        """Drop all output of a closed connection. Return the steps that must be completed."""
        self._aside.clear()
        self.pushed.clear()
        self.pieces.clear()
        return self.break_off()

    def break_off(self) -> Iterator[Reply] | None:
        """Stop the streamed reply. Return the steps that must be completed, if there are any."""
        steps = self._steps if self._is_whole else None
        self._steps, self.under_way = None, False
        return steps


class _BackgroundReply:
    """A reply whose steps run while the next commands of the client run."""

    __slots__ = ("_client", "_steps", "_then", "is_over", "pieces")

    def __init__(self, client: Client, steps: Iterator[Reply], then: Callable[[], None]) -> None:
        self._client = client
        self._steps = steps
        self._then = then
        self.pieces: list[Piece] = []
        self.is_over = False

    def go_on(self) -> None:
        """Run steps until one waits or yields its turn, or the reply is complete."""
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
            self._client.connection.abort()
            return
        self.is_over = True
        self._then()


def _size_of(message: Reply) -> int:
    """Return the bytes of a message. Long values in it are encoded already, others count as `_SHORT`."""
    if isinstance(message, bytes):
        return len(message)
    return sum(map(_size_of, message)) if isinstance(message, tuple) else _SHORT


def _silenced(steps: Iterator[Reply]) -> Iterator[Reply]:
    """Yield the same steps without their replies, for a client that asked for silence."""
    return (step if type(step) is Wait else () for step in steps)


# -- From commands to replies: the core calls fast-path commands, all others go through `execute` ----------------------


class CommandRunner:
    """The command runner of one client. It calls `send` when many bytes of replies wait."""

    def __init__(
        self, client: Client, parser: Parser, replies: Replies, load: ConnectionMemory, send: Callable[[], None]
    ) -> None:
        self._client = client
        self._server = client.server
        self._parser = parser
        self._replies = replies
        self._load = load
        self._send = send
        self._caller = caller_of(client, parser)
        self._postponed: Command | None = None  # it waits for the end of a pause, or for its values
        self._hold: object = None  # keeps the command's values in memory until it has run
        self.is_busy = False  # a command is being run

    @property
    def is_waiting(self) -> bool:
        """Whether a command waits until it can run."""
        return self._postponed is not None

    def run_pending(self, left: int, deadline: int) -> int | None:
        """Run up to `left` commands, until `deadline` in nanoseconds of the monotonic clock.

        Return how many commands may still run before the deadline, or None if no complete command is left. Raises
        Paused, Postponed, ProtocolError, MemoryError.
        """
        client, server, load = self._client, self._server, self._load
        if client.fast_path_ok and self._postponed is None and not server.monitors:
            first = None
            if not load.is_nothing:
                first = self._parser.next()
                load.settle()  # its bytes belong to the store now
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
                self._take_over(command, row, reply, error)
                return left
        else:
            command = self._parser.next() if self._postponed is None else self._postponed
            if command is None:
                return None
        self._answer(command)
        return left - 1 if client.finished <= deadline else 0

    def _take_over(self, command: Command, row: Callee, reply: Reply, error: Exception | None) -> None:
        """Turn the result of a call on the fast path into replies."""
        try:
            finished = finish_call(self._client, row.what, command, reply, error)
        except Postponed as postponed:
            self._put_off(command, self._parser.received, postponed)
            raise
        if self._replies.add(finished):
            self._send()

    def _answer(self, command: Command) -> None:
        client, load = self._client, self._load
        theirs = self._parser.received if self._postponed is None else load.postponed
        self._postponed, load.postponed = None, 0
        queued = 0
        if not load.is_nothing:
            load.settle()  # its bytes belong to the store now, unless it waits for EXEC
            queued = load.unqueue() if is_unqueued(command) else 0
        self.is_busy = True
        client.unanswered = client.silence != 0
        try:
            reply = execute(client, command)
        except (Postponed, Paused) as error:
            self._put_off(command, theirs, error)
            load.queue(queued)
            raise
        finally:
            self.is_busy = False
        self._hold = None
        if reply is QUEUED:
            load.queue(theirs)
        if self._replies.add(reply):
            self._send()

    def _put_off(self, command: Command, size: int, why: Postponed | Paused) -> None:
        """Keep a command, which has `size` bytes in the arena, until it can run."""
        self._postponed, self._load.postponed = command, size
        self._hold = (why.hold or self._hold) if isinstance(why, Postponed) else None
        self._load.settle()

    def drop(self) -> None:
        """Drop the pending command of a closed connection."""
        self._postponed = self._hold = None
