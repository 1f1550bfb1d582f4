"""Contexts without a model: every row is computed from the tokens up to it, so that loaded rows can be checked."""

from __future__ import annotations

from collections.abc import Sequence

from engine_models import letter_tokenizer, tiny_llama

# isort: split
import mlx.core as mx
import numpy as np

from engine.memory.blocks import AgentBlocks, Arrays, KVBlock
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec

BLOCK = 8
SPEC = ModelCacheSpec.probe(tiny_llama(num_hidden_layers=2), letter_tokenizer(), model_id="tiny", block_tokens=BLOCK)


def some_tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 96, count).tolist())


def made(pool: BlockPool, agent_id: str, tokens: Sequence[int]) -> AgentBlocks:
    """A context as an answer leaves it, its blocks allocated."""
    count = SPEC.blocks_for(len(tokens))
    ids = pool.allocate(count, agent_id, len(tokens) * SPEC.token_nbytes)
    blocks = []
    for i, block_id in enumerate(ids):
        end = min((i + 1) * BLOCK, len(tokens))
        blocks.append(KVBlock(block_id, end - i * BLOCK, _arrays(tokens, i * BLOCK, end)))
    pool.settle({block.block_id: block.nbytes for block in blocks})
    return AgentBlocks(agent_id, tuple(tokens), tuple(blocks), SPEC.fingerprint)


def is_true(context: AgentBlocks) -> bool:
    """Whether its blocks are those of its tokens."""
    context.validate(SPEC)
    start = 0
    for block in context.blocks:
        wanted = _arrays(context.tokens, start, start + block.tokens)
        for layer, right in zip(block.layers, wanted, strict=True):
            if not all(mx.array_equal(a, b) for a, b in zip(layer, right, strict=True)):
                return False
        start += block.tokens
    return True


def _arrays(tokens: Sequence[int], start: int, end: int) -> Arrays:
    rows = np.zeros(end - start, np.float32)
    history = 0
    for position, token in enumerate(tokens[:end]):
        history = (history * 101 + token + 1) % 8191
        if position >= start:
            rows[position - start] = history
    arrays = []
    for i, layer in enumerate(SPEC.token_shapes(end - start)):
        planes = []
        for number, kept in enumerate(layer):
            marks = np.arange(kept.heads * kept.plane.head_dim, dtype=np.float32).reshape(kept.heads, 1, -1)
            planes.append(mx.array(rows[None, :, None] + 10_000 * (2 * i + number) + marks / 64))
        arrays.append(tuple(planes))
    mx.eval(arrays)
    return tuple(arrays)
