"""What there is and how it goes: every key, with the accounts of what it takes, who protects it and when it is due.

The layers of a keyspace lie over each other: this one, `room` (what goes when memory is full), `lookup` (finding and
reading), `memory` (writing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from kvpage_server.core import Arena
from kvpage_server.page import HEADER_SIZE, PageKey, unix_ms
from kvpage_server.store.eviction.expiry import Expiry
from kvpage_server.store.eviction.ghosts import Ghosts
from kvpage_server.store.eviction.leases import Guards
from kvpage_server.store.eviction.policies import POLICIES
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.eviction.queues import Queues
from kvpage_server.store.eviction.quotas import Quota, Quotas
from kvpage_server.store.memory.catalogue import Catalogue
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Page, Text, is_page
from kvpage_server.store.memory.index import Block

OVER_QUOTA = "over quota"
BlockListener = Callable[[Sequence[bytes], Iterable[tuple[str, bytes]]], None]  # keys that changed, and their events
_REASONS = {"del": "deleted", "set": "overwritten", "evicted": "evicted", "expired": "expired"}


@dataclass(slots=True)
class Counters:
    """What happened to keys since the start."""

    hits: int = 0
    misses: int = 0
    expired: int = 0
    evicted: int = 0
    writes: int = 0


class Holdings:
    """Every key and value. `maxmemory` is in bytes, 0 for no limit."""

    def __init__(self, *, maxmemory: int = 0, policy: str = "allkeys-prefix") -> None:
        self.maxmemory = maxmemory
        self._policy = policy
        self.arena = Arena()
        self._catalogue = Catalogue()
        self.index = self._catalogue.index
        self.guards = Guards(self._quota_of)
        self.ghosts = Ghosts()
        self.counters = Counters()
        self.on_event: Callable[[str, bytes], None] | None = None  # told what happened to which key
        self.on_block: BlockListener | None = None  # told likewise of all pages of a block, where `on_event` is
        self._expiry = Expiry(self.expires_of)
        self._units: Queues | Quotas = POLICIES[policy]()
        self._quotas: Quotas | None = None  # they are the policy of units then
        self._touching = True  # whether reading counts as a use
        self._texts = 0  # bytes of short strings
        self.receiving = 0  # bytes of slots that are being received: they are their senders', not the store's yet

    def __len__(self) -> int:
        return len(self._catalogue)

    @property
    def used_memory(self) -> int:
        """Bytes that count against maxmemory: slots in use, but for those being received, and short strings."""
        return self.arena.used - self.receiving + self._texts

    @property
    def volatile(self) -> int:
        """Keys that have an expiry."""
        return self._expiry.keys

    def find(self, key: bytes) -> Entry | None:
        """The living value of a key, without counting it as a use."""
        entry = self._catalogue.get(key)
        if entry is not None and entry.expires and entry.expires <= unix_ms():
            self._expire(key)
            return None
        return entry

    def expires_of(self, key: bytes) -> int:
        """A key's expiry in unix milliseconds; 0 when it has none or does not exist."""
        entry = self._catalogue.get(key)
        return entry.expires if entry is not None else 0

    @staticmethod
    def _unit(key: bytes, entry: Entry) -> Unit:
        unit = entry.unit
        return unit if type(unit) is Block else key

    def _join(self, block: Block) -> None:
        """Say that the pages of a request follow each other."""
        self.chain(self.index.around(block))

    def chain(self, blocks: Sequence[Block]) -> None:
        """Each of these extends the one before it, and is worth nothing to an engine without that."""
        if len(blocks) > 1:
            self._units.follows(blocks)

    def tell(self, event: str, key: bytes) -> None:
        """Say what happened to a key, to whoever listens."""
        if self.on_event is not None:
            self.on_event(event, key)

    # -- going -----------------------------------------------------------------------------------------------------

    def delete(self, key: bytes, event: str = "del") -> bool:
        """Remove a key; whether it was there and alive."""
        if self.find(key) is None:
            return False
        self._own(key)
        self._remove(key, event)
        return True

    def _remove(self, key: bytes, event: str) -> None:
        self._forget(key, self._catalogue.entries.pop(key), None, event)
        self.tell(event, key)

    def _own(self, key: bytes) -> Entry | None:
        """The entry of a key that is about to change by itself."""
        entry = self._catalogue.entries.get(key)
        if entry is None and (page := self._catalogue.page_in_extent(key)):
            self._split(cast(Block, page.unit))
            return self._catalogue.entries[key]
        return entry

    def _split(self, block: Block) -> None:
        for key in self._catalogue.split(block):
            if expires := self.expires_of(key):
                self._expiry.note(key, expires)

    def _forget(self, key: bytes, old: Entry, new: Entry | None, event: str = "set") -> None:
        """Undo what the index and the accounts know of `old`; `new` takes its place, if anything does."""
        if old.expires:
            self._expiry.keys -= 1
        if is_page(old):
            self._forget_page(key, old, new, event)
            return
        self._catalogue.forget_stray(key)
        if type(old) is Text:
            self._texts -= len(key) + old.size + TEXT_OVERHEAD
        else:
            self.guards.removed(key)  # the new value was used a moment ago: it needs no promise yet
        if new is None or is_page(new):
            self._units.removed(key)

    def _forget_page(self, key: bytes, old: Page, new: Entry | None, event: str) -> None:
        block = cast(Block, old.unit)
        self._grow(block, -old.footprint)
        if new is not None and new.unit is block:
            return
        name = PageKey.parse(key)
        self.ghosts.page_went(block, name.layer, name.head, name.kv_type, _REASONS.get(event, event))
        block.discard(name.layer, name.head, name.kv_type)
        if self._quotas is not None:
            self._quotas.grew(block, -HEADER_SIZE - old.size)
        if not block.pages:
            self.index.remove(block)
            self._units.removed(block)
            self.guards.removed(block)

    def _quota_of(self, unit: Unit) -> Quota | None:
        """The quota with a limit that a unit counts against, if there is one."""
        quota = self._quotas.of(unit) if self._quotas is not None else None
        return quota if quota is not None and quota.limit else None

    def _grow(self, block: Block, size: int) -> None:
        block.footprint += size
        self.guards.grew(block, size)

    def remove_corrupt(self, key: bytes) -> None:
        """Remove a page that is not what was stored."""
        self._own(key)
        self._forget(key, self._catalogue.entries.pop(key), None, "corrupt")
        self.tell("del", key)

    def remove_block(self, block: Block, event: str, reason: str = "") -> int:
        """Remove every page of a block; how many it had. `reason`: what is remembered, if the event does not tell."""
        self.index.remove(block)
        self._units.removed(block)
        self.guards.removed(block)
        self.ghosts.block_went(block, reason or _REASONS[event], self._who(block, event, reason))
        keys = list(block.page_keys()) if self.on_block is not None else []
        self._expiry.keys -= self._catalogue.take_pages(block)
        block.extent = None  # whoever still looks at the block does not keep its memory
        if self.on_block is not None:
            self.on_block(keys, ((event, key) for key in keys))
        return block.pages

    def _who(self, block: Block, event: str, reason: str) -> str:
        """What evicted a block: the policy, or a quota, by its pattern."""
        quota = self._quotas.of(block) if self._quotas is not None and reason == OVER_QUOTA else None
        if quota is not None:
            return quota.pattern.decode("utf-8", "surrogateescape")
        return self._policy if event == "evicted" else ""

    def _expire(self, key: bytes) -> None:
        """Remove an overdue key; of a block that was stored whole, all of it."""
        page = self._catalogue.page_in_extent(key)
        if page is not None and key not in self._catalogue.entries:
            self.counters.expired += self.remove_block(cast(Block, page.unit), "expired")
        else:
            self.counters.expired += 1
            self._remove(key, "expired")

    def set_expiry(self, key: bytes, expires: int) -> None:
        """Give a living key an expiry in unix milliseconds, 0 to take it away. One in the past removes the key."""
        entry = self._own(key)
        assert entry is not None
        if entry.expires:
            self._expiry.keys -= 1
        entry.expires = expires
        if not expires:
            self.tell("persist", key)
            return
        self._expiry.keys += 1
        if expires <= unix_ms():
            self._remove(key, "del")
            return
        unit = self._unit(key, entry)
        if isinstance(unit, Block):
            unit.expires_at(expires)
        self._expiry.note(key, expires)
        self.tell("expire", key)
