"""Who listens to which channel, by name or by pattern, and how a message reaches them.

A message for a few is pushed at once. For many, and for what comes while such a message is under way, there is a queue,
so that everybody hears what was said in the order in which it was said; some are told in every turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from time import monotonic_ns

from kvpage_server.commands.notifying.recipient import Recipient
from kvpage_server.core.piece import Piece
from kvpage_server.glob import channel_glob
from kvpage_server.patterns import Patterns
from kvpage_server.resp.reply import Push, Raw, Reply, Wait, encode

Listeners = dict[Recipient, None]  # in the order in which they came
Steps = Iterator[None]

_FEW = 32  # listeners who are told at once
_TURN = 1_000_000  # nanoseconds


class Channels:
    """Channels and patterns that have a listener; the listeners' own lists are `Recipient.channels` and `.patterns`."""

    def __init__(self) -> None:
        self.by_name: dict[bytes, Listeners] = {}
        self.by_pattern: Patterns[tuple[bytes, Listeners]] = Patterns()  # each with itself and who listens to it
        self._under_way: deque[Steps] = deque()

    def __bool__(self) -> bool:
        return bool(self.by_name or self.by_pattern)

    def subscribe(self, client: Recipient, channel: bytes) -> None:
        client.channels[channel] = None
        self.by_name.setdefault(channel, {})[client] = None
        client.settle()

    def unsubscribe(self, client: Recipient, channel: bytes) -> None:
        client.channels.pop(channel, None)
        self._leave(channel, client)
        client.settle()

    def _leave(self, channel: bytes, client: Recipient) -> None:
        listeners = self.by_name.get(channel, {})
        listeners.pop(client, None)
        if not listeners:
            self.by_name.pop(channel, None)

    def psubscribe(self, client: Recipient, pattern: bytes) -> None:
        """The client listens to every channel that matches a pattern. Raises PatternTooLong."""
        found = self.by_pattern.get(pattern)
        if found is None:
            found = pattern, {}
            self.by_pattern.add(pattern, found, channel_glob(pattern))
        client.patterns[pattern] = None
        found[1][client] = None
        client.settle()

    def punsubscribe(self, client: Recipient, pattern: bytes) -> None:
        client.patterns.pop(pattern, None)
        self._leave_pattern(pattern, client)
        client.settle()

    def _leave_pattern(self, pattern: bytes, client: Recipient) -> None:
        found = self.by_pattern.get(pattern)
        if found is not None:
            found[1].pop(client, None)
            if not found[1]:
                self.by_pattern.remove(pattern)

    def forget(self, client: Recipient) -> None:
        """The client listens to nothing any more. If it listened to very many channels, they are left in steps."""
        channels, patterns = client.channels, client.patterns
        client.channels, client.patterns = {}, {}
        client.settle()

        def steps() -> Steps:
            for number, channel in enumerate(channels, start=1):
                if channel not in client.channels:  # it may have subscribed again
                    self._leave(channel, client)
                if not number % _FEW:
                    yield
            for pattern in patterns:
                if pattern not in client.patterns:
                    self._leave_pattern(pattern, client)

        self._do(steps(), at_once=len(channels) <= _FEW)

    # -- messages ----------------------------------------------------------------------------------------------------

    def publish(self, channel: bytes, message: bytes, about: bytes | None = None) -> int:
        """Push a message to everybody who listens, and may know of the key that it is about; how many listen.

        The message is encoded once a protocol, not once a listener.
        """
        told = self._told(channel, message)
        count = sum(len(listeners) for listeners, _ in told)
        self._do(_push(told, about), at_once=count <= _FEW)
        return count

    def publish_all(self, messages: Iterator[tuple[bytes, bytes, bytes]]) -> None:
        """Publish very many messages: channel, message, and the key it is about. Each is made when its turn comes."""

        def steps() -> Steps:
            for channel, message, about in messages:
                yield from _push(self._told(channel, message), about)
                yield

        self._do(steps(), at_once=False)

    @property
    def busy(self) -> bool:
        """Whether what was published is still being told."""
        return bool(self._under_way)

    def all_told(self) -> Iterator[Reply]:
        """Steps of a reply until what was published so far has been told."""
        if self._under_way:
            yield Wait(self._when_told, now=self._tell_all)

    def _when_told(self, then: Callable[[], None]) -> None:
        def steps() -> Steps:
            then()
            yield

        self._do(steps(), at_once=False)

    def _told(self, channel: bytes, message: bytes) -> list[tuple[Listeners, list[Reply]]]:
        """The listeners, grouped by the message that they get."""
        listeners = self.by_name.get(channel)
        told: list[tuple[Listeners, list[Reply]]] = []
        if listeners:
            told.append((listeners, [b"message", channel, message]))
        for pattern, listeners in self.by_pattern.matching(channel):
            told.append((listeners, [b"pmessage", pattern, channel, message]))
        return told

    # -- in turns ----------------------------------------------------------------------------------------------------

    def _do(self, steps: Steps, *, at_once: bool) -> None:
        """Do some steps: now, if they are few and none are under way; otherwise in turns, after the others."""
        if at_once and not self._under_way:
            for _ in steps:
                pass
            return
        self._under_way.append(steps)
        if len(self._under_way) == 1:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        end = monotonic_ns() + _TURN
        while self._under_way:
            for _ in self._under_way[0]:
                if monotonic_ns() > end:
                    asyncio.get_running_loop().call_soon(self._take_turn)
                    return
            self._under_way.popleft()

    def _tell_all(self) -> None:
        while self._under_way:
            for _ in self._under_way.popleft():
                pass


def _push(told: list[tuple[Listeners, list[Reply]]], about: bytes | None) -> Steps:
    """Tell those who still listen, some in every step."""
    for listeners, items in told:
        encoded: dict[int, Raw] = {}
        everybody = iter(list(listeners))
        while some := list(islice(everybody, _FEW)):
            for client in some:
                hears = client.channels if items[0] == b"message" else client.patterns
                if items[1] in hears and (about is None or client.sees(about)):
                    protocol = client.protocol
                    if protocol not in encoded:
                        encoded[protocol] = _spelt(items, protocol)
                    client.push(encoded[protocol])
            yield


def _spelt(items: list[Reply], protocol: int) -> Raw:
    out: list[Piece] = []
    encode(Push(items), protocol, out)
    return Raw(b"".join(piece if isinstance(piece, bytes) else piece.view for piece in out))
