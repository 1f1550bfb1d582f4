"""The page tier: contexts on a page server, shared by every engine that computes the same.

What lies where::

    kv:{chain hash}:{layer}:{head}:0:{kv_type}         the pages of a full block
    seal:{chain hash}                                  its digest, written after its pages: the block is complete
    state:{chain hash}                                 the same of the state after it, where layers carry one
    kv:agent/{agent}:{layer}:{head}:{page}:{kv_type}   the pages of the agent's partial last block, its tail
    manifest:{agent}                                   tokens, names and the tail's digests, written last of all

A chain hash names a full block by its content and position, so agents with the same beginning store and fetch the
same pages, and its page_id is 0. A tail is its agent's alone; its page_id is 32 bits of its chain hash, so a new tail
doesn't overwrite one that somebody may be reading.

The server's checksum vouches for a page from its arrival on. The digest vouches for a whole block under this very
name, from the tensors of the engine that computed it to those of the engine that uses it: it catches pages changed,
swapped, mixed or taken from elsewhere, on any hop. What does not match is a miss with its reason, never an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import redis
import xxhash
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import Buffer

from engine.blocks import AgentBlocks, Arrays, KVBlock, check_agent_id, from_body, page_bodies
from engine.pool import BlockPool, PoolExhaustedError
from engine.spec import ModelCacheSpec
from engine.tiers.manifest import FORMAT, Manifest, Miss, Place, block_names
from engine.tiers.plan import Offer, Plan
from kvpage_server.page import PageKey

CHUNK = 8 << 20  # bytes of pages in one command, at most
OUTAGES = (redis.ConnectionError, redis.TimeoutError, redis.ResponseError, redis.InvalidResponse)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save wrote."""

    blocks_written: int
    blocks_present: int  # stored before, by whomever
    nbytes: int  # of pages written


