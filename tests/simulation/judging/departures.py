"""Keys that are removed without a command: evicted, or found damaged on disk. Whether each of them may."""

from __future__ import annotations

from collections.abc import Callable

from kvpage_server.store.records import name_of_block
from tests.simulation.acting.process import Process
from tests.simulation.model.model import Model
from tests.simulation.model.pages import block_of


class Departures:
    """From one process. `fail` is called with a key that must not be removed."""

    def __init__(self, model: Model, process: Process, fail: Callable[[str], None]) -> None:
        self._model = model
        self._process = process
        self._fail = fail
        self._left: list[bytes] = []  # keys that the server has let go of, and the model has still
        process.leaves = self._leaves

    def _leaves(self, keys: list[bytes], evicted: bool) -> None:
        """The server is about to let go of keys by itself: it evicts them, or has found them damaged on disk."""
        if evicted:
            for key in keys:
                self._check_eviction(key)
            self._check_that_one_expires(keys)
        elif not self._model.rotted:
            self._fail(f"{keys[:3]!r} could not be read from disk, where nothing was damaged")
        self._left += keys
        self._model.let_go.update(keys)

    def _check_eviction(self, key: bytes) -> None:
        """Whether a key may be evicted."""
        model, keyspace = self._model, self._process.server.keyspace
        policy = keyspace.eviction_order.policy
        if self._was_refused(key):
            return
        if policy == "noeviction":
            self._fail(f"{key!r} was evicted under noeviction")
        if not (model.limited or self._process.maxdisk or model.disk_fails):
            self._fail(f"{key!r} was evicted, and nothing is limited")
        known = model.store.keys.get(key)
        is_text = known is not None and known.page is None
        is_protected = model.is_protected(block_of(key))
        if not is_text and is_protected and not self._may_be_unpinned(block_of(key)[0]):
            self._fail(f"{key!r} was evicted though its block is pinned or leased")
        is_known = known is not None and key not in model.store.doubtful() | model.store.fog
        expires = keyspace.contents.expires_of(key)  # which a transaction may have set that is being run
        if policy == "volatile-ttl" and key[:3] != b"kv:" and is_known and known and not (known.expires or expires > 0):
            self._fail(f"{key!r} was evicted under volatile-ttl, and does not expire")

    def _was_refused(self, key: bytes) -> bool:
        """Return whether a full disk had no space for a key, so that its client has received an error."""
        tiered = self._process.server.tiered
        if tiered is None or not tiered.behind.refuses:
            return False
        names = {b"k" + key, name_of_block(*block_of(key))}
        return not any(map(tiered.stored.usage.__contains__, names)) and any(map(tiered.behind.waits, names))

    def _check_that_one_expires(self, keys: list[bytes]) -> None:
        """Under volatile-ttl a block may be evicted if one of its pages expires."""
        store, keyspace = self._model.store, self._process.server.keyspace
        if keyspace.eviction_order.policy != "volatile-ttl" or not keys or keys[0][:3] != b"kv:":
            return
        if self._was_refused(keys[0]):
            return
        known = [store.keys.get(key) for key in keys]
        if store.doubtful().union(store.fog).isdisjoint(keys) and all(
            value is not None and not value.expires and keyspace.contents.expires_of(key) <= 0
            for key, value in zip(keys, known, strict=True)
        ):
            self._fail(f"{keys[:3]!r} were evicted under volatile-ttl, and do not expire")

    def _may_be_unpinned(self, req_id: bytes) -> bool:
        """Return whether a transaction that may be running unpins blocks of this request."""
        queued = (words for talk in self._model.talks for words in talk.queued or ())
        return any(words[0].lower() == b"kvpageunpin" and words[1] == req_id for words in queued)

    def forget(self) -> list[bytes]:
        """Remove the evicted keys since the last call from the model."""
        left, self._left = self._left, []
        if left:
            self._model.store.now = self._process.machine.clock.unix_ms
            for key in left:
                self._model.store.forget(key)
        return left

    def forget_again(self, left: list[bytes]) -> None:
        """Values that a command has stored may have been evicted for its other values."""
        there = set(self._process.server.keyspace.listing.names())
        for key in left:
            if key not in there:
                self._model.store.forget(key)
