"""The order in which units are evicted. `Contents.evict` removes them.

**A change of policy** is O(1). The new policy takes over the units in steps, see `queues`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpage_server.store.eviction.policies import POLICIES, Policy
from kvpage_server.store.eviction.queues import Queues, Unit, successor
from kvpage_server.store.eviction.quotas import Quota, Quotas, Rule
from kvpage_server.store.memory.catalogue import IN_MEMORY, IndexCosts
from kvpage_server.store.memory.index import Block, PageIndex

_UNITS_PER_STEP = 500  # units that a new policy takes over in one call, because other clients wait meanwhile


class EvictionOrder:
    """The policies of the store and its quotas. Callers report every use and removal of a unit to `units`."""

    def __init__(self, policy: str, index: PageIndex) -> None:
        self._policy = policy
        self._index = index
        every = POLICIES[policy].order()
        self.quotas = Quotas((), every, IN_MEMORY)
        self.has_quotas = False
        self._changes = False  # whether a change of policy is not complete
        self.units: Queues | Quotas = every  # `quotas` if there are any

    @property
    def rules(self) -> Policy:
        """The units that the policy may evict."""
        return POLICIES[self._policy]

    @property
    def policy(self) -> str:
        """The name of the policy that selects the units to evict when memory is full."""
        return self._policy

    @policy.setter
    def policy(self, name: str) -> None:
        """Change the policy. The new policy takes over the units and their last uses in steps, see `hand_over`."""
        self._policy = name
        self._changes = True
        self.hand_over()

    def set_quotas(self, rules: Sequence[Rule], index_costs: IndexCosts) -> None:
        """Replace the quotas. Nothing is evicted.

        Quotas stay, with their units in order and another limit, up to the first one with another pattern than before:
        they have the same units as before. Another quota whose pattern existed before keeps its count of evictions;
        everything else of it starts empty, and the caller counts its units (`QuotaAccounts.set_rules`). `index_costs`
        computes the bytes that a unit takes in the index.
        """
        old = {quota.pattern: quota for quota in self.quotas.all}
        every = self._policies()[0]
        self.quotas = Quotas(rules, every, index_costs, self.quotas.all)
        self.has_quotas = bool(rules)
        self.units = self.quotas if rules else every
        for quota in self.quotas.all:
            if quota.pattern in old:
                quota.evicted = old[quota.pattern].evicted

    def limit_of(self, unit: Unit) -> Quota | None:
        """Return the quota that a unit belongs to if it has a limit, and None otherwise."""
        quota = self.quotas.of(unit)
        return quota if quota is not None and quota.limit else None

    def chain(self, blocks: Sequence[Block]) -> None:
        """Note that each of these blocks extends the one before it: an engine cannot use it without that one."""
        if len(blocks) > 1:
            self.units.follows(blocks)

    def join(self, block: Block) -> None:
        """Note that a block extends its predecessor in its request, and that its successor extends it."""
        blocks = self._index.around(block)
        if len(blocks) > 1:
            self.units.follows(blocks)

    # -- a change of policy ------------------------------------------------------------------------------------------

    def hand_over(self) -> bool:
        """Let the current policies take over up to _UNITS_PER_STEP units. Return whether more units are left.

        If `policy` was set again before that is complete, the next change begins afterwards.
        """
        if not self._changes:
            return False
        self._begin_to_hand_over()
        for policy in self._policies():
            for unit in policy.hand_over(_UNITS_PER_STEP):
                if isinstance(unit, Block):
                    policy.follows(self._index.around(unit))
            if policy.hands_over:
                return True
        self._changes = self._begin_to_hand_over()
        return self._changes

    def _begin_to_hand_over(self) -> bool:
        """Install policies of the class that `policy` requires, which take over from the present ones.

        Return False, and install none, if they are of this class already, or if the last change is incomplete.
        """
        kind = self.rules.order
        policies = self._policies()
        if all(type(policy) is kind for policy in policies) or any(policy.hands_over for policy in policies):
            return False
        self.quotas.every = successor(policies[0], kind)
        for quota in self.quotas.all:
            if quota.known_units is not None:
                quota.known_units = successor(quota.known_units, kind)
        self.units = self.quotas if self.has_quotas else self.quotas.every
        return True

    def _policies(self) -> list[Queues]:
        """Return the policy of all units, and then the policy of each quota that has one."""
        if isinstance(self.units, Quotas):
            return [self.units.every, *(quota.units for quota in self.units.all if quota.known_units is not None)]
        return [self.units]
