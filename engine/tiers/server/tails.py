"""Records of the blocks with which contexts continue, so that any engine finds contexts with the same beginning.

    tails:{chain hash}   the most recent blocks after a full block, or the most recent first blocks with these tokens

A block's name is a hash of its tokens and of the block before it. A prompt that ends or diverges within a block lacks
some of these tokens, so it cannot compute the name. A record lists the blocks, full and partial, after one block. Its
key is the chain hash of that block. The first block of a context is in two
records, whose keys are hashes of its first tokens (see `first_parts`): fewer contexts share the longer beginning, and
only the record of the shorter one has short contexts. So a prompt determines the keys of its records, which are read
together with the digests of its full blocks.

A record is bounded: MOST_TAILS blocks and MOST_BYTES bytes, the newest first. Partial blocks that leave it are
deleted, and so are partial blocks that a longer one contains. The record is written after the blocks, so it names
blocks that were complete. It has their digests, so that a load needs no further request for their seals.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kvpage_server import bounded
from kvpage_server.client.raw_commands import RawCommand, integer, ok, text
from kvpage_server.page import tag_of, unix_ms

from ...chains import Chain, ContextNames, chain_hash, common_prefix
from ...generation.tokens import token_ids
from ...memory.blocks import block_names
from ...spec import ModelCacheSpec
from .connection import ServerConnection
from .manifest import WRITER, BlockLayout, BlockPlace, ContextManifest, Miss, sealed, unsealed
from .reference_counts import count_key, label_key

FORMAT = 1
MOST_TAILS = 64  # most blocks in a record
MOST_BYTES = 64 << 10  # most bytes of a record
UNREFERENCED = (None, b"0")  # counts of a block that no manifest names
CONCURRENT_BLOCKS = 8  # blocks that are entered concurrently
# Bounds of a record's JSON, which others may have written.
CONTAINERS, STRINGS, VALUES = 2_000, 4_000, 40_000


def least_tail(spec: ModelCacheSpec) -> int:
    """Return the least tokens of a partial block that is stored. A prompt that lacks fewer tokens does not fetch
    more."""
    return max(1, spec.block_tokens // 16)


def first_parts(spec: ModelCacheSpec) -> tuple[int, int]:
    """Return the two numbers of first tokens whose hashes name the records of a context's first block."""
    return least_tail(spec), max(2, spec.block_tokens // 4)


@dataclass(frozen=True, slots=True)
class Parent:
    """The position of a block in a chain: the blocks before it."""

    names: tuple[str, ...]  # the chain hashes of the blocks before it
    chain: Chain
    together: int  # as for BlockLayout

    @property
    def name(self) -> str:
        """The hash of the parent in the name of the block: see `Chain.parent`."""
        return self.chain.parent(len(self.names), self.names[-1] if self.names else None)

    def records(self, tokens: Sequence[int], spec: ModelCacheSpec) -> list[str]:
        """Return the keys of the records that have contexts which continue with these `tokens`."""
        if self.names:
            return [f"tails:{self.name}"]
        parts = [part for part in first_parts(spec) if part <= len(tokens)]
        return [f"tails:{chain_hash(spec.fingerprint, self.name, tokens[:part])}" for part in parts]


@dataclass(frozen=True, slots=True)
class Tail:
    """A block on the page server, full or partial."""

    tokens: tuple[int, ...]
    digest: str
    states: tuple[tuple[int, str], ...]  # for each state: the number of its tokens before it, and its digest

    def places(self, parent: Parent, spec: ModelCacheSpec) -> dict[BlockPlace, str]:
        """Return the places of the block and of its states, with their digests."""
        start = len(parent.names) * spec.block_tokens
        name = chain_hash(spec.fingerprint, parent.name, self.tokens)
        tag = tag_of((*parent.names, name), len(parent.names), parent.together)
        found = {BlockPlace(name, len(self.tokens), start + len(self.tokens), tag=tag): self.digest}
        for count, digest in self.states:
            before = chain_hash(spec.fingerprint, parent.name, self.tokens[:count])
            found[BlockPlace(before, count, start + count, of_state=True, tag=tag)] = digest
        return found

    def usable(self, tokens: Sequence[int], spec: ModelCacheSpec) -> int:
        """Return how many of `tokens` need not be computed with it."""
        common = common_prefix(self.tokens, tokens)
        if not spec.has_state:
            return common
        return max((count for count, _ in self.states if count <= common), default=0)

    def begins(self, tokens: Sequence[int]) -> bool:
        """Return whether `tokens` begin with its tokens."""
        return self.tokens == tuple(tokens[: len(self.tokens)])

    def contains(self, other: Tail) -> bool:
        """Return whether it begins with the tokens of `other`, and has a state wherever `other` has one."""
        counts = {count for count, _ in self.states}
        return other.begins(self.tokens) and all(count in counts for count, _ in other.states)


def parse(raw: bytes, key: str, spec: ModelCacheSpec) -> list[Tail]:
    """Return the tails in a record, the newest first. Raises Miss for a record that is damaged, too long, of another
    key or of another model."""
    try:
        if len(raw) > 2 * MOST_BYTES:
            raise Miss("tails")
        stored = bounded.parse(unsealed(raw, key), containers=CONTAINERS, strings=STRINGS, values=VALUES)
        if (stored["format"], stored["fingerprint"]) != (FORMAT, f"{spec.fingerprint:016x}"):
            raise Miss("tails")
        found = [
            Tail(
                tuple(token_ids(tail["tokens"])),
                str(tail["digest"]),
                tuple((int(count), str(digest)) for count, digest in tail["states"]),
            )
            for tail in stored["tails"]
        ]
    except Miss:
        raise Miss("tails") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise Miss("tails") from error
    for tail in found:
        count = len(tail.tokens)
        if not 0 < count <= spec.block_tokens or any(not 0 < after <= count for after, _ in tail.states):
            raise Miss("tails")
    return found


def dump(tails: Sequence[Tail], key: str, spec: ModelCacheSpec) -> tuple[bytes, int]:
    """Return the bytes of a record with as many of the first `tails` as the limits allow, and their number."""
    head = {"format": FORMAT, "fingerprint": f"{spec.fingerprint:016x}", "by": WRITER, "saved": unix_ms(), "tails": []}
    size, written = len(json.dumps(head)), list[str]()
    for tail in tails[:MOST_TAILS]:
        one = json.dumps({"tokens": tail.tokens, "digest": tail.digest, "states": tail.states})
        size += len(one) + 2
        if written and size > MOST_BYTES:
            break
        written.append(one)
    whole = json.dumps(head).removesuffix("]}") + ", ".join(written) + "]}"
    return sealed(whole.encode(), key), len(written)


async def record(
    connection: ServerConnection,
    layout: BlockLayout,
    spec: ModelCacheSpec,
    context: ContextManifest,
    written: Collection[BlockPlace],
) -> bool:
    """Enter blocks of a stored context in their records: the blocks that are `written` now, or have a state that is,
    and a partial last one that is not too short. Return whether the partial block was entered in a record."""
    size, chain = spec.block_tokens, spec.chain(context.owner, context.tokens)
    inner = context.inner_places(spec, layout.together)

    def states(block: BlockPlace) -> list[BlockPlace]:
        return [*(place for place in inner if block.start < place.end < block.end), block.state()]

    def is_entered(block: BlockPlace) -> bool:
        *within, end = states(block)  # a prompt that was published before may have entered the block without them
        return bool(within) or least_tail(spec) <= block.tokens < size or block in written or end in written

    blocks = list(filter(is_entered, context.places(spec, layout.together)))
    places = [place for block in blocks for place in (block, *(states(block) if spec.has_state else ()))]
    if not places:
        return False
    digests = dict(zip(places, await connection.read([place.seal for place in places]), strict=True))

    async def enter(block: BlockPlace) -> bool:
        if (digest := digests[block]) is None:  # the block was deleted meanwhile
            return False
        taken = {place.end - block.start: digests.get(place) for place in states(block)}
        after = tuple((count, found.decode(errors="replace")) for count, found in taken.items() if found)
        parent = Parent(context.names[: block.start // size], chain, layout.together)
        tail = Tail(context.tokens[block.start : block.end], digest.decode(errors="replace"), after)
        if spec.has_state:
            tail = await _with_earlier_states(connection, spec, parent, tail)
        entered = [await _update(connection, spec, parent, key, tail) for key in parent.records(tail.tokens, spec)]
        return any(entered)

    entered: list[bool | BaseException] = []
    for start in range(0, len(blocks), CONCURRENT_BLOCKS):
        entered += await asyncio.gather(*map(enter, blocks[start : start + CONCURRENT_BLOCKS]), return_exceptions=True)
        for outcome in entered:
            if isinstance(outcome, BaseException):
                raise outcome
    return entered[-1] is True and blocks[-1].tokens < size


async def forget(
    connection: ServerConnection, spec: ModelCacheSpec, names: ContextNames, together: int, kept: int = 0
) -> int:
    """Delete the blocks of a context from its end, and their entries in records, until one that another context
    continues or a manifest names, and without the first `kept`. Return the number of blocks up to that one.
    """
    for i in reversed(range(kept, len(names.blocks))):
        parent = Parent(names.blocks[:i], names.chain, together)
        following = Parent(names.blocks[: i + 1], names.chain, together)
        if await _read(connection, spec, *following.records((), spec)):
            return i + 1
        count = count_key(tag_of(names.blocks, i, together) + names.blocks[i])
        if await connection.ask_one(text, "GET", count) not in UNREFERENCED:
            return i + 1
        removed: list[Tail] = []
        for key in [f"tails:{parent.name}"] if i else [f"tails:{first}" for first in names.first]:
            removed += await _remove(connection, spec, parent, key, names.blocks[i])
        for place in removed[0].places(parent, spec) if removed else ():
            await _delete(connection, place)
    return kept


async def tokens_of(
    connection: ServerConnection, spec: ModelCacheSpec, names: ContextNames, together: int
) -> list[tuple[str, Sequence[int]] | None]:
    """Return for each block of a context the parent's hash in its name, and its tokens; None if no record names it."""
    parents = [Parent(names.blocks[:i], names.chain, together) for i in range(len(names.blocks))]
    keys = [f"tails:{first}" for first in names.first] + [f"tails:{parent.name}" for parent in parents[1:]]
    raws = await connection.ask_untouched([RawCommand(["GET", key], text) for key in keys])
    records = [_known(raw, key, spec) for key, raw in zip(keys, raws, strict=True)]
    first = len(names.first)
    tails = [[tail for record in records[:first] for tail in record], *records[first:]]
    found: list[tuple[str, Sequence[int]] | None] = []
    for name, parent, some in zip(names.blocks, parents, tails, strict=True):
        tokens = (tail.tokens for tail in some if chain_hash(spec.fingerprint, parent.name, tail.tokens) == name)
        found.append(next(((parent.name, one) for one in tokens), None))
    return found


def names_of(agent_id: str, tokens: Sequence[int], spec: ModelCacheSpec) -> ContextNames:
    """Return the names with which `forget` finds a context of an agent."""
    chain = spec.chain(agent_id, tokens)
    parent = chain.parent(0, None)
    first = (chain_hash(spec.fingerprint, parent, tokens[:part]) for part in first_parts(spec))
    return ContextNames(block_names(tokens, spec, agent_id), chain, tuple(first))


async def reusable(
    connection: ServerConnection, spec: ModelCacheSpec, parent: Parent, tokens: Sequence[int]
) -> list[tuple[int, list[BlockPlace]]]:
    """Return each block in the records after `parent` of which `tokens` can reuse some, with the number of these
    tokens, the most first: the place of the block, then those of its states.
    """
    found = [tail for key in parent.records(tokens, spec) for tail in await _read(connection, spec, key)]
    usable = {tail: tail.usable(tokens, spec) for tail in found}
    ordered = sorted(filter(usable.__getitem__, usable), key=usable.__getitem__, reverse=True)
    return [(usable[tail], list(tail.places(parent, spec))) for tail in ordered]


async def _read(connection: ServerConnection, spec: ModelCacheSpec, key: str) -> list[Tail]:
    """Return the tails in a record; empty if there is no valid one."""
    (raw,) = await connection.ask_untouched([RawCommand(["GET", key], text)])
    return _known(raw, key, spec)


def _known(raw: bytes | None, key: str, spec: ModelCacheSpec) -> list[Tail]:
    try:
        return [] if raw is None else parse(raw, key, spec)
    except Miss:
        return []


async def _remove(
    connection: ServerConnection, spec: ModelCacheSpec, parent: Parent, key: str, name: str
) -> list[Tail]:
    """Remove the block `name` from a record. Return it; empty if it is not there."""
    removed: list[Tail] = []

    def change(raw: bytes | None) -> list[RawCommand]:
        nonlocal removed
        before = _known(raw, key, spec)
        removed = [tail for tail in before if chain_hash(spec.fingerprint, parent.name, tail.tokens) == name]
        left = [tail for tail in before if tail not in removed]
        if not removed:
            return []
        return [RawCommand(["SET", key, dump(left, key, spec)[0]], ok) if left else RawCommand(["DEL", key], integer)]

    await connection.transaction([key], RawCommand(["GET", key], text), change)
    return removed


async def _update(connection: ServerConnection, spec: ModelCacheSpec, parent: Parent, key: str, tail: Tail) -> bool:
    """Enter a block in a record, in place of the blocks that it contains, unless a block of the record contains it.
    Return whether the block was entered."""
    unreferenced: list[BlockPlace] = []
    entered = False

    def change(stored: bytes | None) -> list[RawCommand]:
        nonlocal unreferenced, entered
        before = _known(stored, key, spec)
        valid = [other for other in before if key in parent.records(other.tokens, spec)]
        others = [other for other in valid if not other.begins(tail.tokens)]
        entered = not any(other.contains(tail) for other in others)
        record, count = dump([tail, *others] if entered else others, key, spec)
        after = ([tail, *others] if entered else others)[:count]
        # A partial block is deleted when it leaves the last of its records. More contexts share the other record, so a
        # block leaves that one earlier.
        removed = [other for other in {*valid, tail} if other not in after]
        removed = [other for other in removed if parent.records(other.tokens, spec)[-1] == key]
        places = _places(removed, parent, spec) - _places(after, parent, spec)
        unreferenced = [place for place in places if place.tokens < spec.block_tokens]
        return [] if after == before else [RawCommand(["SET", key, record], ok)]

    await connection.transaction([key], RawCommand(["GET", key], text), change)
    for place in unreferenced:
        await _delete(connection, place)
    return entered


async def _with_earlier_states(connection: ServerConnection, spec: ModelCacheSpec, parent: Parent, tail: Tail) -> Tail:
    """Return a block with the stored states of the blocks that it replaces. The engine that wrote it may not have them,
    because it has restored only one state of the prompt.
    """
    earlier = [other for key in parent.records(tail.tokens, spec) for other in await _read(connection, spec, key)]
    counts = {count for other in earlier if other.begins(tail.tokens) for count, _ in other.states}
    counts -= {count for count, _ in tail.states}
    found = replace(tail, states=tuple((count, "") for count in counts)).places(parent, spec)
    places = [place for place in found if place.of_state]
    digests = await connection.read([place.seal for place in places]) if places else ()
    pairs = zip(places, digests, strict=True)
    states = [(place.tokens, digest.decode(errors="replace")) for place, digest in pairs if digest]
    return replace(tail, states=tuple(sorted([*tail.states, *states])))


def _places(tails: Iterable[Tail], parent: Parent, spec: ModelCacheSpec) -> set[BlockPlace]:
    return {place for tail in tails for place in tail.places(parent, spec)}


async def _delete(connection: ServerConnection, place: BlockPlace) -> None:
    """Delete a partial block, or a state, unless a manifest names it."""
    count = count_key(place.tagged)
    name, page = place.block

    def change(references: bytes | None) -> list[RawCommand]:
        if references not in UNREFERENCED:
            return []
        return [
            connection.server.words.delete(name, (page,)),
            RawCommand(["DEL", place.seal, label_key(place.tagged)], integer),
        ]

    await connection.transaction([count], RawCommand(["GET", count], text), change)
