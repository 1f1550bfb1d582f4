"""The load of a context from memory, from the page server, and from its file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, replace

from kvpage_server.tracing import is_seen, span

from ..memory.blocks import AgentBlocks
from ..pool import BlockPool
from ..spec import ModelCacheSpec
from .cold import SafetensorsCacheAdapter
from .load_states import FileState, LoadEvent, LoadState, Patience, moved
from .metrics import Tally, Tier
from .pages import PageTier
from .server.connection import FAILING
from .server.fetch import Fetch

HEDGE_AFTER_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load."""

    blocks: AgentBlocks | None  # freed by the receiver, under its agent's name; None on a miss
    tier: Tier
    reach: int  # tokens of the prompt that need not be computed
    why: str | None  # the reason of a miss, or of a result shorter than the prompt
    seconds: float
    own: bool  # whether it is of the agent's own context

    @property
    def nbytes(self) -> int:
        """The number of bytes in its blocks."""
        return sum(block.nbytes for block in self.blocks.blocks) if self.blocks else 0

    @property
    def unanswered(self) -> bool:
        """Whether the page server failed to answer, or got no request because it had failed before."""
        return self.why == "open" or self.why in FAILING


@dataclass(frozen=True, slots=True)
class Wanted:
    """A context to be loaded."""

    agent_id: str
    tokens: Sequence[int] | None  # the prompt; None for all of the agent's own context
    named: bool = True  # whether the agent can have a context of its own, and a file


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix of a prompt that a tier has. Its blocks are held under the agent's name."""

    blocks: AgentBlocks | None = None
    tier: Tier = "none"
    reach: int = 0
    own: bool = True  # whether it is of the agent's own context


@dataclass(frozen=True, slots=True)
class LoadSources:
    """Sources of contexts below memory, and shared parts of loads."""

    spec: ModelCacheSpec
    pool: BlockPool
    pages: PageTier | None
    cold: SafetensorsCacheAdapter | None
    readers: Executor  # threads that read files
    tally: Tally
    make_room: Callable[[int], object]  # evicts from memory for a context with a number of tokens


@dataclass(slots=True)
class _File:
    """State of the agent's file in a load."""

    state: FileState
    tokens: int = 0  # usable tokens, according to its header
    found: AgentBlocks | None = None
    why: str | None = None  # the reason for which it is unusable
    hedged: bool = False  # whether it was read while the page server could still answer


