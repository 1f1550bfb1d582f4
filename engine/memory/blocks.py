"""Blocks: the keys and values of a run of tokens, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby, islice

import mlx.core as mx

from ..caches import MLX_DTYPES
from ..chains import RULE, chain_hash, chain_hashes, common_prefix, is_agent_id
from ..spec import ModelCacheSpec, Shapes

Arrays = tuple[tuple[mx.array, ...], ...]  # [layer][plane] is [heads, rows, head_dim]; () for a layer without arrays


class BlockError(ValueError):
    """Error: blocks have invalid counts, shapes or ids."""


class IncompatibleBlocksError(BlockError):
    """Error: blocks were made by another model, or with another dtype or block size."""


def check_agent_id(agent_id: str) -> str:
    """Return `agent_id` if it satisfies `RULE`. Raises BlockError otherwise."""
    if not isinstance(agent_id, str) or not is_agent_id(agent_id):
        raise BlockError(f"{RULE}, got {agent_id!r:.200}")
    return agent_id


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """The caches of `tokens` consecutive tokens in every layer. A block never changes, so several owners can share it.

    ``layers[i]`` has an array ``[heads, tokens, head_dim]`` for each plane in which layer i has a row for each token:
    keys (after rotary embedding), then values. It is empty for a layer with a state. ``state`` has the states of the
    layers after the block's last token; None if they were not captured. ``inner[n]`` has the states after its first n
    tokens, fewer than all, because a prompt may end within a block.
    """

    block_id: int  # in the BlockPool
    tokens: int
    layers: Arrays = field(repr=False)
    state: Arrays | None = field(default=None, repr=False)
    inner: Mapping[int, Arrays] = field(default_factory=dict, repr=False)

    @property
    def states(self) -> dict[int, Arrays]:
        """All states of the block, by the number of its tokens before each, in order."""
        end = {} if self.state is None else {self.tokens: self.state}
        return dict(sorted(self.inner.items())) | end

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for layer in (*self.layers, *chain(*self.states.values())) for array in layer)

    def with_state(self, after: int, state: Arrays) -> KVBlock:
        """Return a copy of the block that also has the state after the first `after` of its tokens."""
        if after == self.tokens:
            return replace(self, state=state)
        return replace(self, inner={**self.inner, after: state})

    def validate(self, spec: ModelCacheSpec, end: int) -> None:
        """Raise IncompatibleBlocksError unless every array has the shape and dtype that `spec` requires.

        `end` is the position in the context after the block's last token.
        """
        _check(self.layers, spec.token_shapes(self.tokens), spec, "a block")
        for after, state in self.states.items():
            if not 0 < after <= self.tokens:
                raise IncompatibleBlocksError(f"a block of {self.tokens} tokens has a state after {after} of them")
            position = end - self.tokens + after
            _check(state, spec.state_shapes(position), spec, f"the state after {position} tokens")


def _check(arrays: Arrays, shapes: Shapes, spec: ModelCacheSpec, what: str) -> None:
    if len(arrays) != len(shapes):
        raise IncompatibleBlocksError(f"{what} of {spec.model_id!r} has {len(shapes)} layers, got {len(arrays)}")
    for i, (layer, kept) in enumerate(zip(arrays, shapes, strict=True)):
        found = [(array.shape, array.dtype) for array in layer]
        expected = [(matrices.shape, MLX_DTYPES[matrices.plane.dtype]) for matrices in kept]
        if found != expected:
            raise IncompatibleBlocksError(f"layer {i} of {what} must hold {expected}, got {found}")


def arrays_in(memory: mx.array, shapes: Shapes) -> Arrays:
    """Return arrays of these shapes as views of `memory`, a uint8 array with their bytes in the order of a block's
    body.

    They are evaluated. Only arrays at an address that is not aligned for their dtype are copied. Raises BlockError for
    a `memory` of another length.
    """
    needed = sum(kept.nbytes for layer in shapes for kept in layer)
    if memory.size != needed:
        raise BlockError(f"a body of these shapes has {needed} bytes, got {memory.size}")
    arrays: list[mx.array] = []
    start = 0
    matrices = chain.from_iterable(shapes)
    for (dtype, dim, rows), run in groupby(matrices, lambda kept: (kept.plane.dtype, kept.plane.head_dim, kept.rows)):
        heads = list(accumulate(kept.heads for kept in run))
        stop = start + heads[-1] * rows * dim * dtype.itemsize
        part = memory[start:stop]
        if start % dtype.itemsize:
            part = part + 0  # a copy, which is aligned for this dtype
        values = part.view(MLX_DTYPES[dtype]).reshape(heads[-1], rows, dim)
        arrays += mx.split(values, heads[:-1], axis=0)
        start = stop
    mx.eval(arrays)
    found = iter(arrays)
    return tuple(tuple(islice(found, len(layer))) for layer in shapes)


def block_names(tokens: Sequence[int], spec: ModelCacheSpec, agent_id: str = "") -> tuple[str, ...]:
    """Return the chain hashes of all blocks of an agent's context with these tokens, including a partial last block."""
    chain = spec.chain(agent_id, tokens)
    names = chain_hashes(spec.fingerprint, tokens, spec.block_tokens, chain)
    if tail := tokens[len(names) * spec.block_tokens :]:
        parent = chain.parent(len(names), names[-1] if names else None)
        names.append(chain_hash(spec.fingerprint, parent, tail))
    return tuple(names)


