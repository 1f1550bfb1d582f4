"""Fetching a context from a page server: it is looked up and leased, then received, then made into blocks.

The states of a fetch. An event that is not in the table changes nothing::

    state      | the work ended | it failed | it was cancelled | result() | cancel()
    -----------+----------------+-----------+------------------+----------+---------
    RUNNING    | ENDED          | FAILED    | DROPPED          | (waits)  | DROPPING
    DROPPING   | DROPPED        | FAILED    | DROPPED          | (waits)  | -
    ENDED      | -              | -         | -                | TAKEN    | DROPPED
    TAKEN      | -              | -         | -                | -        | -
    FAILED     | -              | -         | -                | -        | -
    DROPPED    | -              | -         | -                | -        | -

Blocks of the pool are held while it is RUNNING, DROPPING or ENDED. In TAKEN they are the caller's; otherwise freed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from engine.memory.blocks import AgentBlocks, KVBlock
from engine.pool import PoolExhaustedError
from engine.tiers.server.cost_model import Decision
from engine.tiers.server.lookup import FetchReport, FetchRequest, Lookup, Remote
from engine.tiers.server.receive import Receiver
from kvpage_server.tracing import span


class FetchState(Enum):
    RUNNING = auto()  # on the connection's thread
    DROPPING = auto()  # cancelled, but its work has not ended yet
    ENDED = auto()  # the result can be taken
    TAKEN = auto()
    FAILED = auto()  # because of an unexpected error
    DROPPED = auto()

    @property
    def is_over(self) -> bool:
        return self not in (FetchState.RUNNING, FetchState.DROPPING)


class FetchEvent(Enum):
    """What moves a fetch."""

    WORK_ENDED = auto()
    WORK_FAILED = auto()
    WORK_CANCELLED = auto()
    RESULT = auto()
    CANCEL = auto()


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
    return _MOVES.get((state, event), state)


class Fetch:
    """A load under way. It holds blocks until `result` or `cancel` is called."""

    def __init__(self, remote: Remote, request: FetchRequest, over: Callable[[Fetch], None]) -> None:
        """Starts at once, and takes `request.within` seconds at most. `over` is called when it has ended, before all
        other callbacks, on the connection's thread.

        Raises ValueError if `request.held` are not blocks of the pool, or more than its tokens fill.
        """
        self.report = FetchReport()
        self.state = FetchState.RUNNING
        self._request = request
        self._pool = remote.pool
        self._lookup = Lookup(remote, request, self.report)
        self._received = Receiver(self._lookup, self._lookup.in_memory, {})  # only what is held, so far
        self._ids: list[int] = []  # of the blocks to be received
        self._pool.share((block.block_id for block in request.held), request.agent_id)
        self._lock = threading.Lock()  # of the state
        self._over = threading.Event()
        self._ended: list[Callable[[Fetch], None]] = [over]
        self._context: AgentBlocks | None = None
        self._failure: BaseException | None = None
        self._started = time.perf_counter()
        self._cancel = remote.connection.begin(self._run(), self._end)

    # -- for whoever waits -----------------------------------------------------------------------------------------

    @property
    def why(self) -> str | None:
        """Why it found less than it might have; None if nothing was missing."""
        return self.report.reasons[0] if self.report.reasons else None

    @property
    def decision(self) -> Decision | None:
        """The choice between fetching and computing; None if there was nothing to decide."""
        return self.report.decision

    @property
    def nbytes(self) -> int:
        return self.report.nbytes

    @property
    def reach(self) -> int:
        """Tokens of the prompt that need not be computed, once it is done."""
        return self.report.reach

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._over.is_set()

    def add_done_callback(self, callback: Callable[[Fetch], None]) -> None:
        """Call `callback` with this when it is done, on the connection's thread; at once if it is done already."""
        with self._lock:
            if not self._over.is_set():
                self._ended.append(callback)
                return
        callback(self)

    def result(self) -> AgentBlocks | None:
        """Wait, and return the context, whose blocks the caller frees; None if nothing was found, or after `cancel`.

        Returns the same context each time.
        """
        self._over.wait()
        if self._failure:
            raise self._failure
        with self._lock:
            if self._move(FetchEvent.RESULT):
                self._context = self._assemble()
                self._received.arrays.clear()
            return self._context

    def cancel(self) -> None:
        """Stop receiving, and free the blocks. Does nothing after `result`."""
        with self._lock:
            if not self._move(FetchEvent.CANCEL):
                return
            if self.state.is_over:
                self._free()
            else:
                self._cancel()

    def _move(self, event: FetchEvent) -> bool:
        """Called with the lock held. Returns whether the state has changed."""
        before, self.state = self.state, moved(self.state, event)
        return self.state is not before

    # -- on the connection's thread --------------------------------------------------------------------------------

    def _end(self, task: asyncio.Task[None]) -> None:
        with self._lock:
            if task.cancelled():
                self._move(FetchEvent.WORK_CANCELLED)
            else:
                self._failure = task.exception()
                self._move(FetchEvent.WORK_FAILED if self._failure else FetchEvent.WORK_ENDED)
            if self.state is FetchState.ENDED:
                self.report.reach = self._received.reach
            else:
                self._free()
            self.report.seconds = time.perf_counter() - self._started
            counted, *told = self._ended
            counted(self)
            self._over.set()
        for callback in told:
            callback(self)

    async def _run(self) -> None:
        await self._lookup.remote.connection.attempt(self._load(), self.report.missed, self._request.within)

    async def _load(self) -> None:
        with span("kvpage.lookup") as seen:
            digests = await self._lookup.ask()
            plan = await self._lookup.lease(digests)
            wanted = self._lookup.wanted(plan)
            nbytes = self._lookup.remote.layout.nbytes(*wanted)
            if not plan.blocks and not self._request.beyond and not self.report.reasons:
                self.report.missed("absent")
            seen.set(tokens=plan.reach, blocks=len(wanted), bytes=nbytes, reason=self.why)
        try:
            blocks = sum(not place.of_state for place in wanted)
            self._ids = self._pool.allocate(blocks, self._request.agent_id, nbytes)
        except PoolExhaustedError:
            self.report.missed("pool")
            return
        self._received = Receiver(self._lookup, plan, digests)
        self.report.own = plan.own
        with span("kvpage.fetch") as seen:
            try:
                await self._received.receive()
            finally:
                seen.set(tokens=self._received.reach, bytes=self.nbytes, reason=self.why)

    # -- taking it up ----------------------------------------------------------------------------------------------

    def _assemble(self) -> AgentBlocks | None:
        """Make blocks of what has arrived, and free all others."""
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
        except PoolExhaustedError:  # a held block got a state, for which nothing was reserved
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
            for place in received.kept()
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
