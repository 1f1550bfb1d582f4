"""Memory by agent, from the manifests that engines store (docs/architecture.md, "How a context travels").

A manifest is a digest and a JSON object, whose last field is the list of tokens. Earlier versions have no model and no
times, and their list of tokens is before the names of the blocks.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any, NamedTuple

from kvpage_server.observe.asking import Command, Reading, parts_of, refused, text
from kvpage_server.page import tag_of
from kvpage_server.system.text import name_as_text

PREFIX = b"manifest:"
HEAD_BYTES = 1 << 16  # first bytes of a manifest that are read: all but the tokens, for a context of 450,000 tokens
MOST_BYTES = 1 << 19  # most bytes of a manifest that are read: enough for a context of 3.6 million tokens
MOST_KEY = 512  # bytes of a manifest's key; keys of engines are shorter, because names of agents have 128 letters
MOST_LETTERS = 128  # characters of a model's name, and of the name of the process that has saved the agent
_MOST_NAME = 256  # bytes of a block's name
DIGEST_BYTES = 16
_TOKENS = b', "tokens": ['  # the beginning of the last field
_USUAL_BLOCK = 256  # tokens of a block
_MOST = 1 << 53  # every count is less, because JSON readers that use doubles are exact below it
_LAST_MOMENT = 253_370_764_800_000  # unix milliseconds: the start of the year 9999, the last one of Python's datetime


@dataclass(frozen=True, slots=True)
class Manifest:
    """An agent's context for one model."""

    key: bytes  # the key of the manifest
    agent_id: str
    fingerprint: str  # the model's fingerprint; empty in manifests of the earliest versions
    model: str  # the model's name; empty if unknown
    tokens: int  # length of the context
    block_tokens: int  # tokens of each block but the last
    blocks: tuple[bytes, ...]  # the blocks' request ids, in order
    created_ms: int  # time of the first save, in unix milliseconds; 0 if unknown
    saved_ms: int  # time of the last save
    by: str  # the machine and process that has saved it last; empty if unknown

    def tokens_in(self, index: int) -> int:
        """Return the number of tokens of the block with this index."""
        return min(self.block_tokens, self.tokens - index * self.block_tokens)


