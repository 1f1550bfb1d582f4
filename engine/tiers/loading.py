"""A context on its way into memory: what memory has already, the page server, and a file beside or behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, replace

from engine.memory.blocks import AgentBlocks
from engine.memory.prefix import common_prefix
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.metrics import Tally, Tier
from engine.tiers.pages import PageTier
from engine.tiers.server.fetch import Fetch

HEDGE_AFTER = 0.5  # seconds


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


class Loading:
    """A load under way. `result`, or `cancel`, has to be called once: it holds blocks until then.

    The page server is asked for what memory lacks. The agent's file is looked at beside that: if it has more than the
    server, or the server has not delivered after HEDGE_AFTER seconds, it is read, and the first that is there is
    taken. The other is given up, and what it had taken is free. When memory has most of the prompt, the server is
    waited for no longer than that. After so many seconds that a load may take nobody is waited for: what has come is
    taken, and the rest is for the engine to compute.
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
        self._seconds = 0.0  # until it was settled
        self._settled: Future[None] = Future()
        self._loaded: Loaded | None = None
        self._taken = False
        self._cancelled = False
        self._lock = threading.Lock()  # of all below
        self._over = False  # settled or cancelled
        self._within = within
        self._late = False  # HEDGE_AFTER has passed
        self._overdue = False  # all of its time has
        self._fetch: Fetch | None = None
        self._on_file: int | None = None if ways.cold and not enough else 0  # tokens; None: not known yet
        self._reading = False
        self._hedged = False  # the file is read although the server may still answer
        self._was_read = not ways.cold or enough
        self._from_file: AgentBlocks | None = None
        self._why: str | None = None
        self._timers = [threading.Timer(HEDGE_AFTER, self._be_late), threading.Timer(within, self._be_overdue)]
        if not enough:
            self._begin()
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
        self._settled.result(timeout)
        if self._cancelled:
            raise CancelledError
        if self._loaded is None:
            self._taken = True
            start = time.perf_counter()
            found = self._take()
            seconds = self._seconds + time.perf_counter() - start
            why = self._why if found.blocks else self._why or "absent"
            self._loaded = Loaded(found.blocks, found.tier, found.reach, why, seconds)
            self._ways.loaded(self._loaded, self._tokens)
        return self._loaded

    def cancel(self) -> None:
        """Give up, and free what was taken. After `result` this does nothing."""
        with self._lock:
            if self._taken or self._cancelled:
                return
            settled, self._over = self._over, True
            self._cancelled = True
            self._release(self._memory.blocks, self._from_file)
        self._stop_timers()
        if self._fetch:
            self._fetch.cancel()
        if not settled:
            self._settled.set_result(None)

    def _begin(self) -> None:
        ways = self._ways
        if self._tokens is not None:
            ways.make_room(len(self._tokens) - self._memory.reach)
        if ways.pages:
            blocks = self._memory.blocks.blocks if self._memory.blocks else ()
            held = blocks[: self._memory.reach // ways.spec.block_tokens]
            self._fetch = ways.pages.fetch(self._agent_id, self._tokens, held=held, within=self._within)
            self._fetch.add_done_callback(lambda _: self._go_on())
        for timer in self._timers:
            timer.daemon = True
            timer.start()
        if ways.cold:
            ways.readers.submit(self._look)

    def _be_late(self) -> None:
        self._late = True
        self._go_on()

    def _be_overdue(self) -> None:
        """The fetch has the same time, and ends now by itself, with what has come; a file is not waited for."""
        self._overdue = True
        self._go_on()

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _look(self) -> None:
        """On a reader's thread: how much is in the file."""
        assert self._ways.cold
        reach = self._ways.cold.reach(self._agent_id, self._tokens)
        with self._lock:
            self._on_file = reach if self._tokens is None else min(reach, len(self._tokens) - 1)
        self._go_on()

    def _read(self) -> None:
        """On a reader's thread: load the file."""
        assert self._ways.cold
        if self._on_file:
            self._ways.tally.count("disk_loads")
        self._ways.make_room((self._on_file or 0) - self._memory.reach)
        found, why = self._ways.cold.find(self._agent_id, self._tokens, given_up=lambda: self._over)
        with self._lock:
            if self._over:
                self._release(found)
            else:
                self._from_file, self._was_read = found, True
                self._why = self._why or why
        self._go_on()

    def _go_on(self) -> None:
        """Something has changed: settle, or begin to read the file, or go on waiting."""
        with self._lock:
            if self._over or not self._decide():
                return
            self._over = True
            self._seconds = time.perf_counter() - self._started
        self._stop_timers()
        self._settled.set_result(None)

    def _decide(self) -> bool:
        """Whether to wait no longer; begins to read the file when that is worth it."""
        fetched = self._fetch is None or self._fetch.done()
        in_vain = self._late and self._tokens is not None and 2 * self._memory.reach >= len(self._tokens)
        best = max(self._memory.reach, self._fetch.reach if self._fetch and fetched else 0)
        if self._from_file or (self._overdue and fetched):
            return True
        if self._was_read:
            return fetched or in_vain
        if self._on_file is None:
            return False
        if self._reading:
            return fetched and 0 < self._on_file <= best
        if self._on_file > best or (fetched and not best):  # of what is nowhere, the file tells why
            if fetched or self._late:
                self._reading, self._hedged = True, not fetched
                self._ways.readers.submit(self._read)
            return False
        return fetched or in_vain

    def _take(self) -> Found:
        """What was settled upon; the rest is let go of."""
        on_file, best = self._from_file, self._memory
        if on_file:
            best = Found(on_file, "cold", beginning(self._ways.spec, on_file, self._tokens)[1])
        fetch = self._fetch
        try:
            if fetch and fetch.done() and fetch.reach > best.reach and (fetched := fetch.result()):
                best = Found(fetched, "page", fetch.reach)
        finally:
            self._release(*(found for found in (self._memory.blocks, on_file) if found is not best.blocks))
        if fetch and best.tier != "page":
            fetch.cancel()
        if self._hedged:
            self._ways.tally.count("hedges_won" if best.tier == "cold" else "hedges_lost")
        self._why = (fetch.why if fetch and fetch.done() else None) or self._why or ("late" if self._overdue else None)
        return best

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
    reach = context.reusable(spec, min(common_prefix(context.tokens, tokens), len(tokens) - 1))
    if reach <= 0:
        return None, 0
    blocks = context.blocks[: spec.blocks_for(reach)]
    held = sum(block.tokens for block in blocks)
    return replace(context, tokens=context.tokens[:held], blocks=blocks), reach
