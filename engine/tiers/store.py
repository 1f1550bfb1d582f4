"""The contexts of agents: in memory, on the page server, and in files.

>>> store = AgentCacheStore(spec, pool, pages=PageTier(url, spec, pool), cold=SafetensorsCacheAdapter(spec, pool))
>>> loading = store.begin_load("alice", prompt)  # other prompts run meanwhile
>>> known = loading.result()
>>> batch.submit("alice", prompt, known.blocks)
>>> if known.blocks:
...     pool.free(known.blocks.block_ids, "alice")
>>> for done in batch.step():
...     store.save(done.blocks)  # takes references of its own, and queues the context for write-behind
...     pool.free(done.blocks.block_ids, done.agent_id)
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from kvpage_server.kv_events import Event
from kvpage_server.page import unix_ms
from kvpage_server.system.process import trim_malloc
from kvpage_server.system.text import plural

from ..chains import ContextNames, beginnings, root_of
from ..event_loop import EventLoop
from ..generation.tokens import token_ids
from ..memory.blocks import AgentBlocks, BlockError, check_agent_id
from ..memory.context_tree import ContextTree
from ..memory.lifetimes import NOT_WRITTEN, KeptContext, Lifetimes
from ..pool import BlockPool
from ..spec import ModelCacheSpec
from .cold import SafetensorsCacheAdapter
from .flush import Flusher, Publication
from .hot import CacheEntry, HotTier, LowerTier
from .loading import Found, Loaded, Loading, LoadRequest, LoadSources, beginning
from .metrics import StoreMetrics, Tally, Tier, figures, publish_statistics
from .pages import RESTORE_SECONDS, PageTier
from .prefill_claims import Claim, Claims
from .server.connection import Outage
from .server.manifest import DELETION_SECONDS
from .server.tails import least_tail, names_of

# -- Limits of agents' contexts ----------------------------------------------------------------------------------------

Keep = Literal["all", "worth", "named"]
KEEP: tuple[Keep, ...] = get_args(Keep)

MAX_HOT_AGENTS = 8
MAX_QUEUE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Limits of the contexts in memory and of a load. None stands for a share of the pool."""

    max_hot_agents: int = MAX_HOT_AGENTS  # contexts in memory
    hot_bytes: int | None = None  # of their blocks; default: half of the pool
    queue_bytes: int | None = None  # evicted and not yet written; default: a quarter of the pool, a GiB at most
    prefix_bytes: int | None = None  # the tree of all contexts; default: half of the pool
    keep: Keep = "worth"  # the contexts without a name that the page server gets; see `AgentCacheStore.publish`
    restore_within: float = RESTORE_SECONDS  # seconds of a load; the engine computes the missing rest

    def __post_init__(self) -> None:
        if self.keep not in KEEP:
            raise ValueError(f"keep is one of {', '.join(KEEP)}, got {self.keep!r}")
        if not self.restore_within > 0:
            raise ValueError(f"restore_within must be more than 0 seconds, got {self.restore_within}")
        for limit in (self.max_hot_agents, self.hot_bytes, self.queue_bytes, self.prefix_bytes):
            if limit is not None and limit < 0:
                raise ValueError(f"a limit is at least 0, got {limit}")

    def sizes(self, spec: ModelCacheSpec, pool: BlockPool) -> tuple[int, int, int]:
        """Return `hot_bytes`, `queue_bytes` and `prefix_bytes`, with the defaults of this pool."""
        capacity = min(pool.total_bytes, pool.total_blocks * spec.block_nbytes)
        return (
            capacity // 2 if self.hot_bytes is None else self.hot_bytes,
            min(capacity // 4, MAX_QUEUE_BYTES) if self.queue_bytes is None else self.queue_bytes,
            capacity // 2 if self.prefix_bytes is None else self.prefix_bytes,
        )


log = logging.getLogger(__name__)

RENEWAL_PART = 1 / 20  # of a lifetime: hits in memory renew it on the page server once in this time
SHORTEST_LIFETIME = 300  # seconds, that a client can request
MOST_DELETED = 4096  # agents whose deletion is known to answers that began before it
MOST_RENEWALS = 4096  # of which the time is known
WORTH_SECONDS = 0.1  # a context without a name is written at once if computing it takes longer, else at its second use


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """Description of an agent's context in the store."""

    agent_id: str
    tokens: int
    tiers: tuple[str, ...]  # "hot" for memory; "page" and "cold", the tiers below, if the whole context is saved
    nbytes: int  # of these tokens in memory, without states
    saved: bool  # whether a tier below memory has the whole context
    pinned: bool


class StoreUnavailableError(RuntimeError):
    """Error: the page server does not answer, so its part of an operation on an agent is unknown or not done."""

    def __init__(self) -> None:
        super().__init__("the page server does not answer")


class _ContextVersion:
    """Version of an agent's context. A load has a reference to the version at its start, and a save, a fork and a
    delete replace it. So the load recognises that its result is outdated.
    """


class AgentCacheStore:
    """Store of agents' contexts in memory, on a page server and in files. Thread-safe.

    A load takes the longest prefix of the prompt in memory, from the agent's last context or from any other context of
    its tenant (see `ContextTree`). Then the rest is requested from the page server, and the agent's file is read if it
    has more. Loaded blocks are kept in memory, unless the agent's context was saved, replaced by a fork, or deleted
    meanwhile. When a lower tier fails, less is found, and the reason is counted.

    A saved context is dirty until it is written by write-behind. Memory is shared by reference: blocks that agents
    have in common are in memory once, and every reference in the pool has the name of its agent.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        pool: BlockPool,
        *,
        pages: PageTier | None = None,
        cold: SafetensorsCacheAdapter | None = None,
        config: CacheConfig | None = None,
        publish: Callable[[Event], None] | None = None,
    ) -> None:
        """Create the store, which takes over `pages` and `cold`. `publish` gets the KV events of blocks in memory."""
        config = config or CacheConfig()
        hot_bytes, queue_bytes, tree_bytes = config.sizes(spec, pool)
        self.spec = spec
        self.restore_within = config.restore_within
        self._keep = config.keep
        self._pool = pool
        self._pages = pages
        self._cold = cold
        self._tally = Tally()
        self._closed = False
        self._loop = pages.loop if pages else EventLoop(spec.name)
        self._hot = HotTier(pool, config.max_hot_agents, hot_bytes, queue_bytes)
        self._lock = self._hot.lock  # also of the tree, and of `_versions`
        self._tree = ContextTree(spec, pool, tree_bytes, publish)
        self._flusher = Flusher(self._hot, self._loop, pages, cold, self._tally, queue_bytes)
        self.claims = Claims(spec, pages, self._loop)
        self._sources = LoadSources(spec, pool, pages, cold, self._loop, self._tally, self._make_room_for, self._frees)
        self._loadings: weakref.WeakSet[Loading] = weakref.WeakSet()  # to cancel at `close`
        self._deleted: dict[str, float] = {}  # agents, and when they were deleted, the earliest first
        # the time.monotonic() of the next renewal of lifetimes on the page server: see `_put_off_renewal`
        self._renewals: OrderedDict[str | tuple[str, int], float] = OrderedDict()
        self._versions: weakref.WeakValueDictionary[str, _ContextVersion] = weakref.WeakValueDictionary()  # by agent

    def load(self, agent_id: str, tokens: Sequence[int] | None = None) -> Loaded | None:
        """Load the longest stored prefix of `tokens`, or the agent's own context without `tokens`, and wait for it.

        The caller frees its blocks, under the agent's name. Return None if no tier has a usable context. Raises
        BlockError for an invalid agent id, UnknownTokenError for invalid tokens.
        """
        loaded = self.begin_load(agent_id, tokens).result()
        return loaded if loaded.blocks else None

    def begin_load(
        self,
        agent_id: str,
        tokens: Sequence[int] | None = None,
        *,
        within: float | None = None,
        named: bool = True,
        lifetimes: Lifetimes | None = None,
        whole: bool = False,
    ) -> Loading:
        """Begin a load, as `load` does, and return without waiting. It takes at most `within` seconds (default:
        `restore_within`). If that is 0 or less, only memory is searched.

        If the agent is not `named`, its id stands for one prompt: it has no context of its own. The lifetimes of the
        found blocks begin anew; they count for the tenant of `lifetimes`. With `whole`, also tokens that are computed
        faster than fetched are loaded.
        """
        lifetimes = Lifetimes(()) if lifetimes is None else lifetimes
        check_agent_id(agent_id)
        tokens = None if tokens is None else token_ids(tokens)
        within = self.restore_within if within is None else within
        with self._lock:
            memory = self._find_in_memory(agent_id, tokens, lifetimes)
            own = self._hot.look(agent_id)
            # a file has no more than memory, but another engine may have continued the last block of an agent
            file = named and not (own and (own.whole if tokens is None else not self._missing(tokens, memory.reach)))
            least = 1 if whole else least_tail(self.spec)
            enough = not file and (tokens is None or len(tokens) - 1 - memory.reach < least)
            version = self._versions.setdefault(agent_id, _ContextVersion()) if named else None
            if memory.blocks:
                self._tree.renew(memory.blocks)
                self._renew_on_server(memory.blocks, memory.reach, lifetimes)
        within = within if (self._pages or (self._cold and file)) and not enough else 0.0
        loading = Loading(
            self._sources,
            LoadRequest(agent_id, tokens, named, whole, file),
            memory,
            partial(self._keep_loaded, version, lifetimes),
            within,
        )
        self._loadings.add(loading)
        return loading

    def save(self, context: AgentBlocks, lifetimes: Lifetimes | None = None, asked: float | None = None) -> None:
        """Keep a context as its agent's last one, and queue it for write-behind. The store takes references of its own.
        If `delete` has deleted the agent after `asked`, in time.perf_counter(), nothing is kept.

        It is kept for its `lifetimes`, as far as memory and the page server allow, which is reported.

        An empty context changes nothing. Raises IncompatibleBlocksError for blocks of
        another model, ValueError for blocks that were freed.
        """
        context.validate(self.spec)
        if not context.blocks:
            return
        with self._lock:
            if asked is not None and self._deleted.get(context.agent_id, asked) > asked:
                kept: KeptContext | None = KeptContext(0, 0, "the agent was deleted meanwhile")
            else:
                adopted = self._tree.adopt(context)
                self._tree.mark_stored(adopted)
                kept = self._keep_in_memory(adopted, lifetimes)
                self._replace(adopted, lifetimes)
        if lifetimes and kept:
            lifetimes.report(kept)

    def publish(
        self,
        context: AgentBlocks,
        claim: Claim | None = None,
        *,
        label: str | None = "",
        written: bool = True,
        lifetimes: Lifetimes | None = None,
    ) -> bool:
        """Share a context without a name, or the prompt of an agent whose answer is not complete. Return whether it is
        queued for the page server. Release `claim` when it is written. `label` is the text that people see for a
        context without a name. It is None for the prompt of a named agent, of which only the full blocks are written,
        because `save` writes the rest.

        A context without a name is written if `CacheConfig.keep` is "all", or if it is "worth" it: computing the blocks
        that are not stored yet takes WORTH_SECONDS, or another prompt has reused it. If the request has `lifetimes`, it
        is always written, and kept as by `save`. If it may not be `written`, it stays in memory only.

        The store takes references of its own. Raises the errors of `save`.
        """
        context.validate(self.spec)
        with self._lock:
            adopted = self._tree.adopt(context)
            kept = self._keep_in_memory(adopted, lifetimes, written=written)
            stays = not written
            has_lifetimes = bool(lifetimes and lifetimes.requested)
            written = written and (label is None or has_lifetimes or self._is_worth_writing(adopted))
            self._tree.withhold(adopted, withheld=stays)
            if written:
                self._tree.mark_stored(adopted)
            elif label and not stays:
                self._tree.label(adopted, label)
        if lifetimes and kept:
            lifetimes.report(kept)
        if claim:
            claim.published()
        if label is not None and self._pages and not written:
            self._tally.count("unnamed_left")
        if written:
            on_end = claim.release if claim else None
            publication = self._publication(adopted, label, on_end, lifetimes, answering=claim is not None)
            return self._flusher.publish(publication)
        self._pool.free(adopted.block_ids, adopted.agent_id)
        if claim:
            claim.release()
        return False

    def answered(self, tier: Tier, reused: int, computed: int) -> None:
        """Count an answer: `tier` supplied `reused` tokens of its prompt, and `computed` tokens were computed."""
        self._tally.answered(tier, reused, computed)

    def prefilled(self, tokens: int, seconds: float, ago: float = 0.0) -> None:
        """Report the time of a prefill that ended `ago` seconds ago, for the choice between fetching and computing."""
        if self._pages:
            self._pages.rates.prefilled(tokens, seconds, ago)

    def publish_statistics(self) -> None:
        """Start to publish statistics on the page server every few seconds."""
        if self._pages:
            statistics = partial(figures, self.spec.model_id, self._pool, self._tally, self._pages.rates)
            self._pages.do_in_background(lambda connection: publish_statistics(connection, statistics))

    def delete(self, agent_id: str) -> bool:
        """Delete an agent from every tier. Return whether any tier had it. Blocks that others share stay.

        This waits for the write in progress. Raises OSError if its file cannot be deleted, and StoreUnavailableError if
        the page server does not answer: then the agent is deleted from the other tiers, and may still be on the server.
        """
        check_agent_id(agent_id)
        on_server: bool | None = False
        on_file = False
        with self._flusher.paused():
            try:
                on_server = self._pages.delete(agent_id) if self._pages else False
                on_file = bool(self._cold and self._cold.delete(agent_id))
            finally:  # memory last, because a load could restore the context from a tier that still has it
                with self._lock:
                    entry = self._hot.look(agent_id)
                    self._drop(agent_id)
                    self._deleted.pop(agent_id, None)
                    self._deleted[agent_id] = time.perf_counter()
                    if len(self._deleted) > MOST_DELETED:
                        del self._deleted[next(iter(self._deleted))]
                    if entry:
                        self._tree.forget(entry.context, [other.context for other in self._hot])
        if on_server is None:
            raise StoreUnavailableError
        return bool(entry) or on_server or on_file

    def names_of(self, context: AgentBlocks) -> ContextNames:
        """Return the names with which `forget` finds a context."""
        return names_of(context.agent_id, context.tokens, self.spec)

    def ends_in(self, names: ContextNames) -> list[list[str]]:
        """Return for each block of a context the names that the last blocks of contexts have which end in it, from its
        first token to its last; none for a block that neither memory nor the page server has.
        """
        with self._lock:
            found = self._tree.tokens_of(names.blocks)
        if self._pages and None in found:
            stored = self._pages.tokens_of_blocks(names)
            found = [one or other for one, other in zip(found, stored, strict=True)]
        return [beginnings(self.spec.fingerprint, *one) if one else [] for one in found]

    def forget(self, names: ContextNames, kept: int = 0) -> int:
        """Delete a context without a name from memory and from the page server, except its first `kept` blocks and
        blocks that other contexts continue or an agent has. Return the number of its first tokens that stay. This waits
        for the write in progress. If the page server does not answer, its blocks stay there until they are evicted.
        """
        with self._flusher.paused():
            if not kept:
                self._flusher.withdraw(names.blocks)
            with self._lock:
                left = self._tree.forget_blocks(names.blocks, kept)
            if self._pages:
                left = max(left, self._pages.forget(names, kept))
        return left * self.spec.block_tokens

    def why_removed(self, agent_id: str, tokens: Sequence[int]) -> tuple[str, int] | None:
        """Return why the page server does not have a context any more, as `PageTier.why_removed`; None without a page
        server.
        """
        return self._pages.why_removed(agent_id, tokens) if self._pages else None

    def fork(self, agent_id: str, new_id: str) -> bool:
        """Give `new_id` the context of `agent_id` in place of its own. Return whether there was one.

        Blocks are shared, not copied. Raises BlockError for an agent of another tenant, and StoreUnavailableError if
        only the page server could have a context, and does not answer.
        """
        check_agent_id(agent_id)
        if root_of(agent_id) != root_of(check_agent_id(new_id)):
            raise BlockError(f"agents of different tenants share nothing: {agent_id!r}, {new_id!r}")
        with self._lock:
            entry = self._hot.look(agent_id)
            if entry and entry.whole:
                self._pool.share(entry.context.block_ids, new_id)
                self._replace(replace(entry.context, agent_id=new_id))
                return True
        with self._flusher.paused():
            forked = self._pages.fork(agent_id, new_id) if self._pages else False
            if forked:
                try:
                    if self._cold:
                        self._cold.delete(new_id)  # an older context
                finally:  # contexts in memory are older, too, and so are contexts that a load has restored meanwhile
                    with self._lock:
                        self._drop(new_id)
                return True
        found = self._cold.load(agent_id) if self._cold else None
        if not found and forked is None:
            raise StoreUnavailableError
        if not found:
            return False
        self._pool.share(found.block_ids, new_id)
        self._pool.free(found.block_ids, agent_id)
        with self._lock:
            self._replace(replace(found, agent_id=new_id))
        return True

    def pin(self, agent_id: str) -> bool:
        """Keep the agent's context in memory until `unpin`. Return whether it was in memory."""
        return self._pin(agent_id, True)

    def unpin(self, agent_id: str) -> bool:
        """Allow the agent's context to be evicted again. Return whether it was in memory."""
        return self._pin(agent_id, False)

    def pinned(self) -> set[str]:
        """Return the agents whose contexts `pin` keeps in memory."""
        with self._lock:
            return {entry.context.agent_id for entry in self._hot if entry.pinned}

    def demote(self, agent_id: str) -> bool | None:
        """Save an agent's context to the tiers below memory, and free its memory. Return whether this was done: not for
        a pinned context, nor if no tier has the context; None if it is not in memory.
        """
        self.flush_dirty(check_agent_id(agent_id))
        with self._lock:
            entry = self._hot.look(agent_id)
            if not entry:
                return None
            if not self.saves or entry.unwritten_tiers or entry.pinned:
                return False
            self._drop(agent_id)
            self._tree.forget(entry.context, [other.context for other in self._hot])
        return True

    def retain(self, agent_id: str, lifetimes: Lifetimes) -> bool:
        """Give the agent's context in memory `lifetimes`, for the first tokens that they name. Return whether there is
        one. They report the kept part.
        """
        with self._lock:
            entry = self._hot.use(check_agent_id(agent_id))
            if entry and entry.whole:
                self.save(entry.context, lifetimes)
        return bool(entry and entry.whole)

    # -- contexts that end with a block -----------------------------------------------------------------------------

    def block_name(self, context: AgentBlocks) -> str | None:
        """Return the name of the last full block of a context; None if it has none."""
        full = len(context) // self.spec.block_tokens
        with self._lock:
            return self._tree.names(context.agent_id, context.tokens)[full - 1] if full else None

    def agents_of_blocks(self, names: Sequence[str]) -> list[str | None]:
        """Return for each block the agent of a context that has or had it; None for a block that this engine does not
        know, or not any more.
        """
        with self._lock:
            return [self._tree.agent_of(name) for name in names]

    def tokens_to(self, name: str) -> tuple[int, ...]:
        """Return the tokens up to the end of a full block; none if they are not known any more."""
        with self._lock:
            seen = self._tree.seen(name)
        return seen[1] if seen else ()

    def last_blocks(self, names: Sequence[str]) -> list[str]:
        """Return the blocks of `names` that no other one of them continues."""
        with self._lock:
            return self._tree.ends(names)

    def retain_blocks(self, context: AgentBlocks, lifetimes: Lifetimes) -> None:
        """Keep the full blocks of a context, or the only one if it is not full, for `lifetimes`, in memory and on the
        page server. They report the kept part.
        """
        with self._lock:
            written = not self._tree.is_withheld(context)
            label = None if self.block_name(context) else self._tree.label_of(context)
            self.publish(context, label=label, written=written, lifetimes=lifetimes)

    def save_blocks(self, *contexts: AgentBlocks) -> bool:
        """Save the full blocks of contexts, or the only one if it is not full, to the page server now. Return whether
        they are saved.
        """
        for context in contexts:  # one after another, because few bytes may wait
            with self._lock:
                if self._tree.is_withheld(context) or len(context) < least_tail(self.spec):
                    return False
                is_queued = self.publish(context, label=None) if self.block_name(context) else self._write(context)
                if not is_queued:
                    return False
            self.flush_dirty(context.agent_id)
            if self._pages and self._pages.save_failure:
                return False
        return True

    def pin_blocks(self, context: AgentBlocks, tenant: str, tenants: int) -> bool:
        """Keep the full blocks of a context in memory until `unpin_block` of the last one. They count for `tenant`, one
        of `tenants` with equal shares. Return False if its share, or half of the tree's memory, is used up.
        """
        with self._lock:
            adopted = self._tree.adopt(context)
            try:
                return self._tree.pin(adopted, tenant, tenants)
            finally:
                self._pool.free(adopted.block_ids, adopted.agent_id)

    def unpin_block(self, name: str) -> bool:
        """Allow a pinned block to be evicted from memory. Return False if it was not pinned."""
        with self._lock:
            return self._tree.unpin(name)

    def demote_blocks(self, names: Sequence[str]) -> bool | None:
        """Save the contexts up to the ends of blocks to the page server, and free the memory of the blocks that no
        other context continues. Return whether that of each last block was freed: not if it is pinned or continued in
        memory, if an agent's context in memory has it, or if it cannot be saved; None if none is in memory.
        """
        with self._lock:
            found = [(name, self._tree.context_of(name)) for name in self._tree.ends(names)]
            contexts = [context for _, context in found if context]
            for context in contexts:
                self._pool.share(context.block_ids, context.agent_id)
        try:
            saved = bool(contexts) and self.save_blocks(*contexts)
        finally:
            for context in contexts:
                self._pool.free(context.block_ids, context.agent_id)
        with self._lock:
            freed = [self._tree.release(name) for name, context in found if saved and context]
        return (saved and all(freed)) if contexts else None

    def release(self, context: AgentBlocks) -> bool:
        """Free the memory of a context's last block, and of the blocks before it that no other context continues.
        Return False if the last block is pinned, continued in memory, or an agent's.
        """
        with self._lock:
            return self._tree.release(self._tree.names(context.agent_id, context.tokens)[-1])

    def evict_lru(self, n: int = 1) -> int:
        """Evict the `n` least recently used agents from memory, and return their number. A dirty one stays until it is
        written."""
        with self._lock:
            evicted = sum(self._hot.evict(self._flusher.failing) for _ in range(n))
            self._flusher.wake()
        return evicted

    def make_room(self, blocks: int, nbytes: int = 0, *, pinned: bool = False) -> bool:
        """Evict from memory until the pool has `blocks` blocks and `nbytes` bytes free. Return whether it has them now.

        Dirty contexts are freed once they are written: call this again then. Contexts that no tier can take are dropped
        after the others, and are lost. With `pinned`, contexts are unpinned if no memory becomes free.
        """
        with self._lock:
            while not self._has_space(blocks, nbytes):
                failing = self._flusher.failing
                bytes_being_freed = self._hot.bytes_being_freed(failing)
                if self._has_space(blocks - len(bytes_being_freed), nbytes - sum(bytes_being_freed.values())):
                    break
                if self._flusher.abandon_prompt() or self._evict(failing) or self._hot.abandon(failing):
                    continue
                if not pinned or self._frees() or not (self._hot.unpin_oldest() or self._tree.unpin_oldest()):
                    break
            self._flusher.wake()
            return self._has_space(blocks, nbytes)

    def flush_dirty(self, agent_id: str | None = None) -> None:
        """Write all dirty contexts, or one agent's, before returning. A context that cannot be written stays dirty."""
        self._flusher.flush(agent_id)

    @property
    def saves(self) -> bool:
        """Whether there is a tier below memory."""
        return bool(self._flusher.tiers)

    @property
    def outage(self) -> Outage | None:
        """The outage of the page server that lasts now; None if it answers, or if there is no page server."""
        return self._pages.outage if self._pages else None

    @property
    def connected(self) -> bool:
        """Whether the page server, or each of several, has ever answered; True if there is none."""
        return self._pages is None or self._pages.connected

    @property
    def save_failures(self) -> dict[str, str]:
        """The reason for which the last save failed, or that of another context, by tier: "page" or "cold"."""
        tiers = {"page": self._pages, "cold": self._cold}
        found = {name: tier.save_failure for name, tier in tiers.items() if tier and tier.save_failure}
        with self._lock:
            failure = self._hot.failure
        return {"page": failure, **found} if failure else found

    def evict_all_to_disk(self) -> int:
        """Write all dirty contexts, also to files. Then drop all contexts from memory, except pinned contexts and dirty
        ones. Return the number of dropped contexts of agents.

        The system gets the freed memory back.
        """
        self._flusher.flush()
        with self._lock:
            before = len(self._hot)
            self._hot.drop_clean()
            evicted = before - len(self._hot)
            self._tree.clear()
        trim_malloc()
        return evicted

    def agents(self) -> list[AgentInfo]:
        """Return all agents, in any tier. Slow, because it looks up every block of each agent on the page server.

        An agent that only the page server has is left out if it does not answer.
        """
        on_server = set(self._pages.agents()) if self._pages else set()
        on_file = set(self._cold.agents()) if self._cold else set()
        with self._lock:
            hot = {entry.context.agent_id: entry for entry in self._hot}
        is_whole, found = self._completeness(), list[AgentInfo]()
        for agent_id in sorted(on_server | on_file | hot.keys()):
            with suppress(StoreUnavailableError):
                places = {"on_server": agent_id in on_server, "on_file": agent_id in on_file}
                found.append(self._info(agent_id, hot.get(agent_id), is_whole, **places))
        return found

    def agent(self, agent_id: str) -> AgentInfo | None:
        """Return one agent; None if no tier has it.

        Raises StoreUnavailableError if neither memory nor a file has it, and the page server does not answer.
        """
        check_agent_id(agent_id)
        on_server = self._pages.has(agent_id) if self._pages else False
        on_file = bool(self._cold and self._cold.has(agent_id))
        with self._lock:
            entry = self._hot.look(agent_id)
        if not (entry or on_server or on_file):
            if on_server is None:
                raise StoreUnavailableError
            return None
        return self._info(agent_id, entry, self._completeness(), on_server=bool(on_server), on_file=on_file)

    def metrics(self) -> StoreMetrics:
        """Return the counters, and the use of memory."""
        with self._lock:
            dirty = [entry for entry in self._hot if entry.unwritten_tiers]
            return self._tally.snapshot(
                self._pages,
                self._cold,
                evictions=self._hot.evictions,
                lost=self._hot.lost + self._flusher.lost,
                hot_agents=len(self._hot),
                hot_bytes=self._hot.nbytes,
                dirty_agents=len(dirty),
                dirty_bytes=sum(sum(entry.sizes.values()) for entry in dirty) + self._flusher.waiting,
                prefix_blocks=len(self._tree),
                prefix_bytes=self._tree.nbytes,
                kept_bytes=self._tree.kept_bytes,
                prefix_hits=self._tree.hits,
            )

    def close(self) -> int:
        """Cancel loads, write all contexts that no tier has, free memory and close the tiers.

        Log and return the number of contexts that no tier could take. Without a tier below memory, and for a store that
        is closed already, it is 0.
        """
        if self._closed:
            return 0
        self._closed = True
        for loading in list(self._loadings):
            loading.cancel()
        self.claims.close()
        self._find_lost()
        self._flusher.close()
        unnamed = self._flusher.end_prompts()
        with self._lock:
            unsaved = sum(entry.whole and not entry.kept for entry in self._hot) if self._flusher.tiers else 0
            unsaved += unnamed
            failures = self.save_failures
            self._hot.clear()
            self._tree.clear()
        if self._pages:
            self._pages.close()
        self._loop.close()
        if unsaved:
            reasons = ", ".join(f"{tier}: {reason}" for tier, reason in failures.items())
            log.error("%s could not be saved (%s)", plural(unsaved, "context"), reasons)
        return unsaved

    def _find_lost(self) -> None:
        """Mark saved contexts that the page server has lost since, so that `close` writes them again. Not those whose
        last use is older than the mark of a deletion can be, because their agents may have been deleted. One of several
        servers that does not answer has lost nothing.
        """
        earliest = time.monotonic() - DELETION_SECONDS
        with self._lock:
            saved = [entry for entry in self._hot if entry.whole and entry.kept and entry.used > earliest]
        is_whole = self._completeness(silent=1)
        for entry in saved:
            agent_id = entry.context.agent_id
            if not (self._cold and self._cold.has(agent_id)) and is_whole(agent_id) is False:
                entry.kept = False

    def _completeness(self, *, silent: int = 0) -> Callable[[str], bool | None]:
        """Return `PageTier.is_whole` as a function of the agent; it is True without a page server. After None, the
        server is not asked again while its outage lasts, because each agent would cost a deadline.
        """
        answers = True

        def is_whole(agent_id: str) -> bool | None:
            nonlocal answers
            if not (self._pages and answers):
                return None if self._pages else True
            found = self._pages.is_whole(agent_id, silent=silent)
            answers = found is not None or self._pages.outage is None
            return found

        return is_whole

    def _info(
        self,
        agent_id: str,
        entry: CacheEntry | None,
        is_whole: Callable[[str], bool | None],
        *,
        on_server: bool,
        on_file: bool,
    ) -> AgentInfo:
        """Describe an agent's context, of which `entry` is the part in memory. `on_server` and `on_file` are whether
        the page server and a file have one. Raises StoreUnavailableError if only the page server has one, and does not
        answer.
        """
        below = (on_server or on_file) and (entry is None or entry.kept)
        whole = is_whole(agent_id) if below and not on_file else True
        if whole is None and entry is None:
            raise StoreUnavailableError
        tokens = len(entry.context) if entry and entry.whole else None
        if tokens is None and self._pages and on_server and whole is not None and not (on_file and self._pages.outage):
            tokens = self._pages.tokens_of(agent_id)
        if tokens is None and self._cold:
            tokens = self._cold.reach(agent_id)
        is_there = bool(entry or on_server or tokens)  # a file may be damaged, or be of another program
        saved = below and is_there and (whole or (whole is None and tokens is not None))
        places = ("hot", entry), ("page", saved and on_server), ("cold", saved and on_file)
        return AgentInfo(
            agent_id,
            tokens or 0,
            tuple(tier for tier, has in places if has),
            (tokens or 0) * self.spec.token_nbytes,
            saved,
            bool(entry and entry.pinned),
        )

    def _find_in_memory(self, agent_id: str, tokens: Sequence[int] | None, lifetimes: Lifetimes) -> Found:
        """Return the longest prefix of `tokens` in memory; without `tokens`, the agent's own context if it is
        complete.
        """
        entry = self._hot.use(agent_id)
        memory = Found()
        if entry and (entry.whole or tokens is not None):
            blocks, reach = beginning(self.spec, entry.context, tokens)
            if blocks:
                self._pool.share(blocks.block_ids, agent_id)
                memory = Found(blocks, "hot", reach)
        if tokens is None or memory.reach == len(tokens) - 1:
            return memory
        shared = self._tree.find(agent_id, tokens)
        reach = shared.reusable_for(self.spec, tokens) if shared else 0
        better = reach > memory.reach
        if better and shared and reach - self._tree.stored_reach(agent_id, tokens) >= least_tail(self.spec):
            self._write_reused(shared, lifetimes)
        if worse := memory.blocks if better else shared:
            self._pool.free(worse.block_ids, agent_id)
        return Found(shared, "prefix", reach) if better else memory

    def _is_worth_writing(self, context: AgentBlocks) -> bool:
        """Return whether a context without a name is written to the page server now: by `CacheConfig.keep` "all", or
        for "worth" if computing the blocks that are not stored yet takes at least WORTH_SECONDS.
        """
        if self._keep != "worth":
            return self._keep == "all"
        rate = self._pages.rates.prefill_rate if self._pages else None
        return rate is None or self._tree.unstored(context) / rate >= WORTH_SECONDS

    def _write_reused(self, context: AgentBlocks, lifetimes: Lifetimes) -> None:
        """Write a context of the tree, because a second prompt has reused a part that is in no tier below."""
        if self._keep == "worth" and self._pages:
            self._write(context, lifetimes.of_context(self._tree.lifetimes(context)))

    def _write(self, context: AgentBlocks, lifetimes: Lifetimes | None = None) -> bool:
        """Queue a context of the tree without a name for the page server. Return whether it is queued."""
        self._tree.mark_stored(context)
        self._pool.share(context.block_ids, context.agent_id)
        return self._flusher.publish(self._publication(context, self._tree.label_of(context), lifetimes=lifetimes))

    def _keep_in_memory(
        self, context: AgentBlocks, lifetimes: Lifetimes | None, *, written: bool = True
    ) -> KeptContext | None:
        """Keep a context in the tree, also for the lifetimes that its blocks have. Return the part that is kept if the
        page server will not report it, because it does not answer, or because the context is not `written`.
        """
        if lifetimes is not None:
            lifetimes.inherit(self._tree.lifetimes(context))
        if not lifetimes:
            return None
        kept = self._tree.keep(context, lifetimes)
        if not self._pages:
            return kept
        why = NOT_WRITTEN.why if self.outage else "" if written else "it may not be stored"
        if not why:
            return None
        whole = f"only this engine keeps it: {why}" if kept.tokens else why
        return replace(kept, why=f"{whole}; {kept.why}" if kept.why else whole)

    def _publication(
        self,
        context: AgentBlocks,
        label: str | None,
        on_end: Callable[[], object] | None = None,
        lifetimes: Lifetimes | None = None,
        *,
        answering: bool = False,
    ) -> Publication:
        chain = self.spec.chain(context.agent_id, context.tokens)
        names = self._tree.names(context.agent_id, context.tokens)
        return Publication(context, label, (chain.root, chain.client), names, on_end, lifetimes, answering)

    def _missing(self, tokens: Sequence[int], reach: int) -> bool:
        """Return whether the prompt has a full block, without its last token, beyond the first `reach` tokens."""
        size = self.spec.block_tokens
        return reach // size < (len(tokens) - 1) // size

    def _keep_loaded(
        self, version: _ContextVersion | None, lifetimes: Lifetimes, loaded: Loaded, tokens: Sequence[int] | None
    ) -> None:
        """Keep a context from a lower tier in memory: in the tree for all agents, and the agent's own as its context.

        If the `version` has ended since the load began, the loaded context is outdated, and is not kept. For an agent
        without a name `version` is None, and the agent gets no context of its own.
        """
        blocks = loaded.blocks
        self._tally.loaded(loaded.tier, loaded.nbytes, loaded.seconds, loaded.why)
        if blocks is None or loaded.tier not in ("page", "cold"):
            return
        full = len(blocks) % self.spec.block_tokens == 0
        of_prompt = full and tokens and blocks.tokens == tuple(tokens[: len(blocks)])
        is_shared = loaded.tier == "page" and (of_prompt or not loaded.own)
        with self._lock:
            if self._versions.get(blocks.agent_id) is not version:
                return
            adopted = self._tree.adopt(blocks)
            self._tree.mark_stored(adopted)
            if loaded.tier == "page":
                self._renew_on_server(adopted, loaded.reach, lifetimes, loaded=True)
            entry = self._hot.look(blocks.agent_id)
            if version and not is_shared and not (entry and entry.unwritten_tiers):
                whole = tokens is None and (loaded.tier == "cold" or loaded.why is None)
                self._hot.put(adopted, (), whole=whole, kept=True)
                self._hot.trim(self._flusher.failing)
            else:
                self._pool.free(adopted.block_ids, blocks.agent_id)

    def _renew_on_server(self, context: AgentBlocks, reach: int, lifetimes: Lifetimes, *, loaded: bool = False) -> None:
        """Start to begin the lifetimes anew that a context has on the page server, also from other engines. The tree
        keeps it, too, for the tenant of `lifetimes`. `reach` is the number of its tokens that the prompt has reused.

        Unless the context was `loaded` from the server now, this is done once in a RENEWAL_PART of the lifetime, and of
        the shortest lifetime if there is none.
        """
        if not self._pages:
            return
        names = self._tree.names(context.agent_id, context.tokens)
        first, hit, now = names[0], (names[-1], reach), time.monotonic()
        if not loaded and max(self._renewals.get(first, 0.0), self._renewals.get(hit, 0.0)) > now:
            return
        self._put_off_renewal(hit, SHORTEST_LIFETIME)

        def keep(kept: KeptContext) -> None:
            seconds = (kept.until - unix_ms()) / 1000
            with self._lock:
                if kept.tokens:
                    self._tree.keep(context, lifetimes.of_context([(min(kept.tokens, reach), round(seconds))]))
                    self._put_off_renewal(hit, seconds)
                else:
                    self._put_off_renewal(first, SHORTEST_LIFETIME)

        self._pages.keep_anew(context, keep)

    def _put_off_renewal(self, of: str | tuple[str, int], seconds: float) -> None:
        """Renew the lifetimes of contexts with this first block, or of a context with this last block and this number
        of reused tokens, after a part of these `seconds`.
        """
        self._renewals[of] = time.monotonic() + seconds * RENEWAL_PART
        self._renewals.move_to_end(of)
        if len(self._renewals) > MOST_RENEWALS:
            self._renewals.popitem(last=False)

    def _replace(self, context: AgentBlocks, lifetimes: Lifetimes | None = None) -> None:
        """Replace the agent's last context, mark the new one as dirty, and take over its references."""
        self._versions.pop(context.agent_id, None)
        self._hot.put(context, self._flusher.tiers, whole=True, lifetimes=lifetimes)
        self._hot.trim(self._flusher.failing)
        self._flusher.wake()

    def _drop(self, agent_id: str) -> None:
        """Drop an agent's context from memory, because it was replaced or deleted."""
        self._versions.pop(agent_id, None)
        self._hot.drop(agent_id)

    def _pin(self, agent_id: str, pinned: bool) -> bool:
        with self._lock:
            entry = self._hot.use(check_agent_id(agent_id))
            if entry:
                entry.pinned = pinned
                self._hot.trim(self._flusher.failing)
        return entry is not None

    def _evict(self, failing: Collection[LowerTier]) -> bool:
        """Evict an agent's context or a leaf of the tree, the least recently used of the two. Return whether there was
        one."""
        agents, tree = self._hot.idle, self._tree.idle
        if tree is None or (agents is not None and agents > tree):
            return self._hot.evict(failing) or self._tree.evict() or self._tree.evict(kept=True)
        return self._tree.evict() or self._hot.evict(failing) or self._tree.evict(kept=True)

    def _make_room_for(self, tokens: int) -> bool:
        return self.make_room(self.spec.blocks_for(max(tokens, 0)), max(tokens, 0) * self.spec.token_nbytes)

    def _frees(self) -> bool:
        """Return whether memory becomes free soon: a context is being written, or leaves memory when it is written."""
        with self._lock:
            return self._flusher.is_writing or bool(self._hot.bytes_being_freed(self._flusher.failing))

    def _has_space(self, blocks: int, nbytes: int) -> bool:
        return self._pool.available_blocks >= blocks and self._pool.available_bytes >= nbytes
