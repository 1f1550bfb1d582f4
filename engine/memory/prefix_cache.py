"""Shared prefixes: full blocks in memory by chain hash, for every agent whose prompt begins with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from engine.memory.blocks import AgentBlocks, KVBlock
from engine.memory.prefix import chain_hashes, root_of
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec

HOLDER = "shared prefixes"  # no agent can have this name


class SharedPrefixCache:
    """Full blocks by their chain hash, at most `max_bytes`.

    Each has a reference in the pool, under HOLDER, so that a system prompt outlives the agents that brought it. The
    least recently used go first. A use of a block counts for all blocks before it, so a prompt loses its last blocks
    first.

    Not thread-safe: its owner has a lock.
    """

    def __init__(self, spec: ModelCacheSpec, pool: BlockPool, max_bytes: int) -> None:
        self.hits = 0  # prompts whose prefix it had
        self.nbytes = 0
        self._spec = spec
        self._pool = pool
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[str, KVBlock] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def names(self, agent_id: str, tokens: Sequence[int]) -> list[str]:
        """The chain hashes of the full blocks of the agent's `tokens`."""
        return chain_hashes(self._spec.fingerprint, tokens, self._spec.block_tokens, root_of(agent_id))

    def find(self, agent_id: str, tokens: Sequence[int]) -> AgentBlocks | None:
        """The longest prefix of `tokens` in the cache, without their last one.

        Its blocks are shared with the caller, under `agent_id`. Where layers carry a state, one was kept in the last.
        """
        names = self.names(agent_id, tokens[:-1])
        found = [self._blocks[name] for name in takewhile(self._blocks.__contains__, names)]
        while found and self._spec.has_state and not found[-1].states:
            found.pop()
        if not found:
            return None
        self._touch(names[: len(found)])
        self.hits += 1
        held = sum(block.tokens for block in found)
        self._pool.share((block.block_id for block in found), agent_id)
        return AgentBlocks(agent_id, tuple(tokens[:held]), tuple(found), self._spec.fingerprint)

    def adopt(self, context: AgentBlocks) -> AgentBlocks:
        """Add the full blocks of `context`. Returns the context with known blocks in place of its own.

        The returned blocks are shared with the caller, under the agent's name, in addition to what the caller holds.
        Raises ValueError if blocks of `context` were freed.
        """
        names = self.names(context.agent_id, context.tokens)
        blocks = list(context.blocks)
        for i, name in enumerate(names):
            known = self._blocks.get(name)
            if known and known.states.keys() >= blocks[i].states.keys():
                blocks[i] = known
        self._pool.share((block.block_id for block in blocks), context.agent_id)
        for name, block in zip(names, blocks, strict=False):
            self._put(name, block)
        self._touch(names)
        while self.nbytes > self._max_bytes:
            self.evict()
        return replace(context, blocks=tuple(blocks))

    def evict(self) -> bool:
        """Drop the least recently used block; whether there was one."""
        if self._blocks:
            self._drop(next(iter(self._blocks)))
            return True
        return False

    def forget(self, names: Iterable[str]) -> None:
        """Drop those of these blocks that nobody else holds."""
        wanted = {self._blocks[name].block_id: name for name in names if name in self._blocks}
        others = {found.block_id for found in self._pool.references() if found.agent_id != HOLDER}
        for block_id in wanted.keys() - others:
            self._drop(wanted[block_id])

    def clear(self) -> None:
        while self.evict():
            pass

    def _put(self, name: str, block: KVBlock) -> None:
        """Add a block in place of another one of this name, unless only that one can be continued from its end."""
        known = self._blocks.get(name)
        if known is block or (known and known.state is not None and block.state is None):
            return
        if known:
            self._drop(name)
        self._pool.share([block.block_id], HOLDER)
        self._blocks[name] = block
        self.nbytes += block.nbytes

    def _drop(self, name: str) -> None:
        block = self._blocks.pop(name)
        self.nbytes -= block.nbytes
        self._pool.free([block.block_id], HOLDER)

    def _touch(self, names: Sequence[str]) -> None:
        for name in reversed(names):
            self._blocks.move_to_end(name)
