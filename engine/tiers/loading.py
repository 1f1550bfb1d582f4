"""The load of a context from memory, from the page server, and from its file.

The states of a load. An event that is not in the table changes nothing::

    state     | the sources ended | result() | cancel()
    ----------+-------------------+----------+----------
    RUNNING   | SETTLED           | (waits)  | CANCELLED
    SETTLED   | -                 | TAKEN    | CANCELLED
    TAKEN     | -                 | -        | -
    CANCELLED | -                 | -        | -

A load for which memory is enough, or without a tier below, starts SETTLED.

Blocks of the pool are held while it is RUNNING or SETTLED. In TAKEN they are the caller's; in CANCELLED they are freed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from enum import Enum, auto

from kvpage_server.tracing import is_seen, span

from ..event_loop import EventLoop
from ..memory.blocks import AgentBlocks
from ..pool import BlockPool
from ..spec import ModelCacheSpec
from .cold import SafetensorsCacheAdapter
from .metrics import Tally, Tier
from .pages import PageTier
from .server.connection import FAILING
from .server.fetch import Fetch, until_freed
from .server.lookup import REMOVED, FetchReport

log = logging.getLogger(__name__)

HEDGE_AFTER_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load."""

    blocks: AgentBlocks | None  # freed by the receiver, under its agent's name; None on a miss
    tier: Tier
    reach: int  # tokens of the prompt that need not be computed
    why: str | None  # the first reason for a miss or a shorter result; None if some was found, and the rest is absent
    seconds: float  # duration of the load
    own: bool  # whether it is a part of the agent's own context
    coded: float | None = None  # the ratio of blocks to their codes, if some arrived in the lossless code
    mapped: bool = False  # whether blocks were read in the page server's memory

    @property
    def nbytes(self) -> int:
        """The number of bytes in its blocks."""
        return sum(block.nbytes for block in self.blocks.blocks) if self.blocks else 0

    @property
    def unanswered(self) -> bool:
        """Whether `why` is a failure of the page server: it did not answer, or it got no request after failures."""
        return self.why == "open" or self.why in FAILING


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A context to be loaded."""

    agent_id: str
    tokens: Sequence[int] | None  # the prompt; None for all of the agent's own context
    named: bool = True  # whether the agent can have a context of its own
    whole: bool = False  # whether tokens that are computed faster are fetched, too
    file: bool = True  # whether the agent can have a file with more than memory


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix of a prompt in a tier. Its blocks are referenced under the agent's name."""

    blocks: AgentBlocks | None = None
    tier: Tier = "none"
    reach: int = 0
    own: bool = True  # whether it is of the agent's own context


@dataclass(frozen=True, slots=True)
class LoadSources:
    """The tiers below memory, and other objects that all loads of a store use."""

    spec: ModelCacheSpec
    pool: BlockPool
    pages: PageTier | None
    cold: SafetensorsCacheAdapter | None
    loop: EventLoop
    tally: Tally
    make_room: Callable[[int], bool]  # evicts for a context with this number of tokens; returns whether it has space
    frees: Callable[[], bool]  # returns whether memory becomes free when a context is written


class LoadState(Enum):
    """State of a load."""

    RUNNING = auto()  # its coroutine waits for the page server or the file
    SETTLED = auto()  # the result can be taken
    TAKEN = auto()
    CANCELLED = auto()


class LoadEvent(Enum):
    """Event that changes a load's state."""

    SOURCES_ENDED = auto()
    RESULT = auto()
    CANCEL = auto()


_MOVES = {
    (LoadState.RUNNING, LoadEvent.SOURCES_ENDED): LoadState.SETTLED,
    (LoadState.RUNNING, LoadEvent.CANCEL): LoadState.CANCELLED,
    (LoadState.SETTLED, LoadEvent.RESULT): LoadState.TAKEN,
    (LoadState.SETTLED, LoadEvent.CANCEL): LoadState.CANCELLED,
}


def moved(state: LoadState, event: LoadEvent) -> LoadState:
    """Return the state after an event, by the table above."""
    return _MOVES.get((state, event), state)


