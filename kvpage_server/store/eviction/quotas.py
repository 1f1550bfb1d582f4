"""Quotas: limits in bytes for the keys that match a pattern, usually a tenant's; and the order of their eviction.

A string belongs to the first quota whose pattern matches its key, a block to the first whose pattern matches
`kv:{req_id}:`. A value counts with its stored size: that of its bytes in memory, or on disk if it is on disk only. A
page counts 64 bytes for its header and the bytes of its body, alone or in an extent; a body that is coded there counts
the bytes of its code. A string counts its key, its value and `TEXT_OVERHEAD`. The memory of the index is counted apart,
as many small values take more of it than their own size, and has a limit of its own: see `QuotaIndexAccount`.

Each quota has a policy of its own in addition to that of the whole store. It gets only the uses of the quota's units,
so a quota's victim is found without examining other units. Costs: O(1) for a use, a change of size and a victim. The
quota of a name is searched for once, as `Patterns` does, and then cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import proxy

from kvpage_server.glob import Matches, Patterns
from kvpage_server.page import HEADER_SIZE
from kvpage_server.store.eviction.queues import Queues, Unit
from kvpage_server.store.memory.catalogue import IndexCosts
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, is_page, stored_size_of
from kvpage_server.store.memory.index import Block

_MOST_NAMES = 1 << 17  # names whose quota is cached; more clear the cache
_MOST_BYTES = 16 << 20  # of these names


def block_name(req_id: bytes) -> bytes:
    """Return the name that a quota's pattern must match to own the blocks of a request."""
    return b"kv:%b:" % req_id


def text_size(key: bytes, size: int) -> int:
    """Return the bytes that a string with a value of `size` bytes counts for its quota."""
    return len(key) + size + TEXT_OVERHEAD


def counted(key: bytes, entry: Entry | None, *, as_page: bool) -> int:
    """Return the size of a page, or without `as_page` of a string, for its quota; 0 for a value of the other kind."""
    if entry is None or is_page(entry) != as_page:
        return 0
    return HEADER_SIZE + stored_size_of(entry) if as_page else text_size(key, entry.size)


class Rule(NamedTuple):
    """Declaration of a quota: a glob pattern, a limit in bytes, 0 for none, and the function that matches names."""

    pattern: bytes
    limit: int
    matches: Matches


class Quota:
    """The units whose names match a pattern, their sizes, and the policy that orders their eviction."""

    __slots__ = (
        "_begin",
        "bytes",
        "costs",
        "evicted",
        "index",
        "index_costs",
        "known_units",
        "limit",
        "pattern",
        "sizes",
    )

    def __init__(self, rule: Rule, begin: Callable[[], Queues], index_costs: IndexCosts) -> None:
        self.pattern, self.limit = rule.pattern, rule.limit
        self.bytes = 0  # the sum of `sizes`
        self.sizes: dict[Unit, int] = {}  # bytes of every unit that was counted
        self.index = 0  # the sum of `costs`
        self.costs: dict[Unit, int] = {}  # bytes of the index of every unit in `sizes`
        self.index_costs = index_costs
        self.evicted = 0  # number of keys that were evicted because of this quota
        self._begin = begin  # creates the policy
        self.known_units: Queues | None = None  # the policy, None before its first use

    @property
    def units(self) -> Queues:
        """The policy. The first use creates it, because a thousand of them would take 30 ms."""
        if self.known_units is None:
            self.known_units = self._begin()
        return self.known_units

    def stay(self, rule: Rule, begin: Callable[[], Queues]) -> None:
        """Keep the units under a new rule with the same pattern, among other quotas."""
        self.limit, self._begin = rule.limit, begin

    @property
    def is_over(self) -> bool:
        """Whether the units exceed the limit."""
        return self.bytes > self.limit > 0

    def resize(self, unit: Unit, size: int) -> None:
        """Set the size of a unit, in bytes."""
        cost = self.index_costs.of_unit(unit)
        self.bytes += size - self.sizes.get(unit, 0)
        self.index += cost - self.costs.get(unit, 0)
        self.sizes[unit], self.costs[unit] = size, cost

    def remove(self, unit: Unit) -> None:
        """Remove a unit from the sizes and the policy."""
        self.bytes -= self.sizes.pop(unit, 0)
        self.index -= self.costs.pop(unit, 0)
        self.units.removed(unit)


