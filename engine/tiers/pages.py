"""The page tier: contexts on a page server, shared by all engines that run the same model.

The keys::

    kv:{chain hash}:{layer}:{head}:0:{kv_type}   the pages of a block
    kv:{chain hash}:{layer}:{head}:1:{kv_type}   the pages of the state after it, if layers carry one
    seal:{chain hash}, state:{chain hash}        the digest of the block or the state, written after it
    manifest:{agent}:{fingerprint}               token ids and chain hashes, for one model, written last
    refs:{chain hash}                            the number of manifests that name the block
    refs:deleted:{agent}                         the mark of a deleted agent, for a day
    label:{chain hash}                           the text that `kvpage ls` shows for a context without a name
    tails:{chain hash}                           the blocks with which contexts continue after this one
    claim:{chain hash}                           the engine that computes the block at the moment

A chain hash names a block by its tokens and all tokens before them. So agents whose contexts have a common prefix share
its blocks, and a fork only writes a manifest. The hashes of different tenants differ, so they share nothing.

The server's checksum protects a page from its arrival on. The digest protects a whole block under its name, from the
tensors of the engine that computed it to the tensors of the engine that uses it. So changed, swapped and foreign pages
are detected, wherever the fault occurred. A mismatch is a miss, with its reason.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

from kvpage_server.client import Unsupported
from kvpage_server.client.cluster.plan import GONE
from kvpage_server.client.commands import Coding
from kvpage_server.client.raw_commands import Kept, RawCommand, fields, integer, ok_or_not, text, up_to
from kvpage_server.client.raw_commands import kept as kept_of
from kvpage_server.page import SEGMENT, tag_of
from kvpage_server.tracing import current, span

from ..chains import ContextNames, is_unnamed, root_of
from ..memory.blocks import AgentBlocks, BlockError, KVBlock, block_names, check_agent_id
from ..memory.lifetimes import KeptContext, Lifetimes
from ..pool import BlockPool
from ..spec import ModelCacheSpec
from .server import block_writer, reference_counts, reference_marks, tails
from .server.block_writer import Saved, Write
from .server.connection import OUTAGES, Outage, ServerConnection, refuses
from .server.fetch import Fetch
from .server.lookup import MOST_BRANCHES, FetchRequest, Remote
from .server.manifest import (
    DELETION_SECONDS,
    UNKNOWN,
    BlockLayout,
    BlockPlace,
    ContextManifest,
    Miss,
    deletion_key,
    manifest_key,
)
from .server.reference_counts import ManifestMaker, label_key
from .server.tails import Parent, least_tail

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Coroutine[Any, Any, T]
DEADLINE = 5.0  # default time limit of a request, in seconds
RESTORE_SECONDS = 10.0  # default time limit of a load
MOST_UNSAVED = 256  # prompts of named agents that are remembered until their answers are saved
MOST_UNRECORDED = 16_384  # written places of earlier saves that are remembered until a record names them
NOT_STORED = "the page server has not stored the next block, which may be evicted or too short"


class References(Protocol):
    """Operations on manifests that keep the references of blocks consistent, on one server or on several."""

    def save(
        self,
        connection: ServerConnection,
        agent_id: str,
        fingerprint: int,
        manifest: ManifestMaker,
        write: Write,
        deletion: bytes | None,
        /,
    ) -> Work[Saved | None]:
        """Write blocks, then the agent's manifest of them, unless the mark of its deletion is not `deletion` any more:
        then the blocks are deleted, and the result is None.
        """

    def copy(
        self, connection: ServerConnection, agent_id: str, new_id: str, fingerprint: int, /
    ) -> Work[Mapping[str, bytes | None] | None]:
        """Give an agent the context of another. Return its own manifest by key; None if the other has no context."""

    def delete(self, connection: ServerConnection, agent_id: str, /) -> Work[dict[str, bytes]]:
        """Delete an agent's contexts, of any model. Return their manifests by key."""


class UnsavedPrompt(NamedTuple):
    """The prompt of a named agent whose answer is not saved."""

    names: ContextNames
    written: set[str]  # the names of its blocks that only this prompt has, as far as this engine knows