class PageTier:
    """Saves contexts to a page server and loads them.

    With a server that is slow, full, wrong or gone, `load` finds less or nothing and `save` leaves what was there,
    and the reason is counted: ``absent`` nothing is stored; ``gap`` pages are missing; ``shape``, ``checksum`` they
    aren't what was written; ``fingerprint`` another model's manifest; ``manifest`` an unreadable one; ``pool`` no
    blocks are free; ``slow`` no answer in time; ``down`` no connection; ``refused`` an error for an answer.
    """

    def __init__(self, url: str, spec: ModelCacheSpec, pool: BlockPool, *, timeout: float = 5.0) -> None:
        """`url` as redis-py takes it; `timeout` in seconds, for connecting and for every wait on the socket.

        Raises ValueError for a URL that isn't one.
        """
        self.misses: Counter[str] = Counter()  # what loads did not find, by reason
        self.unsaved: Counter[str] = Counter()  # saves that failed, by reason
        self._spec = spec
        self._pool = pool
        self._server: Any = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def load(self, agent_id: str, tokens: Sequence[int] | None = None) -> AgentBlocks | None:
        """The longest stored context that begins as `tokens` do, or, without `tokens`, all of the agent's own.

        In its last block it may go on differently: the engine's submit compares tokens. Its blocks are allocated in
        the pool and the caller's to free. None when there is nothing usable.
        """
        check_agent_id(agent_id)
        try:
            manifest = self._manifest(agent_id)
            wanted = tuple(tokens) if tokens is not None else manifest.tokens if manifest else ()
            offer = Offer(self._spec, wanted, manifest)
            digests = self._digests(offer.places) | (manifest.digests if manifest else {})
        except (Miss, *OUTAGES) as error:
            self.misses[_reason(error)] += 1
            return None
        if offer.has_gap(digests):
            self.misses["gap"] += 1
        plan = offer.plan(digests, len(wanted) - (tokens is not None))
        if not plan.blocks:
            self.misses["absent"] += 1
            return None
        blocks = self._fetch(agent_id, plan, digests)
        held = sum(block.tokens for block in blocks)
        return AgentBlocks(agent_id, plan.tokens[:held], tuple(blocks), self._spec.fingerprint) if blocks else None

    def save(self, context: AgentBlocks) -> Saved | None:
        """Store a context: the blocks that aren't there yet, then the agent's manifest. None when it failed.

        An empty context is nothing to keep: what is stored of the agent stays. Raises IncompatibleBlocksError for
        blocks of another model.
        """
        context.validate(self._spec)
        if not context.blocks:
            return Saved(0, 0, 0)
        try:
            return self._save(context)
        except OUTAGES as error:
            self.unsaved[_reason(error)] += 1
            return None

    def _manifest(self, agent_id: str) -> Manifest | None:
        """What is known of the agent. Raises Miss when that is of no use."""
        raw = self._server.get(f"manifest:{agent_id}")
        return None if raw is None else Manifest.parse(raw, agent_id, self._spec)

    def _digests(self, places: Sequence[Place]) -> dict[str, str]:
        """The digests of those that are sealed, by seal."""
        asked = [place.seal for place in places if not place.agent_id]
        digests = self._pipelined(["GET", seal] for seal in asked)
        return {seal: digest.decode() for seal, digest in zip(asked, digests, strict=True) if digest}

    def _fetch(self, agent_id: str, plan: Plan, digests: Mapping[str, str]) -> list[KVBlock]:
        """The blocks, up to the first that cannot be had; where layers carry a state, up to the last that can."""
        nbytes = sum(place.tokens for place in plan.blocks) * self._spec.token_nbytes
        nbytes += max((self._spec.state_nbytes(place.end) for place in plan.states), default=0)
        try:
            ids = self._pool.allocate(len(plan.blocks), agent_id, nbytes)
        except PoolExhaustedError:
            self.misses["pool"] += 1
            return []
        kept: list[KVBlock] = []
        try:
            blocks = self._blocks(plan, digests, ids)
            kept = self._with_state(plan, blocks, digests) if plan.states else blocks
        finally:
            self._pool.settle(dict.fromkeys(ids, 0) | {block.block_id: block.nbytes for block in kept})
            self._pool.free(ids[len(kept) :], agent_id)
        return kept

    def _blocks(self, plan: Plan, digests: Mapping[str, str], ids: Sequence[int]) -> list[KVBlock]:
        """Without their states, up to the first that cannot be had."""
        blocks: list[KVBlock] = []
        try:
            for place, block_id in zip(plan.blocks, ids, strict=True):
                blocks.append(KVBlock(block_id, place.tokens, self._arrays(place, digests[place.seal])))
        except (Miss, *OUTAGES) as error:
            self.misses[_reason(error)] += 1
        return blocks

    def _with_state(self, plan: Plan, blocks: list[KVBlock], digests: Mapping[str, str]) -> list[KVBlock]:
        """The blocks up to the furthest state that can be had, which is put into the last of them."""
        ends = [place.end for place in plan.blocks[: len(blocks)]]
        for place in plan.states:
            if place.end in ends:
                try:
                    state = self._arrays(place, digests[place.seal])
                except (Miss, *OUTAGES) as error:
                    self.misses[_reason(error)] += 1
                else:
                    *whole, last = blocks[: ends.index(place.end) + 1]
                    return [*whole, replace(last, state=state)]
        return []

    def _arrays(self, place: Place, digest: str) -> Arrays:
        return from_body(self._body(place, digest), place.shapes(self._spec))

    def _body(self, place: Place, digest: str) -> bytearray:
        """Its bytes. Raises Miss, and unseals it for the next save to write it anew, if they are not what was
        written."""
        try:
            body = self._read(place)
            if _digest(place, [body]) != digest:
                raise Miss("checksum")
        except Miss:
            self._server.delete(place.seal)
            raise
        return body

    def _read(self, place: Place) -> bytearray:
        pages = place.pages(self._spec)
        body = bytearray(sum(at.nbytes for _, at in pages))
        start = 0
        for run in _runs(pages):
            wanted = [_arguments(key) for key, _ in run]
            found = self._server.execute_command("KVPAGEMGET", len(wanted), *chain.from_iterable(wanted))
            if None in found:
                raise Miss("gap")
            if [len(page) for page in found] != [at.nbytes for _, at in run]:
                raise Miss("shape")
            for page in found:
                body[start : start + len(page)] = page
                start += len(page)
        return body

    def _save(self, context: AgentBlocks) -> Saved:
        names = block_names(context.tokens, self._spec)
        manifest = Manifest(context.agent_id, context.tokens, names)
        places = manifest.places(self._spec)
        before = None
        with suppress(Miss):
            before = self._manifest(context.agent_id)
        parts: dict[Place, Arrays] = {}
        for place, block in zip(places, context.blocks, strict=True):
            parts[place] = block.layers
            if block.state is not None:
                parts[place.state()] = block.state
        present = self._present(list(parts))
        digests = {place: self._write(place, parts[place]) for place in parts if place not in present}
        if places and places[-1].agent_id:
            tail = places[-1]
            manifest = replace(manifest, tail_digest=digests[tail], tail_state_digest=digests.get(tail.state()))
        self._server.set(f"manifest:{context.agent_id}", manifest.dump(self._spec))
        if before and before.tail_digest and before.names[-1] != names[-1]:
            self._delete(before.places(self._spec)[-1])
        nbytes = sum(at.nbytes for place in digests for _, at in place.pages(self._spec))
        written = sum(place in digests for place in places)
        return Saved(written, len(places) - written, nbytes)

    def _present(self, places: Sequence[Place]) -> set[Place]:
        """Those whose pages and seal are all there. A tail is always written: its digest must be ours."""
        shared = [place for place in places if not place.agent_id]
        keys = [[place.seal, *(bytes(key) for key, _ in place.pages(self._spec))] for place in shared]
        counts = self._pipelined(["EXISTS", *wanted] for wanted in keys)
        return {place for place, wanted, count in zip(shared, keys, counts, strict=True) if count == len(wanted)}

    def _write(self, place: Place, arrays: Arrays) -> str:
        """Send its pages, then, unless it's a tail's, its seal; the digest."""
        bodies = list(page_bodies(arrays))
        sent = zip(place.pages(self._spec), bodies, strict=True)
        for run in _runs([(key, at, body) for (key, at), body in sent]):
            self._server.execute_command(
                "KVPAGEMSET",
                len(run),
                *chain.from_iterable(
                    (*_arguments(key), int(at.plane.dtype), at.rows, at.plane.head_dim, 0, body)
                    for key, at, body in run
                ),
            )
        digest = _digest(place, bodies)
        if not place.agent_id:
            self._server.set(place.seal, digest)
        return digest

    def _delete(self, tail: Place) -> None:
        places = [tail, tail.state()] if self._spec.has_state else [tail]
        if keys := [bytes(key) for place in places for key, _ in place.pages(self._spec)]:
            self._server.delete(*keys)

    def _pipelined(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        pipeline = self._server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = pipeline.execute()
        return replies


_Sent = TypeVar("_Sent", bound=tuple[Any, ...])


def _runs(pages: Sequence[_Sent]) -> Iterator[list[_Sent]]:
    """The pages, whose place in the block comes second, in runs of at most CHUNK bytes, a page at least."""
    run: list[_Sent] = []
    nbytes = 0
    for page in pages:
        if run and nbytes + page[1].nbytes > CHUNK:
            yield run
            run, nbytes = [], 0
        run.append(page)
        nbytes += page[1].nbytes
    if run:
        yield run


def _arguments(key: PageKey) -> tuple[bytes, int, int, int, int]:
    return key.req_id, key.layer, key.head, key.page, key.kv_type


def _digest(place: Place, bodies: Iterable[Buffer]) -> str:
    """XXH3-64, 16 hex digits, of the seal's name and the pages' bodies in canonical order."""
    digest = xxhash.xxh3_64(f"{FORMAT}:{place.seal}".encode())
    for body in bodies:
        digest.update(body)
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, Miss):
        return str(error)
    if isinstance(error, redis.TimeoutError):
        return "slow"
    gone = isinstance(error, redis.ConnectionError) and not isinstance(error, redis.AuthenticationError)
    return "down" if gone else "refused"