def parse(key: bytes, raw: bytes) -> Manifest | None:
    """Parse the manifest at a key. `raw` is its whole value, or the first HEAD_BYTES or MOST_BYTES bytes of it.

    Return None if it is damaged, or if these bytes are not enough. The names of the model and of the process that has
    saved it are cut to MOST_LETTERS.
    """
    agent, _, fingerprint = name_as_text(key.removeprefix(PREFIX)).partition(":")
    try:
        received = _parsed(raw)
        names, together = [_text(name) for name in _list(received["chain"])], _count(received.get("together", 0))
        blocks = tuple((tag_of(names, i, together) + name).encode() for i, name in enumerate(names))
        if any(len(name) > _MOST_NAME for name in blocks):
            raise ValueError("a block's name is too long")
        tokens = _count(received["count"]) if "count" in received else len(_list(received["tokens"]))
        block_tokens = _count(received.get("block_tokens", 0)) or _block_tokens(tokens, len(blocks))
        if not (len(blocks) - 1) * block_tokens < tokens <= len(blocks) * block_tokens and (tokens or blocks):
            raise ValueError("the blocks are too few or too many for the tokens")
        return Manifest(
            key,
            agent,
            fingerprint,
            _text(received.get("model", ""))[:MOST_LETTERS],
            tokens,
            block_tokens,
            blocks,
            _moment(received.get("created", 0)),
            _moment(received.get("saved", 0)),
            _text(received.get("by", ""))[:MOST_LETTERS],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _count(received: object) -> int:
    if type(received) is not int or not 0 <= received < _MOST:
        raise ValueError("no count")
    return received


def _moment(received: object) -> int:
    if type(received) is not int or not 0 <= received < _LAST_MOMENT:
        raise ValueError("no moment in unix milliseconds")
    return received


def _text(received: object) -> str:
    if not isinstance(received, str):
        raise ValueError("no text")
    received.encode()  # raises if a half of a surrogate pair stands alone
    return received


def _list(received: object) -> list[object]:
    if not isinstance(received, list):
        raise ValueError("no list")
    return received


def _parsed(raw: bytes) -> Any:
    text = raw[raw.index(b"{") :]
    end = text.find(_TOKENS)
    return json.loads(text[:end] + b"}" if end >= 0 and b'"count"' in text[:end] else text)


def _block_tokens(tokens: int, blocks: int) -> int:
    """Return the tokens per block of a manifest that does not contain this number.

    It is the usual number if that fits the numbers of tokens and blocks, otherwise the smallest one that fits.
    """
    usual = _USUAL_BLOCK
    return usual if (blocks - 1) * usual < tokens <= blocks * usual else -(-tokens // max(blocks, 1))


# -- Memory by agent: agents and their contexts, shared prefixes, and other requests -----------------------------------
#
# >>> holdings = ask(store, holdings_of_store())
# >>> for agent in holdings.agents:
# ...     print(agent.agent_id, agent.model, agent.tokens, agent.bytes)
#
# A chain hash names a block by its tokens and all tokens before them. So agents whose contexts begin with the
# same tokens have the same first blocks. The work is bounded: LookLimits limits the number of keys, and `Holdings.cut`
# names the kinds that exceed it.

SCAN_COUNT = 250  # the COUNT of a SCAN, during which no other client has a turn
MOST_SCANS = 8000  # SCANs of the first read of the store
TURNS = 8  # SCANs for the newest keys, and as many for the next ones, in each later read of the store
REFRESHED = 100  # known requests that each read of the store queries again
MOST_READ = 16 << 20  # bytes that a read of the store gets of manifests for which HEAD_BYTES are too few
MOST_NAMED = 500_000  # blocks that all manifests together name
_MANIFESTS_PER_STEP = 64  # manifests of which HEAD_BYTES each are read together
MOST_PREFIXES = 100
LABEL = b"label:"
MOST_LABEL = 240  # bytes of a label
_CHAIN_HASH = re.compile(rb"(^|\})[0-9a-f]{32}\Z")  # on several servers, a tag precedes it
MOST_UNREADABLE = 10_000  # unreadable manifests that are read, in addition to the agents


@dataclass(frozen=True, slots=True)
class LookLimits:
    """The most agents, blocks and other requests that one read of the store returns."""

    agents: int = 2000
    blocks: int = 10_000
    requests: int = 1000


class BlockProtection(NamedTuple):
    """The protection of a block from eviction: whether it is pinned, the end of its lifetime in unix milliseconds, 0
    for none, and the tenant for which it is kept.
    """

    pinned: bool
    until: int
    tenant: str


UNPROTECTED = BlockProtection(False, 0, "")


def protection_of(received: Mapping[str, Any]) -> BlockProtection:
    """Return the protection in a reply to KVPAGEINDEX or KVPAGESTAT."""
    return BlockProtection(
        bool(received.get("pinned")), int(received.get("kept_until_ms") or 0), text(received.get("kept_by") or b"")
    )


@dataclass(frozen=True, slots=True)
class ContextBlock:
    """A block of one or more contexts: all pages of the same tokens."""

    name: bytes  # its request id
    tokens: int
    bytes: int = 0  # bytes of its pages; 0 if it is missing
    memory: int = 0  # bytes that it takes in memory; 0 if it is on disk only
    pages: int = 0
    complete: bool = False  # a load finds only complete blocks
    protection: BlockProtection = UNPROTECTED


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent's context for one model."""

    manifest: Manifest
    blocks: tuple[ContextBlock, ...]
    bytes: int  # bytes of its stored blocks
    own_bytes: int  # bytes of the blocks that no other agent has
    memory: int  # bytes that its blocks take in memory
    idle: int | None  # seconds since its manifest was used; None if unknown

    @property
    def agent_id(self) -> str:
        """The name of the agent: NAME, or NAME@TENANT."""
        return self.manifest.agent_id

    @property
    def tenant(self) -> str:
        """The agent's tenant; empty if the engine has no tenants."""
        return self.agent_id.rpartition("@")[2] if "@" in self.agent_id else ""

    @property
    def model(self) -> str:
        """The name of its model, or the fingerprint if the name is unknown."""
        return self.manifest.model or self.manifest.fingerprint

    @property
    def tokens(self) -> int:
        """The length of the context in tokens."""
        return self.manifest.tokens

    @property
    def found(self) -> int:
        """Tokens that a load would find: the tokens of the blocks before the first missing one."""
        return sum(block.tokens for block in takewhile(lambda block: block.complete, self.blocks))

    @property
    def protection(self) -> BlockProtection:
        """The protection of the first block."""
        return self.blocks[0].protection if self.blocks else UNPROTECTED

    @property
    def missing(self) -> int:
        """Number of blocks that are missing or incomplete."""
        return sum(not block.complete for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that the contexts of several agents have in common. More agents may have a shorter prefix in common."""

    name: bytes  # request id of its last block, which identifies the prefix
    tokens: int
    blocks: int
    bytes: int
    agents: tuple[str, ...]

    @property
    def saved(self) -> int:
        """Bytes that sharing saves: one copy for each agent but the first."""
        return self.bytes * (len(self.agents) - 1)


@dataclass(frozen=True, slots=True)
class OtherRequest:
    """A request id that no manifest names: pages of another client, or blocks of a deleted or unnamed context.

    Blocks of contexts without a name that have the same label are merged into one object, with the request id of one of
    them. `bytes` are those of pages, `memory` are bytes in memory.
    """

    req_id: bytes
    blocks: int
    pages: int
    bytes: int
    memory: int
    label: str = ""  # label that the engine has stored for a context without a name: its first words, or a hash
    protection: BlockProtection = UNPROTECTED  # of its first block


class KnownManifest(NamedTuple):
    """A manifest as an earlier read of the store has parsed it."""

    digest: bytes
    manifest: Manifest | None  # None if it is damaged
    at: float  # time just before it was read, in monotonic seconds

    def is_unchanged(self, idle: Any) -> bool:
        """Return whether the manifest was certainly not written since it was read.

        `idle` is the reply to OBJECT IDLETIME, in whole seconds.
        """
        return isinstance(idle, int) and idle > time.monotonic() - self.at + 2


@dataclass(slots=True)
class Known:
    """Cache of a store's manifests and requests, with which the next read needs few commands."""

    manifests: dict[bytes, KnownManifest] = field(default_factory=dict)
    requests: dict[bytes, OtherRequest] = field(default_factory=dict)  # the most recently queried ones are last
    cursor: bytes = b""  # position of the scan for manifests; empty until the first read has scanned all keys


@dataclass(frozen=True, slots=True)
class Holdings:
    """The result of a read of a store. Agents and requests are sorted by their bytes, the largest first."""

    agents: tuple[Agent, ...] = ()
    prefixes: tuple[SharedPrefix, ...] = ()
    requests: tuple[OtherRequest, ...] = ()
    unreadable: tuple[bytes, ...] = ()  # keys of manifests that could not be parsed
    cut: tuple[str, ...] = ()  # the kinds of which not all were read: "agents", "blocks", "requests"
    # The agents that have a block, by its name.
    owners: Mapping[bytes, tuple[str, ...]] = field(default_factory=dict)
    refused: str = ""  # the error if the user may not list keys

    @property
    def bytes(self) -> int:
        """Bytes of all blocks of agents. A shared block counts once."""
        return sum({block.name: block.bytes for agent in self.agents for block in agent.blocks}.values())


@dataclass(slots=True)
class _ReadState:
    cut: set[str] = field(default_factory=set)
    unreadable: list[bytes] = field(default_factory=list)
    refused: str = ""


def holdings_of_store(limits: LookLimits = LookLimits(), known: Known | None = None) -> Reading[Holdings]:
    """Return the agents, shared prefixes and other requests of a store, within `limits`.

    `known` has the results of earlier reads, and is updated. With it, the scan for manifests covers only the newest
    keys and some of the others, unused manifests are not read again, and only REFRESHED of the known requests are
    queried again.
    """
    state, known = _ReadState(), Known() if known is None else known
    keys = yield from _manifest_keys(limits.agents + MOST_UNREADABLE, known, state)
    return (yield from _holdings(keys, limits, known, state))


def _manifest_keys(most: int, known: Known, state: _ReadState) -> Reading[list[bytes]]:
    """Return the keys of at most `most` manifests, some of which may have been deleted since an earlier read."""
    if not known.cursor:
        keys = yield from _keys(b"manifest:*", b"string", most, "agents", state)
        known.cursor = b"" if state.cut else b"0"
        return keys
    # A scan returns the newest keys first.
    _, newest = yield from _scan(b"manifest:*", b"string", b"0", TURNS, most, state)
    cursor, others = yield from _scan(b"manifest:*", b"string", known.cursor, TURNS, most, state)
    known.cursor = cursor
    keys = sorted({*known.manifests, *newest, *others})
    if len(keys) > most:
        state.cut.add("agents")
    return keys[:most]


def holdings_of_agent(agent_id: bytes) -> Reading[Holdings]:
    """Return the contexts of one agent, one for each model, without other agents that share its blocks."""
    state, key, limits = _ReadState(), PREFIX + agent_id, LookLimits(requests=0)
    pattern = exact_pattern(key) + b":*"
    found = yield from _keys(pattern, b"string", limits.agents + MOST_UNREADABLE, "agents", state)
    (older,) = yield [[b"EXISTS", key]]
    keys = [key, *found] if older == 1 else found
    return (yield from _holdings(keys, limits, Known(), state))


def exact_pattern(name: bytes) -> bytes:
    """Return a glob pattern that matches only this name."""
    return re.sub(rb"([*?\[\]\\])", rb"\\\1", name)


def _holdings(keys: Sequence[bytes], limits: LookLimits, known: Known, state: _ReadState) -> Reading[Holdings]:
    found, idle = yield from _manifests(keys, limits.agents, known.manifests, state)
    blocks = yield from _blocks(found, limits.blocks, state)
    requests = (yield from _requests(blocks, limits.requests, known.requests, state)) if limits.requests else []
    owners = _owners(found)
    agents = [_agent(manifest, blocks, owners, idle.get(manifest.key)) for manifest in found]
    agents.sort(key=lambda agent: (-agent.bytes, agent.agent_id))
    requests.sort(key=lambda request: (-request.bytes, request.req_id))
    return Holdings(
        tuple(agents),
        tuple(_prefixes(found, blocks, owners)),
        tuple(requests),
        tuple(state.unreadable),
        tuple(sorted(state.cut)),
        owners,
        state.refused,
    )


def _keys(pattern: bytes, kind: bytes, most: int, what: str, state: _ReadState) -> Reading[list[bytes]]:
    """Return at most `most` keys of the Redis type `kind` that match a pattern, sorted.

    Add `what` to `state.cut` if there are more.
    """
    cursor, found = yield from _scan(pattern, kind, b"0", MOST_SCANS, most, state)
    if cursor != b"0" or len(found) > most:
        state.cut.add(what)
    return sorted(found)[:most]


def _scan(
    pattern: bytes, kind: bytes, cursor: bytes, turns: int, most: int, state: _ReadState
) -> Reading[tuple[bytes, set[bytes]]]:
    """Scan from a cursor with at most `turns` calls, until more than `most` keys were found.

    Return the next cursor and the keys of the Redis type `kind` that match. The cursor is 0 at the end, and empty if
    the user may not scan.
    """
    found = set[bytes]()
    for _ in range(turns):
        bounds: Command = [b"COUNT", SCAN_COUNT, b"MAXLEN", MOST_KEY]
        (answer,) = yield [[b"SCAN", cursor, b"MATCH", pattern, *bounds, b"TYPE", kind]]
        if refused(answer):
            state.refused = str(answer)
            return b"", found
        cursor, some = answer
        found.update(some)
        if cursor == b"0" or len(found) > most:
            break
    return cursor, found


def _manifests(
    keys: Sequence[bytes], most: int, known: dict[bytes, KnownManifest], state: _ReadState
) -> Reading[tuple[list[Manifest], dict[bytes, int]]]:
    """Return at most `most` readable manifests at these keys, and idle seconds by key. Update `known`.

    Keys that are not in `keys` are removed from `known`.
    """
    for key in known.keys() - set(keys):
        del known[key]
    found: list[Manifest] = []
    idle: dict[bytes, int] = {}
    left, names = MOST_READ, 0
    for start in range(0, len(keys), _MANIFESTS_PER_STEP):
        if len(found) >= most or names >= MOST_NAMED:
            state.cut.add("agents")
            break
        some = keys[start : start + _MANIFESTS_PER_STEP]
        unused, left = yield from _update(known, some, left, state)
        idle |= unused
        for key in some:
            if (one := known.get(key)) is None:
                continue
            if one.manifest is not None:
                found.append(one.manifest)
                names += len(one.manifest.blocks)
            else:
                state.unreadable.append(key)
    if len(found) > most:
        state.cut.add("agents")
    return found[:most], idle


def _update(
    known: dict[bytes, KnownManifest], keys: Sequence[bytes], left: int, state: _ReadState
) -> Reading[tuple[dict[bytes, int], int]]:
    """Read changed manifests at these keys into `known`. Return the keys' idle seconds, and the remaining bytes.

    `left` is the number of bytes that may still be read of manifests for which HEAD_BYTES are too few.
    """
    answers = yield [[b"OBJECT", b"IDLETIME", key] for key in keys]
    idle = dict(zip(keys, answers, strict=True))
    used = [key for key in keys if key not in known or not known[key].is_unchanged(idle[key])]
    now = time.monotonic()
    digests = yield [[b"GETRANGE", key, 0, DIGEST_BYTES - 1] for key in used]
    changed = []
    for key, digest in zip(used, digests, strict=True):
        if not isinstance(digest, bytes) or idle[key] is None:  # it was deleted
            known.pop(key, None)
        elif key in known and known[key].digest == digest:
            known[key] = known[key]._replace(at=now)
        else:
            changed.append((key, digest))
    heads = yield [[b"GETRANGE", key, 0, HEAD_BYTES - 1] for key, _ in changed]
    for (key, digest), head in zip(changed, heads, strict=True):
        manifest = parse(key, head) if isinstance(head, bytes) else None
        if manifest is None and isinstance(head, bytes) and len(head) == HEAD_BYTES:
            if left < MOST_BYTES:
                state.cut.add("agents")
                continue
            (more,) = yield [[b"GETRANGE", key, 0, MOST_BYTES - 1]]
            manifest = parse(key, more) if isinstance(more, bytes) else None
            left -= len(more) if isinstance(more, bytes) else 0
        known[key] = KnownManifest(digest, manifest, now)
    return {key: seconds for key, seconds in idle.items() if isinstance(seconds, int)}, left


def _blocks(found: Iterable[Manifest], most: int, state: _ReadState) -> Reading[dict[bytes, ContextBlock]]:
    """Return at most `most` of the blocks that manifests name, with their sizes, by name."""
    sizes = {name: manifest.tokens_in(i) for manifest in found for i, name in enumerate(manifest.blocks)}
    if len(sizes) > most:
        state.cut.add("blocks")
    names = list(sizes)[:most]
    answers = yield [[b"KVPAGEINDEX", name, b"TOTAL"] for name in names]
    return {name: _block(name, sizes[name], answer) for name, answer in zip(names, answers, strict=True)}


def _block(name: bytes, tokens: int, answer: Any) -> ContextBlock:
    """Return a block from the reply to KVPAGEINDEX with TOTAL. All its figures are 0 if the block is missing."""
    for total in parts_of(answer):
        sizes = total["bytes"], total["memory"], total["pages"]
        return ContextBlock(name, tokens, *sizes, bool(total["complete"]), protection_of(total))
    return ContextBlock(name, tokens)


def _requests(
    blocks: Mapping[bytes, ContextBlock], most: int, known: dict[bytes, OtherRequest], state: _ReadState
) -> Reading[list[OtherRequest]]:
    """Return the requests with pages that are not among `blocks`, at most `most` of them. Update `known`."""
    keys = yield from _keys(b"kv:*", b"set", most + len(blocks), "requests", state)
    names = [name for key in keys if (name := key.removeprefix(b"kv:").removesuffix(b":index")) not in blocks]
    if len(names) > most:
        state.cut.add("requests")
    for name in known.keys() - set(names[:most]):
        del known[name]
    asked = [*islice(known, REFRESHED), *(name for name in names[:most] if name not in known)]
    answers = yield [[b"KVPAGEINDEX", name, b"TOTAL"] for name in asked]
    labels = yield from _labels(asked, most, state)
    for name, answer in zip(asked, answers, strict=True):
        known.pop(name, None)
        for total in parts_of(answer):
            sizes = (total[what] for what in ("blocks", "pages", "bytes", "memory"))
            found = OtherRequest(name, *sizes)
            known[name] = replace(found, label=labels.get(name, ""), protection=protection_of(total))
    return _by_label(known.values())


def _labels(names: Iterable[bytes], most: int, state: _ReadState) -> Reading[dict[bytes, str]]:
    """Return the labels of those blocks that have one, by block name.

    Absent label keys are not read, because the store would count a miss.
    """
    blocks = [name for name in names if _CHAIN_HASH.search(name)]
    if not blocks:
        return {}
    keys = {*(yield from _keys(b"label:*", b"string", most, "requests", state))}
    labelled = [name for name in blocks if LABEL + name in keys]
    answers = yield [[b"GETRANGE", LABEL + name, 0, MOST_LABEL - 1] for name in labelled]
    answered = zip(labelled, answers, strict=True)
    return {name: label.decode(errors="replace") for name, label in answered if isinstance(label, bytes)}


def _by_label(requests: Iterable[OtherRequest]) -> list[OtherRequest]:
    """Return the requests, with those of each label merged into one, whose sizes are the sums."""
    found: dict[str | bytes, OtherRequest] = {}
    for one in requests:
        key = one.label or one.req_id
        if (other := found.get(key)) is None:
            found[key] = one
            continue
        sizes = (getattr(one, what) + getattr(other, what) for what in ("blocks", "pages", "bytes", "memory"))
        protection = max(one.protection, other.protection)
        found[key] = replace(OtherRequest(other.req_id, *sizes), label=one.label, protection=protection)
    return [*found.values()]


def _owners(found: Iterable[Manifest]) -> dict[bytes, tuple[str, ...]]:
    owners: dict[bytes, dict[str, None]] = {}
    for manifest in found:
        for name in manifest.blocks:
            owners.setdefault(name, {})[manifest.agent_id] = None
    return {name: tuple(agents) for name, agents in owners.items()}


def _agent(
    manifest: Manifest, blocks: Mapping[bytes, ContextBlock], owners: Mapping[bytes, Sequence[str]], idle: int | None
) -> Agent:
    own_blocks = tuple(
        blocks.get(name, ContextBlock(name, manifest.tokens_in(i))) for i, name in enumerate(manifest.blocks)
    )
    return Agent(
        manifest,
        own_blocks,
        sum(block.bytes for block in own_blocks),
        sum(block.bytes for block in own_blocks if len(owners[block.name]) == 1),
        sum(block.memory for block in own_blocks),
        idle,
    )


def _prefixes(
    found: Sequence[Manifest], blocks: Mapping[bytes, ContextBlock], owners: Mapping[bytes, tuple[str, ...]]
) -> list[SharedPrefix]:
    """Return the prefixes that several agents share, in descending order of the bytes that sharing saves.

    A prefix ends at each block that more agents have than any block that follows it in a context.
    """
    next_agents: Counter[bytes] = Counter()  # by block: the most agents that any block after it has
    for manifest in found:
        for name, after in zip(manifest.blocks, manifest.blocks[1:], strict=False):
            next_agents[name] = max(next_agents[name], len(owners[after]))
    shared: dict[bytes, SharedPrefix] = {}
    for manifest in found:
        for prefix in _prefix_ends(manifest, blocks, owners, next_agents):
            shared[prefix.name] = prefix
    return sorted(shared.values(), key=lambda prefix: (-prefix.saved, -prefix.tokens))[:MOST_PREFIXES]


def _prefix_ends(
    manifest: Manifest,
    blocks: Mapping[bytes, ContextBlock],
    owners: Mapping[bytes, tuple[str, ...]],
    next_agents: Mapping[bytes, int],
) -> Iterator[SharedPrefix]:
    tokens = size = 0
    for i, name in enumerate(manifest.blocks):
        tokens += manifest.tokens_in(i)
        size += blocks[name].bytes if name in blocks else 0
        if len(owners[name]) > max(next_agents[name], 1):
            yield SharedPrefix(name, tokens, i + 1, size, owners[name])
