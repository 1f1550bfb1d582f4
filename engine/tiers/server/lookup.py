"""Lookup of a prompt on a page server: it plans the fetch, and leases the blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from itertools import takewhile

from kvpage_server.client import Refused
from kvpage_server.client.raw_commands import RawCommand, fields

from ...chains import common_prefix
from ...generation.tokens import token_ids
from ...memory.blocks import KVBlock
from ...pool import BlockPool
from ...spec import ModelCacheSpec
from .connection import ServerConnection
from .manifest import BlockLayout, BlockPlace, ContextManifest, Miss, manifest_key, older_key
from .restore_planner import Decision, Offer, Plan, StoredBranch
from .tails import Parent, parse

REMOVED = "evicted", "expired", "over quota"  # reasons of the server for a removal that no client asked for
MOST_BRANCHES = 4  # branches of a record that are considered, at most: those with the most common tokens


@dataclass(frozen=True, slots=True)
class Remote:
    """A page server, and the objects that are necessary to use it for one model."""

    connection: ServerConnection
    spec: ModelCacheSpec
    layout: BlockLayout
    pool: BlockPool  # for received blocks


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A request to fetch a context."""

    agent_id: str
    tokens: Sequence[int] | None  # the prompt; None for all of the agent's own context
    held: Sequence[KVBlock]  # the first full blocks of the prompt, if they are in memory
    within: float  # time limit in seconds
    beyond: int = 0  # tokens of the prompt that memory has: less is not fetched
    named: bool = True  # whether the agent can have a context of its own
    whole: bool = False  # whether blocks that are computed faster are fetched, too
    frees: Callable[[], bool] = lambda: False  # returns whether memory becomes free when a context is written


@dataclass(slots=True)
class FetchReport:
    """Result of a fetch."""

    reasons: list[str] = field(default_factory=list)  # reasons for a shorter result, in order of time
    decision: Decision | None = None  # None if there was nothing to decide
    nbytes: int = 0  # received
    coded: float | None = None  # the ratio of blocks to their codes, if some arrived in the lossless code
    mapped: bool = False  # whether blocks were read in the page server's memory
    seconds: float = 0.0  # of the whole fetch
    reach: int = 0  # tokens of the prompt that need not be computed, once it is done
    own: bool = False  # whether the last block is of the agent's own context

    def missed(self, why: str) -> None:
        """Note a reason for which the result is shorter or missing."""
        if why not in self.reasons:
            self.reasons.append(why)


