"""Subscriptions of clients to channels, by name or by pattern, and delivery of messages.

A message for up to 32 subscribers is sent immediately. A message for more is sent in steps, at most a millisecond of
them in one turn of the event loop. Messages that are published meanwhile wait in a queue, so that every client gets
them in the order of publication.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic_ns
from typing import NamedTuple, Protocol

from kvpage_server.core.pieces import Piece
from kvpage_server.glob import COMPARED, Patterns, compared_bytes, compiled
from kvpage_server.resp import Push, Raw, Reply, Wait, encode

# -- Interface of a client that receives messages ----------------------------------------------------------------------


class Mode:
    """The options that a client gave to CLIENT TRACKING."""

    redirect = 0  # the id of the client that gets the messages; 0 for the client itself
    broadcast = False
    opt_in = False  # only reads after CLIENT CACHING YES are noted
    opt_out = False  # all reads are noted, except those after CLIENT CACHING NO
    no_loop = False  # it gets no messages about its own changes
    caching_called = False  # CLIENT CACHING was called for the next command
    broken = False  # the client of `redirect` has disconnected

    def __init__(self) -> None:
        self.prefixes: dict[bytes, None] = {}

    @property
    def notes_reads(self) -> bool:
        """Whether the keys that the current command reads are noted, so that the client gets a message when they
        change.
        """
        if self.broadcast:
            return False
        return self.caching_called if self.opt_in else not (self.opt_out and self.caching_called)


class Recipient(Protocol):
    """A client that can get messages: the part of `Client` that this package uses."""

    id: int
    protocol: int
    gone: bool  # its connection is closed
    channels: dict[bytes, None]  # subscribed; set by Channels
    patterns: dict[bytes, None]  # subscribed; set by Channels
    watching: set[bytes]  # keys; set by KeyEvents
    watched_changed: bool
    watched_until: int  # when a watched index key changes because a page expires; unix milliseconds, 0 for never
    tracking: Mode | None  # set by Tracking

    @property
    def user(self) -> object:
        """The user that it has logged in as."""

    def keep(self, nbytes: int) -> None:
        """Add `nbytes` to the memory that the server keeps for the client; negative to subtract."""

    def push(self, message: Reply) -> None:
        """Send a message after the replies and messages that are queued already."""

    def update_fast_path(self) -> None:
        """Note that the client's subscriptions or tracking have changed."""

    @property
    def sees_all(self) -> bool:
        """Whether the client may read every key."""

    def sees(self, key: bytes) -> bool:
        """Return whether the client may read a key, and so may know that it exists."""

    def may_see_some(self, prefix: bytes) -> bool:
        """Return False if the client may read no key that begins with `prefix`."""


Listeners = dict[Recipient, None]  # in order of subscription
Group = tuple[Listeners, list[Reply]]  # subscribers, and the items of the message that they get
Steps = Iterator[None]

_END = object()
_FEW = 32  # subscribers that get a message at once
_TURN = 1_000_000  # nanoseconds
MOST_WAITING = 8 << 20  # bytes of messages that wait to be sent; above it, commands that write wait
_MESSAGE = 300  # bytes of a message that waits, in addition to its text
_LISTENERS = 250  # bytes of a message for the listeners of a channel or pattern, in addition to its text
_CHANNEL = 512  # bytes of a client's subscription to a channel, in addition to its name
_PATTERN = 700  # bytes of a client's subscription to a pattern, in addition to the pattern and its compiled form


class Followed(NamedTuple):
    """A pattern that clients are subscribed to."""

    pattern: bytes
    listeners: Listeners
    nbytes: int  # memory of a subscription, at most


@dataclass(slots=True)
class Delivery:
    """A published message."""

    count: int = 0  # subscribers that were found so far


