"""What happens to keys, told to those who care: transactions that watch them, and listeners to keyspace notifications.

Redis's classes of events (`notify.c`), by which `notify-keyspace-events` chooses: g generic, $ string, x expired,
e evicted, m a key that was missed, n a new key; l s h z t d concern types that do not exist here and are accepted.
K and E choose the channels, ``__keyspace@0__:key`` and ``__keyevent@0__:event``; A is every class but m and n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpage_server.commands.channels import Channels
from kvpage_server.store.memory import Keyspace

if TYPE_CHECKING:
    from kvpage_server.commands.context import Client

_CLASS = {"del": "g", "expire": "g", "persist": "g", "set": "$", "incrby": "$", "decrby": "$"} | {
    "expired": "x",
    "evicted": "e",
    "keymiss": "m",
    "new": "n",
}


class KeyEvents:
    """Listens to a keyspace, which is only asked to tell when somebody cares."""

    def __init__(self, keyspace: Keyspace, channels: Channels) -> None:
        self._keyspace = keyspace
        self._channels = channels
        self._watchers: dict[bytes, set[Client]] = {}
        self._notified = ""  # the value of notify-keyspace-events: classes, K and E

    def notify(self, flags: str) -> None:
        """Publish the events that `flags` names from now on."""
        self._notified = flags.replace("A", "g$lshzxetd")
        self._listen()

    def _listen(self) -> None:
        wanted = self._watchers or ("K" in self._notified or "E" in self._notified)
        self._keyspace.on_event = self._happened if wanted else None

    def watch(self, client: Client, key: bytes) -> None:
        """The client's next transaction fails when something happens to `key`."""
        if key not in client.watching:
            client.watching.add(key)
            self._watchers.setdefault(key, set()).add(client)
            self._listen()

    def unwatch(self, client: Client) -> None:
        """The client watches nothing; what happened so far is forgiven."""
        for key in client.watching:
            watchers = self._watchers[key]
            watchers.discard(client)
            if not watchers:
                del self._watchers[key]
        if client.watching:
            client.watching.clear()
            self._listen()
        client.watched_changed = False

    def _happened(self, event: str, key: bytes) -> None:
        if event == "flush":
            for watched in self._watchers:
                if self._keyspace.find(watched) is not None:
                    self._mark(watched)
            return
        if event != "keymiss":
            self._mark(key)
        if _CLASS.get(event, "") in self._notified:
            name = event.encode()
            if "K" in self._notified:
                self._channels.publish(b"__keyspace@0__:" + key, name, about=key)
            if "E" in self._notified:
                self._channels.publish(b"__keyevent@0__:" + name, key, about=key)

    def _mark(self, key: bytes) -> None:
        for client in self._watchers.get(key, ()):
            client.watched_changed = True
