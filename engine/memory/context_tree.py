"""The tree of contexts in memory (a radix tree of blocks). A later prompt of the same tenant can reuse any of them.

A node is a block, and its children are the blocks that follow it in some context. The last block of a context may be
partial; then its node is a leaf. A prompt reuses the longest prefix that it has in common with any context, also a part
of a block. Each tenant has a root of its own, so tenants share nothing, and private blocks have a parent of their own
(see `Chain`).
"""

from __future__ import annotations

import itertools
import sys
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from kvpage_server.kv_events import Event, hash_of, removed, stored
from kvpage_server.page import unix_ms
from kvpage_server.store.eviction.prefix import Prefix
from kvpage_server.store.eviction.queues import BURST

from ..chains import Chain, common_prefix, is_unnamed
from ..pool import BlockPool
from ..spec import ModelCacheSpec
from .blocks import AgentBlocks, KVBlock, block_names
from .lifetimes import KeptContext, Lifetimes

HOLDER = "contexts in memory"  # the holder's name in the pool; it is no valid agent id
FULL = "the contexts with a lifetime take half of the engine's memory, or the tenant's share of that"
MOST_SEEN = 4096  # blocks whose tokens are known by their names, about a KiB each
MOST_NEIGHBOURS = 64  # siblings that are compared on either side of a prompt, so that a lookup is linear in the prompt


@dataclass(slots=True, eq=False)
class _Node:
    name: str  # the chain hash of its tokens and all before them
    parent: str  # the parent's hash in its name: see `Chain.parent`
    tokens: tuple[int, ...]
    block: KVBlock
    used: float = 0.0  # time of the last use, in monotonic seconds
    stored: bool = False  # whether it was passed to a tier below memory
    withheld: bool = False  # whether no request has allowed that it is saved to a tier below
    label: str = ""  # the label with which it will be stored, if its context has no name

    @property
    def key(self) -> bytes:
        """Its key in the eviction policy."""
        return bytes.fromhex(self.name)

    def usable(self, common: int, has_state: bool) -> int:
        """Return how many of the block's first `common` tokens a prompt can reuse: up to a state, if layers have
        one.
        """
        if not has_state:
            return common
        return max((after for after in self.block.states if after <= common), default=0)

    def covers(self, other: _Node) -> bool:
        """Return whether the node can replace `other` for every prompt: its tokens begin with those of `other`, and it
        has its states.
        """
        same = self.tokens[: len(other.tokens)] == other.tokens
        return same and self.block.states.keys() >= other.block.states.keys()


class _Lifetime(NamedTuple):
    until: float  # monotonic seconds
    seconds: int
    tokens: int  # of the block that are to be kept, from its beginning
    tenant: str
    share: int  # bytes that may be kept for the tenant


class _Seen(NamedTuple):
    """The tokens of a full block, by its name."""

    agent_id: str  # of a context that has the block
    before: str  # the name of the block before it; empty for the first one
    tokens: bytes  # its token ids, u32 each


class _Pin(NamedTuple):
    agent_id: str  # of the context that was pinned
    tenant: str