def _begin(quotas: Quotas) -> Queues:
    """Return a new policy of the class of the whole store's."""
    units = type(quotas.every)()
    units.now = quotas.every.now
    return units


class Quotas:
    """Every quota, in the order of the rules, and the policy of the whole store, `every`.

    The object has the methods of a policy. It passes uses and removals to `every` and to the policy of a unit's quota.
    """

    def __init__(
        self, rules: Sequence[Rule], every: Queues, index_costs: IndexCosts, before: Sequence[Quota] = ()
    ) -> None:
        """Create the quotas. Those `before` that have the same units stay: see `EvictionOrder.set_quotas`."""
        self.every = every
        begin = partial(_begin, proxy(self))  # a cycle of references would keep removed values in memory
        same = [*takewhile(lambda pair: pair[0].pattern == pair[1].pattern, zip(rules, before, strict=False))]
        for rule, quota in same:
            quota.stay(rule, begin)
        self._quotas = [quota for _, quota in same] + [Quota(rule, begin, index_costs) for rule in rules[len(same) :]]
        self.limits = sum(quota.limit for quota in self._quotas)  # bytes of all limits together
        self._numbers = {quota: number for number, quota in enumerate(self._quotas)}
        self._patterns = Patterns[Quota]()
        for rule, quota in zip(rules, self._quotas, strict=True):
            self._patterns.add(rule.pattern, quota, rule.matches)
        self._names: dict[bytes, Quota | None] = {}  # cached results of `named`
        self._name_bytes = 0  # of these names

    def __len__(self) -> int:
        return len(self.every)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.every)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self.every

    @property
    def all(self) -> Sequence[Quota]:
        """The quotas in the order of the rules."""
        return self._quotas

    @property
    def now(self) -> int:
        """The time of all policies, in monotonic seconds."""
        return self.every.now

    @now.setter
    def now(self, now: int) -> None:
        if now != self.every.now:
            self.every.now = now
            for quota in self._quotas:
                if quota.known_units is not None:
                    quota.known_units.now = now

    # -- quotas of units --------------------------------------------------------------------------------------------

    def named(self, name: bytes) -> Quota | None:
        """Return the quota of a string's key or of a block's name (see `block_name`); None without one."""
        if not self._quotas:
            return None
        try:
            return self._names[name]
        except KeyError:
            if len(self._names) >= _MOST_NAMES or self._name_bytes > _MOST_BYTES:
                self._names.clear()
                self._name_bytes = 0
            self._name_bytes += len(name)
            matching = self._patterns.matching(name)
            found = self._names[name] = min(matching, key=self._numbers.__getitem__, default=None)
            return found

    def of(self, unit: Unit) -> Quota | None:
        """Return the quota of a unit, or None."""
        if not self._quotas:
            return None
        return self.named(block_name(unit.req_id) if isinstance(unit, Block) else unit)

    def resize(self, unit: Unit, size: int) -> None:
        """Set the size of a unit, in bytes, if it belongs to a quota."""
        if quota := self.of(unit):
            quota.resize(unit, size)

    def grew(self, unit: Unit, size: int) -> None:
        """Add `size` bytes, which may be negative, to a unit that was counted."""
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
        """Note that a unit was evicted or demoted. A demoted unit still counts for its quota."""
        self.every.evicted(unit)

    def victims(self) -> Iterator[Unit]:
        """Yield the units in the order of eviction: first units of exceeded quotas, then all units."""
        yield from filter(self.every.__contains__, self.exceeding())
        yield from self.every.victims()

    def exceeding(self) -> Iterator[Unit]:
        """Yield units of exceeded quotas, also ones on disk only, in the order of eviction."""
        for quota in self._quotas:
            if quota.is_over:
                for unit in quota.units.victims():
                    if not quota.is_over:
                        break
                    yield unit

    def clear(self) -> dict[Unit, Any]:
        """Remove all units from the quotas and the policies. Return the former units of the store's policy."""
        for quota in self._quotas:
            quota.bytes = quota.index = 0
            quota.sizes, quota.costs = {}, {}
            if quota.known_units is not None:
                quota.known_units.clear()
        return self.every.clear()
