"""The restore planner, which finds the longest usable prefix and the blocks to fetch for it, from metadata only.

A plan is a prefix without gaps. If layers carry a state, the plan ends at a stored state, and leaves a token of the
prompt to compute, because a state cannot be shortened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kvpage_server.client.commands import Rate
from kvpage_server.page import tag_of

from ...chains import SHARED, Chain, chain_hashes, common_prefix
from ...spec import ModelCacheSpec
from .manifest import BlockPlace, ContextManifest

# -- Fetch or compute: blocks on the server are fetched if that is faster than computing them again --------------------

VALID_SECONDS = 30.0  # age of the last measurement up to which the link's rate is used
MOST_PERIODS = 64  # of computation, with which a prompt that was computed earlier is compared
LEAST_MEASURED = 1 << 20  # bytes; smaller transfers are not measured, because latency dominates them


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice between fetching and computing, with its figures. Times are in seconds, None if unknown."""

    fetch: bool
    tokens: int  # that need not be computed
    nbytes: int  # to be fetched
    load_seconds: float | None
    compute_seconds: float | None
    link_rate: float | None  # bytes a second
    latency: float | None  # of a request without a body
    prefill_rate: float | None  # tokens a second


class Rates:
    """The speed of the link and of the model's prefill. One thread measures the link, another one the prefill."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without measurements. `clock` returns seconds."""
        self._clock = clock
        self._link = Rate()
        self._requests = Rate()
        self._prefill = Rate()
        self._link_seen = 0.0  # time of `clock` when the link was last measured
        self._computed = 0  # tokens of prompts
        self._computing = 0.0  # seconds in which one or more of them were computed
        self._periods: list[tuple[float, float]] = []  # the latest of these, in times of `clock`; they do not overlap

    def prefilled(self, tokens: int, seconds: float, ago: float = 0.0) -> None:
        """Note that the model has computed `tokens` tokens of a prompt in `seconds`, which ended `ago` seconds ago."""
        self._prefill.observe(tokens, seconds)
        self._computed += tokens
        end = self._clock() - ago
        begin = end - seconds
        overlapping = [period for period in self._periods if period[0] <= end and begin <= period[1]]
        for period in overlapping:
            self._periods.remove(period)
            self._computing -= period[1] - period[0]
        merged = min([begin, *(first for first, _ in overlapping)]), max([end, *(last for _, last in overlapping)])
        self._computing += merged[1] - merged[0]
        self._periods = [*self._periods, merged][-MOST_PERIODS:]

    @property
    def throughput(self) -> float | None:
        """Tokens a second of all prompts together since the start. Prompts that are computed at the same time share the
        model, so it is more than `prefill_rate`, which is the rate of one of them.
        """
        return self._computed / self._computing if self._computing else None

    def asked(self, seconds: float) -> None:
        """Note that the server has answered a request without a body in `seconds`."""
        self._requests.observe(1, seconds)

    def received(self, nbytes: int, seconds: float, planned: int) -> None:
        """Note that `nbytes` of `planned` bytes have arrived in `seconds`, if at least LEAST_MEASURED were planned."""
        if planned >= LEAST_MEASURED:
            self._link.observe(nbytes, seconds)
            self._link_seen = self._clock()

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second."""
        return self._prefill.value

    @property
    def latency(self) -> float | None:
        """Seconds."""
        return 1 / rate if (rate := self._requests.value) else None

    @property
    def link_rate(self) -> float | None:
        """Bytes a second; None if not measured recently. Then the next context is fetched, which measures it."""
        return self._link.value if self._clock() - self._link_seen < VALID_SECONDS else None

    def decide(self, tokens: int, nbytes: int, link: float | None = None) -> Decision:
        """Decide whether to fetch `nbytes` or to compute `tokens`, at `link` bytes a second, or the rate measured
        recently. Fetch if one of the rates is unknown."""
        link, latency, prefill = link or self.link_rate, self.latency, self.prefill_rate
        load = compute = None
        if link is not None:
            load = (latency or 0.0) + (nbytes / link if link else float("inf"))
        if prefill:
            compute = tokens / prefill
        fetch = load is None or compute is None or load < compute
        return Decision(fetch, tokens, nbytes, load, compute, link, latency, prefill)


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks and states to fetch."""

    tokens: tuple[int, ...]  # of the context; the blocks have its first tokens
    blocks: tuple[BlockPlace, ...]  # in order, without gaps
    states: tuple[BlockPlace, ...]  # the furthest first; one of them is needed; () if no layer carries a state
    reach: int  # tokens of the prompt that need not be computed
    own: bool = False  # whether the last block belongs to the agent's own context, not to the prompt or another context


@dataclass(frozen=True, slots=True)
class StoredBranch:
    """A block of a stored context after full blocks of the prompt, in which context and prompt diverge or one of them
    ends."""

    before: int  # full blocks of the prompt
    tokens: tuple[int, ...]  # of the context, at least up to the end of this block
    block: BlockPlace
    common: int  # the number of first tokens that context and prompt have in common
    states: tuple[BlockPlace, ...] = ()  # states within its blocks, and at the end of this one if it is partial


class Offer:
    """Blocks that a prompt could reuse: its full blocks, which any engine may have stored, and branches of stored
    contexts, of the agent or others.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        tokens: tuple[int, ...],
        manifest: ContextManifest | None,
        chain: Chain = SHARED,
        together: int = 0,
        branches: Sequence[StoredBranch] = (),
    ) -> None:
        """Collect the places. `chain` is the chain of the prompt; `together` is as for BlockLayout. The digests of
        `branches` are known."""
        size = spec.block_tokens
        names = chain_hashes(spec.fingerprint, tokens, size, chain)
        self.spec = spec
        self.tokens = tokens
        self.common = common_prefix(manifest.tokens, tokens) if manifest else 0
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
        """Return the full blocks before the first one without a digest. `digests` are by seal."""
        return list(takewhile(lambda place: place.seal in digests, self.full))

    def has_gap(self, digests: Mapping[str, str]) -> bool:
        """Return whether a part of the agent's own context is missing."""
        return len(self.stored(digests)) < self.common // self.spec.block_tokens

    def plan(self, digests: Mapping[str, str], limit: int) -> Plan:
        """Return the longest prefix of places that have a digest.

        `limit` is the most tokens of a prefix that ends in a state: all but one of a prompt.
        """
        stored = self.stored(digests)
        plans = [self._plan(self.tokens, stored, digests, limit, len(self.tokens), self._inner)]
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
        """Return the plan for `blocks` of a context of `tokens`, of which the prompt has the first `common`."""
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
