"""Distribution of keyspace events: to transactions that watch keys, to clients that cache them, and to subscribers of
keyspace notifications.

The classes of events for `notify-keyspace-events` are Redis's (`notify.c`): g generic, $ string, x expired, e evicted,
m a missed key, n a new key. l s h z t d are for types that do not exist here, and are accepted. K and E choose the
channels, ``__keyspace@0__:key`` and ``__keyevent@0__:event``. A is every class but m and n.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, starmap
from time import monotonic_ns
from typing import TypeVar

from kvpage_server.commands.notifying.channels import Channels, Mode, Recipient
from kvpage_server.commands.notifying.tracking import Tracking
from kvpage_server.commands.specs import derived_from
from kvpage_server.page import page_named
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.index import BlockKeys

_CLASS = {"del": "g", "expire": "g", "persist": "g", "set": "$", "incrby": "$", "decrby": "$"} | {
    "expired": "x",
    "evicted": "e",
    "keymiss": "m",
    "new": "n",
}


K = TypeVar("K")

_BY_ITSELF = ("expired", "evicted")
_EVENT = 150  # bytes of an event of a key of a block that waits, in addition to the key
_WATCHED = 512  # bytes of a key that a client watches, in addition to its name
_NO_CHANGE = ("keymiss", "new")  # a new key also causes the event of the command that made it
_FEW = 64  # keys that a client stops watching in one step
_MOST_LEFT = 16_384  # keys that nobody watches any more and that are to be removed; above it, WATCH waits
_TURN = 1_000_000  # nanoseconds


class _Watch:
    """The keys that one client watches until its next EXEC, DISCARD or UNWATCH. `client` is None after that."""

    __slots__ = ("client", "has_value", "keys")

    def __init__(self, client: Recipient) -> None:
        self.client: Recipient | None = client
        self.keys = client.watching
        self.has_value = False  # whether one of the keys had a value when the client began to watch it


class KeyEvents:
    """Distributor of a keyspace's events.

    It receives events only while clients watch or track keys, or `notify-keyspace-events` is set.
    """

    def __init__(self, keyspace: Keyspace, channels: Channels, tracking: Tracking) -> None:
        self.acting: Recipient | None = None  # the client that runs a command at the moment
        self.tracking = tracking
        self._keyspace = keyspace
        self._channels = channels
        self._watches: dict[Recipient, _Watch] = {}
        self._watchers: dict[bytes, set[_Watch]] = {}
        self._ended: deque[_Watch] = deque()  # watches that have ended, with the keys that are to be removed
        self._left = 0  # number of these keys
        self._waiting: list[Callable[[], None]] = []  # called when few of them are left
        self._pages: dict[tuple[bytes, int], set[bytes]] = {}  # watched keys of pages, by request and page id
        self._derived: dict[bytes, set[bytes]] = {}  # watched keys that change with every page of a request
        self._notified = ""  # the value of notify-keyspace-events: classes, K and E

    def notify(self, flags: str) -> None:
        """Publish the events of some classes from now on. `flags` is a value of notify-keyspace-events, for example
        "KEA"; "" for none.
        """
        self._notified = flags.replace("A", "g$lshzxetd")
        self._listen()

    def _listen(self) -> None:
        """Register for the keyspace's events if any of them is used here, otherwise end the registration."""
        is_needed = self._watchers or self.tracking or ("K" in self._notified or "E" in self._notified)
        self._keyspace.contents.on_event = self._distribute if is_needed else None
        self._keyspace.contents.on_block = self._distribute_for_block if is_needed else None

    def watch(self, client: Recipient, key: bytes) -> None:
        """Make the client's next transaction fail if `key` changes."""
        if key not in client.watching:
            watch = self._watches.get(client)
            if watch is None:
                watch = self._watches[client] = _Watch(client)
            watch.keys.add(key)
            watch.has_value = watch.has_value or self._exists(key)
            client.keep(len(key) + _WATCHED)
            self._watchers.setdefault(key, set()).add(watch)
            if name := page_named(key):
                self._pages.setdefault((name.req_id, name.page), set()).add(key)
            if req_id := derived_from(key):
                self._derived.setdefault(req_id, set()).add(key)
            self._listen()

    def unwatch(self, client: Recipient) -> None:
        """Stop watching all keys of a client, and reset its noted changes. Many keys are removed in steps."""
        client.watched_changed, client.watched_until = False, 0
        watch = self._watches.pop(client, None)
        if watch is None:
            return
        client.keep(-sum(map(len, watch.keys)) - _WATCHED * len(watch.keys))
        client.watching, watch.client = set(), None
        if len(watch.keys) <= _FEW:
            self._remove_keys(watch)
            self._listen()
            return
        self._ended.append(watch)
        self._left += len(watch.keys)
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._remove_ended)

    def _remove_ended(self) -> None:
        """Remove the keys of ended watches for one turn, and plan the next turn if keys are left."""
        end = monotonic_ns() + _TURN
        while self._ended and monotonic_ns() < end:
            watch = self._ended[0]
            self._left -= self._remove_keys(watch)
            if not watch.keys:
                self._ended.popleft()
        if not self.has_many_left:
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()
        if self._ended:
            asyncio.get_running_loop().call_soon(self._remove_ended)
        else:
            self._listen()

    def _remove_keys(self, watch: _Watch) -> int:
        """Remove up to `_FEW` keys of an ended watch, and return their number."""
        count = min(_FEW, len(watch.keys))
        for _ in range(count):
            key = watch.keys.pop()
            watchers = self._watchers[key]
            watchers.discard(watch)
            if not watchers:
                del self._watchers[key]
                if name := page_named(key):
                    _discard(self._pages, (name.req_id, name.page), key)
                if req_id := derived_from(key):
                    _discard(self._derived, req_id, key)
        return count

    @property
    def has_many_left(self) -> bool:
        """Whether so many keys that nobody watches are to be removed that WATCH has to wait."""
        return self._left > _MOST_LEFT

    def when_few_left(self, then: Callable[[], None]) -> None:
        """Call `then` when `has_many_left` is False. It must be True now."""
        self._waiting.append(then)

    def track(self, client: Recipient, mode: Mode) -> None:
        """Start CLIENT TRACKING for a client with the options `mode`: from now on, it gets invalidations."""
        self.tracking.begin(client, mode)
        self._listen()

    def untrack(self, client: Recipient) -> None:
        """Stop CLIENT TRACKING for a client, if it tracks."""
        self.tracking.end(client)
        self._listen()

    def forget(self, client: Recipient) -> None:
        """Stop watching and tracking for a client that has disconnected."""
        self.unwatch(client)
        self.untrack(client)

    def _distribute(self, event: str, key: bytes) -> None:
        """Distribute an event of a key, for example "del". The event "flush" is about all keys."""
        if event == "flush":
            self.tracking.flushed()
            # A key of a client whose watched keys have not changed exists if it existed when the client watched it.
            for client, watch in self._watches.items():
                client.watched_changed = client.watched_changed or watch.has_value
            return
        if event != "keymiss":
            self._mark(key)
            self._mark_derived(key)
        if self.tracking and event not in _NO_CHANGE:
            self.tracking.changed(key, None if event in _BY_ITSELF else self.acting)
        self._notify(event, key)

    def _distribute_for_block(self, keys: BlockKeys, events: Iterator[tuple[str, bytes]]) -> None:
        """Distribute events of all keys of a block, of which there may be 131,072. `events` yields (event, key) for
        each key, in order.

        Messages of the events are published in steps, and each is created in its step.
        """
        for key in self._pages.get((keys.req_id, keys.page), ()):
            if key in keys:
                self._mark(key)
        event, first = next(events)
        self._mark_derived(first)
        if self.tracking:
            self.tracking.block_changed(keys, None if event in _BY_ITSELF else self.acting)
        if self._notified and self._channels:
            messages = starmap(self._messages, chain([(event, first)], events))
            self._channels.publish_all(messages, (len(first) + _EVENT) * len(keys))

    def _notify(self, event: str, key: bytes) -> None:
        """Publish the messages for an event of a key."""
        for channel, message, about in self._messages(event, key):
            self._channels.publish(channel, message, about)

    def _messages(self, event: str, key: bytes) -> list[tuple[bytes, bytes, bytes]]:
        """Return the messages for an event, each as (channel, message, key): none, one or two, by
        `notify-keyspace-events`.
        """
        messages = []
        if _CLASS.get(event, "") in self._notified:
            name = event.encode()
            if "K" in self._notified:
                messages.append((b"__keyspace@0__:" + key, name, key))
            if "E" in self._notified:
                messages.append((b"__keyevent@0__:" + name, key, key))
        return messages

    def _exists(self, watched: bytes) -> bool:
        """Return whether a watched key exists: as a value, or as the index key of a request with pages."""
        req_id = derived_from(watched)
        if req_id is not None and self._keyspace.listing.has_pages(req_id):
            return True
        return self._keyspace.contents.find(watched) is not None

    def _mark(self, key: bytes) -> None:
        """Note that a watched key has changed: the next EXEC of the clients that watch it fails."""
        for watch in self._watchers.get(key, ()):
            if watch.client is not None:
                watch.client.watched_changed = True

    def _mark_derived(self, key: bytes) -> None:
        """If `key` is a page's, note a change of the watched keys that change with every page of its request."""
        if self._derived and (page := page_named(key)) is not None:
            for watched in self._derived.get(page.req_id, ()):
                self._mark(watched)


def _discard(sets: dict[K, set[bytes]], name: K, key: bytes) -> None:
    """Remove a key from the set under `name`, and delete the set when it is empty."""
    keys = sets[name]
    keys.discard(key)
    if not keys:
        del sets[name]
