"""Properties of a model that the engine measures by running it, and the fingerprint that distinguishes models."""

from __future__ import annotations

from collections.abc import Callable

from block_pages import pages
from engine_models import letter_tokenizer, tiny, tiny_llama

# isort: split

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache
from mlx_lm.models.llama import Model

from engine.caches import FullLayer, UnsupportedCacheError
from engine.chains import ROOT, chain_hash, chain_hashes, common_prefix
from engine.spec import ModelCacheSpec, ModelTag
from kvpage_server.page import DType, KVType, Plane


def probe(model: Model, **options: object) -> ModelCacheSpec:
    return ModelCacheSpec.probe(model, letter_tokenizer(), **options)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(mx.float32, DType.FLOAT32), (mx.float16, DType.FLOAT16), (mx.bfloat16, DType.BFLOAT16)],
)
def test_the_geometry_is_read_from_the_arrays_a_token_leaves(dtype: mx.Dtype, stored: DType) -> None:
    spec = probe(tiny_llama(dtype=dtype, head_dim=24), model_id="tiny")
    layer = FullLayer((2, 2), (Plane(KVType.K, stored, 24), Plane(KVType.V, stored, 24)))
    assert spec.layers == (layer,) * 4
    assert (spec.vocab_size, spec.context) == (97, 4096)
    assert spec.tag == ModelTag("tiny", 4, 2, 24, 256)
    assert spec.token_nbytes == 4 * 2 * 2 * 24 * stored.itemsize


def test_pages_are_ordered_by_layer_plane_and_head() -> None:
    order = [(at.layer, at.plane.kv_type, at.head) for at in pages(probe(tiny_llama()).token_shapes(256))]
    assert order == sorted(order)
    assert len(order) == 4 * 2 * 2


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (ConcatenateKVCache(), "layer 0 keeps a ConcatenateKVCache; supported: KVCache, Q.*, R.*, ArraysCache"),
        (RotatingKVCache(64, keep=4), "layer 0 keeps a RotatingKVCache with keep=4, which batches lose"),
    ],
)
def test_a_cache_of_another_kind_is_refused_by_name(cache: object, message: str) -> None:
    with pytest.raises(UnsupportedCacheError, match=message):
        probe(tiny_llama(num_hidden_layers=2), cache=[cache, KVCache()])


def test_the_fingerprint_is_independent_of_the_models_name() -> None:
    assert probe(tiny_llama(), model_id="a").fingerprint == probe(tiny_llama(), model_id="b").fingerprint


def nudge(model: Model) -> Model:
    """One bit in one weight: the smallest fine-tune."""
    weights = np.array(model.model.layers[3].self_attn.v_proj.weight)
    weights.view(np.uint32)[0, 0] ^= 1
    model.model.layers[3].self_attn.v_proj.weight = mx.array(weights)
    return model


def half(model: Model) -> Model:
    model.update(tree_map(lambda weight: weight.astype(mx.float16), model.parameters()))
    return model


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: nudge(tiny_llama()), id="one bit of one weight"),
        pytest.param(lambda: half(tiny_llama()), id="the same weights in half precision"),
        pytest.param(lambda: tiny_llama(rope_theta=500000.0), id="another rope"),
        pytest.param(lambda: tiny_llama(rms_norm_eps=1e-6), id="another norm"),
    ],
)
def test_the_fingerprint_changes_with_the_cache(other: Callable[[], Model]) -> None:
    assert probe(other()).fingerprint != probe(tiny_llama()).fingerprint


def test_a_configuration_counts_under_any_name() -> None:
    spec, other = (probe(tiny("baichuan_m1", rope_theta=theta)) for theta in (1e4, 5e5))
    assert spec.fingerprint != other.fingerprint
    assert probe(tiny("llama4")).context == 8192


class Nameless(nn.Module):
    """A model without construction arguments."""

    def __init__(self, theta: float) -> None:
        super().__init__()
        self.inner = tiny_llama(rope_theta=theta).model
        self.layers = self.inner.layers

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
        logits: mx.array = self.inner(tokens, cache=cache)
        return logits


def test_a_model_without_a_configuration_has_an_identity() -> None:
    spec, other = probe(Nameless(1e4)), probe(Nameless(5e5))
    assert (spec.refusal, spec.context) == (None, None)
    assert spec.fingerprint == probe(Nameless(1e4)).fingerprint
    assert spec.fingerprint != other.fingerprint


def test_the_fingerprint_depends_on_block_size_and_vocabulary() -> None:
    model, tokenizer = tiny_llama(), letter_tokenizer()
    plain = probe(model).fingerprint
    assert probe(model, block_tokens=128).fingerprint != plain
    tokenizer.add_tokens(["<|new|>"])
    assert ModelCacheSpec.probe(model, tokenizer).fingerprint != plain


def test_a_chain_hash_matches_its_documentation() -> None:
    """Computed here by hand, so that it can never change unnoticed: stored blocks are named by it."""
    first = chain_hash(0x0123456789ABCDEF, ROOT, [1, 2, 70000])
    assert first == "879fd10214bfa6913e99def4fd8219a2"
    assert chain_hash(0x0123456789ABCDEF, first, [3]) == "44d60b57bfb2aeec51fe6c0e0030acb5"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_chains_name_full_blocks_and_share_common_ones(tokens: list[int], size: int) -> None:
    names = chain_hashes(1, tokens, size)
    assert len(names) == len(tokens) // size
    assert len(set(names)) == len(names)
    for cut in range(len(tokens)):
        changed = [*tokens[:cut], tokens[cut] ^ 1, *tokens[cut + 1 :]]
        assert common_prefix(tokens, changed) == cut
        assert common_prefix(names, chain_hashes(1, changed, size)) == min(cut // size, len(names))
    assert not set(names) & set(chain_hashes(2, tokens, size))
