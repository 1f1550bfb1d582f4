"""The format of a context on the page server: the places of its blocks, and the manifest that lists them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import xxhash
from typing_extensions import Buffer

from kvpage_server import bounded
from kvpage_server.client import BlockName
from kvpage_server.page import BlockShape, DType, PageKey, Plane, tag_of, unix_ms

from ...chains import chain_hash, common_prefix, root_of
from ...generation.tokens import token_ids
from ...memory.blocks import block_names
from ...spec import ModelCacheSpec, Shapes

FORMAT = 4  # version of the format of manifests
OLDER = 3  # the version before: one manifest for each agent, without a digest
DIGESTS = 3  # version of the format of blocks' digests
CHUNK_BYTES = 8 << 20  # of blocks in one request, at most, except for a single larger block
WRITER = f"{socket.gethostname()}:{os.getpid()}"
DELETION_SECONDS = 86_400  # time to live of the mark of a deleted agent
UNKNOWN = b""  # in place of the mark if its server does not answer
MODEL_SHOWN = 200  # characters of a model's name in a manifest, at most
# Bounds of a manifest's JSON, which others may have written: a context has at most two million tokens.
CONTAINERS, STRINGS, VALUES = 50_000, 100_000, 4_000_000
EARLIER_STATES, EARLIER_BYTES = 256, 64 << 20  # states of the manifest before that a manifest keeps, at most
MOST_KINDS = 1024  # kinds of places that a layout remembers; last blocks differ in length, states in position


_NAME = re.compile(r"[0-9a-f]{32}\Z")


class Miss(Exception):
    """Error: a stored context cannot be used; the argument is the reason."""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Names on the server of a block, or of the state after its tokens: of its pages, its seal and its digest."""

    name: str  # the block's chain hash
    tokens: int
    end: int  # the position after the last token
    of_state: bool = False
    tag: str = ""  # keeps neighbouring blocks on the same server: see `tag_of`

    @property
    def start(self) -> int:
        """The position before the first of its tokens."""
        return self.end - self.tokens

    @property
    def tagged(self) -> str:
        """Its name in keys, with the tag."""
        return self.tag + self.name

    @property
    def seal(self) -> str:
        """The key of its digest."""
        return f"{'state' if self.of_state else 'seal'}:{self.tagged}"

    @property
    def block(self) -> BlockName:
        """Its name for the client."""
        return self.tagged.encode(), int(self.of_state)

    def state(self) -> BlockPlace:
        """Return the place of the state after these tokens."""
        return replace(self, of_state=True)

    def digest(self, bodies: Iterable[Buffer]) -> str:
        """Return the digest: XXH3-64, as 16 hex digits, of the seal's key and the arrays' bytes in canonical order."""
        untagged = replace(self, tag="").seal
        digest = xxhash.xxh3_64(f"{DIGESTS}:{untagged}".encode())
        for body in bodies:
            digest.update(body)
        return digest.hexdigest()


class BlockLayout:
    """The pages at each place, for one model."""

    def __init__(self, spec: ModelCacheSpec, together: int = 0) -> None:
        """Set `together`, the number of blocks in a row of a prompt that have the same of several servers; 0 with one
        server."""
        self.together = together
        self._spec = spec
        self._kinds: dict[tuple[bool, int], _Kind] = {}

    def nbytes(self, *places: BlockPlace) -> int:
        """Return the bytes of the arrays at these places: 0 for the tokens of a model whose layers all carry states."""
        return sum(self._kind(place).nbytes for place in places)

    def shapes(self, place: BlockPlace) -> Shapes:
        """Return the shapes of its arrays."""
        return self._kind(place).shapes

    def block(self, place: BlockPlace) -> BlockShape:
        """Return the shape for the server. The place must have arrays."""
        block = self._kind(place).block
        assert block is not None
        return block

    def keys(self, place: BlockPlace) -> list[bytes]:
        """Return the keys of the first page and of the seal at a place."""
        name, page = place.block
        seal = place.seal.encode()
        if not self.nbytes(place):
            return [seal]
        return [bytes(PageKey(name, 0, 0, page, self.block(place).planes[0].kv_type)), seal]

    def chunks(self, places: Iterable[BlockPlace]) -> Iterator[list[BlockPlace]]:
        """Group neighbours with equal shapes into chunks of at most CHUNK_BYTES bytes."""
        chunk: list[BlockPlace] = []
        for place in places:
            full = (len(chunk) + 1) * self.nbytes(place) > CHUNK_BYTES
            if chunk and (full or self.shapes(place) != self.shapes(chunk[0])):
                yield chunk
                chunk = []
            chunk.append(place)
        if chunk:
            yield chunk

    def _kind(self, place: BlockPlace) -> _Kind:
        key = place.of_state, place.end if place.of_state else place.tokens
        kind = self._kinds.get(key)
        if kind is None:
            spec, (of_state, tokens) = self._spec, key
            shapes = spec.state_shapes(tokens) if of_state else spec.token_shapes(tokens)
            nbytes = sum(kept.nbytes for layer in shapes for kept in layer)
            kind = _Kind(shapes, nbytes, block_shape(shapes) if nbytes else None)
            if len(self._kinds) == MOST_KINDS:
                self._kinds.clear()
            self._kinds[key] = kind
        return kind


