"""The page tier: contexts on a page server, shared by every engine that computes the same.

What lies where::

    kv:{chain hash}:{layer}:{head}:0:{kv_type}         the pages of a full block
    seal:{chain hash}                                  its digest, written after its pages: the block is complete
    kv:agent/{agent}:{layer}:{head}:{page}:{kv_type}   the pages of the agent's partial last block, its tail
    manifest:{agent}                                   tokens, names and the tail's digest, written last of all

A chain hash names a full block by its content and position, so agents with the same beginning store and fetch the
same pages, and its page_id is 0. A tail is its agent's alone; its page_id is 32 bits of its chain hash, so a new tail
doesn't overwrite one that somebody may be reading.

The server's checksum vouches for a page from its arrival on. The digest vouches for a whole block under this very
name, from the tensors of the engine that computed it to those of the engine that uses it: it catches pages changed,
swapped, mixed or taken from elsewhere, on any hop. What does not match is a miss with its reason, never an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Any

import redis
import xxhash
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import Buffer

from engine.blocks import AgentBlocks, KVBlock, check_agent_id
from engine.pool import BlockPool, PoolExhaustedError
from engine.prefix import chain_hashes, common_prefix
from engine.spec import ModelCacheSpec
from engine.tiers.manifest import FORMAT, Manifest, Miss, Place, block_names
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
            places, named = self._plan(wanted, manifest)
            if not places:
                raise Miss("absent")
        except (Miss, *OUTAGES) as error:
            self.misses[_reason(error)] += 1
            return None
        blocks = self._fetch(places)
        held = sum(block.tokens for block in blocks)
        return AgentBlocks(agent_id, named[:held], tuple(blocks), self._spec.fingerprint) if blocks else None

    def save(self, context: AgentBlocks) -> Saved | None:
        """Store a context: the blocks that aren't there yet, then the agent's manifest. None when it failed.

        Raises IncompatibleBlocksError for blocks of another model.
        """
        context.validate(self._spec)
        try:
            return self._save(context)
        except OUTAGES as error:
            self.unsaved[_reason(error)] += 1
            return None

    def _manifest(self, agent_id: str) -> Manifest | None:
        """What is known of the agent. Raises Miss when that is of no use."""
        raw = self._server.get(f"manifest:{agent_id}")
        return None if raw is None else Manifest.parse(raw, agent_id, self._spec)

    def _plan(
        self, wanted: tuple[int, ...], manifest: Manifest | None
    ) -> tuple[list[tuple[Place, str]], tuple[int, ...]]:
        """The blocks to fetch, with their digests, and the tokens that they hold.

        They are the full blocks of `wanted` as far as they are stored, whoever stored them, and then the agent's
        block in which the two part.
        """
        size = self._spec.block_tokens
        full = [Place(name, size) for name in chain_hashes(self._spec.fingerprint, wanted, size)]
        shared, rest = divmod(common_prefix(manifest.tokens, wanted), size) if manifest else (0, 0)
        parting = manifest.place(shared, self._spec) if manifest and rest else None
        digests = self._digests([*full, parting] if parting and not parting.agent_id else full)
        if manifest and manifest.tail_digest:
            digests[manifest.names[-1]] = manifest.tail_digest
        stored = [(place, digests[place.name]) for place in takewhile(lambda place: place.name in digests, full)]
        if len(stored) < shared:
            self.misses["gap"] += 1
        if manifest and parting and len(stored) == shared and parting.name in digests:
            return [*stored, (parting, digests[parting.name])], manifest.tokens
        return stored, wanted

    def _digests(self, places: Sequence[Place]) -> dict[str, str]:
        """The digests of those blocks that are sealed, by name."""
        seals = self._pipelined(["GET", _seal(place)] for place in places)
        return {place.name: seal.decode() for place, seal in zip(places, seals, strict=True) if seal}

    def _fetch(self, places: Sequence[tuple[Place, str]]) -> list[KVBlock]:
        """The blocks, up to the first that cannot be had."""
        blocks: list[KVBlock] = []
        try:
            ids = self._pool.allocate(len(places))
        except PoolExhaustedError:
            self.misses["pool"] += 1
            return blocks
        try:
            for (place, digest), block_id in zip(places, ids, strict=True):
                blocks.append(KVBlock.from_body(self._body(place, digest), self._spec, place.tokens, block_id))
        except (Miss, *OUTAGES) as error:
            self.misses[_reason(error)] += 1
        finally:
            self._pool.free(ids[len(blocks) :])
        return blocks

    def _body(self, place: Place, digest: str) -> bytearray:
        """The block's bytes. Raises Miss, and unseals the block for the next save to write it anew, if they are not
        what was written."""
        try:
            body = self._read(place)
            if _digest(place, [body]) != digest:
                raise Miss("checksum")
        except Miss:
            self._server.delete(_seal(place))
            raise
        return body

    def _read(self, place: Place) -> bytearray:
        body = bytearray(place.tokens * self._spec.token_nbytes)
        start = 0
        keys = place.keys(self._spec)
        sizes = [at.nbytes(place.tokens) for at in self._spec.page_order]
        for span in self._spans(place.tokens):
            wanted = [_arguments(key) for key in keys[span]]
            pages = self._server.execute_command("KVPAGEMGET", len(wanted), *chain.from_iterable(wanted))
            if None in pages:
                raise Miss("gap")
            if [len(page) for page in pages] != sizes[span]:
                raise Miss("shape")
            for page in pages:
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
        present = self._present(places)
        nbytes = 0
        for place, block in zip(places, context.blocks, strict=True):
            if place in present:
                continue
            digest = self._write(place, block)
            nbytes += place.tokens * self._spec.token_nbytes
            if place.agent_id:
                manifest = replace(manifest, tail_digest=digest)
            else:
                self._server.set(_seal(place), digest)
        self._server.set(f"manifest:{context.agent_id}", manifest.dump(self._spec))
        if before and before.tail_digest and before.names[-1] != names[-1]:
            self._server.delete(*map(bytes, before.places(self._spec)[-1].keys(self._spec)))
        return Saved(len(places) - len(present), len(present), nbytes)

    def _present(self, places: Sequence[Place]) -> set[Place]:
        """The full blocks whose pages and seal are all there. A tail is always written: its digest must be ours."""
        full = [place for place in places if not place.agent_id]
        keys = [[_seal(place), *map(bytes, place.keys(self._spec))] for place in full]
        counts = self._pipelined(["EXISTS", *wanted] for wanted in keys)
        return {place for place, wanted, count in zip(full, keys, counts, strict=True) if count == len(wanted)}

    def _write(self, place: Place, block: KVBlock) -> str:
        """Send the block's pages; their digest."""
        bodies = list(block.pages())
        pages = list(zip(place.keys(self._spec), self._spec.page_order, bodies, strict=True))
        for span in self._spans(place.tokens):
            self._server.execute_command(
                "KVPAGEMSET",
                len(pages[span]),
                *chain.from_iterable(
                    (*_arguments(key), int(at.plane.dtype), place.tokens, at.plane.head_dim, 0, body)
                    for key, at, body in pages[span]
                ),
            )
        return _digest(place, bodies)

    def _spans(self, tokens: int) -> Iterator[slice]:
        """The block's pages in runs of at most CHUNK bytes."""
        count = max(1, CHUNK // max(at.nbytes(tokens) for at in self._spec.page_order))
        for start in range(0, len(self._spec.page_order), count):
            yield slice(start, start + count)

    def _pipelined(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        pipeline = self._server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = pipeline.execute()
        return replies


def _seal(place: Place) -> str:
    return f"seal:{place.name}"


def _arguments(key: PageKey) -> tuple[bytes, int, int, int, int]:
    return key.req_id, key.layer, key.head, key.page, key.kv_type


def _digest(place: Place, bodies: Iterable[Buffer]) -> str:
    """XXH3-64, 16 hex digits, of the block's name and its pages' bodies in canonical order."""
    digest = xxhash.xxh3_64(f"{FORMAT}:{place.name}".encode())
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
