"""Prompts that begin alike: full blocks in memory under their chain hashes, for every agent whose prompt has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.memory.blocks import AgentBlocks, KVBlock
from engine.memory.prefix import chain_hashes, root_of
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec

HOLDER = "shared prefixes"  # no agent can have this name


@dataclass(slots=True)
class _Entry:
    block: KVBlock
    nbytes: int
    hit_count: int = 0


class SharedPrefixCache:
    """Full blocks by their chain hash, one for each, at most `max_bytes` of them.

    Each is held by a reference in the pool, under HOLDER, so that a system prompt outlives the agents that brought it.
    The least recently used go first, and of a prompt its last blocks before its first: a use of a block is one of all
    before it, from the last to the first.

    Not thread-safe: its owner has a lock.
    """

    def __init__(self, spec: ModelCacheSpec, pool: BlockPool, max_bytes: int) -> None:
        self.hits = 0  # prompts of which it had a beginning
        self.nbytes = 0
        self._spec = spec
        self._pool = pool
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self, agent_id: str, tokens: Sequence[int]) -> list[str]:
        """The chain hashes of the full blocks of the agent's `tokens`."""
        return chain_hashes(self._spec.fingerprint, tokens, self._spec.block_tokens, root_of(agent_id))

    def hit_count(self, name: str) -> int:
        """How many prompts have found this block here."""
        return self._entries[name].hit_count if name in self._entries else 0

    def find(self, agent_id: str, tokens: Sequence[int]) -> AgentBlocks | None:
        """The longest beginning of `tokens`, of at most all but one of them, that is here.

        Its blocks are shared with the caller, under `agent_id`. Where layers carry a state it ends where one was kept.
        """
        names = self.names(agent_id, tokens[:-1])
        found = []
        for name in names:
            if name not in self._entries:
                break
            found.append(self._entries[name].block)
        while found and self._spec.has_state and found[-1].state is None:
            found.pop()
        if not found:
            return None
        used = names[: len(found)]
        self._touch(used)
        self.hits += 1
        for name in used:
            self._entries[name].hit_count += 1
        held = sum(block.tokens for block in found)
        self._pool.share((block.block_id for block in found), agent_id)
        return AgentBlocks(agent_id, tuple(tokens[:held]), tuple(found), self._spec.fingerprint)

    def adopt(self, context: AgentBlocks) -> AgentBlocks:
        """Take in the full blocks of `context`; the same context, with the blocks that were here before in place of
        its own. Its blocks are shared with the caller, under its agent's name, beside what the caller holds already.

        Raises ValueError when blocks of `context` were freed.
        """
        names = self.names(context.agent_id, context.tokens)
        blocks = list(context.blocks)
        for i, name in enumerate(names):
            known = self._entries[name].block if name in self._entries else None
            if known and (known.state is not None or blocks[i].state is None):
                blocks[i] = known
        self._pool.share((block.block_id for block in blocks), context.agent_id)
        for name, block in zip(names, blocks, strict=False):
            self._put(name, block)
        self._touch(names)
        while self.nbytes > self._max_bytes:
            self.evict()
        return replace(context, blocks=tuple(blocks))

    def evict(self) -> bool:
        """Let go of the block that was not used for longest; whether there was one."""
        if not self._entries:
            return False
        self._drop(next(iter(self._entries)))
        return True

    def forget(self, names: Iterable[str]) -> None:
        """Let go of those of these blocks that nobody else holds."""
        wanted = {self._entries[name].block.block_id: name for name in names if name in self._entries}
        others = {found.block_id for found in self._pool.references() if found.agent_id != HOLDER}
        for block_id in wanted.keys() - others:
            self._drop(wanted[block_id])

    def clear(self) -> None:
        """Let go of everything."""
        while self.evict():
            pass

    def _put(self, name: str, block: KVBlock) -> None:
        """In place of the one that is here, if it's another."""
        if name in self._entries:
            if self._entries[name].block is block:
                return
            self._drop(name)
        self._pool.share([block.block_id], HOLDER)
        self._entries[name] = _Entry(block, block.nbytes)
        self.nbytes += self._entries[name].nbytes

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        self.nbytes -= entry.nbytes
        self._pool.free([entry.block.block_id], HOLDER)

    def _touch(self, names: Sequence[str]) -> None:
        for name in reversed(names):
            self._entries.move_to_end(name)
