"""The fetch of a context from a page server: lookup and lease, receipt of the blocks, and the resulting context.

The states of a fetch. An event that is not in the table changes nothing::

    state      | the work ended | it failed | it was cancelled | result() | cancel()
    -----------+----------------+-----------+------------------+----------+---------
    RUNNING    | ENDED          | FAILED    | DROPPED          | (waits)  | DROPPING
    DROPPING   | DROPPED        | FAILED    | DROPPED          | (waits)  | -
    ENDED      | -              | -         | -                | TAKEN    | DROPPED
    TAKEN      | -              | -         | -                | -        | -
    FAILED     | -              | -         | -                | -        | -
    DROPPED    | -              | -         | -                | -        | -

Blocks of the pool are held while it is RUNNING, DROPPING or ENDED. In TAKEN they are the caller's; otherwise they are
freed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from itertools import takewhile

import mlx.core as mx
import numpy as np

from kvpage_server.client.cluster.plan import GONE
from kvpage_server.client.raw_commands import RawCommand, integer
from kvpage_server.tracing import span

from ...memory.blocks import AgentBlocks, Arrays, KVBlock, arrays_in
from ...pool import PoolExhaustedError
from ...spec import Shapes
from .connection import OUTAGES
from .lookup import FetchReport, FetchRequest, Lookup, Remote
from .manifest import BlockPlace, Miss
from .restore_planner import LEAST_MEASURED, Plan

# -- Receiving planned blocks into the memory in which they are used, with a check of each -----------------------------

Chunk = tuple[list[BlockPlace], list[mx.array]]  # blocks of one size, and memory for each


class Receiver:
    """Receives the blocks of a plan, up to the first one that is missing or does not match its seal."""

    def __init__(self, lookup: Lookup, plan: Plan, digests: Mapping[str, str]) -> None:
        """Start with nothing received. `digests` are by seal."""
        self.plan = plan
        self.arrays: dict[BlockPlace, Arrays] = {}  # received blocks that match their seals
        self.state = next(iter(lookup.plan_in_memory.states), None)  # the furthest usable state, at first from memory
        self._lookup = lookup
        self._report = lookup.report
        self._connection = lookup.remote.connection
        self._layout = lookup.remote.layout
        self._digests = digests
        self._stopped = False  # True when a block is missing, so that later ones are unusable
        self._outage: Exception | None = None  # the error that ended the receipt
        self._begun = time.perf_counter()

    @property
    def reach(self) -> int:
        """Tokens of the prompt that the received blocks cover."""
        usable = self.usable()
        end = self.state or usable[-1] if usable else None
        return max(0, min(self.plan.reach, end.end, self._lookup.limit)) if end else 0

    def usable(self) -> list[BlockPlace]:
        """Return the blocks of the context. If layers carry a state, they end at the furthest available state."""
        available = self._available()
        if not self._lookup.remote.spec.has_state:
            return available
        return [place for place in available if self.state and place.start < self.state.end]

    async def receive(self) -> None:
        """Receive the planned blocks that are not in memory. Raises an outage that interrupted it."""
        planned_bytes = self._layout.nbytes(*self._lookup.missing(self.plan))
        missing = [place for place in self.plan.blocks if place not in self._lookup.held]
        self._begun = time.perf_counter()
        before, mapped = self._coded_bytes(), self._connection.server.mapped_bytes
        try:
            chunks = self._with_memory(missing)
            await asyncio.gather(*(self._receive_chunks(chunks) for _ in range(self._connection.connections)))
            if self._outage:
                try:
                    raise self._outage
                finally:
                    self._outage = None  # break the reference cycle: its traceback has this frame
            await self._receive_state()
        finally:
            self._connection.rates.received(self._report.nbytes, time.perf_counter() - self._begun, planned_bytes)
            raw, coded = (now - then for now, then in zip(self._coded_bytes(), before, strict=True))
            self._report.coded = raw / coded if coded > 0 else None
            self._report.mapped = self._connection.server.mapped_bytes > mapped

    def _coded_bytes(self) -> tuple[int, int]:
        """Return the bytes of all blocks that have arrived in the lossless code, and of their codes."""
        code = self._connection.server.code
        return (code.received.raw_bytes, code.received.coded_bytes) if code else (0, 0)

    def _available(self) -> list[BlockPlace]:
        """Return the planned blocks that are in memory or received, up to the first that is missing."""
        return list(takewhile(lambda place: place in self._lookup.held or place in self.arrays, self.plan.blocks))

    def _with_memory(self, blocks: Sequence[BlockPlace]) -> Iterator[Chunk]:
        """Yield chunks of blocks with memory for them. MLX prepares the memory of the next chunk meanwhile."""
        upcoming = None
        for chunk in self._layout.chunks(blocks):
            ready, upcoming = upcoming, (chunk, self._memory(chunk))
            if ready:
                yield ready
        if upcoming:
            yield upcoming

    def _memory(self, places: Sequence[BlockPlace]) -> list[mx.array]:
        """Return memory for each place. MLX fills it with zeros in the background, as uint64, because that is faster
        than as uint8."""
        sizes = [self._layout.nbytes(place) for place in places]
        memory = [mx.zeros((-(-nbytes // 8),), mx.uint64).view(mx.uint8)[:nbytes] for nbytes in sizes]
        mx.async_eval(memory)  # type: ignore[no-untyped-call]
        return memory

    async def _receive_chunks(self, chunks: Iterator[Chunk]) -> None:
        """Receive chunks until none is left, or a block is missing. Several of these tasks share `chunks`."""
        while not self._stopped and (chunk := next(chunks, None)):
            try:
                await self._receive_chunk(*chunk)
                self._check_rate()
            except Miss as error:
                self._report.missed(str(error))
                self._stopped = True
            except OUTAGES as error:
                self._outage = self._outage or error
                self._stopped = True

    def _check_rate(self) -> None:
        """Raise Miss if the rest is computed faster than received, at the rate of this fetch so far."""
        if not self._lookup.may_compute or self._report.nbytes < LEAST_MEASURED:
            return
        rest = [place for place in self._lookup.missing(self.plan) if place not in self.arrays]
        rate = self._report.nbytes / (time.perf_counter() - self._begun)
        again = self._connection.rates.decide(self.plan.reach - self.reach, self._layout.nbytes(*rest), rate)
        if rest and not again.fetch:
            self._report.decision = again
            raise Miss("recompute")

    async def _receive_chunk(self, places: Sequence[BlockPlace], memory: Sequence[mx.array]) -> None:
        """Receive blocks of one size. For a block that is missing, has another shape or does not match its seal, delete
        the seal, so that the next save writes the block again, and raise Miss. If one of several servers does not
        answer, raise Miss only.
        """
        nbytes = self._layout.nbytes(places[0])
        mx.eval(memory)
        misses: list[str | None] = [None] * len(places)  # by place: the reason
        if nbytes:
            names, bodies = [place.block for place in places], [np.asarray(body).data for body in memory]
            misses = await self._connection.server.fetch_blocks_into(names, self._layout.block(places[0]), bodies)
            self._connection.progressed()  # restart the deadline before the blocks are verified
        shapes = self._layout.shapes(places[0])
        whole = [(place, body) for place, body, why in zip(places, memory, misses, strict=True) if why is None]
        with span("kvpage.verify") as seen:
            verified = await self._connection.loop.on_block_thread(partial(_verified, whole, self._digests, shapes))
            seen.set(
                blocks=len(whole), bytes=nbytes * len(whole), reason=None if len(verified) == len(whole) else "checksum"
            )
        for place, why in zip(places, misses, strict=True):
            if place not in verified:
                if why == GONE:
                    raise Miss(GONE)
                await self._connection.ask([RawCommand(["DEL", place.seal], integer)], gone=0)
                if why == "absent":  # deleted since its lease, or its pages do not fit together
                    pages = self._layout.block(place).pages
                    stored = await self._connection.server.prefix([place.block], pages_per_block=pages, lease_ms=0)
                    raise Miss("shape" if stored else "gap")
                raise Miss("shape" if why in ("shape", "size") else "checksum")
            self.arrays[place] = verified[place]
            self._report.nbytes += nbytes

    async def _receive_state(self) -> None:
        """Receive the furthest state that is available within the received blocks."""
        available = self._available()
        for place in self.plan.states:
            if not available or place.end > available[-1].end:
                continue
            if place.seal not in self._lookup.digests_in_memory:
                try:
                    await self._receive_chunk([place], self._memory([place]))
                except Miss as error:
                    self._report.missed(str(error))
                    continue
            self.state = place
            return


def _verified(
    bodies: Sequence[tuple[BlockPlace, mx.array]], digests: Mapping[str, str], shapes: Shapes
) -> dict[BlockPlace, Arrays]:
    """Return the arrays of all blocks that match their seals, in the memory in which they were received."""
    return {
        place: arrays_in(body, shapes)
        for place, body in bodies
        if place.digest([np.asarray(body).data]) == digests[place.seal]
    }


class FetchState(Enum):
    """State of a fetch."""

    RUNNING = auto()  # on the event loop
    DROPPING = auto()  # cancelled, but its work has not ended yet
    ENDED = auto()  # the result can be taken
    TAKEN = auto()
    FAILED = auto()  # because of an unexpected error
    DROPPED = auto()

    @property
    def is_over(self) -> bool:
        return self not in (FetchState.RUNNING, FetchState.DROPPING)


class FetchEvent(Enum):
    """Event that changes a fetch's state."""

    WORK_ENDED = auto()
    WORK_FAILED = auto()
    WORK_CANCELLED = auto()
    RESULT = auto()
    CANCEL = auto()


