"""Write-behind: the coroutine that writes dirty contexts to the page server, and to the cold tier."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kvpage_server.client.cluster.plan import GONE

from ..event_loop import EventLoop
from ..memory.blocks import AgentBlocks
from ..memory.lifetimes import NOT_WRITTEN, Lifetimes
from .cold import SafetensorsCacheAdapter
from .hot import CacheEntry, HotTier, LowerTier
from .metrics import Tally
from .pages import PageTier
from .server.connection import FAILING

log = logging.getLogger(__name__)


class WrittenContext(NamedTuple):
    """The result of a save."""

    nbytes: int
    whole: bool  # False if one of several servers did not take its part


Save = Callable[[AgentBlocks], Coroutine[Any, Any, WrittenContext | None]]  # returns None if it failed
UNREACHABLE = FAILING | {"open", "late"}  # reasons of failures that `Reachability` logs
RETRY_SECONDS = 1.0  # from a failed write to the next write to this tier
INCOMPLETE_SECONDS = 5.0  # from a save of which one of several servers did not take its part, to the next one
IDLE_SECONDS = 5.0  # a context is written to its file after this time without a use


@dataclass(slots=True, eq=False)
class Publication:
    """A context in the queue of the page server that is written without a name. It holds references on its blocks."""

    context: AgentBlocks
    label: str | None  # see `AgentCacheStore.publish`
    owner: tuple[str, str]  # the tenant, and the client whose prompts can reuse it
    names: tuple[str, ...]  # of its blocks
    on_end: Callable[[], object] | None = None  # called once: when it is written, or when the server fails
    lifetimes: Lifetimes | None = None  # for which the server keeps it
    answering: bool = False  # whether it is the prompt of an answer that is not complete

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.context.blocks)

    def end(self) -> None:
        """Call `on_end`, unless it was called before. The caller must not hold the flusher's lock."""
        on_end, self.on_end = self.on_end, None
        if on_end:
            on_end()
        if self.lifetimes:
            self.lifetimes.report(NOT_WRITTEN)

    def covers(self, other: Publication) -> bool:
        """Return whether every prompt that can reuse `other` can reuse as much of this context."""
        ours, theirs = self.context, other.context
        same = self.owner == other.owner and ours.tokens[: len(theirs)] == theirs.tokens
        return same and set(theirs.stored_states) <= set(ours.stored_states)


