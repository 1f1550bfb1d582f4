"""The session of a client: it receives and parses bytes, runs the commands, and sends their replies in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from time import monotonic, monotonic_ns

from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.dispatch.checks import Paused, Postponed
from kvpage_server.commands.steps import freed
from kvpage_server.core import Limits, Parser, ProtocolError, Scratch
from kvpage_server.core.protocol import RECEIVE_AGAIN_FROM, RECEIVE_TURN
from kvpage_server.net import connection_memory
from kvpage_server.net.connection_memory import ConnectionMemory
from kvpage_server.net.replies import CommandRunner, Replies
from kvpage_server.net.run_queue import TURN, RunQueue
from kvpage_server.net.transport import Ends, Transport
from kvpage_server.resp import Reply, Wait


class SessionState(Enum):
    """A state of a session, and the events that lead to others. Only a `READING` session runs commands.

        READING  receives and runs commands
                 LEFT_OVER -> QUEUED; UNREAD -> CROWDED; HELD_BACK -> PAUSED
        QUEUED   has more commands to run, and waits for its turn in the run queue
                 TURN -> READING
        CROWDED  too much output is unsent, because the client reads too slowly
                 DRAINED -> READING
        PAUSED   a command waits for the end of CLIENT PAUSE
                 PAUSE_OVER -> QUEUED
        WAITING  a command or a reply waits for an event, for example for a load from disk
                 ALL_OCCURRED -> READING
        GONE     the connection has ended; final

    MUST_WAIT leads to WAITING from every state but GONE, and LOST leads to GONE from every state. TURN, DRAINED and
    PAUSE_OVER may occur in any state; they change nothing in a state without a row for them. A session that is WAITING
    or GONE keeps its state when its command is HELD_BACK. Any other event is an error.

    After QUIT or a protocol error, a session runs no more commands in any state. It sends the remaining replies before
    it closes.
    """

    READING = auto()
    QUEUED = auto()
    CROWDED = auto()
    PAUSED = auto()
    WAITING = auto()
    GONE = auto()


class SessionEvent(Enum):
    """An event that may change a session's state."""

    LEFT_OVER = auto()  # the turn is over, and commands or steps of a reply remain
    TURN = auto()  # the run queue has reached the session
    UNREAD = auto()  # too many bytes wait to be sent
    DRAINED = auto()  # the waiting output has fallen below the limit
    HELD_BACK = auto()  # a command has to wait for the end of CLIENT PAUSE
    PAUSE_OVER = auto()
    MUST_WAIT = auto()  # the session waits for one more event
    ALL_OCCURRED = auto()  # all events that the session has waited for have occurred
    LOST = auto()  # the connection has ended


READING, QUEUED, CROWDED, PAUSED, WAITING, GONE = SessionState

_ALWAYS = {SessionEvent.MUST_WAIT: WAITING, SessionEvent.LOST: GONE}
MOVES: dict[SessionState, dict[SessionEvent, SessionState]] = {
    READING: {SessionEvent.LEFT_OVER: QUEUED, SessionEvent.UNREAD: CROWDED, SessionEvent.HELD_BACK: PAUSED, **_ALWAYS},
    QUEUED: {SessionEvent.TURN: READING, **_ALWAYS},
    CROWDED: {SessionEvent.DRAINED: READING, **_ALWAYS},
    PAUSED: {SessionEvent.PAUSE_OVER: QUEUED, **_ALWAYS},
    WAITING: {SessionEvent.ALL_OCCURRED: READING, SessionEvent.HELD_BACK: WAITING, **_ALWAYS},
    GONE: dict.fromkeys((SessionEvent.ALL_OCCURRED, SessionEvent.HELD_BACK, *_ALWAYS), GONE),
}
_HARMLESS = (SessionEvent.TURN, SessionEvent.DRAINED, SessionEvent.PAUSE_OVER)


