"""From commands to replies: those that need no decision are called by the core, all others go through `execute`."""

from __future__ import annotations

from collections.abc import Callable

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.admission import Paused, is_unqueued
from kvpage_server.commands.dispatch.at_once import caller_of, came_of
from kvpage_server.commands.dispatch.disk import Postponed
from kvpage_server.commands.dispatch.execute import execute
from kvpage_server.core import Callee, Command, Parser
from kvpage_server.net.load import Load
from kvpage_server.net.replies import Replies
from kvpage_server.resp.reply import QUEUED, Reply


class Answering:
    """Of one client. `send` sends the replies so far; it is called when they are much."""

    def __init__(self, client: Client, parser: Parser, replies: Replies, load: Load, send: Callable[[], None]) -> None:
        self._client = client
        self._server = client.server
        self._parser = parser
        self._replies = replies
        self._load = load
        self._send = send
        self._caller = caller_of(client, parser)
        self._postponed: Command | None = None  # until a pause ends, or the disk has what it needs
        self._hold: object = None  # what it needs stays in memory while somebody has this, until it has run
        self.is_busy = False  # a command is being run

    @property
    def is_waiting(self) -> bool:
        """Whether a command waits until it can run."""
        return self._postponed is not None

    def some(self, left: int, deadline: int) -> int | None:
        """Answer up to `left` commands, until a moment: how many more there is time for, None if no command is left.

        Raises Paused, Postponed, ProtocolError, MemoryError.
        """
        client, server, load = self._client, self._server, self._load
        if client.free and self._postponed is None and not server.monitors:
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
        """What came of a command that the core has called, and handed back."""
        try:
            told = came_of(self._client, row.what, command, reply, error)
        except Postponed as postponed:
            self._put_off(command, self._parser.received, postponed)
            raise
        if self._replies.add(told):
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
        """Keep a command, which has so many bytes of the arena, until it can run."""
        self._postponed, self._load.postponed = command, size
        self._hold = (why.hold or self._hold) if isinstance(why, Postponed) else None
        self._load.settle()

    def drop(self) -> None:
        """The connection is gone, and with it what was to be run."""
        self._postponed = self._hold = None