class Flusher:
    """Write-behind of dirty contexts, one at a time, by a coroutine.

    The order: publications; contexts that leave memory; then, to the page server, the context that has been dirty for
    longest; then, to its file, a context that was not used for IDLE_SECONDS, so that a busy agent's file is not written
    every turn. The entries of the hot tier are the queue, so an agent's new context replaces one that still waits.

    While the page server fails, contexts are written to their files without this delay, and stay dirty for the server.
    Contexts without a name wait for the server, in memory that is freed if other contexts need it.
    """

    def __init__(
        self,
        hot: HotTier,
        loop: EventLoop,
        pages: PageTier | None,
        cold: SafetensorsCacheAdapter | None,
        tally: Tally,
        max_prompt_bytes: int,
    ) -> None:
        """Start the coroutine, if there is a tier to write to. The lock of `hot` also protects the fields below. At
        most `max_prompt_bytes` of prompts wait to be published."""
        self.lost = 0  # contexts without a name that were dropped while the page server failed
        self._hot = hot
        self._lock = hot.lock
        self._loop = loop
        self._pool = hot.pool
        self._tally = tally
        self._max_prompt_bytes = max_prompt_bytes
        self._prompts: deque[Publication] = deque()  # waiting for the page server, the oldest first
        self._pages = pages
        self._cold = cold
        self._tiers: dict[LowerTier, PageTier | SafetensorsCacheAdapter] = {}
        self._tiers |= {"page": pages} if pages else {}
        self._tiers |= {"cold": cold} if cold else {}
        self._logged: set[LowerTier] = set()  # tiers whose failure is logged
        self._failed: dict[LowerTier, float] = {}  # by tier: the time.monotonic() of the next try
        self._writing = asyncio.Lock()  # held during a write
        self._changed = asyncio.Event()  # set when a context becomes dirty, or must be written earlier
        self._closed = False
        self._running: Future[None] | None = loop.start(self._run()) if self._tiers else None

    @property
    def tiers(self) -> set[LowerTier]:
        """The tiers that a new context is written to."""
        return set(self._tiers)

    @property
    def failing(self) -> set[LowerTier]:
        """The tiers whose last write failed."""
        return set(self._failed)

    @property
    def is_writing(self) -> bool:
        """Whether a write is in progress."""
        return self._writing.locked()

    @property
    def waiting(self) -> int:
        """Bytes of the prompts that wait to be published. Called with the lock held."""
        return sum(prompt.nbytes for prompt in self._prompts)

    def wake(self) -> None:
        """Look for the next write again, because a context has changed."""
        self._loop.call(self._changed.set)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the write in progress, and suspend further writes within the `with` statement."""
        self._loop.run(self._writing.acquire())
        try:
            yield
        finally:
            self._loop.call(self._writing.release)

    def publish(self, publication: Publication) -> bool:
        """Queue the blocks of a prompt, which are written before any other context. Takes over the caller's references.
        Return whether they were queued.

        The publication is skipped if `max_prompt_bytes` wait already. While the server fails, the prompt of a named
        agent is skipped, because its context is dirty and will be written, and a new context replaces the oldest
        waiting ones if there is no space.
        """
        failing = False
        with self._lock:
            if self._pages and not self._closed:
                failing = "page" in self._failed
                taken = self._queue_for_server(publication) if failing else self.waiting < self._max_prompt_bytes
                if taken:
                    if not failing:
                        self._prompts.append(publication)
                    self.wake()
            else:
                taken = False
        if not taken:
            self._free(publication)
        if failing or not taken:
            publication.end()
        return taken

    def withdraw(self, names: Sequence[str]) -> None:
        """Drop the waiting publication of a context whose blocks have these names."""
        with self._lock:
            found = [one for one in self._prompts if one.names == tuple(names)]
            for publication in found:
                self._prompts.remove(publication)
                self._free(publication)
        for publication in found:
            publication.end()

    def abandon_prompt(self) -> bool:
        """If the server fails, drop the context without a name that has waited longest. Return whether there was one.

        The caller must hold the lock.
        """
        if not self._prompts or "page" not in self._failed:
            return False
        self._free(self._prompts.popleft())
        self.lost += 1
        return True

    def end_prompts(self) -> int:
        """Drop all contexts without a name that wait. Return their number."""
        with self._lock:
            count = len(self._prompts)
            while self._prompts:
                self._free(self._prompts.popleft())
        return count

    def _free(self, publication: Publication) -> None:
        if publication.lifetimes:  # without effect if it was written
            publication.lifetimes.report(NOT_WRITTEN)
        self._pool.free(publication.context.block_ids, publication.context.agent_id)

    def _queue_for_server(self, publication: Publication) -> bool:
        """Append a context to the queue while the server fails. Return whether it was appended.

        It is not if it is the prompt of a named agent, larger than the queue, or covered by a queued context. Queued
        contexts that it covers are dropped, and the oldest ones if there is no space. The caller must hold the lock.
        """
        if publication.label is None or publication.nbytes > self._max_prompt_bytes:
            self.lost += publication.label is not None
            return False
        if any(other.covers(publication) for other in self._prompts):
            return False
        for covered in [other for other in self._prompts if publication.covers(other)]:
            self._prompts.remove(covered)
            self._free(covered)
        while self.waiting + publication.nbytes > self._max_prompt_bytes and self.abandon_prompt():
            pass
        self._prompts.append(publication)
        return True

    def flush(self, agent_id: str | None = None) -> None:
        """Write all dirty contexts to all their tiers before returning. With an agent, write only its context, even if
        it is clean, because the server may have evicted blocks of it. This is a use of the context.

        A page server that does not answer is tried once, even while its circuit breaker is open. Every file is tried,
        because the failure of one does not concern the others. If one of several servers lacks a part of a context, the
        context is written again.
        """
        self._loop.run(self._flush(agent_id))

    def close(self) -> None:
        """Write all dirty contexts, and end the coroutine."""
        with self._lock:
            self._closed = True
        self.wake()
        if self._running:
            wait([self._running])
        self.flush()

    # -- on the loop's thread --------------------------------------------------------------------------------------

    async def _flush(self, agent_id: str | None) -> None:
        """Write all publications, then all dirty contexts or the one of `agent_id`, to all tiers. If the page server
        does not answer, write no further context to it.
        """
        if self._pages:
            self._pages.breaker.retry()
        while await self._publish(ignore_failure=True):
            pass
        failed: set[LowerTier] = set()
        with self._lock:
            dirty = []
            for entry in self._hot:
                if agent_id in (None, entry.context.agent_id):
                    if entry.whole and not entry.kept:
                        entry.unwritten_tiers |= self._tiers.keys()
                    elif entry.whole and agent_id and self._pages:
                        entry.unwritten_tiers.add("page")
                    if agent_id:
                        entry.used = time.monotonic()
                    if entry.unwritten_tiers:
                        dirty.append(entry.context.agent_id)
        for agent_id in dirty:
            for tier in self._tiers:
                if tier not in failed and not await self._write(agent_id, tier) and tier == "page":
                    failed |= {tier} if self._tiers[tier].save_failure in UNREACHABLE else set()

    async def _run(self) -> None:
        """Write contexts as they become due, until `close`."""
        while not self._closed:
            self._changed.clear()
            with self._lock:
                due, pause = self._due(), self._pause()
                may_publish = self._may_publish()
            if not (due or may_publish):
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
            elif not await self._publish() and due:
                await self._write(*due)

    def _may_publish(self) -> bool:
        return bool(self._prompts) and self._failed.get("page", 0.0) <= time.monotonic()

    async def _publish(self, *, ignore_failure: bool = False) -> bool:
        """Write the blocks of the prompt that has waited longest. Return whether it was written.

        With `ignore_failure`, write even if the server failed less than RETRY_SECONDS ago.
        """
        assert self._pages or not self._prompts
        async with self._writing:
            with self._lock:
                if not (self._prompts if ignore_failure else self._may_publish()):
                    return False
                publication = self._prompts.popleft()
                self._pool.share(publication.context.block_ids, publication.context.agent_id)
            failed = False

            async def save(context: AgentBlocks) -> WrittenContext | None:
                nonlocal failed
                assert self._pages
                saved = await self._pages.publish_async(
                    context, label=publication.label, answering=publication.answering
                )
                failed = saved is None
                if saved and saved.whole and publication.label is not None:
                    self._tally.count("unnamed_written")
                if saved and publication.lifetimes:
                    kept = await self._pages.keep_async(context, publication.lifetimes)
                    publication.lifetimes.report(kept)
                return WrittenContext(saved.nbytes, saved.whole) if saved else None

            result = await self._save_and_free("page", save, publication.context)
            written = result is not None
            with self._lock:
                self._note_incomplete()
            self._log_failure("page")
            with self._lock:
                ended = [publication]
                if result:
                    if result.whole:
                        self._tally.count("published")
                    self._failed.pop("page", None)
                else:
                    self._failed["page"] = time.monotonic() + RETRY_SECONDS
                if failed:  # the other publications would fail as well
                    ended += self._prompts
                    again, self._prompts = [*self._prompts, publication], deque()
                    for one in again:
                        if not self._queue_for_server(one):
                            self._free(one)
                else:
                    self._free(publication)
        for one in ended:
            one.end()
        return written

    def _due(self) -> tuple[str, LowerTier] | None:
        """Return the agent and the tier of the next write; None if none is due."""
        now = time.monotonic()
        due = [(entry, tier) for entry, tier in self._unwritten() if self._earliest(entry, tier) <= now]
        if not due:
            return None
        entry, tier = min(due, key=lambda one: (not one[0].leaving, one[1] != "page", one[0].dirty_since))
        return entry.context.agent_id, tier

    def _pause(self) -> float | None:
        """Return the seconds until the next write; None if there is nothing to write."""
        times = [self._earliest(entry, tier) for entry, tier in self._unwritten()]
        times += [self._failed.get("page", 0.0)] if self._prompts else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _unwritten(self) -> Iterator[tuple[CacheEntry, LowerTier]]:
        return ((entry, tier) for entry in self._hot for tier in entry.unwritten_tiers)

    def _earliest(self, entry: CacheEntry, tier: LowerTier) -> float:
        """Return the earliest time.monotonic() at which an entry may be written to a tier."""
        at_once = tier == "page" or entry.leaving or "page" in self._failed
        at = max(0.0 if at_once else entry.used + IDLE_SECONDS, self._failed.get(tier, 0.0))
        return max(at, entry.retry_at) if tier == "page" else at

    async def _write(self, agent_id: str, tier: LowerTier) -> bool:
        """Write the agent's context to a tier, if the tier still lacks it. Return False if the write failed."""
        async with self._writing:
            with self._lock:
                entry = self._hot.look(agent_id)
                if entry is None or tier not in entry.unwritten_tiers:
                    return True
                context, entry.on_the_way = entry.context, tier == "page"
                idle = time.monotonic() - entry.used
                self._pool.share(context.block_ids, agent_id)
            written = await self._save_and_free(tier, partial(self._save, tier, idle, entry.lifetimes), context)
            with self._lock:
                entry.on_the_way = False
                self._note_result(entry, tier, succeeded=written is not None)
                self._hot.trim(self.failing)
                if tier == "page":
                    self._note_incomplete()
            self._log_failure(tier)
            self._changed.set()
        return written is not None

    async def _save(
        self, tier: LowerTier, idle: float, lifetimes: Lifetimes | None, context: AgentBlocks
    ) -> WrittenContext | None:
        if tier == "cold":
            assert self._cold
            nbytes = await self._loop.on_file_thread(partial(self._cold.save, context))
            return None if nbytes is None else WrittenContext(nbytes, whole=True)
        assert self._pages
        saved = await self._pages.save_async(context, idle)
        if lifetimes:
            keeps = saved is not None and saved.whole
            lifetimes.report(await self._pages.keep_async(context, lifetimes) if keeps else NOT_WRITTEN)
        return WrittenContext(saved.nbytes, saved.whole) if saved else None

    async def _save_and_free(self, tier: LowerTier, save: Save, context: AgentBlocks) -> WrittenContext | None:
        """Save a context, and free its blocks. Return the result, or None if the save failed. An incomplete save counts
        as failed.
        """
        start = time.perf_counter()
        written = None
        try:
            written = await save(context)
        except Exception:  # the coroutine has to write the other contexts
            log.exception("the context of %s could not be written", context.agent_id)
        finally:
            self._pool.free(context.block_ids, context.agent_id)
        nbytes = written.nbytes if written and written.whole else None
        self._tally.saved(tier, nbytes, time.perf_counter() - start)
        return written

    def _log_failure(self, tier: LowerTier) -> None:
        """Log the first failure of a tier, and the first success after it. Reachability logs outages of the server."""
        with self._lock:
            failure = self._hot.failure
        reason = self._tiers[tier].save_failure or (failure if tier == "page" else None)
        place = "the page server" if tier == "page" else "files"
        if reason is None and tier in self._logged:
            self._logged.discard(tier)
            log.warning("contexts are written to %s again", place)
        elif reason and reason not in UNREACHABLE and tier not in self._logged:
            self._logged.add(tier)
            log.warning("contexts cannot be written to %s (%s); they stay in memory and are tried again", place, reason)

    def _note_incomplete(self) -> None:
        """Count the last save to the page server as failed while another context could not be saved: one of several
        servers may fail. The caller has the lock.
        """
        if self._pages and any(entry.retry_at for entry in self._hot):
            self._pages.save_failure = self._pages.save_failure or GONE

    def _note_result(self, entry: CacheEntry, tier: LowerTier, *, succeeded: bool) -> None:
        if not succeeded:
            self._failed[tier] = time.monotonic() + RETRY_SECONDS
            entry.dirty_since = time.monotonic()  # behind the others, because this context may be the cause
            if tier == "page" and self._pages:
                entry.failure = self._pages.save_failure or "error"
            return
        self._failed.pop(tier, None)
        if entry.context.blocks and self._tiers[tier].save_failure:  # one of several servers did not take its part
            entry.dirty_since = time.monotonic()
            entry.retry_at = entry.dirty_since + INCOMPLETE_SECONDS
            entry.failure = GONE
            return
        entry.kept = True
        if tier == "page":
            entry.retry_at, entry.failure = 0.0, ""
        entry.unwritten_tiers.discard(tier)
        if not entry.unwritten_tiers:
            self._tally.count("dirty_flushes")
            self._hot.written(entry)
