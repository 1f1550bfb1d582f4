"""Write-behind: dirty contexts are written to the page server, then to the cold tier."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from engine.memory.blocks import AgentBlocks
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.hot import Below, CacheEntry, HotTier
from engine.tiers.metrics import Tally
from engine.tiers.pages import PageTier
from engine.tiers.server.connection import FAILING

log = logging.getLogger(__name__)

Save = Callable[[AgentBlocks], int | None]  # bytes written; None when it failed
UNREACHABLE = FAILING | {"open", "late"}  # reasons that ServerConnection logs
RETRY_SECONDS = 1.0  # before a tier that failed is tried again
IDLE_SECONDS = 5.0  # without use, before a context is written to its file


@dataclass(frozen=True, slots=True)
class Publication:
    """A context to be written without a name. It holds references on its blocks."""

    context: AgentBlocks
    label: str | None  # see `AgentCacheStore.publish`
    over: Callable[[], object] | None = None  # called when it is written, or will not be


class Flusher:
    """One thread that writes dirty contexts, one at a time.

    The order: contexts that leave memory; then, to the page server, the one dirty for longest; then, to its file, one
    unused for IDLE_SECONDS, so that a busy agent's file is not written every turn. There is no queue of copies: the
    agent's entry in the hot tier is written, so a newer context replaces an older one that waits.

    While the page server fails, contexts go to their files at once, and stay dirty for the server.
    """

    def __init__(
        self,
        hot: HotTier,
        changed: threading.Condition,
        pages: PageTier | None,
        cold: SafetensorsCacheAdapter | None,
        tally: Tally,
        max_prompt_bytes: int,
    ) -> None:
        """`changed` is the lock of `hot`. It is notified when a context becomes dirty, and when one has been written.
        At most `max_prompt_bytes` of prompts wait to be published."""
        self._hot = hot
        self._changed = changed
        self._pool = hot.pool
        self._tally = tally
        self._max_prompt_bytes = max_prompt_bytes
        self._save: dict[Below, Save] = {}
        self._prompts: deque[Publication] = deque()
        self._pages = pages
        self._failures: dict[Below, Callable[[], str | None]] = {}  # the reason for which a tier's last save failed
        self._reported: set[Below] = set()  # tiers whose failure is logged
        if pages:
            self._failures["page"] = lambda: pages.save_failure
            self._save["page"] = lambda context: saved.nbytes if (saved := pages.save(context)) else None
        if cold:
            self._failures["cold"] = lambda: cold.save_failure
            self._save["cold"] = cold.save
        self._failed: dict[Below, float] = {}  # when a failed tier is tried again
        self._writing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvpage-flush", daemon=True)
        if self._save:
            self._thread.start()

    @property
    def tiers(self) -> set[Below]:
        """The tiers that a new context is written to."""
        return set(self._save)

    @property
    def stuck(self) -> set[Below]:
        """The tiers whose last write failed."""
        return set(self._failed)

    @property
    def waiting(self) -> int:
        """Bytes of the prompts that are being published or wait for it. Called with the lock held."""
        return sum(block.nbytes for prompt in self._prompts for block in prompt.context.blocks)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the write under way, and begin no other within this context."""
        with self._writing:
            yield

    def publish(self, publication: Publication) -> None:
        """Write the blocks of a prompt before anything else.

        Skipped while the server fails or too much waits already. Takes over the caller's references.
        """
        with self._changed:
            full = self.waiting >= self._max_prompt_bytes
            if "page" in self._save and not self._fails("page") and not full and not self._closed:
                self._prompts.append(publication)
                self._changed.notify_all()
                return
        self._pool.free(publication.context.block_ids, publication.context.agent_id)
        if publication.over:
            publication.over()

    def flush(self, agent_id: str | None = None) -> None:
        """Write all dirty contexts to all their tiers before returning. With an agent, write its context alone, even a
        clean one, of which the server may have evicted blocks.

        A tier that fails is tried once, the page server also while its circuit breaker is open. A context of which one
        of several servers lacks a part is written again.
        """
        if self._pages:
            self._pages.breaker.retry()
        while self._publish():
            pass
        failed: set[Below] = set()
        with self._changed:
            dirty = []
            for entry in self._hot:
                if agent_id in (None, entry.context.agent_id):
                    if entry.whole and not entry.kept:
                        entry.owed |= self._save.keys()
                    elif entry.whole and agent_id and self._pages:
                        entry.owed.add("page")
                    if entry.owed:
                        dirty.append(entry.context.agent_id)
        for agent_id in dirty:
            for tier in self._save:
                if tier not in failed and not self._write(agent_id, tier):
                    failed.add(tier)

    def close(self) -> None:
        """Write all dirty contexts, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._prompts and not self._due():
                    self._changed.wait(self._pause())
                if self._closed:
                    return
                due = self._due()
            if not self._publish() and due:
                self._write(*due)

    def _publish(self) -> bool:
        """Write the blocks of the prompt that has waited longest; whether there was one."""
        with self._writing:
            with self._changed:
                if not self._prompts:
                    return False
                publication = self._prompts[0]
                in_vain = self._fails("page")
            if in_vain:
                self._pool.free(publication.context.block_ids, publication.context.agent_id)
            elif self._try("page", partial(self._publish_one, publication.label), publication.context) is None:
                with self._changed:
                    self._failed["page"] = time.monotonic() + RETRY_SECONDS
            else:
                self._tally.count("published")
                with self._changed:
                    self._failed.pop("page", None)
            with self._changed:
                self._prompts.popleft()
        if publication.over:
            publication.over()
        return True

    def _fails(self, tier: Below) -> bool:
        """Whether a tier failed and is not to be tried yet."""
        return self._failed.get(tier, 0.0) > time.monotonic()

    def _publish_one(self, label: str | None, context: AgentBlocks) -> int | None:
        assert self._pages
        saved = self._pages.publish(context, label=label)
        return saved.nbytes if saved else None

    def _due(self) -> tuple[str, Below] | None:
        """The agent whose context is to be written now, and the tier."""
        now = time.monotonic()
        due = [(entry, tier) for entry, tier in self._owed() if self._when(entry, tier) <= now]
        if not due:
            return None
        entry, tier = min(due, key=lambda one: (not one[0].leaving, one[1] != "page", one[0].dirty_since))
        return entry.context.agent_id, tier

    def _pause(self) -> float | None:
        """Seconds until the next write; None while nothing is dirty."""
        times = [self._when(entry, tier) for entry, tier in self._owed()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _owed(self) -> Iterator[tuple[CacheEntry, Below]]:
        return ((entry, tier) for entry in self._hot for tier in entry.owed)

    def _when(self, entry: CacheEntry, tier: Below) -> float:
        at_once = tier == "page" or entry.leaving or "page" in self._failed
        return max(0.0 if at_once else entry.used + IDLE_SECONDS, self._failed.get(tier, 0.0))

    def _write(self, agent_id: str, tier: Below) -> bool:
        """Write the agent's context to a tier, if that is still due; False when it failed."""
        with self._writing:
            with self._changed:
                entry = self._hot.look(agent_id)
                if entry is None or tier not in entry.owed:
                    return True
                context = entry.context
                self._pool.share(context.block_ids, agent_id)
            nbytes = self._try(tier, self._save[tier], context)
            self._report(tier)
            with self._changed:
                self._wrote(entry, tier, well=nbytes is not None)
                self._hot.trim(self.stuck)
                self._changed.notify_all()
        return nbytes is not None

    def _try(self, tier: Below, save: Save, context: AgentBlocks) -> int | None:
        """The number of bytes written; None when it failed. Frees the context."""
        start = time.perf_counter()
        nbytes = None
        try:
            nbytes = save(context)
        except Exception:  # the other contexts are still to be written
            log.exception("the context of %s could not be written", context.agent_id)
        finally:
            self._pool.free(context.block_ids, context.agent_id)
        self._tally.saved(tier, nbytes, time.perf_counter() - start)
        return nbytes

    def _report(self, tier: Below) -> None:
        """Log once that a tier takes no contexts, and once that it takes them again. ServerConnection logs outages."""
        reason = self._failures[tier]()
        place = "the page server" if tier == "page" else "files"
        if reason is None and tier in self._reported:
            self._reported.discard(tier)
            log.warning("contexts are written to %s again", place)
        elif reason and reason not in UNREACHABLE and tier not in self._reported:
            self._reported.add(tier)
            log.warning("contexts cannot be written to %s (%s); they stay in memory and are tried again", place, reason)

    def _wrote(self, entry: CacheEntry, tier: Below, *, well: bool) -> None:
        if not well:
            self._failed[tier] = time.monotonic() + RETRY_SECONDS
            entry.dirty_since = time.monotonic()  # this context may be the cause: others come first
            return
        self._failed.pop(tier, None)
        entry.kept |= self._failures[tier]() is None
        entry.owed.discard(tier)
        if not entry.owed:
            self._tally.count("dirty_flushes")
            self._hot.written(entry)
