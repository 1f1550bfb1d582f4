"""Fetching a context from a page server: planned, leased, and received into the memory it is used in."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

import mlx.core as mx
import numpy as np

from engine.memory.blocks import AgentBlocks, Arrays, KVBlock, in_memory
from engine.memory.prefix import root_of
from engine.pool import BlockPool, PoolExhaustedError
from engine.scheduling.request import token_ids
from engine.spec import ModelCacheSpec, Shapes
from engine.tiers.server.connection import OUTAGES, Link
from engine.tiers.server.cost_model import LEAST, Decision
from engine.tiers.server.manifest import Layout, Manifest, Miss, Place, manifest_key, older_key
from engine.tiers.server.restore_planner import Offer, Plan
from kvpage_server.client.questions import Question, integer, texts, up_to


class Fetch:
    """A load that is under way. `result` or `cancel` ends it; until then it holds blocks of the pool.

    What it did not find is in `reasons`, and the first of them in `why`.
    """

    def __init__(
        self,
        link: Link,
        spec: ModelCacheSpec,
        layout: Layout,
        pool: BlockPool,
        agent_id: str,
        tokens: Sequence[int] | None,
        held: Sequence[KVBlock],
        over: Callable[[Fetch], None],
        within: float,
    ) -> None:
        """Starts at once, and takes `within` seconds at most. `over` is called when it has ended, on the tier's thread,
        before anybody is told.

        Raises ValueError when `held` are not blocks of the pool, or are more than `tokens` fill, and UnknownTokenError.
        """
        prompt = () if tokens is None else tuple(token_ids(tokens))
        if len(held) > (full := len(prompt) // spec.block_tokens):
            raise ValueError(f"held blocks are the first of {full} full ones, got {len(held)}")
        pool.share((block.block_id for block in held), agent_id)
        self.agent_id = agent_id
        self.reasons: list[str] = []
        self.decision: Decision | None = None  # None when there was nothing to decide on
        self.nbytes = 0  # received
        self.seconds = 0.0  # from the start to the end
        self.reach = 0  # tokens of the prompt that needn't be computed with what has come, once it is done
        self._link = link
        self._spec = spec
        self._layout = layout
        self._pool = pool
        self._tokens = tokens
        self._offer = Offer(spec, prompt, None, root_of(agent_id))  # of the prompt alone, so far
        self._held = dict(zip(self._offer.full, held, strict=False))
        self._plan = self._offer.plan(self._sealed_in_memory, self._limit)  # what is certain, so far
        self._ids: list[int] = []  # of the blocks to be received
        self._arrays: dict[Place, Arrays] = {}  # what has come and is what was sealed
        self._state = next(iter(self._plan.states), None)  # that which the blocks end in, so far
        self._broken = False  # something is missing: what comes after it is of no use
        self._outage: Exception | None = None  # what kept blocks from coming
        self._failure: BaseException | None = None  # what nobody expected
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._ended = over
        self._callbacks: list[Callable[[Fetch], None]] = []
        self._within = within
        self._dropped = False
        self._taken = False
        self._context: AgentBlocks | None = None
        self._started = self._begun = time.perf_counter()  # began to receive
        self._cancel = link.begin(self._run(), self._end)

    # -- for whoever waits -----------------------------------------------------------------------------------------

    @property
    def why(self) -> str | None:
        """Why it found less than there might have been; None when nothing was missing."""
        return self.reasons[0] if self.reasons else None

    def done(self) -> bool:
        """Whether `result` would not have to wait."""
        return self._over.is_set()

    def add_done_callback(self, callback: Callable[[Fetch], None]) -> None:
        """Have `callback` called with this on the tier's thread when it is done; if it is done already, now."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self) -> AgentBlocks | None:
        """The context, its blocks the caller's to free; None when nothing was found, or it was cancelled. Waits.

        It is the same one each time.
        """
        self._over.wait()
        if self._failure:
            raise self._failure
        with self._lock:
            if not self._taken and not self._dropped:
                self._taken = True
                self._context = self._assemble()
                self._arrays.clear()
            return self._context

    def cancel(self) -> None:
        """Give it up: nothing more is received, and its blocks are freed. Of no effect after `result`."""
        with self._lock:
            if self._taken or self._dropped:
                return
            self._dropped = True
            if self._over.is_set():
                self._free()
            else:
                self._cancel()

    # -- on the link's thread --------------------------------------------------------------------------------------

    def _end(self, task: asyncio.Task[None]) -> None:
        with self._lock:
            if task.cancelled():
                self._dropped = True
            else:
                self._failure = task.exception()
            if self._dropped or self._failure:
                self._free()
            else:
                self.reach = self._reached()
            self.seconds = time.perf_counter() - self._started
            self._ended(self)
            self._over.set()
        for callback in self._callbacks:
            callback(self)

    @property
    def _limit(self) -> int:
        """How many tokens a context that ends in a state may have."""
        return len(self._offer.wanted) - (self._tokens is not None)

    @property
    def _sealed_in_memory(self) -> dict[str, str]:
        """What is held has no need of a digest, but a plan asks for one."""
        blocks = dict.fromkeys((place.seal for place in self._held), "")
        return blocks | {place.state().seal: "" for place, block in self._held.items() if block.state is not None}

    def _missed(self, why: str) -> None:
        if why not in self.reasons:
            self.reasons.append(why)

    async def _run(self) -> None:
        await self._link.attempt(self._load(), self._missed, self._within)

    async def _load(self) -> None:
        digests = await self._ask()
        if self._offer.has_gap(digests):
            self._missed("gap")
        certain = self._plan
        self._plan = await self._lease(digests)
        missing = [place for place in self._plan.blocks if place not in self._held]
        try:
            nbytes = self._layout.nbytes(*self._wanted(self._plan))
            self._ids = self._pool.allocate(len(missing), self.agent_id, nbytes)
        except PoolExhaustedError:
            self._missed("pool")
            self._plan = certain
            return
        if not self._plan.blocks and not self.reasons:
            self._missed("absent")
        await self._receive(missing, digests)

    async def _ask(self) -> dict[str, str]:
        """What there is: the agent's manifest, which goes into the offer, and all digests a plan may need, by seal."""
        seals = [place.seal for place in self._offer.places]
        keys = [manifest_key(self.agent_id, self._spec.fingerprint), older_key(self.agent_id)]
        begun = time.perf_counter()
        (raw, older, *found) = await self._link.ask_one(texts(2 + len(seals)), "MGET", *keys, *seals)
        self._link.rates.asked(time.perf_counter() - begun)
        digests = dict(zip(seals, found, strict=True))
        try:
            manifest = Manifest.parse(raw, self.agent_id, self._spec) if raw is not None else None
        except Miss as error:
            self._missed(str(error))
            manifest = None
        if raw is None and older is not None:
            self._missed("manifest")
        if manifest:
            wanted = manifest.tokens if self._tokens is None else self._offer.wanted
            self._offer = Offer(self._spec, wanted, manifest, root_of(self.agent_id))
            if more := [place.seal for place in self._offer.places if place.seal not in digests]:
                found = await self._link.ask_one(texts(len(more)), "MGET", *more)
                digests |= dict(zip(more, found, strict=True))
        there = {seal: digest.decode(errors="replace") for seal, digest in digests.items() if digest}
        return there | self._sealed_in_memory

    # -- planning --------------------------------------------------------------------------------------------------

    async def _lease(self, digests: dict[str, str]) -> Plan:
        """A plan of which all is there, protected for as long as this may take; without what is computed sooner."""
        certain = self._plan
        while True:
            plan = self._offer.plan(digests, self._limit)
            wanted = self._wanted(plan)
            if not wanted:
                return plan
            if self._tokens is not None:
                self.decision = self._link.rates.decide(plan.reach - certain.reach, self._layout.nbytes(*wanted))
                if not self.decision.fetch:
                    self._missed("recompute")
                    return certain
            lost = await self._lease_all(wanted)
            if not lost:
                return plan
            self._missed("gap")
            for place in lost:
                del digests[place.seal]

    def _wanted(self, plan: Plan) -> list[Place]:
        """What is to be received for a plan: the blocks that are not held, and the furthest state unless it is."""
        held = self._sealed_in_memory
        return [place for place in (*plan.blocks, *plan.states[:1]) if place.seal not in held]

    async def _lease_all(self, places: Sequence[Place]) -> list[Place]:
        """Lease blocks, and states, from the first on up to one that is missing; what is lost with that."""
        stored = [place for place in places if self._layout.nbytes(place)]
        kinds = [kind for of_state in (False, True) if (kind := [p for p in stored if p.of_state == of_state])]
        rate = self._link.rates.link_rate
        expected = self._layout.nbytes(*stored) / rate if rate else 0.0
        milliseconds = round(1000 * (self._link.deadline + 2 * expected))
        counts = await self._link.ask(self._prefix(kind, milliseconds) for kind in kinds)
        short = [i for i, kind in enumerate(kinds) if counts[i] < len(kind)]
        if short:  # perhaps because too much is leased already
            again = await self._link.ask(self._prefix(kinds[i], 0) for i in short)
            for i, count in zip(short, again, strict=True):
                counts[i] = count
        return [place for kind, count in zip(kinds, counts, strict=True) for place in kind[count:]]

    def _prefix(self, places: Sequence[Place], milliseconds: int) -> Question:
        pages = self._layout.block(places[0]).pages
        names = [part for place in places for part in place.block]
        return Question(["KVPAGEPREFIX", pages, milliseconds, len(places), *names], up_to(len(places)))

    # -- receiving -------------------------------------------------------------------------------------------------

    async def _receive(self, blocks: Sequence[Place], digests: dict[str, str]) -> None:
        wanted = self._layout.nbytes(*self._wanted(self._plan))
        self._begun = time.perf_counter()
        try:
            chunks = self._with_memory(blocks)
            await asyncio.gather(*(self._take_all(chunks, digests) for _ in range(self._link.connections)))
            if self._outage:
                raise self._outage
            await self._take_state(digests)
        finally:
            self._link.rates.received(self.nbytes, time.perf_counter() - self._begun, wanted)

    def _with_memory(self, blocks: Sequence[Place]) -> Iterator[tuple[list[Place], list[mx.array]]]:
        """Chunks of blocks, each with memory to be received into, which is made ready while those before it come."""
        upcoming = None
        for chunk in self._layout.chunks(blocks):
            ready, upcoming = upcoming, (chunk, self._memory(chunk))
            if ready:
                yield ready
        if upcoming:
            yield upcoming

    def _memory(self, places: Sequence[Place]) -> list[mx.array]:
        """For each of the places so many bytes, which MLX has begun to fill: eight at a time, since that is faster."""
        sizes = [self._layout.nbytes(place) for place in places]
        memory = [mx.zeros((-(-nbytes // 8),), mx.uint64).view(mx.uint8)[:nbytes] for nbytes in sizes]
        mx.async_eval(memory)  # type: ignore[no-untyped-call]
        return memory

    async def _take_all(self, chunks: Iterator[tuple[list[Place], list[mx.array]]], digests: dict[str, str]) -> None:
        """Receive chunk after chunk until there are no more, or something is missing."""
        while not self._broken and (chunk := next(chunks, None)):
            try:
                await self._take(*chunk, digests)
                self._reconsider()
            except Miss as error:
                self._missed(str(error))
                self._broken = True
            except OUTAGES as error:
                self._outage = self._outage or error
                self._broken = True

    def _reconsider(self) -> None:
        """Let the rest be computed, if that is sooner than to receive it as slowly as this has come."""
        if self._tokens is None or self.nbytes < LEAST:
            return
        rest = [place for place in self._wanted(self._plan) if place not in self._arrays]
        rate = self.nbytes / (time.perf_counter() - self._begun)
        again = self._link.rates.decide(self._plan.reach - self._reached(), self._layout.nbytes(*rest), rate)
        if rest and not again.fetch:
            self.decision = again
            raise Miss("recompute")

    async def _take(self, places: Sequence[Place], memory: Sequence[mx.array], digests: dict[str, str]) -> None:
        """Receive blocks of one size. Raises Miss, and unseals it for the next save to write it anew, for one that is
        not what was sealed."""
        nbytes = self._layout.nbytes(places[0])
        mx.eval(memory)
        there = [True] * len(places)
        if nbytes:
            names, bodies = [place.block for place in places], [np.asarray(body).data for body in memory]
            there = await self._link.server.mget_blocks_into(names, self._layout.block(places[0]), bodies)
            self._link.progressed()  # what is done with them here is not the server's time
        shapes = self._layout.shapes(places[0])
        whole = [(place, body) for place, body, found in zip(places, memory, there, strict=True) if found]
        made = await self._link.beside(partial(_made, whole, digests, shapes))
        for place, found in zip(places, there, strict=True):
            if place not in made:
                await self._link.ask_one(integer, "DEL", place.seal)
                raise Miss("checksum" if found else "shape")
            self._arrays[place] = made[place]
            self.nbytes += nbytes

    async def _take_state(self, digests: dict[str, str]) -> None:
        """The furthest of the states that can be had, at the end of a block that was had."""
        ends = {place.end for place in self._had()}
        for place in self._plan.states:
            if place.end not in ends:
                continue
            if place.seal not in self._sealed_in_memory:
                try:
                    await self._take([place], self._memory([place]), digests)
                except Miss as error:
                    self._missed(str(error))
                    continue
            self._state = place
            return

    def _had(self) -> list[Place]:
        """The planned blocks from the first on that are held or have come."""
        return list(takewhile(lambda place: place in self._held or place in self._arrays, self._plan.blocks))

    def _kept(self) -> list[Place]:
        """Those of them that are of use: where layers carry a state, as far as one has come."""
        had = self._had()
        if not self._spec.has_state:
            return had
        return [place for place in had if self._state and place.end <= self._state.end]

    def _reached(self) -> int:
        kept = self._kept()
        return max(0, min(self._plan.reach, kept[-1].end, self._limit)) if kept else 0

    # -- taking it up ----------------------------------------------------------------------------------------------

    def _assemble(self) -> AgentBlocks | None:
        """What has come, as blocks; all others that were allocated or shared are freed."""
        try:
            blocks = self._blocks()
        except BaseException:
            self._free()
            raise
        used = {block.block_id for block in blocks}
        ours = [*self._ids, *(block.block_id for block in self._held.values())]
        held = self._held.values()
        changed = {block.block_id: block.nbytes for block in blocks if block not in held}
        try:
            self._pool.settle(dict.fromkeys(self._ids, 0) | changed)
        except PoolExhaustedError:  # a state was put to a block that is held, for which nothing was promised
            self._missed("pool")
            self._free()
            return None
        self._pool.free([block_id for block_id in ours if block_id not in used], self.agent_id)
        if not blocks:
            return None
        count = sum(block.tokens for block in blocks)
        return AgentBlocks(self.agent_id, self._plan.tokens[:count], tuple(blocks), self._spec.fingerprint)

    def _blocks(self) -> list[KVBlock]:
        ids = iter(self._ids)
        blocks = []
        for place in self._kept():
            block = self._held.get(place)
            if block is None:
                block = KVBlock(next(ids), place.tokens, self._arrays[place])
            blocks.append(block)
        if self._state and self._state in self._arrays:
            blocks[-1] = replace(blocks[-1], state=self._arrays[self._state])
        return blocks

    def _free(self) -> None:
        self._pool.free([*self._ids, *(block.block_id for block in self._held.values())], self.agent_id)
        self._arrays.clear()


def _made(bodies: Sequence[tuple[Place, mx.array]], digests: Mapping[str, str], shapes: Shapes) -> dict[Place, Arrays]:
    """Arrays of these shapes, in the memory in which they have come: of all that are what was sealed."""
    return {
        place: in_memory(body, shapes)
        for place, body in bodies
        if place.digest([np.asarray(body).data]) == digests[place.seal]
    }
