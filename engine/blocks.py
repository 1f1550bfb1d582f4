"""Blocks: the keys and values of a run of tokens, as they live in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from typing_extensions import Buffer

from engine.spec import DTYPES, ModelCacheSpec

_AGENT_ID = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]{0,127}\Z")
_MLX_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # numpy has no bfloat16, and bits must stay as they are


class BlockError(ValueError):
    """Blocks that contradict themselves: counts, shapes or ids that cannot be."""


class IncompatibleBlocksError(BlockError):
    """Sound blocks, but of another model, dtype or block size."""


def check_agent_id(agent_id: str) -> str:
    """`agent_id` when it can name pages and files: 1 to 128 of ``A-Z a-z 0-9 . _ @ + = -``, no dot first."""
    if not _AGENT_ID.match(agent_id):
        raise BlockError(f"an agent id is 1 to 128 of A-Z a-z 0-9 . _ @ + = - and starts with no dot, got {agent_id!r}")
    return agent_id


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """`tokens` consecutive tokens in every layer. Never changed once made, so that holders can share it.

    ``layers[i]`` has an array ``[heads, tokens, head_dim]`` for each plane of the spec's layer i: keys (rotated to
    their position), then values; it is empty for a layer that keeps nothing.
    """

    block_id: int  # in the BlockPool
    tokens: int
    layers: tuple[tuple[mx.array, ...], ...] = field(repr=False)

    def validate(self, spec: ModelCacheSpec) -> None:
        """Raise IncompatibleBlocksError unless every array has the shape and dtype that `spec` asks for."""
        if len(self.layers) != len(spec.layers):
            raise IncompatibleBlocksError(
                f"a block of {spec.model_id!r} has {len(spec.layers)} layers, got {len(self.layers)}"
            )
        for i, (arrays, layer) in enumerate(zip(self.layers, spec.layers, strict=True)):
            found = [(array.shape, array.dtype) for array in arrays]
            wanted = [((layer.heads, self.tokens, p.head_dim), _MLX_DTYPES[p.dtype]) for p in layer.planes]
            if found != wanted:
                raise IncompatibleBlocksError(f"layer {i} of a block must hold {wanted}, got {found}")

    def pages(self) -> Iterator[memoryview]:
        """The bodies of the block's pages in canonical order, as views of the arrays' own memory."""
        for arrays in self.layers:
            for array in arrays:
                for rows in np.asarray(array.view(mx.uint8)):
                    yield rows.data.cast("B")

    @classmethod
    def from_body(cls, body: Buffer, spec: ModelCacheSpec, tokens: int, block_id: int) -> KVBlock:
        """The block whose pages, one after the other in canonical order, are `body`. Copies.

        Raises BlockError when `body` has not the length that `tokens` tokens have.
        """
        raw = np.frombuffer(memoryview(body), np.uint8)
        if len(raw) != tokens * spec.token_nbytes:
            raise BlockError(f"{tokens} tokens take {tokens * spec.token_nbytes} bytes, got {len(raw)}")
        layers = []
        start = 0
        for layer in spec.layers:
            arrays = []
            for plane in layer.planes:
                values = raw[start:].view(_RAW[plane.dtype.itemsize])[: layer.heads * tokens * plane.head_dim]
                arrays.append(
                    mx.array(values.reshape(layer.heads, tokens, plane.head_dim)).view(_MLX_DTYPES[plane.dtype])
                )
                start += values.nbytes
            layers.append(tuple(arrays))
        return cls(block_id, tokens, tuple(layers))


@dataclass(frozen=True, slots=True, eq=False)
class AgentBlocks:
    """An agent's context: its tokens and the blocks that hold them, all full but perhaps the last.

    Whoever holds it holds one reference on each of its blocks: when done, ``pool.free(agent_blocks.block_ids)``.
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
        """The pool's ids of the blocks, first to last."""
        return [block.block_id for block in self.blocks]

    def validate(self, spec: ModelCacheSpec) -> None:
        """Raise IncompatibleBlocksError unless a model with `spec` can go on from these blocks."""
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
        for block in self.blocks:
            block.validate(spec)
