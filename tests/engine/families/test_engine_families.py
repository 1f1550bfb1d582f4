"""Every family of models goes on from a context that went through the page server as if it had never left: to the bit.

The logits are compared, and the run that was not interrupted takes the same steps: see test_engine_restore. At the end
are caches that are wrong by little, and the comparison has to see each of them in every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from engine_families import KINDS, QUANTIZED, TOKENS, WITH_STATE, WITHOUT_OFFSET, Family, Logits, family
from family_matrix import FOREIGN, GROWN, IDENTITY, LAYER, OFFSET, RESTORED, ROUNDS, STALE, SWAPPED, covers
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import redis

from engine.caches import CacheStateError, parts
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, Arrays, BlockError, IncompatibleBlocksError, KVBlock, block_names
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier
from kvpage_server.page import PageHeader

CUTS = [1, 255, 256, 299]


@contextmanager
def tier_of(server: RunningServer, spec: ModelCacheSpec) -> Iterator[PageTier]:
    tier = PageTier(server.url, spec, BlockPool(8))
    yield tier
    tier.close()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_at_the_cut_continues_identically(
    server: RunningServer, client: redis.Redis, kind: str, cut: int
) -> None:
    of = family(kind)
    live = of.computed(cut)
    with covers(kind, RESTORED), tier_of(server, of.spec) as tier:
        assert tier.save(of.blocks(live, cut))
        loaded = tier.load("agent", TOKENS)
        assert loaded
        assert len(loaded) == cut
        before = bytes_of(loaded)
        restored = kvcache.reconstruct(of.spec, loaded.blocks, cut)
        assert np.array_equal(of.continuation(restored, cut), of.continuation(live, cut))
        assert bytes_of(loaded) == before
        assert not tier.misses


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_grown_by_decoding_is_restored_identically(
    server: RunningServer, client: redis.Redis, kind: str
) -> None:
    """In a ring that has turned the order of the sums is another, which the last bits show."""
    of = family(kind)
    live = of.computed(100, decoded=80)
    with covers(kind, GROWN), tier_of(server, of.spec) as tier:
        assert tier.save(of.blocks(live, 100))
        loaded = tier.load("agent")
        assert loaded
        restored = kvcache.reconstruct(of.spec, loaded.blocks, 100)
        for token in TOKENS[100:105]:
            assert np.array_equal(of.run([token], restored), of.run([token], live))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_change_in_ten_rounds(server: RunningServer, client: redis.Redis, kind: str) -> None:
    of = family(kind)
    context = of.blocks(of.computed(270), 270)
    first = bytes_of(context)
    with covers(kind, ROUNDS), tier_of(server, of.spec) as tier:
        for _ in range(10):
            client.flushall()
            assert tier.save(context)
            context = tier.load("agent")
            assert context
            cache = kvcache.reconstruct(of.spec, context.blocks, 270)
            tier._remote.pool.free(context.block_ids)
            context = of.blocks(cache, 270)
            assert bytes_of(context) == first


def bytes_of(context: AgentBlocks) -> list[bytes]:
    arrays = [array for block in context.blocks for part in (block.layers, block.state or ()) for array in part]
    return [bytes(memoryview(plane.view(mx.uint8))) for layer in arrays for plane in layer]


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_state_is_used_where_it_was_taken_and_nowhere_else(
    server: RunningServer, client: redis.Redis, kind: str
) -> None:
    """One at the end, one at 256: a prompt that departs between them goes on from 256, one that departs before that
    from nothing, and the whole prompt itself, of which a token has to be fed, from 256 as well."""
    of = family(kind)
    at_256 = of.computed(256)
    states = {256: kvcache.capture(of.spec, at_256)}
    of.run(TOKENS[256:], at_256)
    saved = of.blocks(at_256, 300, states)
    assert [saved.reusable(of.spec, limit) for limit in (300, 299, 256, 255)] == [300, 256, 256, 0]
    with pytest.raises(BlockError, match=r"taken after \[256, 300\] tokens, not after 299"):
        kvcache.reconstruct(of.spec, saved.blocks, 299)
    with tier_of(server, of.spec) as tier:
        assert tier.save(saved)
        assert [reach(tier, "agent", prompt) for prompt in (
            [*TOKENS, 1], TOKENS, [*TOKENS[:280], 1], TOKENS[:257], TOKENS[:256], [*TOKENS[:255], 96],
        )] == [300, 256, 256, 256, 0, 0]  # fmt: skip
        assert reach(tier, "another", TOKENS) == 256
        loaded = tier.load("another", TOKENS)
        assert loaded
        restored = kvcache.reconstruct(of.spec, loaded.blocks, 256)
        assert np.array_equal(of.continuation(restored, 256), of.continuation(of.computed(256), 256))


def reach(tier: PageTier, agent_id: str, prompt: list[int]) -> int:
    loaded = tier.load(agent_id, prompt)
    if loaded is None:
        return 0
    tier._remote.pool.free(loaded.block_ids)
    return len(loaded)


@pytest.mark.parametrize(("kind", "block_tokens"), [("lfm2", 2), ("qwen3_next", 22), ("jamba", 22)])
def test_a_state_as_large_as_its_block_is_stored_as_a_state(
    server: RunningServer, client: redis.Redis, kind: str, block_tokens: int
) -> None:
    of = Family(kind, block_tokens=block_tokens)
    end = 2 * block_tokens
    assert of.spec.state_nbytes(end) == block_tokens * of.spec.token_nbytes
    live = of.computed(block_tokens)
    states = {block_tokens: kvcache.capture(of.spec, live)}
    of.run(TOKENS[block_tokens:end], live)
    with tier_of(server, of.spec) as tier:
        assert tier.save(of.blocks(live, end, states))
        assert reach(tier, "agent", TOKENS[:end]) == block_tokens
        loaded = tier.load("agent", TOKENS)
        assert loaded
        assert not tier.misses
        restored = kvcache.reconstruct(of.spec, loaded.blocks, end)
        assert np.array_equal(of.continuation(restored, end), of.continuation(live, end))


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_lost_state_shortens_the_prefix_to_the_one_before(
    server: RunningServer, client: redis.Redis, kind: str
) -> None:
    of = family(kind)
    at_256 = of.computed(256)
    states = {256: kvcache.capture(of.spec, at_256)}
    of.run(TOKENS[256:], at_256)
    tail, full = (block_names(TOKENS, of.spec)[i] for i in (1, 0))
    with tier_of(server, of.spec) as tier:
        tier.save(of.blocks(at_256, 300, states))
        assert client.execute_command("KVPAGEDEL", tail, 1) > 0
        assert reach(tier, "agent", [*TOKENS, 1]) == 256
        assert tier.misses == {"gap": 1}
        header = PageHeader.parse(client.get(f"kv:{full}:0:0:1:0"))
        shape = header.dtype, header.page_size, header.head_dim
        client.execute_command("KVPAGESET", full, 0, 0, 1, 0, *map(int, shape), 0, bytes(header.tensor_size))
        assert reach(tier, "agent", [*TOKENS, 1]) == 0
        assert tier.misses == {"gap": 2, "checksum": 1}
        assert not client.exists(f"state:{full}")
        assert tier._remote.pool.available_blocks == 8


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_of_the_same_shapes_finds_nothing(server: RunningServer, client: redis.Redis, kind: str) -> None:
    of, other = family(kind), family(kind, seed=8)
    with covers(kind, IDENTITY), tier_of(server, of.spec) as ours, tier_of(server, other.spec) as theirs:
        assert theirs.save(other.blocks(other.computed(270), 270))
        assert ours.load("agent") is None
        assert ours.load("another", TOKENS) is None
        assert ours.misses == {"absent": 2}


def test_a_state_of_another_window_is_refused() -> None:
    of = family("gemma3_text")
    whole = of.blocks(of.computed(270), 270)
    assert whole.blocks[-1].state
    short = tuple(tuple(array[:, -63:] for array in layer) for layer in whole.blocks[-1].state)
    wrong = replace(whole, blocks=(whole.blocks[0], replace(whole.blocks[1], state=short)))
    with pytest.raises(IncompatibleBlocksError, match="layer 0 of the state after 270 tokens must hold"):
        wrong.validate(of.spec)


def test_a_truncated_chunk_is_refused() -> None:
    of = family("llama4")
    cache = of.computed(270)
    of.run(TOKENS[270:275], cache)
    for layer in cache:
        layer.trim(10)
    with pytest.raises(CacheStateError, match="a ChunkedKVCache after 265 tokens holds 64 of them, got 59"):
        kvcache.extract(of.spec, cache, [0, 1], 265)


def test_a_list_of_caches_is_several_layers_of_pages() -> None:
    spec = family("falcon_h1").spec
    assert [layer.KIND.__name__ for layer in spec.layers] == ["ArraysCache", "KVCache"] * 2
    assert spec.tag.n_layers == 2
    assert [type(layer).__name__ for layer in kvcache.empty(spec)] == ["CacheList"] * 2


def test_quantised_caches_differ_by_bits_and_group() -> None:
    assert len({family(kind).spec.fingerprint for kind in ["llama", *QUANTIZED]}) == 5


def alike(layers: Arrays) -> list[tuple[int, int]]:
    """For each shape that layers keep, the last two layers that keep it; the same one twice if it is the only one."""
    shapes = [tuple(array.shape for array in layer) for layer in layers]
    places = {shape: [i for i, other in enumerate(shapes) if other == shape] for shape in shapes if shape}
    return [(found[-2:][0], found[-1]) for found in places.values()]


def pages_swapped(layers: Arrays, a: int, b: int) -> Arrays:
    """The first pages of two layers, each in the other's place; of one layer, those of its heads."""
    if a == b:
        return tuple((layer[0][::-1], *layer[1:]) if i == a else layer for i, layer in enumerate(layers))
    (mine, *rest), (theirs, *others) = layers[a], layers[b]
    changed = {
        a: (mx.concatenate([theirs[:1], mine[1:]]), *rest),
        b: (mx.concatenate([mine[:1], theirs[1:]]), *others),
    }
    return tuple(changed.get(i, layer) for i, layer in enumerate(layers))


