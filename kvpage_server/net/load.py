"""What a connection holds of the server's memory: what it sends, what it queued, and what it does not read."""

from __future__ import annotations

from kvpage_server.commands.context import Client
from kvpage_server.core import Parser
from kvpage_server.net import limits


class Load:
    """Of one connection. What is being received is its sender's: it counts against that, and evicts nothing."""

    __slots__ = ("_client", "_held", "_keyspace", "_parser", "_queued", "_receiving", "postponed")

    def __init__(self, client: Client, parser: Parser) -> None:
        self._client = client
        self._parser = parser
        self._keyspace = client.server.keyspace
        self.postponed = 0  # bytes of the arena's memory of a command that could not be run when it came
        self._receiving = 0  # and of all that were not run, as the keyspace knows it
        self._queued = 0  # and of those that wait for EXEC, likewise
        self._held = 0  # bytes that the server knows it holds

    def settle(self) -> None:
        """Tell the keyspace what is being received. A command that is run now is not: it is the store's."""
        receiving = self._parser.receiving + self.postponed
        if receiving != self._receiving:
            self._keyspace.receiving += receiving - self._receiving
            self._receiving = receiving

    def queue(self, size: int) -> None:
        """So many bytes more are of commands that wait for EXEC: the sender's, too."""
        self._queued += size
        self._keyspace.receiving += size

    def unqueue(self) -> int:
        """They do not wait any more: how many these were."""
        queued = self._queued
        self.queue(-queued)
        return queued

    def account(self) -> None:
        """Tell the server what is held, and have the limits on it kept."""
        client = self._client
        self.settle()
        held = client.held
        if held != self._held:
            client.server.in_flight += held - self._held
            self._held = held
            limits.keep(client)

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is held, as far as the server knows."""
        return not (self._held or self._receiving or self._queued)

    def drop(self) -> None:
        """The connection is gone, and what it held."""
        self.postponed = 0
        self.settle()
        self.unqueue()
        self._client.server.in_flight -= self._held
        self._held = 0
