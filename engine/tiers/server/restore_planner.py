"""The restore planner: finds, from metadata only, the longest usable prefix and what to fetch for it.

A plan is a prefix without gaps. Where layers carry a state, it ends where one was taken, and leaves a token of the
prompt to compute, since a state cannot be cut back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.memory.prefix import ROOT, chain_hashes, common_prefix
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


class Offer:
    """What may be of use for a prompt: its full blocks, whoever stored them, and the block of the agent's own context
    in which context and prompt diverge, if there is one."""

    def __init__(
        self,
        spec: ModelCacheSpec,
        wanted: tuple[int, ...],
        manifest: ContextManifest | None,
        root: str = ROOT,
        together: int = 0,
    ) -> None:
        """The agent's chains begin at `root`; `together` is that of the layout."""
        size = spec.block_tokens
        names = chain_hashes(spec.fingerprint, wanted, size, root)
        self.spec = spec
        self.wanted = wanted
        self.manifest = manifest
        self.common = common_prefix(manifest.tokens, wanted) if manifest else 0
        self.full = [
            BlockPlace(name, size, (i + 1) * size, tag=tag_of(names, i, together)) for i, name in enumerate(names)
        ]
        parts = manifest and self.common % size
        self.parting = manifest.place(self.common // size, spec, together) if manifest and parts else None
        inner = manifest.inner_places(spec, together) if manifest and spec.has_state else []
        self.inner = [place for place in inner if place.end <= self.common]

    @property
    def places(self) -> list[BlockPlace]:
        """All places, with their states if layers carry any: a plan needs their digests."""
        blocks = [*self.full, self.parting] if self.parting else self.full
        return [*blocks, *(place.state() for place in blocks), *self.inner] if self.spec.has_state else blocks

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
        plans = [self._plan(self.wanted, stored, digests, limit)]
        shared = self.common // self.spec.block_tokens
        if self.manifest and self.parting and self.parting.seal in digests and len(stored) >= shared:
            blocks = [*stored[:shared], self.parting]
            plans.append(self._plan(self.manifest.tokens, blocks, digests, min(limit, self.common)))
        return max(plans, key=lambda plan: plan.reach)

    def _plan(
        self, tokens: tuple[int, ...], blocks: Sequence[BlockPlace], digests: Mapping[str, str], limit: int
    ) -> Plan:
        if not self.spec.has_state:
            reach = min(blocks[-1].end if blocks else 0, self.common if tokens is not self.wanted else len(tokens))
            return Plan(tokens, tuple(blocks), (), reach)
        states = [place for place in (*(block.state() for block in blocks), *self.inner) if place.seal in digests]
        last = min(limit, blocks[-1].end if blocks else 0)
        states = sorted((place for place in states if place.end <= last), key=lambda place: place.end, reverse=True)
        reach = states[0].end if states else 0
        return Plan(tokens, tuple(place for place in blocks if place.start < reach), tuple(states), reach)
