"""The restore planner: finds, from metadata only, the longest usable prefix and what to fetch for it.

A plan is a prefix without gaps. Where layers carry a state, it ends where one was taken, and leaves a token of the
prompt to compute, since a state cannot be cut back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from engine.chains import SHARED, Chain, chain_hashes, common_prefix
from engine.spec import ModelCacheSpec
from engine.tiers.server.manifest import BlockPlace, ContextManifest
from kvpage_server.segments import tag_of


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fetch."""

    tokens: tuple[int, ...]  # the blocks have its beginning
    blocks: tuple[BlockPlace, ...]  # in order, without gaps
    states: tuple[BlockPlace, ...]  # the furthest first; one of them is needed; () if no layer carries a state
    reach: int  # tokens of the prompt that needn't be computed
    own: bool = False  # whether the last block is of the agent's own context, and not of the prompt or of another one


@dataclass(frozen=True, slots=True)
class StoredBranch:
    """A block of a stored context that goes on from full blocks of the prompt, and in which the two diverge or the
    context ends."""

    before: int  # full blocks of the prompt
    tokens: tuple[int, ...]  # of the context, at least up to the end of this block
    block: BlockPlace
    common: int  # how many first tokens context and prompt have in common
    states: tuple[BlockPlace, ...] = ()  # states within its blocks, and at the end of this one if it is partial


class Offer:
    """Blocks that may be of use for a prompt: its full blocks, which any engine may have stored, and branches, of the
    agent's own context and of others."""

    def __init__(
        self,
        spec: ModelCacheSpec,
        wanted: tuple[int, ...],
        manifest: ContextManifest | None,
        chain: Chain = SHARED,
        together: int = 0,
        branches: Sequence[StoredBranch] = (),
    ) -> None:
        """`chain` is that of the prompt; `together` is that of the layout. The digests of `branches` are known."""
        size = spec.block_tokens
        names = chain_hashes(spec.fingerprint, wanted, size, chain)
        self.spec = spec
        self.wanted = wanted
        self.common = common_prefix(manifest.tokens, wanted) if manifest else 0
        self.full = [
            BlockPlace(name, size, (i + 1) * size, tag=tag_of(names, i, together)) for i, name in enumerate(names)
        ]
        inner = manifest.inner_places(spec, together) if manifest and spec.has_state else []
        self._inner = tuple(place for place in inner if place.end <= self.common)
        self._own = None
        if manifest and self.common % size:
            before = self.common // size
            block = manifest.place(before, spec, together)
            self._own = StoredBranch(before, manifest.tokens, block, self.common, self._inner)
        self._branches = branches

    @property
    def places(self) -> list[BlockPlace]:
        """All places whose digests a plan needs, with their states if layers carry any."""
        blocks = [*self.full, self._own.block] if self._own else self.full
        return [*blocks, *(place.state() for place in blocks), *self._inner] if self.spec.has_state else blocks

    def stored(self, digests: Mapping[str, str]) -> list[BlockPlace]:
        """The full blocks before the first one without a digest. `digests` are by seal."""
        return list(takewhile(lambda place: place.seal in digests, self.full))

    def has_gap(self, digests: Mapping[str, str]) -> bool:
        """Whether a part of the agent's own context is missing."""
        return len(self.stored(digests)) < self.common // self.spec.block_tokens

    def plan(self, digests: Mapping[str, str], limit: int) -> Plan:
        """The longest prefix of places that have a digest.

        `limit` is the most tokens of a prefix that ends in a state: all but one of a prompt.
        """
        stored = self.stored(digests)
        plans = [self._plan(self.wanted, stored, digests, limit, len(self.wanted), self._inner)]
        for branch in [self._own, *self._branches] if self._own else self._branches:
            if branch.block.seal in digests and len(stored) >= branch.before:
                blocks = [*stored[: branch.before], branch.block]
                most = min(limit, branch.common)
                plan = self._plan(branch.tokens, blocks, digests, most, branch.common, branch.states)
                plans.append(replace(plan, own=branch is self._own))
        return max(plans, key=lambda plan: plan.reach)

    def _plan(
        self,
        tokens: tuple[int, ...],
        blocks: Sequence[BlockPlace],
        digests: Mapping[str, str],
        limit: int,
        common: int,
        inner: Sequence[BlockPlace],
    ) -> Plan:
        """The plan for these blocks of a context of these `tokens`, of which the prompt has the first `common`."""
        if not self.spec.has_state:
            return Plan(tokens, tuple(blocks), (), min(blocks[-1].end if blocks else 0, common))
        states = {*(block.state() for block in blocks), *inner}
        last = min(limit, blocks[-1].end if blocks else 0)
        usable = sorted(
            (place for place in states if place.seal in digests and place.end <= last),
            key=lambda place: place.end,
            reverse=True,
        )
        reach = usable[0].end if usable else 0
        return Plan(tokens, tuple(place for place in blocks if place.start < reach), tuple(usable), reach)
