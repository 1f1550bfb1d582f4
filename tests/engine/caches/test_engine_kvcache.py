"""Blocks and mlx-lm's caches have the same bits, in memory and as pages; other shapes are errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from block_pages import from_body, page_bodies, pages
from engine_models import letter_tokenizer, tiny_llama

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache, trim_prompt_cache

from engine.caches import DTYPES, FullLayer
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, BlockError, IncompatibleBlocksError, KVBlock
from engine.spec import ModelCacheSpec

MODEL = tiny_llama()
SPEC = ModelCacheSpec.probe(MODEL, letter_tokenizer(), model_id="tiny")
TOKENS = np.random.default_rng(1).integers(0, 96, 700).tolist()


def filled(tokens: Sequence[int]) -> list[KVCache]:
    cache: list[KVCache] = make_prompt_cache(MODEL)
    mx.eval(MODEL(mx.array([tokens]), cache=cache))
    return cache


def blocks_of(cache: list[KVCache], spec: ModelCacheSpec = SPEC) -> tuple[KVBlock, ...]:
    return kvcache.extract(spec, cache, range(spec.blocks_for(cache[0].offset)), cache[0].offset)


def bits(cache: list[KVCache]) -> list[bytes]:
    return [bytes(memoryview(array.view(mx.uint8))) for layer in cache for array in layer.keys_and_values()]


def context(tokens: Sequence[int] = TOKENS[:300], agent_id: str = "alice") -> AgentBlocks:
    return AgentBlocks(agent_id, tuple(tokens), blocks_of(filled(tokens)), SPEC.fingerprint)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 512, 700])
def test_a_cache_is_restored_from_blocks_bit_for_bit(count: int) -> None:
    cache = filled(TOKENS[:count])
    blocks = blocks_of(cache)
    assert [block.tokens for block in blocks] == [256] * (count // 256) + [count % 256] * (count % 256 > 0)
    restored = kvcache.reconstruct(SPEC, blocks, count)
    assert [layer.offset for layer in restored] == [count] * 4
    assert bits(restored) == bits(cache)


@pytest.mark.parametrize("cut", [1, 255, 256, 257, 699])
def test_a_restored_prefix_has_no_later_token(cut: int) -> None:
    cache = filled(TOKENS)
    restored = kvcache.reconstruct(SPEC, blocks_of(cache), cut)
    trim_prompt_cache(cache, 700 - cut)
    assert bits(restored) == bits(cache)
    for layer in restored:
        assert not np.array(layer.keys[..., cut:, :]).any()


def test_trimmed_tokens_do_not_leak_into_blocks() -> None:
    cache = filled(TOKENS)
    trim_prompt_cache(cache, 400)
    assert sum(block.tokens for block in blocks_of(cache)) == 300
    assert bits(kvcache.reconstruct(SPEC, blocks_of(cache), 300)) == bits(cache)


def test_extraction_can_start_after_the_blocks_that_are_kept() -> None:
    cache = filled(TOKENS)
    first, *rest = blocks_of(cache)
    later = kvcache.extract(SPEC, cache, [5, 6], 700, start=256)
    assert [block.block_id for block in later] == [5, 6]
    assert [list(map(bytes, page_bodies(block.layers))) for block in later] == [
        list(map(bytes, page_bodies(block.layers))) for block in rest
    ]
    assert bits(kvcache.reconstruct(SPEC, [first, *later], 700)) == bits(cache)


def test_decoding_on_a_restored_cache_does_not_change_its_blocks() -> None:
    blocks = blocks_of(filled(TOKENS))
    before = [bytes(body) for block in blocks for body in page_bodies(block.layers)]
    restored = kvcache.reconstruct(SPEC, blocks, 600)
    mx.eval(MODEL(mx.array([TOKENS[:200]]), cache=restored))
    assert [bytes(body) for block in blocks for body in page_bodies(block.layers)] == before


def test_reconstruction_computes_nothing_until_it_is_needed() -> None:
    """The lazy result has 700 tokens in 4 layers; nothing is allocated immediately."""
    blocks = blocks_of(filled(TOKENS))
    mx.synchronize()
    before = mx.get_active_memory()
    restored = kvcache.reconstruct(SPEC, blocks, 700)
    assert mx.get_active_memory() - before < 4096
    mx.eval([layer.state for layer in restored])
    assert mx.get_active_memory() - before >= 700 * SPEC.token_nbytes


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_pages_keep_every_bit_of_every_dtype(dtype: mx.Dtype) -> None:
    """NaNs with payloads, infinities and subnormals among them."""
    stored = DTYPES[dtype]
    layers = tuple(
        replace(layer, planes=tuple(replace(p, dtype=stored) for p in layer.planes)) for layer in SPEC.layers
    )
    spec = replace(SPEC, layers=layers)
    body = np.random.default_rng(2).bytes(77 * spec.token_nbytes)
    block = KVBlock(0, 77, from_body(body, spec.token_shapes(77)))
    block.validate(spec, 77)
    assert {array.dtype for arrays in block.layers for array in arrays} == {dtype}
    assert b"".join(page_bodies(block.layers)) == body
    assert [len(page) for page in page_bodies(block.layers)] == [at.nbytes for at in pages(spec.token_shapes(77))]
    copy = kvcache.extract(spec, kvcache.reconstruct(spec, [block], 77), [1], 77)[0]
    assert b"".join(page_bodies(copy.layers)) == body


def test_a_page_holds_the_rows_of_its_own_head_layer_and_plane() -> None:
    block = blocks_of(filled(TOKENS[:9]))[0]
    for at, body in zip(pages(SPEC.token_shapes(9)), page_bodies(block.layers), strict=True):
        rows = np.frombuffer(body, np.float32).reshape(9, 16)
        assert (rows == np.array(block.layers[at.layer][at.plane.kv_type])[at.head]).all()


def test_a_layer_that_keeps_nothing_is_skipped_both_ways() -> None:
    spec = replace(SPEC, layers=(*SPEC.layers[:2], FullLayer((), ()), SPEC.layers[3]))
    cache = filled(TOKENS[:300])
    cache[2] = KVCache()
    blocks = blocks_of(cache, spec)
    restored = kvcache.reconstruct(spec, blocks, 300)
    assert restored[2].empty()
    assert bits([*restored[:2], restored[3]]) == bits([*cache[:2], cache[3]])
    body = b"".join(page_bodies(blocks[0].layers))
    assert b"".join(page_bodies(from_body(body, spec.token_shapes(256)))) == body


@pytest.mark.parametrize(("last", "message"), [
    ([], "a cache of 'tiny' has 4 layers, got 3"),
    ([QuantizedKVCache(32, 8)], "layer 3 must be a FullLayer.*, got a QuantizedLayer"),
    ([RotatingKVCache(8)], "layer 3 must be a FullLayer.*, got a WindowLayer"),
    ([KVCache()], r"layer 3 must be a FullLayer\(heads=\(2, 2\).*, got a FullLayer\(heads=\(1, 1\)"),
], ids=["a layer less", "a quantised layer", "a window", "other heads"])  # fmt: skip
def test_a_cache_of_another_make_is_no_cache_of_this_model(last: list[Any], message: str) -> None:
    for layer in last:
        layer.update_and_fetch(mx.zeros((1, 1, 32, 32)), mx.zeros((1, 1, 32, 32)))
    with pytest.raises(BlockError, match=message):
        kvcache.extract(SPEC, [*filled(TOKENS[:32])[:3], *last], [0], 32)


def test_layers_with_different_lengths_are_no_cache() -> None:
    cache = filled(TOKENS[:300])
    cache[2].trim(1)
    with pytest.raises(BlockError, match=r"a cache of 300 tokens hold as many, got \[299, 300\]"):
        blocks_of(cache)


@pytest.mark.parametrize(("ids", "start", "message"), [
    ([0], 0, "300 tokens take 2 blocks, got 1 ids"),
    ([0, 1, 2], 0, "300 tokens take 2 blocks, got 3 ids"),
    ([0], 100, "start at a multiple of 256 up to 300, got 100"),
    ([0], 512, "start at a multiple of 256 up to 300, got 512"),
])  # fmt: skip
def test_extraction_refuses_ids_and_starts_that_do_not_fit(ids: list[int], start: int, message: str) -> None:
    with pytest.raises(BlockError, match=message):
        kvcache.extract(SPEC, filled(TOKENS[:300]), ids, 300, start)


@pytest.mark.parametrize("tokens", [0, 301, -1])
def test_no_more_tokens_are_restored_than_the_blocks_hold(tokens: int) -> None:
    with pytest.raises(BlockError, match="1 to 300 tokens can be restored"):
        kvcache.reconstruct(SPEC, context().blocks, tokens)


def test_a_body_of_another_length_is_no_block() -> None:
    with pytest.raises(BlockError, match="these shapes has 9216 bytes, got 9215"):
        from_body(bytes(9215), SPEC.token_shapes(9))


def test_blocks_of_another_model_are_refused() -> None:
    with pytest.raises(IncompatibleBlocksError, match="agent 'alice' have the fingerprint"):
        replace(context(), fingerprint=1).validate(SPEC)


@pytest.mark.parametrize("change", [
    lambda arrays: arrays[:1],
    lambda arrays: (arrays[0], arrays[1].astype(mx.float16)),
    lambda arrays: (arrays[0], arrays[1][:1]),
    lambda arrays: (arrays[0], arrays[1][:, :-1]),
    lambda arrays: (arrays[0], arrays[1][..., :8]),
], ids=["no values", "another dtype", "a head less", "a token less", "another head_dim"])  # fmt: skip
def test_blocks_of_another_shape_are_refused(change: object) -> None:
    whole = context()
    wrong = replace(whole.blocks[0], layers=(*whole.blocks[0].layers[:3], change(whole.blocks[0].layers[3])))
    with pytest.raises(IncompatibleBlocksError, match="layer 3 of a block must hold"):
        replace(whole, blocks=(wrong, *whole.blocks[1:])).validate(SPEC)
    with pytest.raises(IncompatibleBlocksError, match="4 layers, got 3"):
        replace(whole, blocks=(replace(wrong, layers=wrong.layers[:3]), *whole.blocks[1:])).validate(SPEC)


def test_only_the_last_block_may_be_partial() -> None:
    whole = context()
    with pytest.raises(IncompatibleBlocksError, match=r"all blocks but the last hold 256 tokens, got \[44, 256\]"):
        replace(whole, blocks=whole.blocks[::-1]).validate(SPEC)


def test_tokens_and_blocks_must_agree() -> None:
    whole = context()
    with pytest.raises(BlockError, match="299 tokens are named, the blocks hold 300"):
        replace(whole, tokens=whole.tokens[:-1])


@pytest.mark.parametrize("agent_id", ["", "a:b", "a b", "../alice", "/etc/passwd", ".hidden", "a\n", "a" * 129, "é"])
def test_an_agent_id_that_cannot_name_pages_and_files_is_refused(agent_id: str) -> None:
    with pytest.raises(BlockError, match="an agent id is 1 to 128 of"):
        context(TOKENS[:3], agent_id)


@pytest.mark.parametrize("agent_id", ["a", "alice@example.org", "A-1_b.c+d=e", "a" * 128])
def test_an_agent_id_may_be_a_name_or_an_address(agent_id: str) -> None:
    assert context(TOKENS[:3], agent_id).agent_id == agent_id
