"""A context that went through the page server gives the logits of one that never left: bit for bit.

Tokens would not do for the comparison: many a wrong cache leaves the likeliest token as it was. The negative controls
at the end are such caches, and the comparison has to see each of them.

With OpenBLAS the same rows multiplied in another batch differ in their last bits, so the uninterrupted run takes the
same steps there; MLX's own BLAS gives the bits of the run in one piece, whatever the steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache

from engine_models import letter_tokenizer, tiny_llama
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import redis
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, KVBlock
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

MODEL = tiny_llama()
SPEC = ModelCacheSpec.probe(MODEL, letter_tokenizer(), model_id="tiny")
TOKENS = np.random.default_rng(5).integers(0, 96, 600).tolist()
CUTS = [1, 127, 255, 256, 257, 599]
STOCK = os.environ.get("KVPAGE_BLAS") == "stock"

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def tier(server: RunningServer) -> Iterator[PageTier]:
    tier = PageTier(server.url, SPEC, BlockPool(1000))
    yield tier
    tier.close()


def run(tokens: Sequence[int], cache: list[KVCache]) -> Logits:
    """The logits of every one of `tokens`, ``[tokens, vocabulary]``."""
    return np.array(MODEL(mx.array([tokens]), cache=cache)[0])


def computed(count: int) -> list[KVCache]:
    """The cache after the first `count` tokens, computed in one piece."""
    cache = make_prompt_cache(MODEL)
    run(TOKENS[:count], cache)
    return cache


@cache
def whole() -> tuple[Logits, list[KVCache]]:
    """The logits of all of them in one piece, and the cache: copy it before you go on from it."""
    cache = make_prompt_cache(MODEL)
    return run(TOKENS, cache), cache


def blocks_of(cache: list[KVCache], agent_id: str = "restored") -> AgentBlocks:
    blocks = kvcache.extract(SPEC, cache, range(SPEC.blocks_for(cache[0].offset)), cache[0].offset)
    return AgentBlocks(agent_id, tuple(TOKENS[: cache[0].offset]), blocks, SPEC.fingerprint)


def through_the_server(tier: PageTier, cache: list[KVCache], cut: int) -> list[KVCache]:
    """The first `cut` tokens of `cache`, saved, loaded and reconstructed."""
    assert tier.save(blocks_of(cache))
    loaded = tier.load("restored", TOKENS)
    assert loaded
    return kvcache.reconstruct(SPEC, loaded.blocks, cut)


def decoded(cache: list[KVCache], first: int, count: int = 20) -> Logits:
    steps = []
    token = first
    for _ in range(count):
        steps.append(run([token], cache)[0])
        token = int(steps[-1].argmax())
    return np.array(steps)


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_stopped_at_the_cut_continues_identically(tier: PageTier, client: redis.Redis, cut: int) -> None:
    live = computed(cut)
    restored = through_the_server(tier, live, cut)
    assert np.array_equal(run(TOKENS[cut:], restored), run(TOKENS[cut:], live))
    assert np.array_equal(decoded(restored, 7), decoded(live, 7))


@pytest.mark.parametrize("cut", CUTS)
def test_a_prefix_of_a_longer_context_equals_the_trimmed_context(tier: PageTier, cut: int) -> None:
    live = deepcopy(whole()[1])
    restored = through_the_server(tier, live, cut)
    trim_prompt_cache(live, 600 - cut)
    assert np.array_equal(run(TOKENS[cut:], restored), run(TOKENS[cut:], live))


@pytest.mark.parametrize("cut", CUTS)
def test_the_logits_equal_those_of_one_run(tier: PageTier, cut: int) -> None:
    logits, cache = whole()
    resumed = run(TOKENS[cut:], through_the_server(tier, cache, cut))
    assert np.array_equal(resumed, logits[cut:]) if STOCK else np.allclose(resumed, logits[cut:], rtol=0, atol=1e-4)


@pytest.mark.skipif(STOCK, reason="is what this test starts")
def test_with_mlxs_own_blas_they_are_the_same_bits() -> None:
    """In a process of its own, since a process has one BLAS."""
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", "equal_those_of_one_run"],
        env={**os.environ, "KVPAGE_BLAS": "stock"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert tests.returncode == 0, tests.stdout
    assert f"{len(CUTS)} passed" in tests.stdout


def of_another(block: KVBlock) -> KVBlock:
    """The block with one page of another agent's context: other tokens, same place, same shape."""
    other = make_prompt_cache(MODEL)
    run(TOKENS[::-1], other)
    theirs = kvcache.extract(SPEC, other, range(3), 600)[0]
    keys, values = block.layers[1]
    keys = mx.concatenate([theirs.layers[1][0][:1], keys[1:]])
    return replace(block, layers=(block.layers[0], (keys, values), *block.layers[2:]))


def heads_swapped(block: KVBlock) -> KVBlock:
    keys, values = block.layers[3]
    return replace(block, layers=(*block.layers[:3], (keys[::-1], values)))


def keys_for_values(block: KVBlock) -> KVBlock:
    keys, values = block.layers[3]
    return replace(block, layers=(*block.layers[:3], (values, keys)))


def layers_swapped(block: KVBlock) -> KVBlock:
    first, second, *rest = block.layers
    return replace(block, layers=(second, first, *rest))


def layer_lost(block: KVBlock) -> KVBlock:
    lost = tuple(mx.zeros_like(array) for array in block.layers[2])
    return replace(block, layers=(*block.layers[:2], lost, block.layers[3]))


@pytest.mark.parametrize("spoil", [of_another, heads_swapped, keys_for_values, layers_swapped, layer_lost])
def test_the_comparison_sees_a_wrong_page(spoil: Callable[[KVBlock], KVBlock]) -> None:
    live = computed(599)
    blocks = blocks_of(live).blocks
    wrong = kvcache.reconstruct(SPEC, (spoil(blocks[0]), *blocks[1:]), 599)
    assert not np.allclose(run(TOKENS[599:], wrong), run(TOKENS[599:], live), rtol=0, atol=1e-3)


def test_the_comparison_sees_blocks_in_the_wrong_order() -> None:
    live = computed(599)
    first, second, tail = blocks_of(live).blocks
    wrong = kvcache.reconstruct(SPEC, (second, first, tail), 599)
    # Keys carry their positions, so that attention, a sum, would be right again: it takes the prefix of one block.
    assert np.allclose(run(TOKENS[599:], wrong), run(TOKENS[599:], live), rtol=0, atol=1e-3)
    halved = kvcache.reconstruct(SPEC, (second, first, tail), 256)
    trim_prompt_cache(live, live[0].offset - 256)
    assert not np.allclose(run(TOKENS[256:], halved), run(TOKENS[256:], live), rtol=0, atol=1e-3)


@pytest.mark.parametrize("error", [-1, 1])
def test_the_comparison_sees_an_offset_that_is_off_by_one(error: int) -> None:
    live = computed(599)
    wrong = kvcache.reconstruct(SPEC, blocks_of(live).blocks, 599)
    for layer in wrong:
        layer.offset += error
    assert not np.allclose(run(TOKENS[599:], wrong), run(TOKENS[599:], live), rtol=0, atol=1e-3)
