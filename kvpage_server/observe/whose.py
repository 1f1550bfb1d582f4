"""Whose memory it is: agents and their contexts, the beginnings that they share, and requests that belong to nobody.

>>> holdings = ask(store, holdings_of_store())
>>> for agent in holdings.agents:
...     print(agent.agent_id, agent.model, agent.tokens, agent.bytes)

Chain hashes name blocks by all that precedes them, so agents whose contexts begin alike name the same blocks. The work
is bounded: so many manifests, blocks and requests are looked at, and `cut` says when there are more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpage_server.observe import manifests
from kvpage_server.observe.asking import AT_ONCE, Command, Reading, named, refused
from kvpage_server.observe.manifests import Manifest

SCAN_COUNT = 2000  # places of the store that are looked at in one go
MOST_SCANS = 2000
MOST_READ = 64 << 20  # bytes of manifests that are read whole
MOST_PREFIXES = 100
MOST_UNREADABLE = 10_000  # manifests, beside the agents that are looked for

# By key: a manifest's digest, and what it says; None where that makes no sense.
Known = MutableMapping[bytes, tuple[bytes, Manifest | None]]


@dataclass(frozen=True, slots=True)
class LookLimits:
    """How much is looked at, of each."""

    agents: int = 2000
    blocks: int = 10_000
    requests: int = 1000


@dataclass(frozen=True, slots=True)
class ContextBlock:
    """A block of contexts: all pages of the same tokens."""

    name: bytes  # the request it lies under
    tokens: int
    bytes: int = 0  # of its pages; 0 when it is not there
    memory: int = 0  # what it occupies in memory; 0 when it lies on disk alone
    pages: int = 0
    complete: bool = False

    @property
    def there(self) -> bool:
        """Whether a load would find it."""
        return self.complete


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent's context under one model."""

    manifest: Manifest
    blocks: tuple[ContextBlock, ...]
    bytes: int  # of all its blocks that are there
    own_bytes: int  # of those that no other agent has
    memory: int  # bytes that its blocks occupy in memory
    idle: int | None  # seconds since its manifest was used; None when that is not known

    @property
    def agent_id(self) -> str:
        """As the engine calls it: NAME, or NAME@TENANT."""
        return self.manifest.agent_id

    @property
    def tenant(self) -> str:
        """Whose agent it is; empty where the engine knows no tenants."""
        return self.agent_id.rpartition("@")[2] if "@" in self.agent_id else ""

    @property
    def model(self) -> str:
        """The name of its model, or else the fingerprint."""
        return self.manifest.model or self.manifest.fingerprint

    @property
    def tokens(self) -> int:
        """Of the whole context."""
        return self.manifest.tokens

    @property
    def found(self) -> int:
        """Tokens that a load would find: those before the first block that is missing."""
        tokens = 0
        for block in self.blocks:
            if not block.there:
                break
            tokens += block.tokens
        return tokens

    @property
    def missing(self) -> int:
        """Blocks that are not there whole."""
        return sum(not block.there for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A beginning that several agents have in common. Part of it may be shared by more agents: that is another one."""

    name: bytes  # of its last block, which stands for all of it
    tokens: int
    blocks: int
    bytes: int
    agents: tuple[str, ...]

    @property
    def saved(self) -> int:
        """Bytes that would be stored besides, if agents shared nothing."""
        return self.bytes * (len(self.agents) - 1)


@dataclass(frozen=True, slots=True)
class OtherRequest:
    """A request that no agent's manifest names: somebody else's pages, or blocks that were left behind."""

    req_id: bytes
    blocks: int
    pages: int
    bytes: int
    memory: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """All of it, what takes most first."""

    agents: tuple[Agent, ...] = ()
    prefixes: tuple[SharedPrefix, ...] = ()
    requests: tuple[OtherRequest, ...] = ()
    unreadable: tuple[bytes, ...] = ()  # manifests' keys
    cut: tuple[str, ...] = ()  # what there is more of than was looked at: "agents", "blocks", "requests"
    owners: Mapping[bytes, tuple[str, ...]] = field(default_factory=dict)  # who has which block

    @property
    def bytes(self) -> int:
        """Of all blocks of agents, each counted once."""
        return sum({block.name: block.bytes for agent in self.agents for block in agent.blocks}.values())


@dataclass(slots=True)
class _Looked:
    cut: set[str] = field(default_factory=set)
    unreadable: list[bytes] = field(default_factory=list)


def holdings_of_store(limits: LookLimits = LookLimits(), known: Known | None = None) -> Reading[Holdings]:
    """Look through the store. What is in `known` and has not changed is not read again; it is brought up to date."""
    looked = _Looked()
    keys = yield from _keys(b"manifest:*", b"string", limits.agents + MOST_UNREADABLE, "agents", looked)
    return (yield from _holdings(keys, limits, {} if known is None else known, looked))


def holdings_of_agent(agent_id: bytes, limits: LookLimits = LookLimits()) -> Reading[Holdings]:
    """What there is of one agent, under every model; who shares its blocks is not looked for."""
    looked, key = _Looked(), manifests.PREFIX + agent_id
    pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", key) + b":*"
    found = yield from _keys(pattern, b"string", limits.agents + MOST_UNREADABLE, "agents", looked)
    (older,) = yield [[b"EXISTS", key]]
    keys = [key, *found] if older == 1 else found
    return (yield from _holdings(keys, LookLimits(limits.agents, limits.blocks, 0), {}, looked))


def _holdings(keys: Sequence[bytes], limits: LookLimits, known: Known, looked: _Looked) -> Reading[Holdings]:
    found, idle = yield from _manifests(keys, limits.agents, known, looked)
    blocks = yield from _blocks(found, limits.blocks, looked)
    requests: list[OtherRequest] = []
    if limits.requests:
        requests = yield from _requests(blocks, limits.requests, looked)
    owners = _owners(found)
    agents = [_agent(manifest, blocks, owners, idle.get(manifest.key)) for manifest in found]
    agents.sort(key=lambda agent: (-agent.bytes, agent.agent_id))
    requests.sort(key=lambda request: (-request.bytes, request.req_id))
    return Holdings(
        tuple(agents),
        tuple(_prefixes(found, blocks, owners)),
        tuple(requests),
        tuple(looked.unreadable),
        tuple(sorted(looked.cut)),
        owners,
    )


def _keys(pattern: bytes, kind: bytes, most: int, what: str, looked: _Looked) -> Reading[list[bytes]]:
    """The keys of a kind that match, sorted, so many at the most."""
    cursor, found = b"0", set[bytes]()
    for _ in range(MOST_SCANS):
        (answer,) = yield [[b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCAN_COUNT, b"TYPE", kind]]
        if refused(answer):
            looked.cut.add(what)
            break
        cursor, some = answer
        found.update(some)
        if cursor == b"0" or len(found) > most:
            break
    if cursor != b"0" or len(found) > most:
        looked.cut.add(what)
    return sorted(found)[:most]


def _manifests(
    keys: Sequence[bytes], most: int, known: Known, looked: _Looked
) -> Reading[tuple[list[Manifest], dict[bytes, int]]]:
    """The manifests at these keys that can be read, so many at the most; for how many seconds each was not used. Has in
    `known` what lies at these keys and nothing else."""
    for key in known.keys() - set(keys):
        del known[key]
    found: list[Manifest] = []
    idle: dict[bytes, int] = {}
    left = MOST_READ
    for start in range(0, len(keys), AT_ONCE):
        if len(found) >= most:
            looked.cut.add("agents")
            break
        some = keys[start : start + AT_ONCE]
        unused, left = yield from _update(known, some, left, looked)
        idle |= unused
        for key in some:
            _, manifest = known.get(key, (b"", None))
            if manifest is not None:
                found.append(manifest)
            elif key in known:
                looked.unreadable.append(key)
    if len(found) > most:
        looked.cut.add("agents")
    return found[:most], idle


def _update(known: Known, keys: Sequence[bytes], left: int, looked: _Looked) -> Reading[tuple[dict[bytes, int], int]]:
    """Have in `known` what lies at these keys, with `left` bytes that may be read whole. For how many seconds each was
    not used, and how many bytes are left."""
    idle = yield [[b"OBJECT", b"IDLETIME", key] for key in keys]
    digests = yield [[b"GETRANGE", key, 0, manifests.DIGEST_BYTES - 1] for key in keys]
    changed = [
        (key, digest)
        for key, digest in zip(keys, digests, strict=True)
        if isinstance(digest, bytes) and (key not in known or known[key][0] != digest)
    ]
    for key, digest in zip(keys, digests, strict=True):
        if not isinstance(digest, bytes):
            known.pop(key, None)
    heads = yield [[b"GETRANGE", key, 0, manifests.HEAD_BYTES - 1] for key, _ in changed]
    for (key, digest), head in zip(changed, heads, strict=True):
        manifest = manifests.parse(key, head) if isinstance(head, bytes) else None
        if manifest is None and isinstance(head, bytes) and len(head) == manifests.HEAD_BYTES:
            (size,) = yield [[b"STRLEN", key]]
            if not isinstance(size, int) or size > left:
                looked.cut.add("agents")
                continue
            left -= size
            (whole,) = yield [[b"GET", key]]
            manifest = manifests.parse(key, whole) if isinstance(whole, bytes) else None
        known[key] = digest, manifest
    return {key: seconds for key, seconds in zip(keys, idle, strict=True) if isinstance(seconds, int)}, left


def _blocks(found: Iterable[Manifest], most: int, looked: _Looked) -> Reading[dict[bytes, ContextBlock]]:
    """The blocks that manifests name, the first of each before the later ones, so many at the most."""
    sizes = {name: manifest.tokens_in(i) for manifest in found for i, name in enumerate(manifest.blocks)}
    if len(sizes) > most:
        looked.cut.add("blocks")
    names = list(sizes)[:most]
    answers = yield [[b"KVPAGEINDEX", name, b"WITHSIZES"] for name in names]
    return {name: _block(name, sizes[name], answer) for name, answer in zip(names, answers, strict=True)}


def _block(name: bytes, tokens: int, answer: Any) -> ContextBlock:
    """What KVPAGEINDEX says of it: page 0 are the tokens, page 1 is the state after them."""
    parts = [] if refused(answer) else [named(part) for part in answer]
    return ContextBlock(
        name,
        tokens,
        sum(part["bytes"] for part in parts),
        sum(part["memory"] for part in parts),
        sum(part["pages"] for part in parts),
        bool(parts) and all(part["complete"] for part in parts),
    )


def _requests(blocks: Mapping[bytes, ContextBlock], most: int, looked: _Looked) -> Reading[list[OtherRequest]]:
    """Requests that are none of these blocks."""
    keys = yield from _keys(b"kv:*", b"set", most + len(blocks), "requests", looked)
    names = [name for key in keys if (name := key.removeprefix(b"kv:").removesuffix(b":index")) not in blocks]
    if len(names) > most:
        looked.cut.add("requests")
    commands: list[Command] = [[b"KVPAGEINDEX", name, b"WITHSIZES"] for name in names[:most]]
    answers = yield commands
    found = []
    for name, answer in zip(names, answers, strict=False):
        parts = [] if refused(answer) else [named(part) for part in answer]
        if parts:
            pages, size, memory = (sum(part[what] for part in parts) for what in ("pages", "bytes", "memory"))
            found.append(OtherRequest(name, len(parts), pages, size, memory))
    return found


def _owners(found: Iterable[Manifest]) -> dict[bytes, tuple[str, ...]]:
    owners: dict[bytes, dict[str, None]] = {}
    for manifest in found:
        for name in manifest.blocks:
            owners.setdefault(name, {})[manifest.agent_id] = None
    return {name: tuple(agents) for name, agents in owners.items()}


def _agent(
    manifest: Manifest, blocks: Mapping[bytes, ContextBlock], owners: Mapping[bytes, Sequence[str]], idle: int | None
) -> Agent:
    its = tuple(blocks.get(name, ContextBlock(name, manifest.tokens_in(i))) for i, name in enumerate(manifest.blocks))
    return Agent(
        manifest,
        its,
        sum(block.bytes for block in its),
        sum(block.bytes for block in its if len(owners[block.name]) == 1),
        sum(block.memory for block in its),
        idle,
    )


def _prefixes(
    found: Sequence[Manifest], blocks: Mapping[bytes, ContextBlock], owners: Mapping[bytes, tuple[str, ...]]
) -> list[SharedPrefix]:
    """What agents have in common: it ends at a block after which fewer of them go on together."""
    longest: Counter[bytes] = Counter()  # by block: how many agents have the next one that most of them have
    for manifest in found:
        for name, after in zip(manifest.blocks, manifest.blocks[1:], strict=False):
            longest[name] = max(longest[name], len(owners[after]))
    shared: dict[bytes, SharedPrefix] = {}
    for manifest in found:
        for prefix in _ends(manifest, blocks, owners, longest):
            shared[prefix.name] = prefix
    return sorted(shared.values(), key=lambda prefix: (-prefix.saved, -prefix.tokens))[:MOST_PREFIXES]


def _ends(
    manifest: Manifest,
    blocks: Mapping[bytes, ContextBlock],
    owners: Mapping[bytes, tuple[str, ...]],
    longest: Mapping[bytes, int],
) -> Iterator[SharedPrefix]:
    tokens = size = 0
    for i, name in enumerate(manifest.blocks):
        tokens += manifest.tokens_in(i)
        size += blocks[name].bytes if name in blocks else 0
        if len(owners[name]) > max(longest[name], 1):
            yield SharedPrefix(name, tokens, i + 1, size, owners[name])
