"""A cache of any dtype returns from the page server and from a file with the same bytes and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from block_pages import page_bodies
from engine_models import letter_tokenizer, tiny_llama
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import redis
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier

TOKENS = tuple(np.random.default_rng(8).integers(0, 96, 80).tolist())
DTYPES = {
    "float32": (mx.float32, None),
    "float16": (mx.float16, None),
    "bfloat16": (mx.bfloat16, None),
    "8-bit, scales in float32": (mx.float32, 8),
    "8-bit, scales in float16": (mx.float16, 8),
    "8-bit, scales in bfloat16": (mx.bfloat16, 8),
    "4-bit, scales in float32": (mx.float32, 4),
    "4-bit, scales in bfloat16": (mx.bfloat16, 4),
}
CYCLES = 10

Round = Callable[[AgentBlocks], AgentBlocks]  # saved, forgotten, loaded


class Kept:
    """A model whose cache has one dtype, and its cache of TOKENS without the last."""

    def __init__(self, dtype: mx.Dtype, bits: int | None) -> None:
        self.bits = bits
        self.model = tiny_llama(dtype=dtype, head_dim=64)
        self.spec = ModelCacheSpec.probe(self.model, letter_tokenizer(), block_tokens=32, cache=self.empty())
        cache = self.empty()
        mx.eval(self.model(mx.array([TOKENS[:-1]]), cache=cache))
        ids = range(self.spec.blocks_for(len(TOKENS)))
        blocks = kvcache.extract(self.spec, cache, ids, len(TOKENS) - 1)
        self.context = AgentBlocks("alice", TOKENS[:-1], blocks, self.spec.fingerprint)
        self.logits = self.next_logits(cache)

    def empty(self) -> list[Any]:
        if self.bits is None:
            return make_prompt_cache(self.model)
        return [QuantizedKVCache(32, self.bits) for _ in self.model.layers]

    def next_logits(self, cache: list[Any]) -> bytes:
        return bytes(memoryview(self.model(mx.array([TOKENS[-1:]]), cache=cache).astype(mx.float32)))

    def holds(self, context: AgentBlocks) -> bool:
        """Return whether a context is identical to the computed one, and continues identically."""
        if [*map(bodies, context.blocks)] != [*map(bodies, self.context.blocks)]:
            return False
        return self.next_logits(kvcache.reconstruct(self.spec, context.blocks, len(context))) == self.logits


def bodies(block: Any) -> list[bytes]:
    return [bytes(page) for page in page_bodies(block.layers)]


@pytest.fixture(scope="module", params=DTYPES)
def kept(request: pytest.FixtureRequest) -> Kept:
    return Kept(*DTYPES[request.param])


@pytest.fixture(params=["page server", "safetensors file"])
def cycle(request: pytest.FixtureRequest, kept: Kept, tmp_path: Path) -> Iterator[Round]:
    pool = BlockPool(8)
    tier: PageTier | SafetensorsCacheAdapter
    if request.param == "page server":
        server: RunningServer = request.getfixturevalue("server")
        client: redis.Redis = request.getfixturevalue("client")
        tier, forget = PageTier(server.url, kept.spec, pool), client.flushall
    else:
        tier, forget = (
            SafetensorsCacheAdapter(kept.spec, pool, tmp_path),
            lambda: [*map(Path.unlink, tmp_path.iterdir())],
        )

    def cycle(context: AgentBlocks) -> AgentBlocks:
        forget()
        assert tier.save(context)
        loaded = tier.load("alice")
        assert loaded, tier.misses
        pool.free(loaded.block_ids)
        return loaded

    yield cycle
    if isinstance(tier, PageTier):
        tier.close()
    pool.check_empty()


def test_repeated_saves_and_loads_change_nothing(kept: Kept, cycle: Round) -> None:
    context = kept.context
    for _ in range(CYCLES):
        context = cycle(context)
    assert kept.holds(context)


def test_a_changed_bit_would_be_found(kept: Kept) -> None:
    """In the last plane of the last layer, the last head's last row."""
    *before, last = kept.context.blocks
    *layers, (*planes, array) = last.layers
    flipped = np.array(array.view(mx.uint8))
    flipped[-1, -1, 0] ^= 1
    changed = mx.array(flipped).view(array.dtype)
    other = type(last)(last.block_id, last.tokens, (*layers, (*planes, changed)))
    assert not kept.holds(AgentBlocks("alice", kept.context.tokens, (*before, other), kept.spec.fingerprint))
