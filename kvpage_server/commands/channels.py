"""Who listens to which channel, by name or by pattern, and how a message reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpage_server.glob import Matches, channel_glob
from kvpage_server.resp.reply import Piece, Push, Raw, Reply, encode

if TYPE_CHECKING:
    from kvpage_server.commands.context import Client

Listeners = dict["Client", None]  # in the order in which they came


class Channels:
    """Channels and patterns that have a listener; the listeners' own lists are `Client.channels` and `.patterns`."""

    def __init__(self) -> None:
        self.by_name: dict[bytes, Listeners] = {}
        self.by_pattern: dict[bytes, Listeners] = {}
        self._matches: dict[bytes, Matches] = {}

    def __bool__(self) -> bool:
        return bool(self.by_name or self.by_pattern)

    def subscribe(self, client: Client, channel: bytes) -> None:
        """The client listens to a channel."""
        client.channels[channel] = None
        self.by_name.setdefault(channel, {})[client] = None
        client.settle()

    def unsubscribe(self, client: Client, channel: bytes) -> None:
        """It no longer does, if it did."""
        client.channels.pop(channel, None)
        _leave(self.by_name, channel, client)
        client.settle()

    def psubscribe(self, client: Client, pattern: bytes) -> None:
        """The client listens to every channel that matches a pattern. Raises PatternTooLong."""
        self._matches[pattern] = channel_glob(pattern)
        client.patterns[pattern] = None
        self.by_pattern.setdefault(pattern, {})[client] = None
        client.settle()

    def punsubscribe(self, client: Client, pattern: bytes) -> None:
        """It no longer does, if it did."""
        client.patterns.pop(pattern, None)
        _leave(self.by_pattern, pattern, client)
        if pattern not in self.by_pattern:
            self._matches.pop(pattern, None)
        client.settle()

    def forget(self, client: Client) -> None:
        """The client listens to nothing any more."""
        for channel in client.channels:
            _leave(self.by_name, channel, client)
        for pattern in client.patterns:
            _leave(self.by_pattern, pattern, client)
            if pattern not in self.by_pattern:
                self._matches.pop(pattern, None)
        client.channels.clear()
        client.patterns.clear()
        client.settle()

    def publish(self, channel: bytes, message: bytes, about: bytes | None = None) -> int:
        """Push a message to everybody who listens, and may know of the key that it is about; how many times.

        O(listeners + patterns). The message is encoded once a protocol, not once a listener.
        """
        count = 0
        listeners = self.by_name.get(channel)
        if listeners:
            count += _push(listeners, [b"message", channel, message], about)
        for pattern, listeners in self.by_pattern.items():
            if self._matches[pattern](channel):
                count += _push(listeners, [b"pmessage", pattern, channel, message], about)
        return count


def _push(listeners: Listeners, items: list[Reply], about: bytes | None) -> int:
    encoded: dict[int, Raw] = {}
    chosen = [client for client in listeners if about is None or client.sees(about)]
    for client in chosen:
        protocol = client.protocol
        if protocol not in encoded:
            out: list[Piece] = []
            encode(Push(items), protocol, out)
            encoded[protocol] = Raw(b"".join(piece if isinstance(piece, bytes) else piece.view for piece in out))
        client.push(encoded[protocol])
    return len(chosen)


def _leave(listeners_of: dict[bytes, Listeners], name: bytes, client: Client) -> None:
    listeners = listeners_of.get(name, {})
    listeners.pop(client, None)
    if not listeners:
        listeners_of.pop(name, None)
