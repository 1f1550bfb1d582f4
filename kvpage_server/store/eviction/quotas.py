"""Quotas: limits in bytes for the keys that match a pattern, usually a tenant's; and the order of their eviction.

A key belongs to the first quota whose pattern matches it, a block to the first that matches `kv:{req_id}:`. The size
counts as it was stored, in memory or on disk: a page as the 64 bytes of its header and its body, alone or in a block; a
string as its key, its value and `TEXT_OVERHEAD`. So it is the same after a restart.

Each quota has a policy of its own in addition to that of the whole store. It gets only the uses of the quota's units,
so a quota's victim is found without passing over other units. Costs: O(1) a use, a change and a victim; which quota a
name belongs to is looked for once, and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvpage_server.store.eviction.queues import Queues, Unit
from kvpage_server.store.memory.entry import TEXT_OVERHEAD
from kvpage_server.store.memory.index import Block
from kvpage_server.store.reservation import Account

_MOST_NAMES = 1 << 17  # that are remembered


def block_name(req_id: bytes) -> bytes:
    """Return the name that a quota's pattern must match to own the blocks of a request."""
    return b"kv:%b:" % req_id


def text_size(key: bytes, size: int) -> int:
    """Return bytes that a string of `size` bytes counts as."""
    return len(key) + size + TEXT_OVERHEAD


class OverLimit(Exception):
    """A write would take more than it may, and there is nothing that the policy may evict for it. Says so."""


class OverQuota(OverLimit):
    """A write would take a quota over its limit, and there is nothing that the policy may evict for it."""

    def __init__(self, quota: Quota) -> None:
        shown = quota.pattern.decode("utf-8", "surrogateescape")
        super().__init__(f"command not allowed when the quota of '{shown}', {quota.limit} bytes, is used up.")


class Rule(NamedTuple):
    """Declaration of a quota: a glob pattern, bytes (0 for no limit), and the function that matches names."""

    pattern: bytes
    limit: int
    matches: Callable[[bytes], object]


class Quota(Account):
    """The keys of a pattern: `bytes`, of `limit`. `units` is the order they go in, `evicted` how many did."""

    __slots__ = ("bytes", "evicted", "limit", "matches", "pattern", "sizes", "units")

    def __init__(self, rule: Rule, units: Queues) -> None:
        super().__init__()
        self.pattern, self.limit, self.matches = rule
        self.bytes = 0
        self.sizes: dict[Unit, int] = {}  # of every unit that is counted
        self.units = units
        self.evicted = 0

    def lacks(self, coming: int) -> int:
        """Return the bytes to evict before `coming` bytes can be stored; negative if there is space."""
        return self.bytes + self.promised + coming - self.limit if self.limit else -1

    @property
    def is_over(self) -> bool:
        return self.bytes > self.limit > 0

    def resize(self, unit: Unit, size: int) -> None:
        """Set the size of a unit, in bytes."""
        self.bytes += size - self.sizes.get(unit, 0)
        self.sizes[unit] = size

    def remove(self, unit: Unit) -> None:
        self.bytes -= self.sizes.pop(unit, 0)
        self.units.removed(unit)


class Quotas:
    """Every quota, in order, and the policy of the whole store: together, they are a policy of units."""

    def __init__(self, rules: Iterable[Rule], every: Queues, make: Callable[[], Queues]) -> None:
        self.every = every
        self._quotas = [Quota(rule, make()) for rule in rules]
        self.limits = sum(quota.limit for quota in self._quotas)  # bytes
        self._names: dict[bytes, Quota | None] = {}
        self.now = every.now  # of every one of them

    def __len__(self) -> int:
        return len(self.every)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.every)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self.every

    @property
    def all(self) -> Sequence[Quota]:
        """The quotas, in order."""
        return self._quotas

    @property
    def now(self) -> int:
        """Unix seconds."""
        return self.every.now

    @now.setter
    def now(self, now: int) -> None:
        self.every.now = now
        for quota in self._quotas:
            quota.units.now = now

    # -- whose ------------------------------------------------------------------------------------------------------

    def named(self, name: bytes) -> Quota | None:
        """Return the quota of a string's key, or of a block: see `block_name`."""
        try:
            return self._names[name]
        except KeyError:
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            found = self._names[name] = next((quota for quota in self._quotas if quota.matches(name)), None)
            return found

    def of(self, unit: Unit) -> Quota | None:
        """Return the quota of a unit, if it has one."""
        return self.named(block_name(unit.req_id) if isinstance(unit, Block) else unit)

    def resize(self, unit: Unit, size: int) -> None:
        """Set the size of a unit, in bytes."""
        if quota := self.of(unit):
            quota.resize(unit, size)

    def grew(self, unit: Unit, size: int) -> None:
        """Change the size of a unit by a number of bytes."""
        quota = self.of(unit)
        if quota is not None and unit in quota.sizes:
            quota.resize(unit, quota.sizes[unit] + size)

    # -- a policy ----------------------------------------------------------------------------------------------------

    def used(self, unit: Unit) -> None:
        self.every.used(unit)
        if quota := self.of(unit):
            quota.units.used(unit)

    def used_all(self, units: list[Unit]) -> None:
        self.every.used_all(units)
        for unit in units:
            if quota := self.of(unit):
                quota.units.used(unit)

    def follows(self, units: Sequence[Unit]) -> None:
        self.every.follows(units)
        for quota in {quota: None for unit in units if (quota := self.of(unit))}:
            quota.units.follows(units)

    def idle(self, unit: Unit) -> int:
        return self.every.idle(unit)

    def removed(self, unit: Unit) -> None:
        self.every.removed(unit)
        if quota := self.of(unit):
            quota.remove(unit)

    def evicted(self, unit: Unit) -> None:
        """Note that a unit was evicted from memory: it may be on disk, and counts for its quota until it is removed."""
        self.every.evicted(unit)

    def victims(self) -> Iterator[Unit]:
        """Yield the units in the order they should go: those of quotas that are exceeded, then all."""
        for quota in self._quotas:
            if quota.is_over:
                for unit in quota.units.victims():
                    if not quota.is_over:
                        break
                    if unit in self.every:
                        yield unit
        yield from self.every.victims()

    def clear(self) -> dict[Unit, Any]:
        for quota in self._quotas:
            quota.bytes = 0
            quota.sizes = {}
            quota.units.clear()
        return self.every.clear()