def layer_missing(layers: Arrays, _: int, lost: int) -> Arrays:
    empty = tuple(array if array.dtype == mx.uint32 else mx.zeros_like(array) for array in layers[lost])
    return tuple(empty if i == lost else layer for i, layer in enumerate(layers))


def parts_of(of: Family) -> list[str]:
    return ["layers"] * (of.spec.token_nbytes > 0) + ["state"] * of.spec.has_state


@cache
def intact(kind: str, seed: int = 7) -> tuple[Family, tuple[KVBlock, ...], Logits]:
    """The blocks of 270 tokens, and the logits of the one after the last."""
    of = family(kind, seed)
    live = of.computed(270)
    blocks = of.blocks(live, 270).blocks
    return of, blocks, following(of, live)


def following(of: Family, cache: list[Any]) -> Logits:
    return of.run(TOKENS[270:275], cache)[0]


def differs(found: Logits, right: Logits) -> bool:
    return bool(np.abs(found - right).max() > 1e-4)


@pytest.mark.parametrize(("spoil", "column"), [(pages_swapped, SWAPPED), (layer_missing, LAYER)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_sees_a_wrong_page(kind: str, spoil: Callable[[Arrays, int, int], Arrays], column: str) -> None:
    of, (*whole, last), right = intact(kind)
    for part in parts_of(of):
        for a, b in alike(getattr(last, part)):
            wrong = replace(last, **{part: spoil(getattr(last, part), a, b)})
            with covers(kind, column):
                assert differs(following(of, kvcache.reconstruct(of.spec, [*whole, wrong], 270)), right)


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_detects_pages_of_another_model(kind: str) -> None:
    of, blocks, right = intact(kind)
    _, theirs, _ = intact(kind, seed=8)
    for part in parts_of(of):
        mixed = [replace(a, **{part: getattr(b, part)}) for a, b in zip(blocks, theirs, strict=True)]
        with covers(kind, FOREIGN):
            assert differs(following(of, kvcache.reconstruct(of.spec, mixed, 270)), right)


@pytest.mark.parametrize("error", [-1, 1])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_OFFSET])
def test_the_comparison_sees_an_offset_that_is_off_by_one(kind: str, error: int) -> None:
    of, blocks, right = intact(kind)
    wrong = kvcache.reconstruct(of.spec, blocks, 270)
    for layer in parts(wrong):
        if hasattr(layer, "offset"):
            layer.offset += error
    with covers(kind, OFFSET):
        assert differs(following(of, wrong), right)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_the_comparison_sees_a_state_that_is_a_token_old(kind: str) -> None:
    """A ring that has not turned on among others."""
    of, (*whole, last), right = intact(kind)
    stale = kvcache.capture(of.spec, of.computed(269))
    wrong = kvcache.reconstruct(of.spec, [*whole, replace(last, state=stale)], 270)
    with covers(kind, STALE):
        assert differs(following(of, wrong), right)