_FREED_WITHIN = 1.0  # seconds for which a load waits for memory that is being freed
_MOVES = {
    (FetchState.RUNNING, FetchEvent.WORK_ENDED): FetchState.ENDED,
    (FetchState.RUNNING, FetchEvent.WORK_FAILED): FetchState.FAILED,
    (FetchState.RUNNING, FetchEvent.WORK_CANCELLED): FetchState.DROPPED,
    (FetchState.RUNNING, FetchEvent.CANCEL): FetchState.DROPPING,
    (FetchState.DROPPING, FetchEvent.WORK_ENDED): FetchState.DROPPED,
    (FetchState.DROPPING, FetchEvent.WORK_FAILED): FetchState.FAILED,
    (FetchState.DROPPING, FetchEvent.WORK_CANCELLED): FetchState.DROPPED,
    (FetchState.ENDED, FetchEvent.RESULT): FetchState.TAKEN,
    (FetchState.ENDED, FetchEvent.CANCEL): FetchState.DROPPED,
}


def moved(state: FetchState, event: FetchEvent) -> FetchState:
    """Return the state after an event, by the table above."""
    return _MOVES.get((state, event), state)


async def until_freed(attempt: Callable[[], bool], frees: Callable[[], bool]) -> bool:
    """Repeat `attempt` until it returns True, up to _FREED_WITHIN seconds, while contexts are written that free memory
    then: `frees` returns that. Return the last result.
    """
    end = time.monotonic() + _FREED_WITHIN
    while True:
        waits = frees() and time.monotonic() < end
        if attempt():
            return True
        if not waits:
            return False
        await asyncio.sleep(_FREED_WITHIN / 100)