class _Kind(NamedTuple):
    shapes: Shapes
    nbytes: int
    block: BlockShape | None


def block_shape(shapes: Shapes) -> BlockShape:
    """Return the shape under which the server stores arrays of these shapes. There must be at least one array.

    If all layers keep arrays of the same shapes, with equal heads and rows in each plane, they are the block's layers,
    and each page can be read by itself. Otherwise the block is one page: the arrays' bytes in canonical order.
    """
    layers = [layer for layer in shapes if layer]
    heads, rows = layers[0][0].heads, layers[0][0].rows
    alike = all(layer == layers[0] for layer in layers)
    if alike and all((kept.heads, kept.rows) == (heads, rows) for kept in layers[0]):
        return BlockShape(len(layers), heads, rows, tuple(kept.plane for kept in layers[0]))
    return BlockShape(1, 1, 1, (Plane(0, DType.UINT8, sum(kept.nbytes for layer in layers for kept in layer)),))


@dataclass(frozen=True, slots=True)
class ContextManifest:
    """Content of an agent's manifest: the tokens of its context, the names of its blocks, and the positions of
    states.
    """

    agent_id: str
    owner: str  # the agent that has the chain of its blocks; another one in a fork
    tokens: tuple[int, ...]
    names: tuple[str, ...]  # the chain hashes of all blocks, including a partial last one
    inner: tuple[int, ...] = ()  # positions within blocks whose state is stored

    @classmethod
    def of(
        cls,
        agent_id: str,
        tokens: Sequence[int],
        spec: ModelCacheSpec,
        states: Iterable[int] = (),
        owner: str | None = None,
    ) -> Self:
        """Return the manifest of an agent's context of `tokens`, with states after the positions `states`. Its blocks
        are in the chain of `owner`, by default the agent."""
        owner = owner or agent_id
        size, count = spec.block_tokens, len(tokens)
        inner = tuple(position for position in states if position % size and position < count)
        return cls(agent_id, owner, tuple(tokens), block_names(tokens, spec, owner), inner)

    def place(self, index: int, spec: ModelCacheSpec, together: int = 0) -> BlockPlace:
        """Return the place of block `index`."""
        start = index * spec.block_tokens
        tokens = min(spec.block_tokens, len(self.tokens) - start)
        return BlockPlace(self.names[index], tokens, start + tokens, tag=tag_of(self.names, index, together))

    def places(self, spec: ModelCacheSpec, together: int = 0) -> list[BlockPlace]:
        """Return the places of all blocks, in order."""
        return [self.place(i, spec, together) for i in range(len(self.names))]

    def inner_places(self, spec: ModelCacheSpec, together: int = 0) -> list[BlockPlace]:
        """Return the places of the states within blocks, in order. The name of a state is the chain hash of the block's
        tokens before it."""
        places, chain = [], spec.chain(self.owner, self.tokens)
        for position in self.inner:
            index, tokens = divmod(position, spec.block_tokens)
            parent = chain.parent(index, self.names[index - 1] if index else None)
            name = chain_hash(spec.fingerprint, parent, self.tokens[position - tokens : position])
            places.append(BlockPlace(name, tokens, position, of_state=True, tag=tag_of(self.names, index, together)))
        return places

    def with_earlier_states(self, before: bytes | None, spec: ModelCacheSpec) -> Self:
        """Return the manifest with the last states of the manifest `before` that its tokens have. The engine that saves
        the context does not have them if it has restored only one state.
        """
        try:
            if not spec.has_state or before is None:
                return self
            other = self.parse(before, self.agent_id, spec)
        except Miss:
            return self
        common, size = min(common_prefix(self.tokens, other.tokens), len(self.tokens) - 1), spec.block_tokens
        found = {position for position in (*other.inner, len(other.tokens)) if position % size and position <= common}
        inner, left = {*self.inner}, EARLIER_BYTES
        for position in sorted(found - inner, reverse=True)[:EARLIER_STATES]:
            left -= spec.state_nbytes(position)
            if left < 0:
                break
            inner.add(position)
        named = {place.name for place in other.inner_places(spec)} | {*other.names}
        places = replace(self, inner=tuple(sorted(inner))).inner_places(spec)
        mine = tuple(place.end for place in places if place.end in self.inner or place.name in named)
        return replace(self, inner=mine)

    def dump(self, spec: ModelCacheSpec, together: int, before: bytes | None = None) -> bytes:
        """Return the bytes to store in place of the manifest `before`: a digest, and JSON. The tokens are last, so that
        a reader of the chain need not read them.
        """
        now, key = unix_ms(), manifest_key(self.agent_id, spec.fingerprint)
        text = json.dumps({
            "format": FORMAT,
            "fingerprint": f"{spec.fingerprint:016x}",
            "model": spec.model_id[:MODEL_SHOWN],
            "block_tokens": spec.block_tokens,
            "count": len(self.tokens),
            "created": _created(before, key) or now,
            "saved": now,
            "by": WRITER,
            "together": together,
            "owner": self.owner,
            "share": spec.sharing.share,
            "chain": self.names,
            "states": [[place.end, place.name] for place in self.inner_places(spec)],
            "tokens": self.tokens,
        })  # fmt: skip
        return sealed(text.encode(), key)

    @classmethod
    def parse(cls, raw: bytes, agent_id: str, spec: ModelCacheSpec) -> Self:
        """Parse the output of `dump`. Raises Miss for the manifest of another agent or model, a damaged one, and one
        whose blocks have names by another rule of sharing.
        """
        stored = _content(raw, manifest_key(agent_id, spec.fingerprint))
        try:
            states = list(token_ids([position for position, _ in stored.get("states", ())]))
            owner = stored.get("owner", agent_id)
            if not isinstance(owner, str) or root_of(owner) != root_of(agent_id):
                raise Miss("manifest")
            found = cls.of(agent_id, token_ids(stored["tokens"]), spec, states, owner)
            if list(found.names) != stored["chain"] or list(found.inner) != states:
                share = spec.sharing.share
                raise Miss("manifest" if stored.get("share", share) == share else "share")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise Miss("manifest") from error
        return found