class Loading:
    """A load in progress. It holds blocks until `result` or `cancel` is called.

    The page server is queried for blocks that memory lacks. Meanwhile the header of the agent's file is read. The file
    itself is read if it has more than the server, or if the server has not delivered after HEDGE_AFTER_SECONDS; then
    the first of the two is taken and the other cancelled. If memory has at least half of the prompt, and the file has
    no more, the load ends at that point. After its time limit a load takes the received blocks, and the engine computes
    the rest. Its states are in `load_states`.
    """

    def __init__(
        self,
        ways: LoadSources,
        wanted: Wanted,
        memory: Found,
        came: Callable[[Loaded, Sequence[int] | None], None],
        within: float,
    ) -> None:
        """Begin the load. `came` is called with the result and the tokens, before the caller gets the result. `within`
        is the time limit in seconds; if it is 0, only `memory` is used.
        """
        self._ways = ways
        self._agent_id = wanted.agent_id
        self._tokens = wanted.tokens
        self._memory = memory
        self._on_loaded = came
        self._named = wanted.named
        self._started = time.perf_counter()
        self._settled: Future[float] = Future()  # seconds from the begin of the load to SETTLED
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()  # of all fields below
        self._state = LoadState.WAITING
        self._patience = Patience.FRESH
        self._file = _File(FileState.LOOKING if ways.cold and wanted.named and within > 0 else FileState.DONE)
        self._fetch: Fetch | None = None
        # The fetch has the same limit, and ends by itself. After the deadline, the load does not wait for the file.
        self._timers = [
            threading.Timer(seconds, self._grow_impatient, [event])
            for seconds, event in ((HEDGE_AFTER_SECONDS, LoadEvent.HEDGE_TIMER), (within, LoadEvent.DEADLINE))
        ]
        self._span = span("kvpage.load")
        if within > 0:
            with self._span.current():
                self._begin(within)
        self._advance()

    def done(self) -> bool:
        """Return whether `result` returns without waiting."""
        return self._settled.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the load is done, on any thread; immediately if it is done already."""
        self._settled.add_done_callback(lambda _: callback())

    def result(self, timeout: float | None = None) -> Loaded:
        """Wait for the result, and return it. This creates arrays, so only the thread that owns MLX may call it.

        Raises TimeoutError after `timeout` seconds, and CancelledError after `cancel`.
        """
        seconds = self._settled.result(timeout)
        with self._lock:
            self._state = moved(self._state, LoadEvent.RESULT)
            if self._state is LoadState.CANCELLED:
                raise CancelledError
        if self._loaded is None:
            start = time.perf_counter()
            found, why = self._take()
            seconds += time.perf_counter() - start
            why = why if found.blocks else why or "absent"
            self._loaded = Loaded(found.blocks, found.tier, found.reach, why, seconds, found.own)
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
            self._release(self._memory.blocks, self._file.found)
        self._span.set(reason="cancelled")
        self._span.end()
        self._stop_timers()
        if self._fetch:
            self._fetch.cancel()
        if before is LoadState.WAITING:
            self._settled.set_result(0.0)

    def _begin(self, within: float) -> None:
        ways = self._ways
        if self._tokens is not None:
            ways.make_room(len(self._tokens) - self._memory.reach)
        if ways.pages:
            blocks = self._memory.blocks.blocks if self._memory.blocks else ()
            held = blocks[: self._memory.reach // ways.spec.block_tokens]
            self._fetch = ways.pages.fetch(
                self._agent_id, self._tokens, held=held, within=within, beyond=self._memory.reach, named=self._named
            )
            self._fetch.add_done_callback(lambda _: self._advance())
        for timer in self._timers:
            timer.daemon = True
            timer.start()
        if self._file.state is FileState.LOOKING:
            ways.readers.submit(self._look)

    def _grow_impatient(self, event: LoadEvent) -> None:
        with self._lock:
            self._patience = moved(self._patience, event)
        self._advance()

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _look(self) -> None:
        """Read the file's header, on a reader's thread."""
        assert self._ways.cold
        reach = self._ways.cold.reach(self._agent_id, self._tokens)
        with self._lock:
            self._file.tokens = reach if self._tokens is None else min(reach, len(self._tokens) - 1)
            self._file.state = moved(self._file.state, LoadEvent.LOOKED)
        self._advance()

    def _read(self) -> None:
        """Load the file, on a reader's thread."""
        assert self._ways.cold
        if self._file.tokens:
            self._ways.tally.count("disk_loads")
        self._ways.make_room(self._file.tokens - self._memory.reach)
        found, why = self._ways.cold.find(
            self._agent_id, self._tokens, given_up=lambda: self._state is not LoadState.WAITING
        )
        with self._lock:
            if self._state is LoadState.WAITING:
                self._file.state = moved(self._file.state, LoadEvent.READ_ENDED)
                self._file.found, self._file.why = found, why
            else:
                self._release(found)
        self._advance()

    def _advance(self) -> None:
        """Settle the load, begin to read the file, or continue to wait. Called after each change of a source or of the
        patience."""
        with self._lock:
            if self._state is not LoadState.WAITING or not self._has_enough():
                return
            self._state = moved(self._state, LoadEvent.SETTLE)
        self._stop_timers()
        self._settled.set_result(time.perf_counter() - self._started)

    def _has_enough(self) -> bool:
        """Return whether to settle now. Begin to read the file when it has more than the other sources."""
        file, late = self._file, self._patience is Patience.LATE
        fetched = self._fetch is None or self._fetch.done()
        # The server is late, and memory has at least half of the prompt: the rest is computed instead.
        in_vain = late and self._tokens is not None and 2 * self._memory.reach >= len(self._tokens)
        best = max(self._memory.reach, self._fetch.reach if self._fetch and fetched else 0)
        if file.found or (self._patience is Patience.OVERDUE and fetched):
            return True
        if file.state is FileState.LOOKING:
            return False
        if file.state is FileState.READING:
            return fetched and 0 < file.tokens <= best
        worth_reading = file.tokens > best or (fetched and not best)  # a miss reports the file's reason
        if file.state is FileState.DONE or not worth_reading:
            return fetched or in_vain
        if fetched or late:
            file.state, file.hedged = moved(file.state, LoadEvent.READ_BEGAN), not fetched
            self._ways.readers.submit(self._read)
        return False

    def _take(self) -> tuple[Found, str | None]:
        """Return the best result, and the reason why it is not longer. Free the blocks of the other results."""
        file, fetch, best = self._file, self._fetch, self._memory
        if file.found:
            best = Found(file.found, "cold", beginning(self._ways.spec, file.found, self._tokens)[1])
        try:
            if fetch and fetch.done() and fetch.reach > best.reach and (fetched := fetch.result()):
                best = Found(fetched, "page", fetch.reach, self._tokens is None or fetch.report.own)
        finally:
            self._release(*(found for found in (self._memory.blocks, file.found) if found is not best.blocks))
        if fetch and best.tier != "page":
            fetch.cancel()
        if file.hedged:
            self._ways.tally.count("hedges_won" if best.tier == "cold" else "hedges_lost")
        late = "late" if self._patience is Patience.OVERDUE else None
        why = (fetch.why if fetch and fetch.done() else None) or file.why or late
        return best, None if why == "absent" and best.blocks else why

    def _release(self, *contexts: AgentBlocks | None) -> None:
        for context in contexts:
            if context:
                self._ways.pool.free(context.block_ids, self._agent_id)


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