class Fetch:
    """A fetch in progress. It holds blocks until `result` or `cancel` is called."""

    def __init__(self, remote: Remote, request: FetchRequest, on_end: Callable[[Fetch], None]) -> None:
        """Start the fetch, which takes `request.within` seconds at most. `on_end` is called when it has ended, before
        other callbacks, on the loop's thread.

        Raises ValueError if `request.held` are not blocks of the pool, or more than its tokens fill.
        """
        self.report = FetchReport()
        self.state = FetchState.RUNNING
        self.failure: BaseException | None = None  # the unexpected error that ended it, once it is done
        self._request = request
        self._pool = remote.pool
        self._lookup = Lookup(remote, request, self.report)
        self._received = Receiver(self._lookup, self._lookup.plan_in_memory, {})  # until there is a plan
        self._ids: list[int] = []  # ids in the pool of the blocks to be received
        self._pool.share((block.block_id for block in request.held), request.agent_id)
        self._lock = threading.Lock()  # of the state
        self._done = threading.Event()
        self._callbacks: list[Callable[[Fetch], None]] = [on_end]
        self._context: AgentBlocks | None = None
        self._started = time.perf_counter()
        self._cancel = remote.connection.begin(self._run(), self._end)

    # -- interface for the waiting caller --------------------------------------------------------------------------

    @property
    def why(self) -> str | None:
        """The first reason for a shorter result; None if nothing was missing."""
        return self.report.reasons[0] if self.report.reasons else None

    @property
    def reach(self) -> int:
        """Tokens of the prompt that need not be computed, once it is done."""
        return self.report.reach

    def done(self) -> bool:
        """Return whether `result` returns without waiting."""
        return self._done.is_set()

    def add_done_callback(self, callback: Callable[[Fetch], None]) -> None:
        """Call `callback` with this when it is done, on the loop's thread; immediately if it is done already."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self) -> AgentBlocks | None:
        """Wait, and return the context, whose blocks the caller frees; None if nothing was found, or after `cancel`.

        Return the same context each time. Raises the unexpected error that ended the fetch, if there was one.
        """
        self._done.wait()
        if self.failure:
            raise self.failure
        with self._lock:
            if self._move(FetchEvent.RESULT):
                self._context = self._assemble()
                self._received.arrays.clear()
            return self._context

    def cancel(self) -> None:
        """Stop receiving, and free the blocks. This does nothing after `result`."""
        with self._lock:
            if not self._move(FetchEvent.CANCEL):
                return
            if self.state.is_over:
                self._free()
            else:
                self._cancel()

    def _move(self, event: FetchEvent) -> bool:
        """Change the state, with the lock held. Return whether it has changed."""
        before, self.state = self.state, moved(self.state, event)
        return self.state is not before

    # -- on the loop's thread --------------------------------------------------------------------------------------

    def _end(self, task: asyncio.Task[None]) -> None:
        """Set the final state when the work has ended, free the blocks unless there is a result, and call the
        callbacks.
        """
        with self._lock:
            if task.cancelled():
                self._move(FetchEvent.WORK_CANCELLED)
            else:
                self.failure = task.exception()
                self._move(FetchEvent.WORK_FAILED if self.failure else FetchEvent.WORK_ENDED)
            if self.state is FetchState.ENDED:
                self.report.reach = self._received.reach
            else:
                self._free()
            self.report.seconds = time.perf_counter() - self._started
            first, *others = self._callbacks
            first(self)
            self._done.set()
        for callback in others:
            callback(self)

    async def _run(self) -> None:
        await self._lookup.remote.connection.attempt(self._load(), self.report.missed, self._request.within)

    async def _load(self) -> None:
        """Fetch the context: look up, plan and lease its blocks, allocate memory in the pool, and receive them."""
        with span("kvpage.lookup") as seen:
            digests = await self._lookup.ask()
            plan = await self._lookup.plan_and_lease(digests)
            missing = self._lookup.missing(plan)
            nbytes = self._lookup.remote.layout.nbytes(*missing)
            if not plan.blocks and not self._request.beyond and not self.report.reasons:
                self.report.missed(await self._lookup.why_absent())
            seen.set(tokens=plan.reach, blocks=len(missing), bytes=nbytes, reason=self.why)
        allocate = partial(self._allocate, sum(not place.of_state for place in missing), nbytes)
        if not await until_freed(allocate, self._request.frees):
            self.report.missed("pool")
            return
        self._received = Receiver(self._lookup, plan, digests)
        self.report.own = plan.own
        with span("kvpage.fetch") as seen:
            try:
                await self._received.receive()
            finally:
                seen.set(tokens=self._received.reach, bytes=self.report.nbytes, reason=self.why)

    def _allocate(self, blocks: int, nbytes: int) -> bool:
        """Allocate memory in the pool. Return whether there is enough."""
        try:
            self._ids = self._pool.allocate(blocks, self._request.agent_id, nbytes)
        except PoolExhaustedError:
            return False
        return True

    # -- assembling the context ------------------------------------------------------------------------------------

    def _assemble(self) -> AgentBlocks | None:
        """Return the context of the received arrays and held blocks, and free the unused blocks. None if there is no
        block."""
        agent_id = self._request.agent_id
        try:
            blocks = self._blocks()
        except BaseException:
            self._free()
            raise
        used = {block.block_id for block in blocks}
        changed = {block.block_id: block.nbytes for block in blocks if block not in self._request.held}
        try:
            self._pool.settle(dict.fromkeys(self._ids, 0) | changed)
        except PoolExhaustedError:  # a held block got a state, for which no bytes were reserved
            self.report.missed("pool")
            self._free()
            return None
        self._pool.free([block_id for block_id in self._holding if block_id not in used], agent_id)
        if not blocks:
            return None
        count = sum(block.tokens for block in blocks)
        tokens = self._received.plan.tokens[:count]
        return AgentBlocks(agent_id, tokens, tuple(blocks), self._lookup.remote.spec.fingerprint)

    def _blocks(self) -> list[KVBlock]:
        ids = iter(self._ids)
        received = self._received
        blocks = [
            self._lookup.held.get(place) or KVBlock(next(ids), place.tokens, received.arrays[place])
            for place in received.usable()
        ]
        if received.state and received.state in received.arrays:
            after = received.state.end - sum(block.tokens for block in blocks[:-1])
            blocks[-1] = blocks[-1].with_state(after, received.arrays[received.state])
        return blocks

    @property
    def _holding(self) -> list[int]:
        """The ids of the blocks that it has allocated or shares."""
        return [*self._ids, *(block.block_id for block in self._request.held)]

    def _free(self) -> None:
        self._pool.free(self._holding, self._request.agent_id)
        self._received.arrays.clear()
