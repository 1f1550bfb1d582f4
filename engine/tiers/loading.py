"""A context on its way into memory: what memory has already, the page server, and a file beside or behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, replace

from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.load_states import FileState, LoadEvent, LoadState, Patience, moved
from engine.tiers.metrics import Tally, Tier
from engine.tiers.pages import PageTier
from engine.tiers.server.fetch import Fetch

HEDGE_AFTER_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found."""

    blocks: AgentBlocks | None  # the receiver's to free, under its agent's name; None on a miss
    tier: Tier
    reach: int  # tokens of the prompt that needn't be computed
    why: str | None  # the reason of a miss, or why there is not more
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """The longest beginning of a prompt that a tier has, if any. Its blocks are held under its agent's name."""

    blocks: AgentBlocks | None = None
    tier: Tier = "none"
    reach: int = 0


@dataclass(frozen=True, slots=True)
class Ways:
    """From where contexts are loaded, and who is told."""

    spec: ModelCacheSpec
    pool: BlockPool
    pages: PageTier | None
    cold: SafetensorsCacheAdapter | None
    readers: Executor  # threads that read files
    tally: Tally
    make_room: Callable[[int], object]  # for a context of so many tokens
    loaded: Callable[[Loaded, Sequence[int] | None], None]


@dataclass(slots=True)
class _File:
    """The agent's file, as far as it is known."""

    state: FileState
    tokens: int = 0  # of use, as its header says
    found: AgentBlocks | None = None
    why: str | None = None  # it was of no use
    hedged: bool = False  # it was read although the page server could still answer