class Lookup:
    """The lookup for one request."""

    def __init__(self, remote: Remote, request: FetchRequest, report: FetchReport) -> None:
        """Plan with the blocks in memory. Raises ValueError if more blocks are held than the prompt fills, and
        UnknownTokenError."""
        prompt = () if request.tokens is None else tuple(token_ids(request.tokens))
        if len(request.held) > (full := len(prompt) // remote.spec.block_tokens):
            raise ValueError(f"held blocks are the first of {full} full ones, got {len(request.held)}")
        self.remote = remote
        self.report = report
        self.whole_context = request.tokens is None
        self.may_compute = not (request.whole or self.whole_context)
        self._request = request
        self._chain = remote.spec.chain(request.agent_id, prompt)
        self._offer = Offer(
            remote.spec, prompt, None, self._chain, remote.layout.together
        )  # of the prompt only, so far
        self.held = dict(zip(self._offer.full, request.held, strict=False))
        self.plan_in_memory = self._offer.plan(self.digests_in_memory, self.limit)

    @property
    def limit(self) -> int:
        """The most tokens of a context that ends in a state. One token of a prompt is left to compute."""
        return len(self._offer.tokens) - (not self.whole_context)

    @cached_property
    def digests_in_memory(self) -> dict[str, str]:
        """An empty digest for each block in memory, by seal, because a plan consists of blocks with a digest."""
        blocks = dict.fromkeys((place.seal for place in self.held), "")
        return blocks | {place.state().seal: "" for place, block in self.held.items() if block.state is not None}

    def missing(self, plan: Plan) -> list[BlockPlace]:
        """Return the places to fetch for a plan: the blocks that are not in memory, and the furthest state if it is
        not.
        """
        return [place for place in (*plan.blocks, *plan.states[:1]) if place.seal not in self.digests_in_memory]

    async def ask(self) -> dict[str, str]:
        """Read the agent's manifest, the records of full and partial blocks, and the digests of the blocks of prompt
        and manifest. Return the digests by seal, also those of the records, and an empty one for each block in memory.
        """
        connection, spec, agent_id = self.remote.connection, self.remote.spec, self._request.agent_id
        seals = [place.seal for place in self._offer.places]
        parents = self._parents()
        keys = [manifest_key(agent_id, spec.fingerprint), older_key(agent_id)] if self._request.named else []
        # First request: the manifests, the records, and the digests of the prompt's full blocks.
        begun = time.perf_counter()
        found = await connection.read([*keys, *parents, *seals], self.report.missed)
        connection.rates.asked(time.perf_counter() - begun)
        manifest = self._manifest(*found[: len(keys)]) if keys else None
        records = dict(zip(parents, found[len(keys) :], strict=False))
        digests = dict(zip(seals, found[len(keys) + len(parents) :], strict=True))
        branches, in_records = self._branches(records, parents)
        tokens = manifest.tokens if manifest and self.whole_context else self._offer.tokens
        chain = spec.chain(manifest.owner if manifest else agent_id, tokens)
        self._offer = Offer(spec, tokens, manifest, chain, self.remote.layout.together, branches)
        # Second request: the digests of blocks that only the manifest names.
        if more := [place.seal for place in self._offer.places if place.seal not in digests]:
            digests |= dict(zip(more, await connection.read(more, self.report.missed), strict=True))
        stored = {seal: digest.decode(errors="replace") for seal, digest in digests.items() if digest}
        # A block whose seal was asked for and is absent is not usable: a load may have found it damaged.
        in_records = {seal: digest for seal, digest in in_records.items() if seal not in digests}
        stored = in_records | stored | self.digests_in_memory
        if self._offer.has_gap(stored):
            self.report.missed("gap")
        return stored

    async def plan_and_lease(self, digests: dict[str, str]) -> Plan:
        """Decide between the fetch of blocks and their computation. Return a plan whose blocks exist and are leased;
        if computing is faster, only the blocks in memory.
        """
        found = set[BlockPlace]()
        while True:
            plan = self._offer.plan(digests, self.limit)
            beyond = max(self.plan_in_memory.reach, self._request.beyond)
            if self._request.beyond and min(plan.reach, self.limit) <= beyond:
                return self.plan_in_memory
            missing = self.missing(plan)
            if not missing:
                return plan
            if self.may_compute:
                tokens, nbytes = plan.reach - beyond, self.remote.layout.nbytes(*missing)
                self.report.decision = self.remote.connection.rates.decide(tokens, nbytes)
                if not self.report.decision.fetch:
                    self.report.missed("recompute")
                    return self.plan_in_memory
            stored = [place for place in missing if self.remote.layout.nbytes(place)]
            if found.issuperset(stored):
                return plan
            leased, lost = await self._lease_all(plan, stored)
            if not lost:
                return plan
            found.update(leased)
            self.report.missed("gap")
            for place in lost:
                del digests[place.seal]

    async def why_absent(self) -> str:
        """Return why the server has nothing for the prompt: the reason in REMOVED for which it has removed the first
        block or the agent's manifest; ``absent`` for another reason, and if it does not say.
        """
        connection, asked = self.remote.connection, list[RawCommand]()
        if self._offer.full:
            asked.append(RawCommand(["KVPAGEWHY", self._offer.full[0].block[0]], fields))
        if self._request.named:
            key = manifest_key(self._request.agent_id, self.remote.spec.fingerprint)  # has no wildcard
            asked.append(RawCommand(["KVLOST", key], fields))
        for command in asked:
            try:
                (found,) = await connection.ask([command], gone={})
            except Refused:  # by a plain Redis or a gateway, or without the right
                continue
            for answer in (found, *map(fields, found.get(b"strings", ()))):
                reason = answer.get(b"reason", b"")
                if isinstance(reason, bytes) and (why := reason.decode(errors="replace")) in REMOVED:
                    return why
        return "absent"

    def _manifest(self, raw: bytes | None, older: bytes | None) -> ContextManifest | None:
        """Return the agent's manifest, or None. A manifest of an earlier version is not read."""
        if raw is None:
            if older is not None:
                self.report.missed("manifest")
            return None
        try:
            return ContextManifest.parse(raw, self._request.agent_id, self.remote.spec)
        except Miss as error:
            self.report.missed(str(error))
            return None

    def _parents(self) -> dict[str, Parent]:
        """Return the keys of the records that may have more of the prompt than memory has, with the parents of their
        blocks: one for each full block, and the records of the prompt's first tokens."""
        spec, prompt = self.remote.spec, self._offer.tokens
        names = tuple(place.name for place in self._offer.full)
        parents = [Parent(names[:count], self._chain, self.remote.layout.together) for count in range(len(names) + 1)]
        starts = range(0, len(prompt), spec.block_tokens)
        return {
            key: parent
            for parent, start in zip(parents, starts, strict=False)
            if start + spec.block_tokens > self._request.beyond
            for key in parent.records(prompt[start : start + spec.block_tokens], spec)
        }

    def _branches(
        self, records: Mapping[str, bytes | None], parents: Mapping[str, Parent]
    ) -> tuple[list[StoredBranch], dict[str, str]]:
        """Return the blocks of the records that have tokens in common with the prompt, and the digests of these blocks
        and of their states by seal."""
        spec, branches, digests = self.remote.spec, list[StoredBranch](), dict[str, str]()
        for key, raw in records.items():
            if raw is None:
                continue
            try:
                tails = parse(raw, key, spec)
            except Miss as error:
                self.report.missed(str(error))
                continue
            parent = parents[key]
            start = len(parent.names) * spec.block_tokens
            rest = self._offer.tokens[start : self.limit]
            near = nlargest(MOST_BRANCHES, ((tail.usable(rest, spec), i) for i, tail in enumerate(tails)))
            for usable, i in near:
                if usable:
                    block, *states = places = tails[i].places(parent, spec)
                    tokens = (*self._offer.tokens[:start], *tails[i].tokens)
                    common = start + common_prefix(tails[i].tokens, self._offer.tokens[start:])
                    branches.append(StoredBranch(len(parent.names), tokens, block, common, tuple(states)))
                    digests |= {place.seal: digest for place, digest in places.items()}
        return branches, digests

    async def _lease_all(
        self, plan: Plan, stored: Sequence[BlockPlace]
    ) -> tuple[Sequence[BlockPlace], Sequence[BlockPlace]]:
        """Lease the places of a plan that are `stored` on the server: blocks, and the furthest state. Return the leased
        places, and the lost ones: blocks from the first missing one on, or, with states, the states after which the
        context cannot be restored. If the furthest one is lost, the next usable one is leased.
        """
        connection, layout = self.remote.connection, self.remote.layout
        rate = connection.rates.link_rate
        expected = layout.nbytes(*stored) / rate if rate else 0.0
        milliseconds = round(1000 * (connection.deadline + 2 * expected))
        blocks = [place for place in stored if not place.of_state]
        states = self._states_in(plan, blocks)
        if not states:
            count = await self._lease_longest(stored, {}, milliseconds)
            return stored[:count], stored[count:]
        names, ends, upcoming = list[BlockPlace](), dict[int, BlockPlace](), deque(states)
        for block in blocks:
            names.append(block)
            while upcoming and upcoming[0].end <= block.end:
                if len(names) in ends:  # one of several states of a block: a length of its own, so that one is enough
                    names.append(block)
                ends[len(names)] = upcoming.popleft()
        count = await self._lease_longest(names, ends, milliseconds)
        reach = ends[count].end if count else 0
        return [*names[:count], *([ends[count]] if count else [])], [place for place in states if place.end > reach]

    def _states_in(self, plan: Plan, blocks: Sequence[BlockPlace]) -> list[BlockPlace]:
        """Return the states of a plan, in order, that are neither in memory nor before one in memory, and that need
        some of `blocks`.
        """
        missing = takewhile(lambda place: place.seal not in self.digests_in_memory, plan.states)
        return [place for place in missing if blocks and place.end > blocks[0].start][::-1]

    async def _lease_longest(
        self, places: Sequence[BlockPlace], ends: Mapping[int, BlockPlace], milliseconds: int
    ) -> int:
        """Lease places, up to the first that is missing. With `ends`, lease the most places after which the state is
        stored, and this state; `ends` has the states by number of places. Return the number of places.

        If not all of them are leased, the limit of leases may be reached. So count again without a lease.
        """
        connection = self.remote.connection
        names, pages = [place.block for place in places], self.remote.layout.block(places[0]).pages
        states = [(*state.block, need) for need, state in ends.items()]
        count = 0
        for lease_ms in (milliseconds, 0):
            options = {"pages_per_block": pages, "lease_ms": lease_ms}
            if states:
                count = max(await connection.server.lengths(names, states, **options), default=0)
            else:
                count = await connection.server.prefix(names, **options)
            connection.progressed()
            if count == len(names):
                break
        return count
