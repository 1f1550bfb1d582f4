"""Memory of a connection: incoming and queued commands, unread replies, and names that the server keeps for it."""

from __future__ import annotations

from kvpage_server.commands.context import Client
from kvpage_server.core import Parser
from kvpage_server.net import limits


class Load:
    """Of one connection. What it is still sending counts against the connection, and evicts nothing."""

    __slots__ = ("_client", "_held", "_keyspace", "_parser", "_queued", "_receiving", "is_nothing", "kept", "postponed")

    def __init__(self, client: Client, parser: Parser) -> None:
        self._client = client
        self._parser = parser
        self._keyspace = client.server.keyspace
        self.postponed = 0  # bytes in the arena of a command that has to wait before it runs
        self._receiving = 0  # of that and of what is being received, as last told to the keyspace
        self._queued = 0  # of commands that wait for EXEC, as last told to the keyspace
        self._held = 0  # bytes that pass through it, as last reported to the server
        self.kept = 0  # bytes that are kept for it, as they were when the limits were last looked at
        self.is_nothing = True  # it holds nothing, as far as the server knows

    def settle(self) -> None:
        """Tell the keyspace how much is being received. The command that runs now does not count: it is the store's."""
        receiving = self._parser.receiving + self.postponed
        if receiving != self._receiving:
            self._keyspace.memory.receiving += receiving - self._receiving
            self._receiving = receiving
            self._look()

    def queue(self, size: int) -> None:
        """Add bytes of a command that waits for EXEC. They count against the sender, too."""
        self._queued += size
        self._keyspace.memory.receiving += size
        self._look()

    def unqueue(self) -> int:
        """The queued commands do not wait any more: how many bytes they were."""
        queued = self._queued
        self.queue(-queued)
        return queued

    def account(self) -> None:
        """Tell the server how much this connection holds, and enforce the limits."""
        client = self._client
        if client.gone:
            return
        self.settle()
        held = client.passing
        if held != self._held or client.kept != self.kept:
            client.server.in_flight += held - self._held
            self._held, self.kept = held, client.kept
            self._look()
            limits.keep(client)

    def _look(self) -> None:
        self.is_nothing = not (self._held or self._receiving or self._queued)

    def drop(self) -> None:
        """The connection is gone, and what it held."""
        self.postponed = 0
        self.settle()
        self.unqueue()
        self._client.server.in_flight -= self._held + self._client.kept
        self._held = self._client.kept = 0
        self._look()