def states_of(blocks: Sequence[KVBlock]) -> dict[int, Arrays]:
    """Return the states in a context's first blocks, by position in the context, in order."""
    starts = accumulate((block.tokens for block in blocks), initial=0)
    return {
        start + after: state
        for block, start in zip(blocks, starts, strict=False)
        for after, state in block.states.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class AgentBlocks:
    """An agent's context: its tokens and their blocks. All blocks except the last one are full.

    Its owner has one reference on each block in the pool, and drops them with ``pool.free(agent_blocks.block_ids)``.
    """

    agent_id: str
    tokens: tuple[int, ...] = field(repr=False)
    blocks: tuple[KVBlock, ...]
    fingerprint: int

    def __post_init__(self) -> None:
        check_agent_id(self.agent_id)
        held = sum(block.tokens for block in self.blocks)
        if held != len(self.tokens):
            raise BlockError(f"{len(self.tokens)} tokens are named, the blocks hold {held}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]

    @property
    def ends(self) -> list[int]:
        """The position after each block."""
        return list(accumulate(block.tokens for block in self.blocks))

    @property
    def states(self) -> dict[int, Arrays]:
        """All states, by the position in the context after which they were captured, in order."""
        return states_of(self.blocks)

    @property
    def stored_states(self) -> list[int]:
        """Positions of the states that tiers below memory store.

        A state within a block that is one token after another state is left out. It would save the computation of one
        token, and take as many bytes as the other.
        """
        taken, ends = self.states, {*self.ends}
        return [position for position in taken if position in ends or position - 1 not in taken]

    def reusable(self, spec: ModelCacheSpec, limit: int) -> int:
        """Return how many of the first tokens, at most `limit`, a cache can be restored with.

        If all layers have a row for each token, this is `limit` or all tokens; otherwise the last position with a
        state.
        """
        if not spec.has_state:
            return min(limit, len(self))
        return max((position for position in self.states if position <= limit), default=0)

    def reusable_for(self, spec: ModelCacheSpec, prompt: Sequence[int]) -> int:
        """Return how many tokens of `prompt` need not be computed if these blocks are restored. At least one is always
        computed.
        """
        return self.reusable(spec, min(common_prefix(self.tokens, prompt), len(prompt) - 1))

    def validate(self, spec: ModelCacheSpec) -> None:
        """Raise IncompatibleBlocksError unless a model with `spec` can continue after these blocks."""
        if self.fingerprint != spec.fingerprint:
            raise IncompatibleBlocksError(
                f"the blocks of agent {self.agent_id!r} have the fingerprint {self.fingerprint:016x}, "
                f"the model {spec.model_id!r} has {spec.fingerprint:016x}"
            )
        *full, last = [block.tokens for block in self.blocks] or [0]
        if any(count != spec.block_tokens for count in full) or last > spec.block_tokens:
            raise IncompatibleBlocksError(
                f"all blocks but the last hold {spec.block_tokens} tokens, got {[*full, last]}"
            )
        for block, end in zip(self.blocks, self.ends, strict=True):
            block.validate(spec, end)
