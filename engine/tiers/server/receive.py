"""Receives planned blocks into the memory in which they are used, and checks each one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

import mlx.core as mx
import numpy as np

from engine.memory.blocks import Arrays, in_memory
from engine.spec import Shapes
from engine.tiers.server.connection import OUTAGES
from engine.tiers.server.cost_model import LEAST_BYTES
from engine.tiers.server.lookup import Lookup
from engine.tiers.server.manifest import BlockPlace, Miss
from engine.tiers.server.restore_planner import Plan
from kvpage_server.client.cluster.plan import GONE
from kvpage_server.client.questions import Question, integer
from kvpage_server.tracing import span

Chunk = tuple[list[BlockPlace], list[mx.array]]  # blocks of one size, and memory for each


class Receiver:
    """The received part of a plan. It ends at the first block that is missing or not what was sealed."""

    def __init__(self, lookup: Lookup, plan: Plan, digests: Mapping[str, str]) -> None:
        """`digests` are by seal."""
        self.plan = plan
        self.arrays: dict[BlockPlace, Arrays] = {}  # what has arrived and matches its seal
        self.state = next(iter(lookup.in_memory.states), None)  # the state from which the model goes on, so far
        self._lookup = lookup
        self._report = lookup.report
        self._connection = lookup.remote.connection
        self._layout = lookup.remote.layout
        self._digests = digests
        self._broken = False  # a block is missing, so later ones are of no use
        self._outage: Exception | None = None  # the error that stopped it
        self._begun = time.perf_counter()

    @property
    def reach(self) -> int:
        """Tokens of the prompt that need not be computed with what has arrived."""
        kept = self.kept()
        end = self.state or kept[-1] if kept else None
        return max(0, min(self.plan.reach, end.end, self._lookup.limit)) if end else 0

    def kept(self) -> list[BlockPlace]:
        """The usable blocks, held or received. Where layers carry a state, up to the furthest state."""
        had = self._had()
        if not self._lookup.remote.spec.has_state:
            return had
        return [place for place in had if self.state and place.start < self.state.end]

    async def receive(self) -> None:
        """Receive what the plan has and is not held. Raises an outage that stopped it."""
        wanted = self._layout.nbytes(*self._lookup.wanted(self.plan))
        missing = [place for place in self.plan.blocks if place not in self._lookup.held]
        self._begun = time.perf_counter()
        try:
            chunks = self._with_memory(missing)
            await asyncio.gather(*(self._take_all(chunks) for _ in range(self._connection.connections)))
            if self._outage:
                try:
                    raise self._outage
                finally:
                    self._outage = None  # it has this frame
            await self._take_state()
        finally:
            self._connection.rates.received(self._report.nbytes, time.perf_counter() - self._begun, wanted)

    def _had(self) -> list[BlockPlace]:
        """The planned blocks, held or received, up to the first that is missing."""
        return list(takewhile(lambda place: place in self._lookup.held or place in self.arrays, self.plan.blocks))

    def _with_memory(self, blocks: Sequence[BlockPlace]) -> Iterator[Chunk]:
        """Chunks of blocks with memory for them. The memory for the next chunk is prepared in advance."""
        upcoming = None
        for chunk in self._layout.chunks(blocks):
            ready, upcoming = upcoming, (chunk, self._memory(chunk))
            if ready:
                yield ready
        if upcoming:
            yield upcoming

    def _memory(self, places: Sequence[BlockPlace]) -> list[mx.array]:
        """Memory for each place, which MLX has begun to fill: eight bytes at a time, which is faster."""
        sizes = [self._layout.nbytes(place) for place in places]
        memory = [mx.zeros((-(-nbytes // 8),), mx.uint64).view(mx.uint8)[:nbytes] for nbytes in sizes]
        mx.async_eval(memory)  # type: ignore[no-untyped-call]
        return memory

    async def _take_all(self, chunks: Iterator[Chunk]) -> None:
        """Receive chunks until there are no more, or something is missing."""
        while not self._broken and (chunk := next(chunks, None)):
            try:
                await self._take(*chunk)
                self._reconsider()
            except Miss as error:
                self._report.missed(str(error))
                self._broken = True
            except OUTAGES as error:
                self._outage = self._outage or error
                self._broken = True

    def _reconsider(self) -> None:
        """Stop, if computing the rest is faster than receiving it at the rate so far."""
        if self._lookup.whole_context or self._report.nbytes < LEAST_BYTES:
            return
        rest = [place for place in self._lookup.wanted(self.plan) if place not in self.arrays]
        rate = self._report.nbytes / (time.perf_counter() - self._begun)
        again = self._connection.rates.decide(self.plan.reach - self.reach, self._layout.nbytes(*rest), rate)
        if rest and not again.fetch:
            self._report.decision = again
            raise Miss("recompute")

    async def _take(self, places: Sequence[BlockPlace], memory: Sequence[mx.array]) -> None:
        """Receive blocks of one size. For a block that is not what was sealed, raises Miss and deletes the seal, so
        that the next save writes it again."""
        nbytes = self._layout.nbytes(places[0])
        mx.eval(memory)
        missed: list[str | None] = [None] * len(places)
        if nbytes:
            names, bodies = [place.block for place in places], [np.asarray(body).data for body in memory]
            missed = await self._connection.server.fetch_blocks_into(names, self._layout.block(places[0]), bodies)
            self._connection.progressed()  # what follows does not count as the server's time
        shapes = self._layout.shapes(places[0])
        whole = [(place, body) for place, body, why in zip(places, memory, missed, strict=True) if why is None]
        with span("kvpage.verify") as seen:
            made = await self._connection.beside(partial(_made, whole, self._digests, shapes))
            seen.set(
                blocks=len(whole), bytes=nbytes * len(whole), reason=None if len(made) == len(whole) else "checksum"
            )
        for place, why in zip(places, missed, strict=True):
            if place not in made:
                if why == GONE:
                    raise Miss(GONE)
                await self._connection.ask([Question(["DEL", place.seal], integer)], gone=0)
                raise Miss("shape" if why in ("absent", "size") else "checksum")
            self.arrays[place] = made[place]
            self._report.nbytes += nbytes

    async def _take_state(self) -> None:
        """Receive the furthest state that is available in a received block."""
        had = self._had()
        for place in self.plan.states:
            if not had or place.end > had[-1].end:
                continue
            if place.seal not in self._lookup.digests_in_memory:
                try:
                    await self._take([place], self._memory([place]))
                except Miss as error:
                    self._report.missed(str(error))
                    continue
            self.state = place
            return


def _made(
    bodies: Sequence[tuple[BlockPlace, mx.array]], digests: Mapping[str, str], shapes: Shapes
) -> dict[BlockPlace, Arrays]:
    """The arrays of all blocks that match their seals, in the memory in which they arrived."""
    return {
        place: in_memory(body, shapes)
        for place, body in bodies
        if place.digest([np.asarray(body).data]) == digests[place.seal]
    }