class ContextTree:
    """Contexts of one model in memory. Their blocks have at most `max_bytes` in total.

    The tree has a reference on each block in the pool, under HOLDER, so that a context outlives its agent. The eviction
    policy is the page server's `allkeys-prefix`: the least valuable leaf is evicted first. A prompt counts as one use
    of every block that it reuses. A new block counts as not reused. A partial block is dropped when a longer one
    contains it.

    Not thread-safe: callers hold the store's lock.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        pool: BlockPool,
        max_bytes: int,
        publish: Callable[[Event], None] | None = None,
    ) -> None:
        """Create an empty tree. `publish` is called with the KV events of full blocks."""
        self.hits = 0  # prompts with a prefix in the tree
        self.nbytes = 0
        self._spec = spec
        self._pool = pool
        self._max_bytes = max_bytes
        self._publish = publish
        self._nodes: dict[str, _Node] = {}  # by chain hash
        self._children: dict[str, list[_Node]] = {}  # by the parent's name or the root, in the order of their tokens
        self._order = Prefix()  # the eviction policy, with the same keys as the nodes
        # the last result of `names`, and its arguments: `adopt`, `mark_stored` and `label` of a context follow each
        # other
        self._named: tuple[str, Sequence[int], tuple[str, ...]] = "", (), ()
        self._kept: dict[str, _Lifetime] = {}  # by chain hash
        self._first_end = inf  # no lifetime ends earlier, in monotonic seconds
        self._ended: dict[str, float] = {}  # ends of lifetimes, in monotonic seconds, of blocks that are evicted first
        self._pins: dict[str, _Pin] = {}  # by the chain hash of a pinned block
        # full blocks, also evicted ones, the least recently added first; a block precedes its predecessors
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._nodes)

    def names(self, agent_id: str, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the chain hashes of the blocks of an agent's context with these tokens, including a partial last
        block.
        """
        agent, named, names = self._named
        if agent != agent_id or named is not tokens:
            names = block_names(tokens, self._spec, agent_id)
            self._named = agent_id, tokens, names
        return names

    def find(self, agent_id: str, tokens: Sequence[int]) -> AgentBlocks | None:
        """Return the blocks with the longest prefix of `tokens` that can be reused; None if there is none. Counts as a
        use.

        The last block may differ from `tokens` after some tokens: `AgentBlocks.reusable_for` returns the number of
        usable tokens. The caller gets a reference on each block, under `agent_id`, and has to free it.
        """
        path = self._path(self._spec.chain(agent_id, tokens), tuple(tokens))
        if not path:
            return None
        self.hits += 1
        self._order.now += BURST  # the policy counts uses within BURST as one; each prompt is a use of its own
        self._use(path)
        blocks = tuple(node.block for node in path)
        self._pool.share((block.block_id for block in blocks), agent_id)
        held = tuple(token for node in path for token in node.tokens)
        return AgentBlocks(agent_id, held, blocks, self._spec.fingerprint)

    def adopt(self, context: AgentBlocks) -> AgentBlocks:
        """Add a context, and evict other blocks if necessary. Return the context with blocks of the tree in place of
        equal ones.

        The caller gets a reference on each returned block, under the agent's name, and keeps those on its own blocks.
        Raises ValueError if blocks of `context` were freed.
        """
        path = self._nodes_of(context)
        blocks = [self._known(node).block for node in path]
        self._pool.share((block.block_id for block in blocks), context.agent_id)
        self._add(path, context.agent_id)
        self._note_seen(context.agent_id, path)
        while self.nbytes > self._max_bytes and (self.evict() or self.evict(kept=True)):
            pass
        return replace(context, blocks=tuple(blocks))

    def _note_seen(self, agent_id: str, path: Sequence[_Node]) -> None:
        """Note the tokens of the full blocks of a context. A block is forgotten after those behind it."""
        for i in reversed(range(len(path))):
            if len(path[i].tokens) == self._spec.block_tokens:
                name, before = path[i].name, path[i - 1].name if i else ""
                if name not in self._seen:
                    self._seen[name] = _Seen(agent_id, before, np.asarray(path[i].tokens, "<u4").tobytes())
                self._seen.move_to_end(name)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def agent_of(self, name: str) -> str | None:
        """Return the agent of a context that has or had the full block `name`; None if that is not known any more. It
        is known of a pinned block.
        """
        found = self._pins.get(name) or self._seen.get(name)
        return found.agent_id if found else None

    def seen(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return the agent of a context that has or had the full block `name`, and the tokens up to its end; None if
        they are not known any more.
        """
        parts, agent_id = list[bytes](), ""
        while name:
            if (found := self._seen.get(name)) is None:
                return None
            agent_id = agent_id or found.agent_id
            parts.append(found.tokens)
            name = found.before
        return (agent_id, tuple(np.frombuffer(b"".join(reversed(parts)), "<u4").tolist())) if parts else None

    def ends(self, names: Iterable[str]) -> list[str]:
        """Return the blocks of `names` that no other one of them continues."""
        before = set[str]()
        for name in names:
            found = self._seen.get(name)
            while found and found.before not in before:
                before.add(found.before)
                found = self._seen.get(found.before)
        return [name for name in dict.fromkeys(names) if name not in before]

    def unstored(self, context: AgentBlocks) -> int:
        """Return how many tokens of a context are in blocks that were not saved to a tier below, or that are not in the
        tree any more.
        """
        names = self.names(context.agent_id, context.tokens)
        nodes = (self._nodes.get(name) for name in names)
        pairs = zip(nodes, context.blocks, strict=True)
        return sum(block.tokens for node, block in pairs if not (node and node.stored))

    def stored_reach(self, agent_id: str, tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` are in blocks that were saved to a tier below, or may not be saved."""
        chain, path = self._spec.chain(agent_id, tokens), list[_Node]()
        while node := self._child(self._parent(chain, path), self._rest(tokens, path)):
            if not (node.stored or node.withheld):
                break
            path.append(node)
        rest = self._rest(tokens, path)
        sides = (node for side in self._sides(self._parent(chain, path), rest) for node in side)
        others = (node for node in sides if node.stored or node.withheld)
        return len(path) * self._spec.block_tokens + max(
            (common_prefix(node.tokens, rest) for node in others), default=0
        )

    def mark_stored(self, context: AgentBlocks) -> None:
        """Note that the blocks of a context were saved to a tier below."""
        for name in self.names(context.agent_id, context.tokens):
            if node := self._nodes.get(name):
                node.stored = True

    def withhold(self, context: AgentBlocks, *, withheld: bool = True) -> None:
        """Note whether the blocks of a context that were not saved yet stay in memory when another prompt reuses
        them.
        """
        for name in self.names(context.agent_id, context.tokens):
            if node := self._nodes.get(name):
                node.withheld = withheld

    def label(self, context: AgentBlocks, label: str) -> None:
        """Set the label of a context without a name, with which it is stored if a later prompt reuses it."""
        if node := self._nodes.get(self.names(context.agent_id, context.tokens)[-1]):
            node.label = label

    def label_of(self, context: AgentBlocks) -> str:
        """Return the label of a context; empty if it has none."""
        node = self._nodes.get(self.names(context.agent_id, context.tokens)[-1])
        return node.label if node else ""

    @property
    def idle(self) -> float | None:
        """Seconds since the last use of the block that is evicted next; None if the tree is empty."""
        victim = self._find_victim()
        return None if victim is None else time.monotonic() - victim.used

    def keep(self, context: AgentBlocks, lifetimes: Lifetimes) -> KeptContext:
        """Protect the first blocks of a context in the tree until their lifetimes end: unprotected blocks are evicted
        before them.

        All protected blocks take at most half of the tree's memory, and the blocks of one tenant take at most its
        share of that half. The result has the number of tokens that are protected, and the reason if not all are.
        """
        self._settle()
        now, wall = time.monotonic(), unix_ms()
        protected, most = self._protected(), self._max_bytes // 2
        tenant, share, sizes = lifetimes.tenant, most // lifetimes.tenants, self._sizes(protected)
        end, tokens, until = 0, 0, 0
        for one in self._nodes_of(context):
            start, end = end, end + len(one.tokens)
            if not (seconds := lifetimes.seconds(start)):
                break
            node = self._holder(one)
            if node is None:
                return KeptContext(tokens, until, "the engine's memory has no room for the context")
            if node.name not in protected:
                sizes[tenant] += node.block.nbytes
                if sizes.total() > most or sizes[tenant] > share:
                    return KeptContext(tokens, until, FULL)
            count = min(end, lifetimes.end(seconds)) - start
            if known := self._kept.get(node.name):
                seconds, count = max(seconds, known.seconds), max(count, known.tokens)
            self._kept[node.name] = _Lifetime(now + seconds, seconds, count, tenant, share)
            self._ended.pop(node.name, None)
            self._first_end = min(self._first_end, now + seconds)
            if start < lifetimes.tokens:
                tokens, until = min(end, lifetimes.tokens), min(until or sys.maxsize, wall + 1000 * seconds)
        return KeptContext(tokens, until)

    def pin(self, context: AgentBlocks, tenant: str, tenants: int) -> bool:
        """Keep the full blocks of a context in memory until the last one is unpinned. Return False if the tree does not
        have them, or if lifetimes and pins would take more than half of its memory, or the tenant's share of that.
        """
        names = self.names(context.agent_id, context.tokens)
        if not all(name in self._nodes for name in names):
            return False
        sizes, most = self._sizes(self._protected() | dict.fromkeys(names, tenant)), self._max_bytes // 2
        if sizes.total() > most or sizes[tenant] > most // tenants:
            return False
        self._pins[names[-1]] = _Pin(context.agent_id, tenant)
        return True

    def unpin(self, name: str) -> bool:
        """Allow a pinned block to be evicted again. Return False if it was not pinned."""
        return self._pins.pop(name, None) is not None

    def unpin_oldest(self) -> bool:
        """Unpin the block that has been pinned for longest, because a prompt needs its memory. Return whether there was
        one.
        """
        return any(self.unpin(name) for name in list(self._pins)[:1])

    def _protected(self) -> dict[str, str]:
        """Return the tenants of the blocks that have a lifetime or are pinned, and of those before pinned ones."""
        pinned = dict[str, str]()
        for last, pin in self._pins.items():
            name = last
            while name in self._nodes and name not in pinned:
                pinned[name] = pin.tenant
                name = self._nodes[name].parent
        return {name: kept.tenant for name, kept in self._kept.items()} | pinned

    def _sizes(self, tenants: Mapping[str, str]) -> Counter[str]:
        """Return the bytes of blocks by tenant. `tenants` are those of the blocks, by name."""
        sizes = Counter[str]()
        for name, tenant in tenants.items():
            sizes[tenant] += self._nodes[name].block.nbytes
        return sizes

    def renew(self, context: AgentBlocks) -> None:
        """Begin the lifetimes of a context's blocks anew, because a prompt has reused them."""
        self._settle()
        now, names = time.monotonic(), self.names(context.agent_id, context.tokens)
        kept = {name: self._kept[name] for name in names if name in self._kept}
        self._kept |= {name: one._replace(until=now + one.seconds) for name, one in kept.items()}

    def lifetimes(self, context: AgentBlocks) -> list[tuple[int, int]]:
        """Return pairs of the first tokens of a context and the seconds of their lifetime, up to the first block
        without one.
        """
        self._settle()
        found, start = list[tuple[int, int]](), 0
        for node in self._nodes_of(context) if self._kept else ():
            if (kept := self._lifetime_of(node)) is None:
                break
            found.append((start + kept.tokens, kept.seconds))
            start += len(node.tokens)
        return found

    def _lifetime_of(self, node: _Node) -> _Lifetime | None:
        """Return the lifetime of a block, or of another one of which it has the kept tokens, and the state after them;
        None if there is none.
        """
        if found := self._kept.get(node.name):
            return found
        for other in itertools.chain.from_iterable(self._sides(node.parent, node.tokens)):
            kept = self._kept.get(other.name)
            same = kept and node.tokens[: kept.tokens] == other.tokens[: kept.tokens]
            if kept and same and (kept.tokens in node.block.states or not self._spec.has_state):
                return kept
        return None

    def _holder(self, node: _Node) -> _Node | None:
        """Return the node of the tree that has the tokens of `node` at its beginning; None if there is none."""
        longer, _ = self._sides(node.parent, node.tokens)
        return self._nodes.get(node.name) or next((other for other in longer if other.covers(node)), None)

    @property
    def kept_bytes(self) -> int:
        """The bytes of blocks in their lifetimes."""
        self._settle()
        return sum(self._nodes[name].block.nbytes for name in self._kept)

    def _settle(self) -> None:
        """Remove lifetimes that have ended."""
        now = time.monotonic()
        if now < self._first_end:
            return
        for name, kept in list(self._kept.items()):
            if kept.until <= now:
                del self._kept[name]
                self._ended[name] = kept.until
        self._first_end = min((kept.until for kept in self._kept.values()), default=inf)

    def evict(self, *, kept: bool = False) -> bool:
        """Evict the least valuable leaf, with `kept` also one in its lifetime. Return False if there is none."""
        victim = self._find_victim(kept=kept)
        if victim is None:
            return False
        self._order.evicted(victim.key)
        self._drop(victim)
        self._publish_removed([victim])
        return True

    def forget(self, context: AgentBlocks, others: Iterable[AgentBlocks]) -> None:
        """Drop the blocks of a context, as `forget_blocks`.

        `others` are the contexts of agents. Their partial blocks are added again, because the tree drops partial blocks
        that a block of the forgotten context contains.
        """
        self.forget_blocks(self.names(context.agent_id, context.tokens))
        for other in others:
            if common_prefix(other.tokens, context.tokens):
                self._add(self._nodes_of(other), other.agent_id)

    def tokens_of(self, names: Sequence[str]) -> list[tuple[str, Sequence[int]] | None]:
        """Return for each block the parent's hash in its name, and its tokens; None if it is not in the tree."""
        nodes = [self._nodes.get(name) for name in names]
        return [(node.parent, node.tokens) if node else None for node in nodes]

    def forget_blocks(self, names: Sequence[str], kept: int = 0) -> int:
        """Drop the blocks with these names from the last on, until one that an agent references or another context
        continues, and without the first `kept`. Return the number of names up to that block.
        """
        held = {found.block_id for found in self._pool.references() if found.agent_id != HOLDER}
        for i in reversed(range(kept, len(names))):
            node = self._nodes.get(names[i])
            if node and (node.block.block_id in held or names[i] in self._children):
                return i + 1
            if node:
                self._order.removed(node.key)
                self._drop(node)
                self._publish_removed([node])
        return kept

    def context_of(self, name: str) -> AgentBlocks | None:
        """Return the blocks up to the full block `name`; None if they are not all in the tree."""
        if not (seen := self.seen(name)):
            return None
        agent_id, tokens = seen
        nodes = [self._nodes.get(one) for one in self.names(agent_id, tokens)]
        blocks = tuple(node.block for node in nodes if node)
        return AgentBlocks(agent_id, tokens, blocks, self._spec.fingerprint) if len(blocks) == len(nodes) else None

    def is_withheld(self, context: AgentBlocks) -> bool:
        """Return whether a block of a context may not be saved to a tier below."""
        nodes = (self._nodes.get(name) for name in self.names(context.agent_id, context.tokens))
        return any(node and node.withheld and not node.stored for node in nodes)

    def release(self, name: str) -> bool:
        """Drop a full block, the parts of a block after it, and the blocks before it up to one that stays: a block
        stays if it is pinned, if an agent references it, or if another block continues it. Return whether the block
        `name` was dropped.
        """
        held = {found.block_id for found in self._pool.references() if found.agent_id != HOLDER}
        first = True
        while node := self._nodes.get(name):
            after = self._children.get(name, [])
            whole = any(not first or len(other.tokens) == self._spec.block_tokens for other in after)
            stays = {one.block.block_id for one in (node, *after)} & held
            if whole or stays or name in self._pins:
                break
            for other in [*after, node]:
                self._order.removed(other.key)
                self._drop(other)
            self._publish_removed([node])
            first = False
            name = self._seen[name].before if name in self._seen else ""
        return not first

    def clear(self) -> None:
        """Drop all blocks."""
        self._order.clear()
        every = list(self._nodes.values())
        for node in every:
            self._drop(node)
        self._publish_removed(every)

    # -- searching -------------------------------------------------------------------------------------------------

    def _path(self, chain: Chain, prompt: tuple[int, ...]) -> list[_Node]:
        """Return the nodes from the root on with the longest usable prefix of `prompt` without its last token."""
        size, limit = self._spec.block_tokens, len(prompt) - 1
        path: list[_Node] = []
        while len(path) * size < limit:
            rest = self._rest(prompt, path)
            node = self._child(self._parent(chain, path), rest) if len(rest) == size else None
            if node is None:
                break
            path.append(node)
        # Full blocks match so far. The next block may match in part. If no state was kept there, an earlier state is
        # used.
        for depth in range(len(path), -1, -1):
            parent = self._parent(chain, path[:depth])
            if found := self._nearest(parent, prompt[depth * size : limit][:size]):
                return [*path[:depth], found]
            if depth and not self._spec.has_state:
                return path[:depth]
        return []

    def _parent(self, chain: Chain, path: Sequence[_Node]) -> str:
        """Return the name of the parent for a node that follows the nodes of `path`."""
        return chain.parent(len(path), path[-1].name if path else None)

    def _rest(self, tokens: Sequence[int], path: Sequence[_Node]) -> tuple[int, ...]:
        """Return the tokens of the block that follows the nodes of `path`."""
        start = len(path) * self._spec.block_tokens
        return tuple(tokens[start : start + self._spec.block_tokens])

    def _child(self, parent: str, tokens: tuple[int, ...]) -> _Node | None:
        """Return the child of `parent` with exactly these tokens; None if there is none."""
        at, siblings = self._place(parent, tokens)
        return siblings[at] if at < len(siblings) and siblings[at].tokens == tokens else None

    def _nearest(self, parent: str, tokens: tuple[int, ...]) -> _Node | None:
        """Return the child of `parent` with which most of `tokens` can be reused; of equal ones, preferably one that
        was stored; None if none of `tokens` can be reused.
        """
        best, nearest = 0, None
        for side in self._sides(parent, tokens):
            for node in side:
                common = common_prefix(node.tokens, tokens)
                if common < best or not common:
                    break
                usable = node.usable(common, self._spec.has_state)
                if usable > best or (usable == best and nearest and node.stored and not nearest.stored):
                    best, nearest = usable, node
        return nearest

    def _sides(self, parent: str, tokens: tuple[int, ...]) -> tuple[list[_Node], list[_Node]]:
        """Return the MOST_NEIGHBOURS children on each side of `tokens` in the sorted order of their tokens: the greater
        ones, and the smaller ones.

        In both lists, the nearest children are first; they have the most first tokens in common with `tokens`.
        """
        at, siblings = self._place(parent, tokens)
        return siblings[at : at + MOST_NEIGHBOURS], siblings[max(0, at - MOST_NEIGHBOURS) : at][::-1]

    def _place(self, parent: str, tokens: tuple[int, ...]) -> tuple[int, list[_Node]]:
        siblings = self._children.get(parent, [])
        return bisect_left(siblings, tokens, key=lambda node: node.tokens), siblings

    def _nodes_of(self, context: AgentBlocks) -> list[_Node]:
        """Return a new node for each block of a context, in order."""
        chain, start, path = self._spec.chain(context.agent_id, context.tokens), 0, list[_Node]()
        for name, block in zip(self.names(context.agent_id, context.tokens), context.blocks, strict=True):
            end, parent = start + block.tokens, self._parent(chain, path)
            path.append(_Node(name, parent, context.tokens[start:end], block))
            start = end
        return path

    # -- changing --------------------------------------------------------------------------------------------------

    def _known(self, node: _Node) -> _Node:
        """Return the tree's node of the same name if it covers `node`, otherwise `node`."""
        known = self._nodes.get(node.name)
        return known if known and known.covers(node) else node

    def _put(self, node: _Node, kept: list[tuple[_Node, _Lifetime]]) -> _Node:
        """Add a node, and return the node of the tree for its tokens. Append it to `kept` with the lifetime of each
        node that it replaces.

        It replaces the node of the same name, unless that covers it, or is the only one of both with a state at its
        end. If a longer sibling covers it, that is returned instead. Shorter siblings that it covers are dropped.
        """
        known = self._nodes.get(node.name)
        if known and (known.covers(node) or (known.block.state is not None and node.block.state is None)):
            return known
        lifetimes: list[_Lifetime | None] = []  # of the nodes that it replaces
        pin: _Pin | None = None
        # A longer sibling may cover this node, and this node may cover shorter siblings.
        longer, shorter = self._sides(node.parent, node.tokens)
        if known:
            node.used = known.used  # it is not stored, because `known` lacks some of its states
            node.withheld = known.withheld
            pin = self._pins.get(known.name)
            lifetimes.append(self._drop(known))
        elif covering := next((other for other in longer if other.covers(node)), None):
            return covering
        for other in shorter:
            if len(other.tokens) < len(node.tokens) and node.covers(other):
                pin = pin or self._pins.get(other.name)
                self._order.removed(other.key)
                lifetimes.append(self._drop(other))
        self._pool.share([node.block.block_id], HOLDER)
        self._nodes[node.name] = node
        if pin:
            self._pins[node.name] = pin
        kept += [(node, lifetime) for lifetime in sorted(filter(None, lifetimes))]  # the last one ends last
        at, siblings = self._place(node.parent, node.tokens)
        siblings.insert(at, node)
        self._children[node.parent] = siblings
        self.nbytes += node.block.nbytes
        return node

    def _drop(self, node: _Node) -> _Lifetime | None:
        """Remove a node from the tree, and return its lifetime. The caller updates the eviction policy."""
        del self._nodes[node.name]
        lifetime = self._kept.pop(node.name, None)
        self._ended.pop(node.name, None)
        self._pins.pop(node.name, None)
        at, siblings = self._place(node.parent, node.tokens)
        del siblings[at]
        if not siblings:
            del self._children[node.parent]
        self.nbytes -= node.block.nbytes
        self._pool.free([node.block.block_id], HOLDER)
        return lifetime

    def _add(self, path: Sequence[_Node], agent_id: str) -> None:
        """Add the nodes of an agent's context. Only new nodes count as used. If they replace a shorter node, a client
        continues this context, and they count as used again.
        """
        size, kept = len(self._nodes), list[tuple[_Node, _Lifetime]]()
        put = [self._put(node, kept) for node in path]
        self._keep_again(kept)
        new = [node for node in put if node.key not in self._order]
        self._use(new)
        self._order.follows([node.key for node in put])
        self._publish_stored(new, "" if is_unnamed(agent_id) else agent_id)
        if len(self._nodes) < size + len(new):
            self._order.now += BURST
            self._use(new)

    def _keep_again(self, lifetimes: Sequence[tuple[_Node, _Lifetime]]) -> None:
        """Give new nodes the lifetimes of the nodes that they replace, in this order and as far as there is room."""
        protected = self._protected() if lifetimes else {}
        sizes, most = self._sizes(protected), self._max_bytes // 2
        for node, lifetime in lifetimes:
            nbytes, before = node.block.nbytes, protected.get(node.name)
            after = sizes + Counter({lifetime.tenant: nbytes}) - Counter({before: nbytes} if before is not None else {})
            if after.total() <= most and after[lifetime.tenant] <= lifetime.share:
                self._kept[node.name], protected[node.name], sizes = lifetime, lifetime.tenant, after

    def _publish_stored(self, nodes: Sequence[_Node], session: str) -> None:
        """Publish an event for each chain of full blocks among new nodes, which are in the order of their tokens."""
        if self._publish is None:
            return
        chain = list[_Node]()
        for node in (*nodes, None):
            is_full = node is not None and len(node.tokens) == self._spec.block_tokens
            if chain and not (node and is_full and node.parent == chain[-1].name):
                self._publish(
                    stored(
                        [hash_of(one.name) for one in chain],
                        parent=hash_of(chain[0].parent) if chain[0].parent else None,
                        tokens=[token for one in chain for token in one.tokens],
                        block_size=self._spec.block_tokens,
                        session=session,
                        **self._where,
                    )
                )
                chain = []
            if node and is_full:
                chain.append(node)

    def _publish_removed(self, nodes: Sequence[_Node]) -> None:
        full = [hash_of(node.name) for node in nodes if len(node.tokens) == self._spec.block_tokens]
        if self._publish is not None and full:
            self._publish(removed(full, **self._where))

    @property
    def _where(self) -> dict[str, Any]:
        return {"medium": "GPU", "locality": "LOCAL", "ownership": f"kvpage:{self._spec.model_id}"}

    def _use(self, path: Sequence[_Node]) -> None:
        self._order.used_all([node.key for node in path])
        now = time.monotonic()
        for node in path:
            node.used = now

    def _find_victim(self, *, kept: bool = False) -> _Node | None:
        """Return the node that is evicted next, with `kept` also one in its lifetime; None if there is none.

        The first ones are nodes that were not used since the end of their lifetime.
        """
        self._settle()
        for name, end in reversed(list(self._ended.items())):
            node = self._nodes[name]
            if node.used > end:
                del self._ended[name]
            elif name not in self._children and name not in self._pins:
                return node
        for victim in self._order.victims():
            assert isinstance(victim, bytes)
            name = victim.hex()
            if name not in self._pins and (kept or name not in self._kept):
                return self._nodes[name]
        return None