def after(state: SessionState, event: SessionEvent) -> SessionState:
    """Return the state that follows `state` after an event.

    Raises RuntimeError for an event that cannot occur in `state`.
    """
    to = MOVES[state].get(event)
    if to is None:
        if event not in _HARMLESS:
            raise RuntimeError(f"{event.name} cannot happen while {state.name}")
        return state
    return to


# -- The session -------------------------------------------------------------------------------------------------------


MOST_COMMANDS = 256  # commands, or calls of `Replies.step`, in a turn

log = logging.getLogger("kvpage")


class Session:
    """Session of one client. `open_transport` creates its transport. `SessionState` describes its states."""

    def __init__(
        self,
        server: Server,
        loop: asyncio.AbstractEventLoop,
        run_queue: RunQueue,
        scratch: Scratch,
        ends: Ends,
        open_transport: Callable[[Session], Transport],
    ) -> None:
        self._server = server
        self._loop = loop
        self._run_queue = run_queue
        self._descriptor = ends.descriptor
        self._events, self._tracking = server.events, server.events.tracking
        self._parser = Parser(
            server.keyspace.arena,
            scratch,
            Limits(max_bulk=server.config.proto_max_bulk_len, max_command=server.config.client_query_buffer_limit),
            connection_memory.hashed_commands(server),
        )
        self._state = READING
        self._ending = False  # whether no more commands are run
        self._pause_end: asyncio.TimerHandle | None = None
        self._awaited = 0  # number of events for which the session is WAITING
        self._is_held = False  # whether one of them is the end of the messages to tracking clients
        tiered = server.tiered
        # The write-behind queue, if replies have to wait until changes are on disk (`appendfsync always`).
        self._write_behind = tiered.behind if tiered is not None and tiered.behind.mode == "always" else None
        self._position_before = 0  # position of the write-behind queue at the start of the turn
        self._not_durable = ""  # the error of a commit that had changes of the client; empty if there is none
        self.client = Client(
            server,
            id=next(server.client_ids),
            address=ends.address,
            local_address=ends.local_address,
            descriptor=ends.descriptor,
            connection=self,
        )
        self._replies = Replies(self.client, self._background_reply_added)
        self._memory = ConnectionMemory(self.client, self._parser)
        self._runner = CommandRunner(self.client, self._parser, self._replies, self._memory, self._flush)
        default = server.users.default
        self.client.become(default if default.no_password and default.enabled else None)
        server.clients[self.client.id] = self.client
        server.stats.connections += 1
        self._transport = open_transport(self)

    def _move(self, event: SessionEvent) -> bool:
        """Change the state after an event. Return whether the new state differs from the old one."""
        before = self._state
        self._state = after(before, event)
        return self._state is not before

    # -- the transport's side --------------------------------------------------------------------------------------

    def readable(self) -> None:
        """Receive from the socket, at most about RECEIVE_TURN bytes, and run the complete commands."""
        if self._state is not READING:
            self._transport.ignore()
            return
        taken = 0
        while True:
            try:
                count = self._parser.receive(self._descriptor)
            except OSError:
                count = 0
            except MemoryError:
                self._out_of_memory()
                return
            if count <= 0:
                if not count:
                    self.abort()
                return
            self._server.stats.bytes_in += count
            self.client.active = monotonic()
            if not self._memory.is_empty and self._parser.is_partial:  # the command is not complete yet
                self._memory.account()
            else:
                self._run()
            taken += count
            if count < RECEIVE_AGAIN_FROM or taken >= RECEIVE_TURN or self._state is not READING:
                return

    def received(self, data: bytes) -> None:
        """Parse bytes that the transport has received and decrypted, and run complete commands."""
        if self._state is GONE:
            return
        self._server.stats.bytes_in += len(data)
        self.client.active = monotonic()
        try:
            self._parser.feed(data)
        except MemoryError:
            self._out_of_memory()
            return
        if self._state is READING:
            self._run()
        elif not self._transport.ignored:
            self._transport.ignore()

    def drained(self) -> None:
        """Continue after the unsent output has fallen to HIGH_WATER bytes or to nothing, if the session was CROWDED."""
        self.client.finished = monotonic_ns()
        if self._move(SessionEvent.DRAINED):
            self._run()
        else:
            self._memory.account()

    def lost(self) -> None:
        """Close the session after its connection has ended.

        This may happen while the caller iterates over clients, so a later callback removes the client from the server.
        """
        self._release()
        self._loop.call_soon(self._forget_client)

    def _release(self) -> None:
        """Release all resources of the session. A second call does nothing."""
        if not self._move(SessionEvent.LOST):
            return
        self._ending = self.client.gone = True
        self.client.fast_path_ok = False
        self.client.transaction = None
        self._run_queue.finish(self._replies.drop())
        self._run_queue.finish(freed(self._parser.give_up()))
        if self.client.tickets:
            self._run_queue.finish(freed(self.client.take_back_all()))
        self.client.drop_area()
        self._cancel_pause_end()
        self._runner.drop()
        self._memory.drop()

    def _forget_client(self) -> None:
        """Remove the client from the server, and break reference cycles, because the garbage collector rarely runs."""
        self._server.stats.bytes_out += self._transport.bytes_out
        self._server.forget(self.client)
        del self._transport, self._runner, self._replies, self.client.connection

    # -- the client's interface: `commands.context.Connection` documents these methods ---------------------------------

    def push(self, message: Reply) -> None:
        if self._ending:
            return
        now = not (self._runner.is_busy or self._replies.under_way)
        self._replies.push(message, now=now)
        if now:
            self._flush()
        if self._events.acting is not self.client and (self.outgoing or not self._memory.is_empty):
            self._memory.account()

    def close(self) -> None:
        if not self._ending:
            self._ending = True
            self._loop.call_soon(self._close)

    def _close(self) -> None:
        self._flush()
        self._run_queue.finish(self._replies.break_off())
        if self._replies.is_behind:
            self._transport.ignore()
        elif self._state is not WAITING:  # while it is WAITING, the last reply has not been sent
            self._transport.close()

    def abort(self, error: str = "") -> None:
        awaits_others = (
            self._state is not READING or self._replies.is_behind or self._replies.under_way or self.outgoing
        )
        if error and not (awaits_others or self._parser.is_idle) and self._parser.is_partial:
            self._transport.write([b"-%b\r\n" % error.encode()])
        self._release()
        self._transport.abort()

    def resume(self) -> None:
        self._cancel_pause_end()
        if self.paused and self._transport.peer_has_left():
            self.abort()  # as in Valkey, whose clients lose a waiting command when they disconnect
        elif self._move(SessionEvent.PAUSE_OVER):
            self._run_queue.join(self)

    def renew(self) -> None:
        self._transport.renew()

    def pass_descriptors(self, reply: bytes, descriptors: Sequence[int]) -> bool:
        replies = self._replies
        if replies.pieces or replies.is_behind or replies.under_way or self.client.durable_before_reply:
            return False
        return self._transport.pass_descriptors(reply, descriptors)

    def trust(self, trusted: bool) -> None:
        self._parser.trust(trusted)

    @property
    def paused(self) -> bool:
        return self._state is PAUSED

    @property
    def sent(self) -> int:
        return self._transport.bytes_out

    @property
    def incoming(self) -> int:
        return self._parser.held

    @property
    def running(self) -> int:
        if self._replies.under_way:
            return self._parser.taken_bytes + self.client.read_ahead
        return self._parser.taken_bytes if self._runner.is_waiting else 0

    @property
    def outgoing(self) -> int:
        return self._transport.queued + self._replies.waiting

    @property
    def unread(self) -> int:
        return max(self._transport.queued, self._transport.largest) + self._replies.waiting

    # -- commands --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run received commands for one turn at most, and send their replies. Join the run queue if commands remain."""
        client, transport, replies, memory = self.client, self._transport, self._replies, self._memory
        if self._tracking.is_under_way:
            self._hold(first=True)
            return
        left, deadline = MOST_COMMANDS, monotonic_ns() + TURN
        stopped = False  # whether the loop ended because too much output was unsent; after the flush, it may be less
        self._events.acting = client
        if self._write_behind is not None:
            self._position_before = self._write_behind.position
        try:
            while left and self._state is READING and not self._ending:
                if transport.queued:
                    memory.account()  # before the next command, so that sessions in the same round count this output
                    stopped = self._output_is_full
                    if stopped:
                        break
                if replies.under_way:
                    left = left - 1 if self._continue(deadline) else 0
                    continue
                more = self._runner.run_pending(left, deadline)
                if more is None:
                    break
                left = more
            self._flush()
            if (
                not (memory.is_empty and self._parser.is_idle and client.transaction is None)
                or transport.queued
                or replies.under_way
                or client.kept != memory.kept
            ):
                memory.account()
        except (ProtocolError, Paused, Postponed, MemoryError) as error:
            self._handle_error(error)
            memory.account()
            return
        except Exception:
            log.exception("the connection of %s cannot go on", self.client.address)
            self.abort()
            return
        finally:
            self._events.acting = None
        if self._state is not READING:
            return
        if self._ending:
            self._close()
        elif transport.queued and self._output_is_full:
            self._move(SessionEvent.UNREAD)
        elif stopped or not left:
            self._wait_for_a_turn()
        elif transport.ignored:
            transport.attend()

    def _handle_error(self, error: Exception) -> None:
        """Handle an exception of `run_pending`: end with a protocol error or a lack of memory; let a command wait."""
        error.__traceback__ = None  # its frames refer to it, and keep the command's words in memory
        if isinstance(error, ProtocolError):
            self._end_with(b"-ERR Protocol error: %b\r\n" % str(error).encode("utf-8", "surrogateescape"))
        elif isinstance(error, Paused):
            self._wait_for_the_end_of_the_pause()
        elif isinstance(error, Postponed):
            self._flush()
            self._wait(error.wait)
        else:
            self._out_of_memory()

    def _out_of_memory(self) -> None:
        self._server.seldom.log(logging.WARNING, "no memory for what %s sends: closed", self.client.address)
        self._end_with(b"-OOM the system has no memory left for this value\r\n")

    def _end_with(self, last_words: bytes) -> None:
        """Send an error, and close the connection, because the start of the next command is unknown."""
        self._replies.end_with(last_words)
        self._ending = True
        self._close()

    def _background_reply_added(self) -> None:
        """Send completed background replies. Close the connection if the session is ending."""
        if self._state is not GONE:
            (self._close if self._ending else self._flush)()

    def _wait_for_a_turn(self) -> None:
        self._move(SessionEvent.LEFT_OVER)
        self._run_queue.join(self)

    def take_turn(self) -> None:
        """Run the remaining commands for one turn, if the session is QUEUED."""
        if self._move(SessionEvent.TURN):
            self._run()

    def _wait_for_the_end_of_the_pause(self) -> None:
        self._flush()
        self._move(SessionEvent.HELD_BACK)
        pause = self._server.pause
        if pause is not None:
            self._cancel_pause_end()
            self._pause_end = self._loop.call_later(max(0, pause.ends - monotonic()), self.resume)

    def _cancel_pause_end(self) -> None:
        if self._pause_end is not None:
            self._pause_end.cancel()
            self._pause_end = None

    def _wait(self, wait: Wait) -> None:
        """Wait for one more event, such as a load from disk. The session continues after all its events."""
        self._move(SessionEvent.MUST_WAIT)
        if self._state is GONE:  # a send before this call may have failed
            return
        self._awaited += 1
        try:
            wait.start(self._advance)
        except MemoryError:
            self._server.seldom.log(logging.ERROR, "there is no memory for what %s asks for", self.client.address)
            self.abort()

    def _advance(self) -> None:
        """Count an event that has occurred. After the last one, send the replies and continue.

        If the client's changes cannot be written to disk, send an error instead of the replies, and close the
        connection.
        """
        self._awaited -= 1
        if self._awaited or not self._move(SessionEvent.ALL_OCCURRED):
            return
        if self._not_durable:
            error = b"-MISCONF Errors writing to disk: %b\r\n" % self._not_durable.encode()
            self._replies.pieces = [] if self._replies.broken else [error]
            self.client.durable_before_reply, self._not_durable = 0, ""
            self._ending = True
        self._flush()
        if self._state is not READING:
            return
        if self._ending:
            self._transport.close()
        else:
            self._wait_for_a_turn()

    def _continue(self, deadline: int) -> bool:
        """Run steps of the streamed reply, and send its output.

        Return False if the turn is over, or if the reply has to wait.
        """
        try:
            done = self._replies.step(deadline)
        except Exception:
            log.exception("a reply broke off; so does the connection of %s", self.client.address)
            self.abort()
            return False
        self._flush()
        if isinstance(done, Wait):
            self._wait(done)
            return False
        return done

    @property
    def _output_is_full(self) -> bool:
        """Whether so much output is unsent that no more commands of the client should run.

        A client may send a long pipeline before it reads the first reply. So as many bytes may be unsent as a long
        reply looks up. A value counts whole until the last output is sent, because it is in memory until then.
        """
        transport = self._transport
        return transport.queued > 0 and max(transport.queued, transport.largest) > self._server.lookup_bytes

    def _flush(self) -> None:
        if self._write_behind is not None and self._events.acting is self.client:
            position = self._write_behind.position
            if position != self._position_before:  # the client has made changes, which its reply waits for
                self.client.durable_before_reply = position
        is_held_back = self.client.durable_before_reply > 0 and self._await_disk()
        if (self._tracking.is_due and self._await_messages()) or is_held_back:
            return
        replies = self._replies
        if pieces := replies.pieces:
            replies.pieces, replies.broken = [], replies.under_way
            self._transport.write(pieces)

    def _await_messages(self) -> bool:
        """Send the pending messages to tracking clients, and begin to wait if some are left. Return whether replies
        have to wait.
        """
        tracking = self._tracking
        if tracking.is_sending:  # a message to this client, after the replies that wait
            return self._is_held
        if tracking.send_pending():
            return False
        self._hold(first=False)
        return True

    def _hold(self, *, first: bool) -> None:
        """Wait until all pending messages to tracking clients are sent, see `Tracking.when_sent`."""

        def start(then: Callable[[], None]) -> None:
            def sent() -> None:
                self._is_held = False
                then()

            self._tracking.when_sent(sent, first=first)

        if not self._is_held:
            self._is_held = True
            self._wait(Wait(start))

    def _await_disk(self) -> bool:
        """Begin to wait until the client's changes are on disk, unless they are. Return whether replies have to
        wait.
        """
        tiered, durable_before_reply = self._server.tiered, self.client.durable_before_reply
        assert tiered is not None
        if tiered.behind.durable >= durable_before_reply:
            self.client.durable_before_reply = 0
            return False
        if self._state is not WAITING:
            self._wait(Wait(partial(self._when_durable, durable_before_reply)))
        return True

    def _when_durable(self, position: int, then: Callable[[], None]) -> None:
        """Call `then` when all changes up to `position` are on disk, or after a failed commit. The error of that is
        noted, because the store may drop the changed values then, and a later commit does not have them.
        """
        tiered = self._server.tiered
        assert tiered is not None
        behind = tiered.behind

        def settled() -> None:
            if behind.durable < position:
                self._not_durable = behind.failing
            then()

        behind.when_durable(position, settled)