class Loading:
    """A load in progress. It holds blocks until `result` or `cancel` is called.

    A fetch from the page server, for blocks that memory lacks, and the read of the header of the agent's file start
    together. Then a coroutine waits for them; see `_wait_for_sources`. After its time limit a load takes the received
    blocks, and the engine computes the rest.
    """

    def __init__(
        self,
        sources: LoadSources,
        request: LoadRequest,
        memory: Found,
        on_loaded: Callable[[Loaded, Sequence[int] | None], None],
        within: float,
    ) -> None:
        """Start the load. `on_loaded` is called with the result and the tokens, before the caller gets the result.
        `within` is the time limit in seconds; if it is 0, only `memory` is used.
        """
        self._sources = sources
        self._agent_id = request.agent_id
        self._tokens = request.tokens
        self._memory = memory
        self._on_loaded = on_loaded
        self._started = time.perf_counter()
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()  # of the state, and of the file's blocks
        self._state = LoadState.RUNNING
        self._fetch: Fetch | None = None
        self._failure: BaseException | None = None  # the unexpected error of the fetch, if the load has waited for it
        self._header: Future[int] | None = None  # the number of tokens in the file; None for a load without a file
        self._from_file: AgentBlocks | None = None
        self._file_why: str | None = None  # the reason for which the file is unusable
        self._hedged = False  # whether the file was read while the page server could still answer
        self._late = False  # whether the time limit was reached
        self._span = span("kvpage.load")
        self._ended: Future[float]  # seconds from the start of the load to SETTLED
        if within > 0:
            with self._span.current():
                self._ended = self._start(request, within)
        else:
            self._state = LoadState.SETTLED
            self._ended = Future()
            self._ended.set_result(0.0)

    def done(self) -> bool:
        """Return whether `result` returns without waiting."""
        return self._ended.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the load is done, on any thread; immediately if it is done already. It must not wait."""
        self._ended.add_done_callback(lambda _: callback())

    def result(self, timeout: float | None = None) -> Loaded:
        """Wait for the result, and return it. Only the engine's thread calls it: it changes the tree of contexts.

        Raises TimeoutError after `timeout` seconds, CancelledError after `cancel`, and an unexpected error of the fetch
        or the file. Then all blocks are freed.
        """
        try:
            seconds = self._ended.result(timeout)
        except Exception:
            if self._ended.done():
                self.cancel()
            raise
        if self._failure:
            self.cancel()
            raise self._failure
        with self._lock:
            self._state = moved(self._state, LoadEvent.RESULT)
            if self._state is LoadState.CANCELLED:
                raise CancelledError
        if self._loaded is None:
            start = time.perf_counter()
            found, why = self._take()
            seconds += time.perf_counter() - start
            why = why if found.blocks else why or "absent"
            report = self._fetch.report if self._fetch and found.tier == "page" else FetchReport()
            self._loaded = Loaded(
                found.blocks, found.tier, found.reach, why, seconds, found.own, report.coded, report.mapped
            )
            if is_seen(self._span):
                self._span.set(tier=found.tier, tokens=found.reach, bytes=self._loaded.nbytes, reason=why)
            self._span.end()
            self._on_loaded(self._loaded, self._tokens)
        return self._loaded

    def cancel(self) -> None:
        """Cancel the load, and free all blocks. This does nothing after `result`."""
        with self._lock:
            before, self._state = self._state, moved(self._state, LoadEvent.CANCEL)
            if self._state is before:
                return
            self._free(self._memory.blocks, self._from_file)
        self._span.set(reason="cancelled")
        self._span.end()
        if self._fetch:
            self._fetch.cancel()
        self._ended.cancel()

    def _start(self, request: LoadRequest, within: float) -> Future[float]:
        """Start to fetch and to read the file's header, and start the coroutine that waits for them."""
        sources, memory = self._sources, self._memory
        if self._tokens is not None:
            sources.make_room(len(self._tokens) - memory.reach)
        if sources.pages:
            blocks = memory.blocks.blocks if memory.blocks else ()
            held = blocks[: memory.reach // sources.spec.block_tokens]
            self._fetch = sources.pages.fetch(
                self._agent_id,
                self._tokens,
                held=held,
                within=within,
                beyond=memory.reach,
                named=request.named,
                whole=request.whole,
                frees=sources.frees,
            )
            self._fetch.add_done_callback(self._log_failure)
        if sources.cold and request.file:
            self._header = sources.loop.files.submit(sources.cold.reach, self._agent_id, self._tokens)
        return sources.loop.start(self._run(within))

    # -- on the loop's thread --------------------------------------------------------------------------------------

    async def _run(self, within: float) -> float:
        """Wait for the sources, at most `within` seconds. Return the seconds since the start of the load."""
        fetching = asyncio.create_task(self._fetch_ends())
        try:
            async with asyncio.timeout(within):
                await self._wait_for_sources(fetching)
        except TimeoutError:
            self._late = True
            await asyncio.wait([fetching])  # the fetch ends soon, because it has the same time limit
        finally:
            fetching.cancel()
        self._failure = self._fetch.failure if self._fetch else None
        with self._lock:
            self._state = moved(self._state, LoadEvent.SOURCES_ENDED)
        return time.perf_counter() - self._started

    def _log_failure(self, fetch: Fetch) -> None:
        """Log an unexpected error of the fetch, whether or not the load still waits for it."""
        if fetch.failure:
            log.error("the context of %s could not be fetched", self._agent_id, exc_info=fetch.failure)

    async def _fetch_ends(self) -> None:
        if self._fetch:
            ended = asyncio.Event()
            self._fetch.add_done_callback(lambda _: ended.set())
            await ended.wait()

    async def _wait_for_sources(self, fetching: asyncio.Task[None]) -> None:
        """Wait until the fetch or the file has the longest available prefix.

        `asyncio.wait` waits for the fetch, because a cancellation of `await fetching` would cancel that task, too.

        The fetch and the header of the file have HEDGE_AFTER_SECONDS. After that, the file is read as well if it has
        more than memory; otherwise the load ends if memory has half of the prompt. When the fetch has ended, the file
        is read if it has more than fetch and memory, or if they have nothing, because then the file determines the
        reason of the miss. A header that is late is awaited only if they have nothing, because the disk may hang.
        """
        header = asyncio.create_task(self._tokens_in_file())
        try:
            patience = HEDGE_AFTER_SECONDS - (time.perf_counter() - self._started)
            await asyncio.wait([header, fetching], timeout=max(0.0, patience))
            if not fetching.done() and not header.done() and not self._memory_has_half:
                await asyncio.wait([header, fetching], return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                if header.done() and (in_file := header.result()) > self._memory.reach:
                    return await self._hedge(in_file, fetching)
                if self._memory_has_half:
                    return None
                await asyncio.wait([fetching])
            best = max(self._memory.reach, self._fetch.reach if self._fetch else 0)
            if not self._header or (best and not header.done()):
                return None
            in_file = await header
            if in_file > best or not best:
                await self._read(in_file)
            return None
        finally:
            header.cancel()

    async def _hedge(self, in_file: int, fetching: asyncio.Task[None]) -> None:
        """Read the file while the page server is late, and wait for the first of the two that has enough."""
        self._hedged = True
        reading = asyncio.create_task(self._read(in_file))
        try:
            await asyncio.wait([reading, fetching], return_when=asyncio.FIRST_COMPLETED)
            if fetching.done() and self._fetch and self._fetch.reach >= in_file:
                return
            await reading
            if not self._from_file and not self._memory_has_half:  # the file is unusable
                await asyncio.wait([fetching])
        finally:
            reading.cancel()  # a read that has started frees its blocks when it ends

    @property
    def _memory_has_half(self) -> bool:
        """Whether memory has at least half of the prompt: then the rest is computed rather than waited for."""
        return self._tokens is not None and 2 * self._memory.reach >= len(self._tokens)

    async def _tokens_in_file(self) -> int:
        """Return the number of usable tokens in the agent's file, according to its header."""
        if not self._header:
            return 0
        reach = await asyncio.wrap_future(self._header)
        return reach if self._tokens is None else min(reach, len(self._tokens) - 1)

    async def _read(self, in_file: int) -> None:
        """Load the agent's file, as soon as memory that is being freed is free. The wait takes no file thread, because
        memory may be freed by the write of a file.
        """
        await until_freed(lambda: self._sources.make_room(in_file), self._sources.frees)
        await self._sources.loop.on_file_thread(lambda: self._read_file(in_file))

    def _read_file(self, in_file: int) -> None:
        """Load the agent's file, on a file thread. If the load has ended meanwhile, free its blocks."""
        sources = self._sources
        assert sources.cold
        if in_file:
            sources.tally.count("disk_loads")
        found, why = sources.cold.find(
            self._agent_id, self._tokens, is_cancelled=lambda: self._state is not LoadState.RUNNING
        )
        with self._lock:
            if self._state is LoadState.RUNNING:
                self._from_file, self._file_why = found, why
            else:
                self._free(found)

    # -- taking the result -----------------------------------------------------------------------------------------

    def _take(self) -> tuple[Found, str | None]:
        """Return the best result, and the reason why it is not longer. Free the blocks of the other results."""
        file, fetch, best = self._from_file, self._fetch, self._memory
        if file:
            best = Found(file, "cold", beginning(self._sources.spec, file, self._tokens)[1])
        try:
            if fetch and fetch.done() and fetch.reach > best.reach and (fetched := fetch.result()):
                best = Found(fetched, "page", fetch.reach, self._tokens is None or fetch.report.own)
        finally:
            self._free(*(blocks for blocks in (self._memory.blocks, file) if blocks is not best.blocks))
        if fetch and best.tier != "page":
            fetch.cancel()
        if self._hedged:
            self._sources.tally.count("hedges_won" if best.tier == "cold" else "hedges_lost")
        late = "late" if self._late else None
        why = (fetch.why if fetch and fetch.done() else None) or self._file_why or late
        return best, None if why in ("absent", *REMOVED) and best.blocks else why

    def _free(self, *contexts: AgentBlocks | None) -> None:
        for context in contexts:
            if context:
                self._sources.pool.free(context.block_ids, self._agent_id)


def beginning(
    spec: ModelCacheSpec, context: AgentBlocks, tokens: Sequence[int] | None
) -> tuple[AgentBlocks | None, int]:
    """Return the blocks of `context` that a prompt can use, and the number of its tokens that need not be computed.

    At least one token of the prompt is left to compute. Without `tokens`, return all of the context.
    """
    if tokens is None:
        return context, len(context)
    reach = context.reusable_for(spec, tokens)
    if reach <= 0:
        return None, 0
    blocks = context.blocks[: spec.blocks_for(reach)]
    held = sum(block.tokens for block in blocks)
    return replace(context, tokens=context.tokens[:held], blocks=blocks), reach