class Channels:
    """Channels and patterns with their subscribers. `Recipient.channels` and `.patterns` have those of one client."""

    def __init__(self) -> None:
        self.by_name: dict[bytes, Listeners] = {}
        self.by_pattern: Patterns[Followed] = Patterns()
        self._under_way: deque[tuple[Steps, int]] = deque()  # with the bytes of memory of each; the oldest first
        self._size = 0  # sum of these bytes
        self._compared = 0  # bytes of channels that were compared with patterns since the last steps
        # Whether so many messages wait that commands that cause others have to wait; an attribute, because each command
        # reads it.
        self.is_full = False

    def __bool__(self) -> bool:
        """Return whether any client is subscribed to a channel or a pattern."""
        return bool(self.by_name or self.by_pattern)

    def subscribe(self, client: Recipient, channel: bytes) -> None:
        """Subscribe a client to a channel. A second subscription of the same client changes nothing."""
        if channel not in client.channels:
            client.keep(len(channel) + _CHANNEL)
        client.channels[channel] = None
        self.by_name.setdefault(channel, {})[client] = None
        client.update_fast_path()

    def unsubscribe(self, client: Recipient, channel: bytes) -> None:
        """End a client's subscription to a channel, if it has one."""
        if channel in client.channels:
            del client.channels[channel]
            client.keep(-len(channel) - _CHANNEL)
        self._leave(channel, client)
        client.update_fast_path()

    def _leave(self, channel: bytes, client: Recipient) -> None:
        """Remove a client from the subscribers of a channel."""
        listeners = self.by_name.get(channel, {})
        listeners.pop(client, None)
        if not listeners:
            self.by_name.pop(channel, None)

    def psubscribe(self, client: Recipient, pattern: bytes) -> None:
        """Subscribe a client to every channel that matches a pattern. Raises PatternTooLong."""
        found = self.by_pattern.get(pattern)
        if found is None:
            glob = compiled(pattern)
            found = Followed(pattern, {}, _PATTERN + len(pattern) + glob.nbytes)
            self.by_pattern.add(pattern, found, glob.matches)
        if pattern not in client.patterns:
            client.keep(found.nbytes)
        client.patterns[pattern] = None
        found.listeners[client] = None
        client.update_fast_path()

    def punsubscribe(self, client: Recipient, pattern: bytes) -> None:
        """End a client's subscription to a pattern, if it has one."""
        if pattern in client.patterns:
            del client.patterns[pattern]
            client.keep(-self._size_of(pattern))
        self._leave_pattern(pattern, client)
        client.update_fast_path()

    def _leave_pattern(self, pattern: bytes, client: Recipient) -> None:
        """Remove a client from the subscribers of a pattern."""
        found = self.by_pattern.get(pattern)
        if found is not None:
            found.listeners.pop(client, None)
            if not found.listeners:
                self.by_pattern.remove(pattern)

    def _size_of(self, pattern: bytes) -> int:
        """Return the bytes that the server keeps for a client's subscription to a pattern."""
        found = self.by_pattern.get(pattern)
        return 0 if found is None else found.nbytes

    def forget(self, client: Recipient) -> None:
        """Remove all subscriptions of a client. It gets no message of a channel after this call. If it has many
        channels, they are removed in steps.
        """
        channels, patterns = client.channels, client.patterns
        client.channels, client.patterns = {}, {}
        client.keep(-sum(map(len, channels)) - _CHANNEL * len(channels) - sum(map(self._size_of, patterns)))
        client.update_fast_path()

        def steps() -> Steps:
            """Remove the client from its former channels and patterns, unless it has subscribed once more."""
            for number, channel in enumerate(channels, start=1):
                if channel not in client.channels:  # it may have subscribed again
                    self._leave(channel, client)
                if not number % _FEW:
                    yield
            for pattern in patterns:
                if pattern not in client.patterns:
                    self._leave_pattern(pattern, client)

        if len(channels) <= _FEW:  # also while messages wait, since the client does not get them
            for _ in steps():
                pass
        else:
            self._do(steps(), at_once=False)

    # -- messages ----------------------------------------------------------------------------------------------------

    def publish(self, channel: bytes, message: bytes, about: bytes | None = None) -> Delivery:
        """Send a message to all subscribers of a channel, and return their number, which is final when it was sent.

        If the message is about a key, `about`, only clients that may read this key get it, but all are counted. The
        message is encoded once for each protocol, not for each subscriber. If the comparison of the channel with all
        patterns takes long, also of all messages since the last steps together, it is done in steps, too.
        """
        delivery, size = Delivery(), len(channel) + len(message) + _MESSAGE
        self._compared += compared_bytes(channel) * self.by_pattern.cost
        if self._compared > COMPARED:
            self._do(self._deliver(channel, message, about, delivery), size, at_once=False)
            return delivery
        recipients = [group for group in self._groups(channel, message) if group]
        delivery.count = sum(len(listeners) for listeners, _ in recipients)
        self._do(_push(recipients, about), size + _LISTENERS * len(recipients), at_once=delivery.count <= _FEW)
        return delivery

    def _deliver(self, channel: bytes, message: bytes, about: bytes | None, delivery: Delivery) -> Steps:
        """Send a message to the subscribers of a channel, while it is compared with the patterns."""
        compared = 0
        for group in self._groups(channel, message):
            if group:
                delivery.count += len(group[0])
                yield from _push([group], about)
            compared += compared_bytes(channel)
            if compared > COMPARED:
                compared = 0
                yield

    def publish_all(self, messages: Iterator[Sequence[tuple[bytes, bytes, bytes]]], size: int) -> None:
        """Publish very many messages in steps. Each message is (channel, message, key that it is about).

        The iterator yields a few messages, or none, for each step, and creates them when they are sent. Until the end,
        all of them together count as `size` bytes of messages that wait.
        """

        def steps() -> Steps:
            for some in messages:
                for channel, message, about in some:
                    yield from self._deliver(channel, message, about, Delivery())
                yield

        self._do(steps(), size, at_once=False)

    @property
    def busy(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._under_way)

    def all_sent(self) -> Iterator[Reply]:
        """Yield a Wait until all messages published so far are sent, if some are not.

        In a transaction, which does not wait, send them immediately.
        """
        if self._under_way:
            yield Wait(self.when_sent, now=self._send_to_all)

    def when_sent(self, then: Callable[[], None]) -> None:
        """Call `then` when all messages published so far have been sent, in a later turn of the event loop."""

        def steps() -> Steps:
            then()
            yield

        self._do(steps(), at_once=False)

    def _groups(self, channel: bytes, message: bytes) -> Iterator[Group | None]:
        """Yield groups of subscribers of a channel: one group for the name, one for each matching pattern, and None for
        each other pattern.
        """
        listeners = self.by_name.get(channel)
        yield (listeners, [b"message", channel, message]) if listeners else None
        for found in self.by_pattern.compared(channel):
            yield (found.listeners, [b"pmessage", found.pattern, channel, message]) if found else None

    # -- in turns ----------------------------------------------------------------------------------------------------

    def _do(self, steps: Steps, size: int = 0, *, at_once: bool) -> None:
        """Run the steps of a delivery, which keep `size` bytes in memory.

        They run now if `at_once` and no others wait. Otherwise they run after the others, in turns of the event loop.
        """
        if at_once and not self._under_way:
            for _ in steps:
                pass
            return
        self._under_way.append((steps, size))
        self._grow(size)
        if len(self._under_way) == 1:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Run waiting steps for up to `_TURN` nanoseconds, and plan the next turn if some are left."""
        end = monotonic_ns() + _TURN
        while self._under_way:
            if next(self._under_way[0][0], _END) is _END:
                self._grow(-self._under_way.popleft()[1])
            if self._under_way and monotonic_ns() > end:
                asyncio.get_running_loop().call_soon(self._take_turn)
                return
        self._compared = 0

    def _send_to_all(self) -> None:
        """Run all waiting steps now."""
        while self._under_way:
            steps, size = self._under_way.popleft()
            self._grow(-size)
            for _ in steps:
                pass

    def _grow(self, size: int) -> None:
        """Add `size` bytes to the messages that wait, and update `is_full`."""
        self._size += size
        self.is_full = self._size > MOST_WAITING


def _push(recipients: Iterable[Group], about: bytes | None) -> Steps:
    """Send messages to groups of subscribers; yield after `_FEW` of them. Skip clients that have unsubscribed
    meanwhile, and clients that may not read the key `about`.
    """
    for listeners, items in recipients:
        encoded: dict[int, Raw] = {}
        everybody = iter(list(listeners))
        while some := list(islice(everybody, _FEW)):
            for client in some:
                subscribed = client.channels if items[0] == b"message" else client.patterns
                if items[1] in subscribed and (about is None or client.sees(about)):
                    protocol = client.protocol
                    if protocol not in encoded:
                        encoded[protocol] = _encode_push(items, protocol)
                    client.push(encoded[protocol])
            yield


def _encode_push(items: list[Reply], protocol: int) -> Raw:
    """Return an out-of-band message of these items, encoded for RESP `protocol` (2 or 3)."""
    out: list[Piece] = []
    encode(Push(items), protocol, out)
    return Raw(b"".join(piece if isinstance(piece, bytes) else piece.view for piece in out))