class Loading:
    """A load under way. `result`, or `cancel`, has to be called once: it holds blocks until then.

    The page server is asked for what memory lacks. The agent's file is looked at beside that: if it has more than the
    server, or the server has not delivered after HEDGE_AFTER_SECONDS, it is read, and the first that is there is taken.
    The other is given up, and what it had taken is free. When memory has most of the prompt, the server is waited for
    no longer than that. After so many seconds that a load may take nobody is waited for: what has come is taken, and
    the rest is for the engine to compute. `load_states` has the tables of what moves it.
    """

    def __init__(
        self, ways: Ways, agent_id: str, tokens: Sequence[int] | None, memory: Found, *, enough: bool, within: float
    ) -> None:
        """`enough`: nothing but `memory` is asked. `within` is how many seconds it may take."""
        self._ways = ways
        self._agent_id = agent_id
        self._tokens = tokens
        self._memory = memory
        self._started = time.perf_counter()
        self._settled: Future[float] = Future()  # the seconds that it took
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()  # of all below
        self._state = LoadState.WAITING
        self._patience = Patience.FRESH
        self._file = _File(FileState.LOOKING if ways.cold and not enough else FileState.DONE)
        self._fetch: Fetch | None = None
        # The fetch has the same deadline, and ends then by itself, with what has come. A file is not waited for.
        self._timers = [
            threading.Timer(seconds, self._grow_impatient, [event])
            for seconds, event in ((HEDGE_AFTER_SECONDS, LoadEvent.HEDGE_TIMER), (within, LoadEvent.DEADLINE))
        ]
        if not enough:
            self._begin(within)
        self._go_on()

    def done(self) -> bool:
        """Whether `result` returns without waiting for the server or a file."""
        return self._settled.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call it when done, on whichever thread that is; at once if it's done already."""
        self._settled.add_done_callback(lambda _: callback())

    def result(self, timeout: float | None = None) -> Loaded:
        """What was found; its arrays are made now, so this is for the thread that owns MLX.

        Waits until it is done. Raises TimeoutError when that takes longer than `timeout` seconds, CancelledError after
        `cancel`.
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
            self._loaded = Loaded(found.blocks, found.tier, found.reach, why, seconds)
            self._ways.loaded(self._loaded, self._tokens)
        return self._loaded

    def cancel(self) -> None:
        """Give up, and free what was taken. After `result` this does nothing."""
        with self._lock:
            before, self._state = self._state, moved(self._state, LoadEvent.CANCEL)
            if self._state is before:
                return
            self._release(self._memory.blocks, self._file.found)
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
            self._fetch = ways.pages.fetch(self._agent_id, self._tokens, held=held, within=within)
            self._fetch.add_done_callback(lambda _: self._go_on())
        for timer in self._timers:
            timer.daemon = True
            timer.start()
        if ways.cold:
            ways.readers.submit(self._look)

    def _grow_impatient(self, event: LoadEvent) -> None:
        with self._lock:
            self._patience = moved(self._patience, event)
        self._go_on()

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _look(self) -> None:
        """On a reader's thread: how much is in the file."""
        assert self._ways.cold
        reach = self._ways.cold.reach(self._agent_id, self._tokens)
        with self._lock:
            self._file.tokens = reach if self._tokens is None else min(reach, len(self._tokens) - 1)
            self._file.state = moved(self._file.state, LoadEvent.LOOKED)
        self._go_on()

    def _read(self) -> None:
        """On a reader's thread: load the file."""
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
        self._go_on()

    def _go_on(self) -> None:
        """Something has changed: settle, or begin to read the file, or go on waiting."""
        with self._lock:
            if self._state is not LoadState.WAITING or not self._has_enough():
                return
            self._state = moved(self._state, LoadEvent.SETTLE)
        self._stop_timers()
        self._settled.set_result(time.perf_counter() - self._started)

    def _has_enough(self) -> bool:
        """Whether to wait no longer; begins to read the file when that is worth it."""
        file, late = self._file, self._patience is Patience.LATE
        fetched = self._fetch is None or self._fetch.done()
        in_vain = late and self._tokens is not None and 2 * self._memory.reach >= len(self._tokens)
        best = max(self._memory.reach, self._fetch.reach if self._fetch and fetched else 0)
        if file.found or (self._patience is Patience.OVERDUE and fetched):
            return True
        if file.state is FileState.LOOKING:
            return False
        if file.state is FileState.READING:
            return fetched and 0 < file.tokens <= best
        worth_reading = file.tokens > best or (fetched and not best)  # of what is nowhere, the file tells why
        if file.state is FileState.DONE or not worth_reading:
            return fetched or in_vain
        if fetched or late:
            file.state, file.hedged = moved(file.state, LoadEvent.READ_BEGAN), not fetched
            self._ways.readers.submit(self._read)
        return False

    def _take(self) -> tuple[Found, str | None]:
        """What was settled upon, and why there is not more; the rest is let go of."""
        file, fetch, best = self._file, self._fetch, self._memory
        if file.found:
            best = Found(file.found, "cold", beginning(self._ways.spec, file.found, self._tokens)[1])
        try:
            if fetch and fetch.done() and fetch.reach > best.reach and (fetched := fetch.result()):
                best = Found(fetched, "page", fetch.reach)
        finally:
            self._release(*(found for found in (self._memory.blocks, file.found) if found is not best.blocks))
        if fetch and best.tier != "page":
            fetch.cancel()
        if file.hedged:
            self._ways.tally.count("hedges_won" if best.tier == "cold" else "hedges_lost")
        late = "late" if self._patience is Patience.OVERDUE else None
        return best, (fetch.why if fetch and fetch.done() else None) or file.why or late

    def _release(self, *contexts: AgentBlocks | None) -> None:
        for context in contexts:
            if context:
                self._ways.pool.free(context.block_ids, self._agent_id)


def beginning(
    spec: ModelCacheSpec, context: AgentBlocks, tokens: Sequence[int] | None
) -> tuple[AgentBlocks | None, int]:
    """The blocks of `context` that are of use to a prompt, and how many of its tokens needn't be computed.

    A token of the prompt has to be fed to the model. Without `tokens`: all of it.
    """
    if tokens is None:
        return context, len(context)
    reach = context.reusable_for(spec, tokens)
    if reach <= 0:
        return None, 0
    blocks = context.blocks[: spec.blocks_for(reach)]
    held = sum(block.tokens for block in blocks)
    return replace(context, tokens=context.tokens[:held], blocks=blocks), reach