class PageTier:
    """Store of contexts on a page server. Thread-safe. Its methods do not raise errors of the server.

    With a server that is slow, full, faulty or unavailable, a load finds less or nothing, and a save leaves the old
    state. The reason is counted: ``absent`` nothing is stored; ``evicted``, ``expired``, ``over quota`` nothing is
    stored, because the server has removed it for this reason; ``gap`` blocks are missing; ``shape``, ``checksum`` they
    are damaged; ``manifest`` it is unreadable, or of an earlier version; ``tails`` a record of blocks is unreadable;
    ``pool`` no blocks are free; ``recompute`` computing is faster than fetching; ``slow`` no reply in time; ``late``
    not everything within the limit of a load; ``down`` no connection; ``gone`` one of several servers does not answer;
    ``full`` the server has no memory left; ``garbled`` the reply is unreadable; ``refused`` the reply is an error;
    ``open`` the circuit breaker is open, so no request was sent; ``error`` an unexpected error of the load itself.

    With several servers, every name begins with a tag in braces, the same for four blocks of a prompt in a row. If one
    of the servers is unavailable, a save stores the blocks before the first one that belongs to it, for other prompts
    with this prefix, and leaves the agent's last manifest unchanged.
    """

    def __init__(
        self,
        url: str,
        spec: ModelCacheSpec,
        pool: BlockPool,
        *,
        deadline: float = DEADLINE,
        restore_within: float | None = None,
        code: Coding = "auto",
    ) -> None:
        """Create the tier for the server at `url`, which is as for PageClient. `deadline` is in seconds, for a request
        or for a chunk of blocks (8 MiB, or one block). `restore_within` limits a whole load, in seconds; by default 10,
        or twice the deadline if that is longer. The deadline is shortened to half of it if it is longer. `code` says
        whether blocks travel in the lossless code, as for PageClient.

        Raises ValueError for an invalid URL, and for a time that is not more than 0.
        """
        within = max(RESTORE_SECONDS, 2 * deadline) if restore_within is None else restore_within
        if not min(deadline, within) > 0:
            raise ValueError(f"a time must be more than 0 seconds, got {min(deadline, within)}")
        self.misses: Counter[str] = Counter()  # misses of loads, by reason
        self.unsaved: Counter[str] = Counter()  # failed writes, by reason
        self.unasked: Counter[str] = Counter()  # failures of all other requests, by reason
        self.loads: Counter[bool] = Counter()  # loads by the decision: True to fetch, False to compute
        self.save_failure: str | None = None  # the reason for which the last save failed; None if it succeeded
        self._spec = spec
        self._within = within
        self._connection = ServerConnection(url, spec.name, min(deadline, within / 2), code)
        self.breaker = self._connection.breaker
        self.rates = self._connection.rates  # for the choice between fetching and computing; the engine adds to them
        self.loop = self._connection.loop  # the event loop, which all tiers of the engine share
        self._layout = BlockLayout(spec, SEGMENT if self._connection.several else 0)
        self._references: References = reference_marks if self._connection.several else reference_counts
        self._remote = Remote(self._connection, spec, self._layout, pool)
        self._token = uuid.uuid4().hex  # the value of this engine's claims, by which it recognises them
        # The prompts of named agents whose answers are not saved, by agent and name of the last block. If an answer is
        # cancelled, its prompt is forgotten with the agent's context.
        self._unsaved: OrderedDict[tuple[str, str], UnsavedPrompt] = OrderedDict()
        # Places that a save has written, or tried to, and that no record names yet, the oldest first. A save can fail
        # after it has written blocks: the next one finds them on the server, and has to link and record them.
        self._unrecorded: dict[BlockPlace, None] = {}

    @property
    def outage(self) -> Outage | None:
        """The outage of the server, or of one of several, that lasts now; None if all answer."""
        return self._connection.outage

    @property
    def connected(self) -> bool:
        """Whether the server, or each of several, has ever answered."""
        return self._connection.connected

    def do_in_background(self, work: Callable[[ServerConnection], Coroutine[Any, Any, None]]) -> None:
        """Start the coroutine `work(connection)` on the event loop. It is cancelled when the tier is closed."""
        self._connection.begin(work(self._connection), lambda _: None)

    def close(self) -> None:
        """Cancel operations in progress, and close the connections."""
        self._connection.close()

    # -- loading ---------------------------------------------------------------------------------------------------

    def fetch(
        self,
        agent_id: str,
        tokens: Sequence[int] | None = None,
        *,
        held: Sequence[KVBlock] = (),
        within: float | None = None,
        beyond: int = 0,
        named: bool = True,
        whole: bool = False,
        frees: Callable[[], bool] = lambda: False,
    ) -> Fetch:
        """Begin a load; see `load`.

        `held` are the first full blocks of `tokens`, if they are in memory: they are shared instead of fetched. Nothing
        is fetched unless it has more than the first `beyond` tokens. `within` is the time limit in seconds, by default
        `restore_within`. An agent that is not `named` has no context of its own. With `whole`, also blocks that are
        computed faster are fetched. `frees` returns whether memory becomes free when a context is written.
        """
        check_agent_id(agent_id)
        within = self._within if within is None else within
        request = FetchRequest(agent_id, tokens, held, within, beyond, named, whole, frees)
        return Fetch(self._remote, request, self._count)

    def _count(self, fetch: Fetch) -> None:
        self.misses.update([*fetch.report.reasons, *(["error"] if fetch.failure else [])])
        if fetch.report.decision:
            self.loads[fetch.report.decision.fetch] += 1

    def load(
        self, agent_id: str, tokens: Sequence[int] | None = None, *, held: Sequence[KVBlock] = ()
    ) -> AgentBlocks | None:
        """Return the longest stored context that begins like `tokens`, or, without `tokens`, the agent's own context.
        It consists of the blocks received within `restore_within` seconds.

        Its last block may continue differently from `tokens`; the engine's submit compares them. Its blocks are
        allocated in the pool, and the caller frees them. Return None if nothing is usable.
        """
        return self.fetch(agent_id, tokens, held=held).result()

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, context: AgentBlocks, idle: float = 0.0) -> Saved | None:
        """Store a context as `save_async` does, and wait for it."""
        return self.loop.run(self.save_async(context, idle))

    def publish(self, context: AgentBlocks, *, label: str | None = "", answering: bool = False) -> Saved | None:
        """Store a context without a name as `publish_async` does, and wait for it."""
        return self.loop.run(self.publish_async(context, label=label, answering=answering))

    async def save_async(self, context: AgentBlocks, idle: float = 0.0) -> Saved | None:
        """Store a context: the missing blocks, the agent's manifest, and the records that name the blocks. Return None
        if it failed.

        `idle` is the number of seconds since the context was used. If any engine has deleted the agent since, nothing
        is stored. An empty context changes nothing. Raises IncompatibleBlocksError for blocks of another model.
        """
        used = time.monotonic() - idle
        context.validate(self._spec)
        if not context.blocks:
            return Saved(0, 0, 0)
        return await self._report_save(self._save(context, used))

    async def _deletion(self, agent_id: str, used: float) -> tuple[bytes | None, bool]:
        """Return the mark of an agent's deletion, None without one and UNKNOWN if that one of several servers does not
        answer, and whether it is later than `used`, in time.monotonic(), by the clock of the server. It is not if the
        server's clock was set back behind the time of the deletion.
        """
        key, idle = deletion_key(agent_id), time.monotonic() - used
        commands = [RawCommand(["PTTL", key], integer), RawCommand(["GET", key], text)]
        left, mark = await self._connection.ask(commands, gone=UNKNOWN)
        return mark, left not in (UNKNOWN, -1, -2) and 0 <= DELETION_SECONDS - left / 1000 < idle

    async def _save(self, context: AgentBlocks, used: float) -> Saved:
        """Write the blocks of an agent's context, its manifest, and the records that name the blocks, unless the agent
        was deleted after `used` or is deleted meanwhile. The records do not name the blocks of the agent's context
        before any more, except blocks that others use.
        """
        connection, spec, agent_id = self._connection, self._spec, context.agent_id
        before: bytes | None = None
        mark, deleted = await self._deletion(agent_id, used)  # at first: a later deletion changes the mark
        manifest, parts = await self.loop.on_block_thread(lambda: self._parts(context, context.stored_states))
        named = manifest  # as it is stored

        def made(stored: bytes | None) -> bytes:
            nonlocal before, named
            before, named = stored, manifest.with_earlier_states(stored, spec)
            return named.dump(spec, self._layout.together, stored)

        saved = None
        if not deleted:
            write = partial(self._write, parts)
            saved = await self._references.save(connection, agent_id, spec.fingerprint, made, write, mark)
        if saved is None:
            log.info("the context of %s is not written, because the agent was deleted after its last use", agent_id)
            await self._forget_unsaved(agent_id)
            return Saved(0, 0, 0)
        if not saved.whole:
            return saved

        async def record() -> None:
            await tails.record(connection, self._layout, spec, named, self._unrecorded)
            self._note_recorded(parts)
            await self._forget_unsaved(agent_id)
            await self._forget_records({manifest_key(agent_id, spec.fingerprint): before}, agent_id)

        await self._complete(saved, record())
        return saved  # its blocks and the manifest are stored

    async def publish_async(
        self, context: AgentBlocks, *, label: str | None = "", answering: bool = False
    ) -> Saved | None:
        """Store a context without a name, for all prompts with a common prefix. The agent's manifest is not changed.

        A last block with few tokens is not stored (see `least_tail`). `label` is the text that `kvpage ls` shows for
        the context. It is None for the context of a named agent: then only full blocks are stored. If the agent is
        `answering` this prompt, and does not save the answer, the next change of its context forgets the prompt.
        """
        context.validate(self._spec)
        size = self._spec.block_tokens
        full = len(context) // size * size
        if label is None or len(context) - full < least_tail(self._spec):
            context = replace(context, tokens=context.tokens[:full], blocks=context.blocks[: full // size])
        if not context.blocks:
            return Saved(0, 0, 0)
        states = () if label is None else context.stored_states
        manifest, parts = await self.loop.on_block_thread(lambda: self._parts(context, states))
        if label is None and answering:
            names = tails.names_of(context.agent_id, context.tokens, self._spec)
            unsaved = self._unsaved.setdefault((context.agent_id, names.blocks[-1]), UnsavedPrompt(names, set()))
            if len(self._unsaved) > MOST_UNSAVED:
                self._unsaved.popitem(last=False)
        saved = await self._report_save(self._publish(manifest, parts, label))
        if answering and label is None:
            unsaved.written.update(place.name for place in (saved.places if saved else ()))
        else:
            for one in self._unsaved.values():
                one.written.difference_update(manifest.names)
        return saved

    async def _publish(self, manifest: ContextManifest, parts: block_writer.Parts, label: str | None) -> Saved:
        """Write a context without a name: its blocks, the records that name them, and the label."""
        saved = await self._write(parts)
        if not saved.whole:
            return saved

        async def record() -> None:
            written = [place for place in parts if place in self._unrecorded and not place.of_state]
            entered = await tails.record(self._connection, self._layout, self._spec, manifest, self._unrecorded)
            if label:
                await self._connection.write({label_key(place.tagged): label for place in written})
            self._note_recorded(parts)
            if entered:
                await self._write(parts)  # another engine may have deleted a block before the record named it

        return await self._complete(saved, record())

    async def _complete(self, saved: Saved, work: Work[None]) -> Saved:
        """Complete a save with `work`. On several servers, return an incomplete `Saved` if it fails."""
        try:
            await work
        except OUTAGES as error:
            if not self._connection.several or refuses(error):
                raise
            return replace(saved, whole=False)
        return saved

    async def keep_async(self, context: AgentBlocks, lifetimes: Lifetimes) -> KeptContext:
        """Keep a stored context on the server for its lifetimes, and return the part that is kept."""
        manifest, parts = await self.loop.on_block_thread(lambda: self._parts(context, context.stored_states))
        failures: Counter[str] = Counter()
        kept = await self._attempt(self._keep(manifest, list(parts), lifetimes), failures)
        self.unasked.update(failures)
        return kept or KeptContext(0, 0, f"the page server has not kept it: {', '.join(failures)}")

    async def _keep(self, manifest: ContextManifest, places: list[BlockPlace], lifetimes: Lifetimes) -> KeptContext:
        keep = partial(self._connection.server.keep, tenant=lifetimes.tenant, tenants=lifetimes.tenants)
        reach, ends = 0, list[int]()  # the ends of the lifetimes of the request's tokens
        for seconds, run in _runs(lifetimes, sorted(places, key=lambda place: (place.start, place.end))):
            keys = [(key, place) for place in run for key in self._layout.keys(place)]
            try:
                kept = await keep([key for key, _ in keys], seconds)
            except Unsupported as error:
                return KeptContext(0, 0, str(error))
            if kept.keys < len(keys):
                start = keys[kept.keys][1].start
                if start >= lifetimes.tokens:
                    break
                ends += [kept.until] if kept.keys else []
                for covering in await self._covering(manifest, start, lifetimes.tokens):
                    again = await keep(covering, seconds)
                    if again.keys == len(covering):
                        return KeptContext(lifetimes.tokens, min([*ends, again.until]))
                why = NOT_STORED if kept.why == "absent" else kept.why
                return KeptContext(start, min(ends, default=0) if start else 0, why)
            reach = max(place.end for place in run)
            finding = self._finding(manifest, reach)
            found = [kept, *await self._keep_each(finding, seconds, lifetimes.tenant, lifetimes.tenants)]
            if run[0].start < lifetimes.tokens:
                if refused := next((one.why for one in found if one.why not in ("", "absent")), ""):
                    return KeptContext(run[0].start, min(ends, default=0), refused)
                ends += [one.until for one in found if one.keys]
            self._connection.progressed()
        return KeptContext(min(reach, lifetimes.tokens), min(ends, default=0))

    async def _keep_each(self, keys: Sequence[bytes], seconds: int, tenant: str = "", tenants: int = 1) -> list[Kept]:
        """Give the value of each of some keys a lifetime, or begin its own anew with 0 seconds, in one pipeline."""
        words = "KVPAGEKEEP", tenant, tenants, seconds
        asked = [RawCommand([*words, key], kept_of(1), key=len(words)) for key in keys]
        return await self._connection.ask(asked) if asked else []

    async def _covering(self, manifest: ContextManifest, start: int, end: int) -> list[list[bytes]]:
        """Return the keys of each longer block that has the tokens of a context between two positions, and the keys of
        the records that name it.
        """
        size, tokens = self._spec.block_tokens, manifest.tokens[start:end]
        if start % size or len(tokens) >= size:
            return []
        found = await tails.reusable(self._connection, self._spec, self._parent(manifest, start), tokens)
        least = len(tokens) - self._spec.has_state
        blocks = [places for count, places in found if count >= least]
        finding = self._finding(manifest, end)
        return [[*(key for place in places for key in self._layout.keys(place)), *finding] for places in blocks]

    def keep_anew(self, context: AgentBlocks, on_renewed: Callable[[KeptContext], object]) -> None:
        """Start to begin the lifetimes anew that the first blocks of a context have on the server. If it answers, call
        `on_renewed` with the part that is kept, on the loop's thread.
        """

        async def renew(_: ServerConnection) -> None:
            kept = await self._attempt(self._renew(context), self.unasked)
            if kept:
                on_renewed(kept)

        self.do_in_background(renew)

    async def _renew(self, context: AgentBlocks) -> KeptContext:
        keep, layout, agent_id = self._connection.server.keep, self._layout, context.agent_id
        manifest = ContextManifest.of(agent_id, context.tokens, self._spec, context.stored_states)
        blocks = manifest.places(self._spec, layout.together)
        keys = [(key, place) for place in blocks for key in layout.keys(place)]
        try:
            kept = await keep([key for key, _ in keys], 0)
        except Unsupported:
            return KeptContext(0, 0)
        reach, ends = len(context), [kept.until] if kept.keys else []
        others: list[BlockPlace] = []  # of the last block, if the server has another one with the same first tokens
        if kept.keys < len(keys):
            reach = keys[kept.keys][1].start
            rest = manifest.tokens[reach : reach + self._spec.block_tokens]
            if reach or kept.why == "absent":
                found = await tails.reusable(self._connection, self._spec, self._parent(manifest, reach), rest)
                for count, (block, *behind) in found[:MOST_BRANCHES]:
                    last = await keep(layout.keys(block), 0)
                    if not last.why:
                        reach, ends, others = reach + count, [*ends, last.until], behind
                        break
        if not reach or not ends:
            return KeptContext(0, 0)
        states = [*(place.state() for place in blocks), *manifest.inner_places(self._spec, layout.together)]
        places = {*others, *(place for place in states if place.end <= reach)}
        more = [key for place in places for key in layout.keys(place)]
        await self._keep_each([*more, *self._finding(manifest, reach)], 0)
        return KeptContext(reach, min(ends))

    def _finding(self, manifest: ContextManifest, end: int) -> list[bytes]:
        """Return the keys of strings by which the block of a context is found that ends at `end`: the agent's manifest,
        if there is one, and the records of the block before it.
        """
        start = (end - 1) // self._spec.block_tokens * self._spec.block_tokens
        parent = self._parent(manifest, start)
        names = [] if is_unnamed(manifest.agent_id) else [manifest_key(manifest.agent_id, self._spec.fingerprint)]
        return [key.encode() for key in (*names, *parent.records(manifest.tokens[start:end], self._spec))]

    def _parent(self, manifest: ContextManifest, start: int) -> Parent:
        """Return the blocks of a context before the one that begins at `start`."""
        chain = self._spec.chain(manifest.agent_id, manifest.tokens)
        return Parent(manifest.names[: start // self._spec.block_tokens], chain, self._layout.together)

    def _parts(self, context: AgentBlocks, states: Sequence[int]) -> tuple[ContextManifest, block_writer.Parts]:
        """Return the manifest of a context with states after the positions `states`, and the arrays of its places."""
        spec, together = self._spec, self._layout.together
        manifest = ContextManifest.of(context.agent_id, context.tokens, spec, states)
        places, inner = manifest.places(spec, together), manifest.inner_places(spec, together)
        return manifest, block_writer.parts_of(context, places, inner)

    async def _write(self, parts: block_writer.Parts) -> Saved:
        """Write the parts that the server lacks. Raises an outage if all are missing and no server takes any."""
        missing = await block_writer.missing(self._connection, self._layout, list(parts))
        while len(self._unrecorded) > MOST_UNRECORDED:
            del self._unrecorded[next(iter(self._unrecorded))]
        self._unrecorded |= dict.fromkeys(missing)
        written = await block_writer.write(self._connection, self._layout, parts, missing)
        present = sum(not place.of_state for place in parts) - sum(not place.of_state for place in missing)
        if len(written) < len(missing) == len(parts):
            await self._connection.check()
        elif any(place in self._unrecorded for place in parts):
            await block_writer.link(self._connection, self._layout, parts)
        blocks, nbytes = sum(not place.of_state for place in written), self._layout.nbytes(*written)
        return Saved(blocks, present, nbytes, len(written) == len(missing), tuple(written))

    def _note_recorded(self, places: Iterable[BlockPlace]) -> None:
        for place in places:
            self._unrecorded.pop(place, None)

    async def _report_save(self, work: Work[Saved]) -> Saved | None:
        failures: Counter[str] = Counter()
        with span("kvpage.save") as seen:
            saved = await self._attempt(work, failures)
            if saved and not saved.whole:
                failures[GONE] += 1
                seen.set(reason=GONE)
            if saved:
                seen.set(blocks=saved.blocks_written, bytes=saved.nbytes)
        self.unsaved.update(failures)
        why = next(iter(failures), None)
        self.save_failure = self.outage.reason if why == "open" and self.outage else why
        return saved

    def tokens_of_blocks(self, names: ContextNames) -> list[tuple[str, Sequence[int]] | None]:
        """Return for each block of a context the parent's hash in its name, and its tokens; None if the server has no
        record of it.
        """
        found = self._ask(tails.tokens_of(self._connection, self._spec, names, self._layout.together))
        return found or [None] * len(names.blocks)

    def forget(self, names: ContextNames, kept: int = 0) -> int:
        """Delete a context without a name, except its first `kept` blocks and blocks that other contexts continue or
        a manifest names. Return the number of its first blocks that stay, which is all of them if the server does not
        answer.
        """
        left = self._ask(tails.forget(self._connection, self._spec, names, self._layout.together, kept))
        return len(names.blocks) if left is None else left

    # -- agents ----------------------------------------------------------------------------------------------------

    def fork(self, agent_id: str, new_id: str) -> bool | None:
        """Give `new_id` the context of `agent_id` in place of its own. Return whether there was one; None if the server
        does not answer.

        Raises BlockError for agents of different tenants.
        """
        if root_of(check_agent_id(agent_id)) != root_of(check_agent_id(new_id)):
            raise BlockError(f"a fork belongs to its agent's tenant: {new_id!r} cannot be one of {agent_id!r}")
        return self._ask(self._fork(agent_id, new_id))

    async def _fork(self, agent_id: str, new_id: str) -> bool:
        replaced = await self._references.copy(self._connection, agent_id, new_id, self._spec.fingerprint)
        if replaced is None:
            return False
        await self._forget_unsaved(new_id)
        await self._forget_records(replaced, new_id)
        return True

    def delete(self, agent_id: str) -> bool | None:
        """Delete an agent's contexts, of any model, except blocks that others use. Return whether there were any; None
        if the server does not answer: then they may still be stored. This scans all keys of the server."""
        return self._ask(self._delete(check_agent_id(agent_id)))

    async def _delete(self, agent_id: str) -> bool:
        deleted = await self._references.delete(self._connection, agent_id)
        await self._forget_unsaved(agent_id)
        await self._forget_records(deleted, agent_id)
        return bool(deleted)

    async def _forget_records(self, manifests: Mapping[str, bytes | None], agent_id: str) -> None:
        """Remove the blocks of an agent's contexts from the records, except blocks that others use. `manifests` are its
        earlier ones, of any model, by key.
        """
        for key, raw in manifests.items():
            try:
                spec = replace(self._spec, fingerprint=int(key.rpartition(":")[2], 16))
                manifest = ContextManifest.parse(raw or b"", agent_id, spec)
            except (Miss, ValueError):  # there is none, or it is damaged
                continue
            names = tails.names_of(manifest.owner, manifest.tokens, spec)
            await tails.forget(self._connection, spec, names, self._layout.together)

    async def _forget_unsaved(self, agent_id: str) -> None:
        """Delete the blocks that an agent's prompts without a saved answer have written, except blocks that others
        use.
        """
        unsaved = [self._unsaved.pop(key) for key in list(self._unsaved) if key[0] == agent_id]
        written = set[str]().union(*(one.written for one in unsaved))
        for one in sorted(unsaved, key=lambda one: len(one.names.blocks), reverse=True):
            blocks = one.names.blocks
            kept = next((i + 1 for i in reversed(range(len(blocks))) if blocks[i] not in written), 0)
            await tails.forget(self._connection, self._spec, one.names, self._layout.together, kept)

    def agents(self) -> list[str]:
        """Return the agents that have a context for this model."""
        return self._ask(reference_counts.agents(self._connection, self._spec.fingerprint)) or []

    def servers(self) -> list[str]:
        """Return the addresses of the servers that are known at the moment, if there are several."""
        return [str(node) for node in self._ask(self._connection.server.nodes()) or [] if node is not None]

    def has(self, agent_id: str) -> bool | None:
        """Return whether the agent has a context for this model; None if the server does not answer. Like all methods
        about agents, this does not count as a use of keys."""
        found = self._ask(self._connection.ask_untouched([RawCommand(["EXISTS", self._key(agent_id)], up_to(1))]))
        return None if found is None else found == [1]

    def tokens_of(self, agent_id: str) -> int | None:
        """Return the number of tokens in the agent's manifest; None without a context for this model."""
        manifest = self._ask(self._manifest(agent_id))
        return len(manifest.tokens) if manifest else None

    def is_whole(self, agent_id: str, *, silent: int = 0) -> bool | None:
        """Return whether the agent has a context for this model without a missing block; None if the server does not
        answer. `silent` replaces the answers of one of several servers that does not answer: with 0, its blocks are
        missing, with 1, they are not.
        """
        return self._ask(self._is_whole(agent_id, silent))

    def why_removed(self, agent_id: str, tokens: Sequence[int]) -> tuple[str, int] | None:
        """Return why the server does not have the first lost block of an agent's context, a reason of KVPAGEWHY, and
        when it was removed in unix milliseconds, 0 if that is unknown. None if it has all full blocks, and without an
        answer. Blocks that are not full are stored under other names, too.
        """
        names = block_names(tokens, self._spec, agent_id)[: len(tokens) // self._spec.block_tokens]
        tags = (tag_of(names, i, self._layout.together) for i in range(len(names)))
        asked = [RawCommand(["KVPAGEWHY", tag + name], fields) for tag, name in zip(tags, names, strict=True)]
        for found in (self._ask(self._connection.ask_untouched(asked)) or ()) if asked else ():
            reason, at = found.get(b"cause", found.get(b"reason")), found.get(b"at")
            if isinstance(reason, bytes) and reason != b"stored":
                return reason.decode(errors="replace"), at if isinstance(at, int) else 0
        return None

    async def _manifest(self, agent_id: str) -> ContextManifest | None:
        (raw,) = await self._connection.ask_untouched([RawCommand(["GET", self._key(agent_id)], text)])
        try:
            return ContextManifest.parse(raw, agent_id, self._spec) if raw is not None else None
        except Miss:
            return None

    async def _is_whole(self, agent_id: str, silent: int) -> bool:
        manifest = await self._manifest(agent_id)
        if not manifest:
            return False
        places = manifest.places(self._spec, self._layout.together)
        return not await block_writer.missing(self._connection, self._layout, places, untouched=True, silent=silent)

    def _key(self, agent_id: str) -> str:
        return manifest_key(check_agent_id(agent_id), self._spec.fingerprint)

    # -- claims on blocks ------------------------------------------------------------------------------------------

    async def sealed(self, names: Sequence[str], before: Sequence[str] = ()) -> int:
        """Return how many of the first blocks in `names` are stored and sealed. `before` are the names of the prompt's
        blocks before them.
        """
        chain, size, together = [*before, *names], self._spec.block_tokens, self._layout.together
        tags = [tag_of(chain, len(before) + i, together) for i in range(len(names))]
        places = [BlockPlace(name, size, 0, tag=tag) for name, tag in zip(names, tags, strict=True)]
        missing = await self._attempt(block_writer.missing(self._connection, self._layout, places), self.unasked)
        return 0 if missing is None else len(list(takewhile(lambda place: place not in missing, places)))

    async def claim(self, name: str, seconds: float) -> bool:
        """Claim the computation of a block for `seconds`. Return False if another engine has claimed it.

        Return True if the server did not answer, because then no engine can be waited for.
        """
        return await self._attempt(self._claim(_claim_key(name), _milliseconds(seconds)), self.unasked) is not False

    async def renew(self, name: str, seconds: float) -> bool:
        """Prolong this engine's claim. Return whether it still had one."""
        changed = self._change_claim(_claim_key(name), _milliseconds(seconds))
        return await self._attempt(changed, self.unasked) or False

    async def release(self, name: str) -> bool:
        """End this engine's claim. Return whether it still had one."""
        return await self._attempt(self._change_claim(_claim_key(name), 0), self.unasked) or False

    async def _claim(self, key: str, milliseconds: int) -> bool:
        return await self._connection.ask_one(ok_or_not, "SET", key, self._token, "NX", "PX", milliseconds)

    async def _change_claim(self, key: str, milliseconds: int) -> bool:
        """Set the time left of a claim, 0 to end it, if the claim is this engine's. Return whether it is."""
        ours = False

        def change(holder: bytes | None) -> list[RawCommand]:
            nonlocal ours
            ours = holder == self._token.encode()
            return [RawCommand(["PEXPIRE", key, milliseconds], up_to(1))] if ours else []

        await self._connection.transaction([key], RawCommand(["GET", key], text), change)
        return ours

    def _ask(self, work: Work[T]) -> T | None:
        """Wait for the result of `work`, and return it. Without an answer, count the reason and return None."""
        return self.loop.run(self._attempt(work, self.unasked))

    async def _attempt(self, work: Work[T], failures: Counter[str]) -> T | None:
        def missed(why: str) -> None:
            failures.update([why])
            seen.set(reason=why)

        seen = current()
        return await self._connection.attempt(work, missed)


def _claim_key(name: str) -> str:
    return f"claim:{name}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def _runs(lifetimes: Lifetimes, places: Sequence[BlockPlace]) -> list[tuple[int, list[BlockPlace]]]:
    """Return the places that are to be kept, in order, grouped by their seconds. Those of the request's tokens are
    apart from others.
    """
    runs = groupby(places, key=lambda place: (lifetimes.seconds(place.start), place.start < lifetimes.tokens))
    return [(seconds, list(run)) for (seconds, _), run in runs if seconds]