def manifest_key(agent_id: str, fingerprint: int) -> str:
    """Return the key of an agent's manifest for a model."""
    return f"{older_key(agent_id)}:{fingerprint:016x}"


def older_key(agent_id: str) -> str:
    """Return the key of an agent's manifest in earlier versions."""
    return f"manifest:{agent_id}"


def deletion_key(agent_id: str) -> str:
    """Return the key of the mark of a deleted agent, because of which no engine writes an earlier context of it."""
    return f"refs:deleted:{agent_id}"


def named_in(raw: bytes | None, key: str, together: int = 0) -> list[tuple[str, str]]:
    """Return the tags and names of the blocks, and of the states within them, that a manifest of any model names; none
    if it is damaged. `together` is as for BlockLayout."""
    if raw is None:
        return []
    try:
        stored = _content(raw, key)
        chain, states, size = stored["chain"], stored.get("states", ()), stored.get("block_tokens", 1)
        named = [*enumerate(chain), *((position // size, name) for position, name in states)]
        return [(tag_of(chain, index, together), name) for index, name in sorted(named) if _NAME.match(name)]
    except (Miss, LookupError, TypeError, ValueError, ArithmeticError):
        return []


def names_in(raw: bytes | None, key: str) -> set[str]:
    """Return the names of the blocks and states that a manifest of any model names."""
    return {name for _, name in named_in(raw, key)}


def _created(raw: bytes | None, key: str) -> int:
    """Return the time at which the agent was first stored, in unix milliseconds; 0 if the manifest lacks it."""
    try:
        created = _content(raw, key).get("created", 0) if raw is not None else 0
        return created if type(created) is int else 0
    except (Miss, AttributeError):
        return 0


def renamed_manifest(raw: bytes | None, key: str, new_key: str) -> bytes | None:
    """Return a manifest with the digest for `new_key`; None if it is missing, damaged or empty."""
    return sealed(raw.partition(b" ")[2], new_key) if raw is not None and named_in(raw, key) else None


def digest_of(manifest: bytes) -> bytes:
    """Return the digest at a manifest's beginning."""
    return manifest.partition(b" ")[0]


def sealed(text: bytes, key: str) -> bytes:
    """Return the value to store under `key`: a digest of the key and the text, a space, and the text.

    `unsealed` checks the digest with the requested key. So a wrong bit in the text, or in a key on its way to the
    server, is a miss, and never another agent's context.
    """
    return b"%b %b" % (_digest(text, key), text)


def unsealed(raw: bytes, key: str) -> bytes:
    """Return the text from the output of `sealed`. Raises Miss for a wrong digest."""
    digest, _, text = raw.partition(b" ")
    if digest != _digest(text, key):
        raise Miss("manifest")
    return text


def _content(raw: bytes, key: str) -> Any:
    """Return the content of a manifest. Raises Miss."""
    older = key.count(":") == 1
    text = raw if older else unsealed(raw, key)
    try:
        stored = bounded.parse(text, containers=CONTAINERS, strings=STRINGS, values=VALUES)
        if stored["format"] != (OLDER if older else FORMAT):
            raise Miss("manifest")
    except (ValueError, KeyError, TypeError) as error:
        raise Miss("manifest") from error
    return stored


def _digest(text: bytes, key: str) -> bytes:
    digest = xxhash.xxh3_64(key.encode())
    digest.update(text)
    return digest.hexdigest().encode()
