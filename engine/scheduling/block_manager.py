"""The blocks of prompts and answers: reserved in the pool at submit, and made from the cache while a request runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..memory import kvcache
from ..memory.blocks import AgentBlocks, KVBlock
from ..memory.kvcache import Cache
from ..pool import BlockPool, PoolExhaustedError
from ..spec import ModelCacheSpec
from .request import Request, Use


class BlockManager:
    """Manager of requests' blocks: it reserves them in the pool, makes them from the cache, and frees unused ones."""

    def __init__(self, spec: ModelCacheSpec, pool: BlockPool, state_budget: int) -> None:
        """Create a manager. `state_budget` limits the bytes of a prompt's states, without its last state and the
        answer's.
        """
        self.spec = spec
        self.pool = pool
        self._state_budget = state_budget

    def checkpoints(self, start: int, tokens: int, boundaries: Collection[int]) -> list[int]:
        """Return the positions from `start` in a prompt of `tokens` tokens at which to capture the states of the
        layers: ends of blocks, and `boundaries`, positions at which later prompts may differ. Empty if no layer has a
        state.
        """
        if not self.spec.has_state:
            return []
        within = {boundary for boundary in boundaries if start < boundary < tokens - 1}
        return sorted({*self._checkpoints(start, tokens), *within})

    def _checkpoints(self, start: int, tokens: int) -> list[int]:
        """Return ends of blocks after `start`, spread evenly over the prompt, as many as the state budget allows."""
        size = self.spec.block_tokens
        ends = range((start // size + 1) * size, tokens, size)
        count = min(len(ends), self._budgeted(tokens))
        return [ends[(i + 1) * len(ends) // count - 1] for i in range(count)]

    def spare_states(self, checkpoints: int, shared: Sequence[KVBlock], carried: int, tokens: int) -> int:
        """Return how many states a prompt of `tokens` tokens may keep in addition to those at its checkpoints.

        Candidates are the `carried` states in the caller's cache after the `shared` blocks, and the state at the
        prompt's end. States in shared blocks count against the budget.
        """
        if not self.spec.has_state:
            return 0
        left = self._budgeted(tokens) - checkpoints - sum(len(block.states) for block in shared)
        return max(0, min(left, carried + 1))

    def needed(self, request: Request) -> tuple[int, int]:
        """Return the largest number of blocks that a request's context may need in addition to the shared ones, and
        their bytes.
        """
        return self._needed(request.capacity, len(request.shared), len(request.checkpoints) + request.spare_states)

    def check_fits(self, tokens: int, capacity: int, boundaries: Collection[int]) -> None:
        """Raise PoolExhaustedError if a prompt of `tokens` tokens and its answer may need more than the whole pool.

        `capacity` is the number of tokens of prompt and answer. `boundaries` are as for `checkpoints`.
        """
        checkpoints = len(self.checkpoints(0, tokens, boundaries))
        states = checkpoints + self.spare_states(checkpoints, (), 0, tokens)
        blocks, nbytes = self._needed(capacity, 0, states)
        for needed, total, what in (
            (blocks, self.pool.total_blocks, "blocks"),
            (nbytes, self.pool.total_bytes, "bytes"),
        ):
            if needed > total:
                larger = "make it larger (--memory), or the prompt or max_tokens smaller"
                raise PoolExhaustedError(f"{needed} {what} needed, the pool has {total} in all: {larger}")

    def ever_fits(self, use: Use, capacity: int) -> bool:
        """Return whether the whole pool can hold a context of `capacity` tokens that uses a part of a cache. The blocks
        that it shares may have more states than it would keep itself.
        """
        blocks, nbytes = self._needed(capacity, len(use.shared), len(use.checkpoints) + use.spare_states)
        held = sum(block.nbytes for block in use.shared)
        return blocks + len(use.shared) <= self.pool.total_blocks and nbytes + held <= self.pool.total_bytes

    def reserve(self, request: Request, forked: bool = False) -> None:
        """Reserve blocks in the pool for a request. If it is `forked`, it will share the full blocks of its prompt.
        Raises PoolExhaustedError if the pool has too few blocks or bytes.
        """
        shared = self.full_blocks(request) if forked else len(request.shared)
        blocks, nbytes = self._needed(request.capacity, shared, len(request.checkpoints) + request.spare_states)
        request.reserved = self.pool.allocate(blocks, request.agent_id, nbytes)
        request.promised = nbytes

    def full_blocks(self, request: Request) -> int:
        """Return the number of full blocks in a prompt without its last token."""
        return 0 if self.spec.refusal else (len(request.prompt) - 1) // self.spec.block_tokens

    def make_full(self, request: Request, cache: Cache, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens of a prompt from `cache`. The context of the answer will
        share them.
        """
        kept = len(request.shared)
        needed = tokens // self.spec.block_tokens - kept
        ids, others = request.reserved[:needed], request.reserved[needed:]
        start, end = kept * self.spec.block_tokens, (kept + needed) * self.spec.block_tokens
        made = kvcache.extract(self.spec, cache, ids, tokens, start, request.kept_states(), end=end)
        sizes = {block.block_id: block.nbytes for block in made}
        request.promised -= sum(sizes.values())
        self.pool.settle(sizes | dict.fromkeys(others, 0) | {others[0]: request.promised})
        request.shared, request.reserved = (*request.shared, *made), others

    def make_context(self, request: Request, cache: Cache, tokens: Sequence[int]) -> AgentBlocks:
        """Return the context after an answer: its shared blocks, and new blocks from `cache`, under ids that were
        reserved at submit. It ends after the tokens that the request wants to be kept.
        """
        kept = len(request.shared)
        start = kept * self.spec.block_tokens
        end = len(tokens) if request.kept_tokens is None else min(len(tokens), max(start, request.kept_tokens))
        needed = self.spec.blocks_for(end) - kept
        ids, surplus = request.reserved[:needed], request.reserved[needed:]
        made = kvcache.extract(self.spec, cache, ids, len(tokens), start, request.kept_states(), end=end)
        self.pool.settle(dict.fromkeys(surplus, 0) | {block.block_id: block.nbytes for block in made})
        self.pool.free(surplus, request.agent_id)
        return AgentBlocks(request.agent_id, tuple(tokens[:end]), (*request.shared, *made), self.spec.fingerprint)

    def release(self, request: Request) -> None:
        self.pool.free(request.held, request.agent_id)

    def _budgeted(self, tokens: int) -> int:
        """Return how many states of a prompt of `tokens` tokens fit in the state budget."""
        return self._state_budget // self.spec.state_nbytes(tokens)

    def _needed(self, capacity: int, shared: int, states: int) -> tuple[int, int]:
        """Return the blocks and bytes for a context of `capacity` tokens without its first `shared` blocks, with
        `states` states.
        """
        if self.spec.refusal:
            return 0, 0
        rows = capacity - shared * self.spec.block_tokens
        nbytes = (states + 2) * self.spec.state_nbytes(capacity)  # with the prompt's last state and the answer's
        return self.spec.blocks_for(capacity) - shared, rows * self.spec.token_nbytes + nbytes
