"""Every kind of cache is served; storable ones are restored, and others are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_bench import EngineBench
from every_family import random_model
from odd_models import TOKENIZER, TOKENS, Model

# isort: split
import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from engine.caches import ChunkedLayer, UnsupportedCacheError, WindowLayer, describe, parts
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.startup import _probe
from engine.tiers.cold import SafetensorsCacheAdapter


@pytest.mark.parametrize(("cache", "kind"), [(RotatingKVCache(64), WindowLayer), (ChunkedKVCache(64), ChunkedLayer)])
def test_a_layer_that_has_kept_nothing_keeps_nothing(cache: Any, kind: type) -> None:
    layer = describe(0, cache)
    assert isinstance(layer, kind)
    assert layer.matrices(100) == ()
    restored = layer.restore(layer.capture(cache), 100)  # type: ignore[attr-defined]
    assert (type(restored), restored.keys, restored.offset) == (type(cache), None, 0)


def test_a_cache_unlike_its_kind_is_refused_by_name() -> None:
    odd = KVCache()
    odd.keys, odd.values = "keys", "values"
    with pytest.raises(UnsupportedCacheError, match="layer 3 keeps a KVCache unlike those that are known"):
        describe(3, odd)


def test_values_of_width_zero_are_restored() -> None:
    """Sparse attention keeps such values next to the keys of its index."""
    of = Model("minimax_m3_vl")
    cache = of.empty()
    mx.eval(of.model(mx.array([TOKENS[:50]]), cache=cache))
    blocks = kvcache.extract(of.spec, cache, [0, 1], 50)
    restored = kvcache.reconstruct(of.spec, blocks, 50)
    shapes = [part.values.shape[-1] for part in parts(restored)]
    assert shapes == [part.values.shape[-1] for part in parts(cache)]
    assert 0 in shapes
    following = mx.array([[7]])
    assert mx.array_equal(of.model(following, cache=restored), of.model(following, cache=cache))


def test_integer_states_are_restored_and_growing_ones_dropped() -> None:
    """The tokens before, of which there are as many as the longest n-gram has once there were so many."""
    of = Model("longcat_flash_ngram")
    cache = of.empty()
    mx.eval(of.model(mx.array([TOKENS[:50]]), cache=cache))
    (state,), *_ = kvcache.capture(of.spec, cache)
    assert state.dtype == mx.int64
    bench = EngineBench(of, TOKENIZER, 64)  # type: ignore[arg-type]
    bench.batch.submit("agent", [5], max_tokens=1)
    (short,) = bench.batch.step()
    assert len(short.tokens) == 1
    bench.batch.submit("agent", TOKENS[:40], max_tokens=2)
    (long,) = bench.batch.step()
    assert (long.not_kept, len(long.blocks)) == (None, 42)
    bench.free(short, long)


@pytest.mark.parametrize("name", ["minimax_m3_vl", "longcat_flash_ngram"])
def test_odd_caches_are_restored_from_a_file(name: str, tmp_path: Path) -> None:
    of = Model(name)
    cache = of.empty()
    mx.eval(of.model(mx.array([TOKENS[:50]]), cache=cache))
    pool = BlockPool(8)
    context = AgentBlocks("agent", tuple(TOKENS[:50]), kvcache.extract(of.spec, cache, [0, 1], 50), of.spec.fingerprint)
    files = SafetensorsCacheAdapter(of.spec, pool, tmp_path)
    assert files.save(context)
    loaded = files.load("agent")
    assert loaded
    restored = kvcache.reconstruct(of.spec, loaded.blocks, 50)
    following = mx.array([[7]])
    assert mx.array_equal(of.model(following, cache=restored), of.model(following, cache=cache))


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "jamba", "lfm2", "llama4", "mamba2", "gemma3_text"])
def test_keys_and_values_in_fewer_bits_and_all_else_as_it_is(name: str, caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = random_model(
        name, **({} if name == "mamba2" else {"text_config": changes} if name == "llama4" else changes)
    )
    spec = _probe(model, TOKENIZER, name, 8)
    kinds = {layer.KIND.__name__ for layer in spec.layers}
    assert "KVCache" not in kinds
    assert ("QuantizedKVCache" in kinds) == (name != "mamba2")
    assert caplog.messages == [
        f"what these layers keep is not kept in 8 bits but as it is: {kind}" for kind in kinds - {"QuantizedKVCache"}
    ]
    assert {type(layer) for layer in kvcache.empty(spec)} <= {*map(type, make_prompt_cache(model))} | {
        layer.KIND for layer in spec.layers
    } | {CacheList}


def test_a_model_without_support_for_fewer_bits_is_reported() -> None:
    with pytest.raises(
        UnsupportedCacheError, match="deepseek_v3 cannot do with keys and values of 8 bits, in groups of"
    ):
        _probe(random_model("deepseek_v3"), TOKENIZER, "deepseek_v3", 8)
