"""Permission of a push: of a channel, of a changed key, of a key that a client caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hiredis

from tests.simulation.acting.peers import Peer
from tests.simulation.model.model import Model
from tests.simulation.model.replies import agrees
from tests.simulation.model.tracking import CHANNEL


class Messages:
    """To all peers. `fail` is called with a push that is not permitted, or not yet."""

    def __init__(self, model: Model, fail: Callable[[str], None]) -> None:
        self._model = model
        self._fail = fail

    def is_one(self, peer: Peer, reply: Any) -> bool:
        """Return whether a frame is a push, which is permitted now."""
        if not isinstance(reply, list):
            return False
        is_message = reply[:1] in ([b"message"], [b"pmessage"], [b"invalidate"])
        if is_message and peer.speaks and isinstance(reply, hiredis.PushNotification) != (peer.speaks == 3):
            self._fail(f"peer {peer.number}, who speaks RESP{peer.speaks}, was told {reply!r:.200} in the other")
        if reply[:1] == [b"invalidate"] or reply[:2] == [b"message", CHANNEL]:
            if wrong := self._model.track_told(peer.talk, reply[-1]):
                self._fail(f"peer {peer.number} {wrong}")
        elif reply[:1] == [b"tracking-redir-broken"]:
            if wrong := self._model.track_broken(peer.talk, reply[1]):
                self._fail(f"peer {peer.number} {wrong}")
        elif reply[:1] == [b"pmessage"] and reply[2].startswith(b"__key"):
            self._notified(peer, *reply[2:])
        elif (peer.pushes or peer.may_come) and reply[:1] in ([b"message"], [b"pmessage"]):
            self._published(peer, reply)
        else:
            return False
        return True

    def _published(self, peer: Peer, reply: list[Any]) -> None:
        if peer.pushes and agrees(peer.pushes[0], list(reply)):
            peer.pushes.popleft()
        elif reply in peer.may_come:
            peer.may_come.remove(reply)
        else:
            self._fail(f"peer {peer.number} was told {reply!r:.200}, expected was {[*peer.pushes][:1]!r:.200}")

    def _notified(self, peer: Peer, channel: bytes, message: bytes) -> None:
        """Check a keyspace notification: of a change, sent to the key's channel and then to the event's."""
        kind, _, name = channel.partition(b":")
        if kind == b"__keyspace@0__":
            key, peer.talk.event = name, (name, message)
        else:
            key, known, peer.talk.event = message, peer.talk.event, None
            peer.talk.unheard.discard(key)
            if known not in (None, (key, name)):
                self._fail(f"peer {peer.number} was notified of {name!r} of {key!r} after {known!r}")
        if key not in self._model.changes | self._model.store.keys.keys() | self._model.store.fog:
            self._fail(f"peer {peer.number} was notified of {message!r} in {channel!r}, which has never changed")
