"""Layouts: every number is at the other layout's position, and the inverse conversion restores it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.layouts import (
    from_mlx,
    keys_from_vllm,
    keys_to_vllm,
    raw_dtype,
    to_mlx,
    values_from_vllm,
    values_to_vllm,
)
from kvpage_server.page import BlockShape, DType, KVType, PageError, Plane

dtypes = st.sampled_from(DType)
sizes = st.integers(1, 5)
kinds = st.dictionaries(st.sampled_from(KVType), st.tuples(dtypes, st.integers(1, 9)), min_size=1)


@st.composite
def shapes(draw: st.DrawFn) -> BlockShape:
    planes = tuple(Plane(kv_type, dtype, dim) for kv_type, (dtype, dim) in sorted(draw(kinds).items()))
    return BlockShape(draw(sizes), draw(sizes), draw(st.integers(1, 9)), planes)


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    """``[heads, tokens, dim]`` of any of the contract's dtypes, dim a multiple of vLLM's x, every element another."""
    raw = raw_dtype(draw(dtypes))
    shape = draw(sizes), draw(st.integers(1, 17)), draw(st.integers(1, 3)) * 16 // raw.itemsize
    return np.arange(np.prod(shape)).astype(raw).reshape(shape)


def noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@given(shapes())
def test_a_block_taken_apart_and_joined_is_the_same_block(shape: BlockShape) -> None:
    body = noise(shape.nbytes)
    assert from_mlx(to_mlx(body, shape), shape) == body


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.UINT8])
def test_arrays_of_mlx_are_joined_with_any_strides(dtype: DType) -> None:
    mx = pytest.importorskip("mlx.core")
    shape = BlockShape(1, 2, 3, (Plane(KVType.K, dtype, 4),))
    turned = mx.arange(24).astype(getattr(mx, dtype.name.lower())).reshape(2, 4, 3).swapaxes(1, 2)
    (planes,) = to_mlx(from_mlx([{KVType.K: turned}], shape), shape)
    assert mx.array_equal(mx.array(planes[KVType.K]).view(turned.dtype), turned)
    with pytest.raises(TypeError, match="plane 0 of layer 0 must be an array of numpy or MLX, got list"):
        from_mlx([{KVType.K: turned.tolist()}], shape)


@given(shapes())
def test_each_head_of_each_plane_is_the_page_of_that_name(shape: BlockShape) -> None:
    body = noise(shape.nbytes)
    layers = to_mlx(body, shape)
    for layer, planes in enumerate(layers):
        assert list(planes) == [plane.kv_type for plane in shape.planes]
        for kv_type, plane in planes.items():
            for head in range(shape.heads):
                assert plane[head].tobytes() == body[shape.page_span(layer, head, kv_type)]


@given(shapes())
def test_taking_a_block_apart_copies_nothing(shape: BlockShape) -> None:
    body = bytearray(shape.nbytes)
    for planes in to_mlx(body, shape):
        for plane in planes.values():
            assert np.shares_memory(plane, np.frombuffer(body, np.uint8))
            plane[...] = np.iinfo(plane.dtype).max
    assert body == b"\xff" * shape.nbytes


def test_arrays_of_the_engines_dtypes_are_joined_bit_for_bit() -> None:
    shape = BlockShape(1, 2, 3, (Plane(KVType.K, DType.FLOAT16, 4), Plane(KVType.V, DType.FLOAT32, 5)))
    nan = np.array([0x7E01], np.uint16).view(np.float16)[0]  # one of many NaNs: it must stay this one
    keys = np.arange(24, dtype=np.float16).reshape(3, 2, 4).swapaxes(0, 1)  # as a batch-first model would give them
    keys[1, 2, 3] = nan
    values = np.arange(60, dtype=np.float32).reshape(2, 6, 5)[:, ::2]  # a longer buffer, every other row
    body = from_mlx([{0: keys, 1: values}], shape)
    assert body == keys.tobytes() + values.tobytes()
    assert body[46:48] == b"\x01\x7e"


def test_layers_that_do_not_fit_the_block_are_refused_by_name() -> None:
    shape = BlockShape(2, 2, 3, (Plane(KVType.K, DType.BFLOAT16, 4), Plane(KVType.V, DType.BFLOAT16, 4)))
    good = {0: np.zeros((2, 3, 4), np.uint16), 1: np.zeros((2, 3, 4), np.uint16)}
    cases = [
        ([good], "^a block of this shape has 2 layers, got 1$"),
        ([good, {0: good[0]}], r"^layer 1 must have the planes \[0, 1\], got \[0\]$"),
        ([good, good | {2: good[0]}], r"^layer 1 must have the planes \[0, 1\], got \[0, 1, 2\]$"),
        (
            [good | {1: good[1][:, :2]}, good],
            r"^plane 1 of layer 0 must be \(2, 3, 4\) of 2 bytes, got \(2, 2, 4\) of 2$",
        ),
        ([good, good | {0: good[0].astype(np.float32)}], r"^plane 0 of layer 1 must be .* of 2 bytes, got .* of 4$"),
    ]
    for layers, message in cases:
        with pytest.raises(PageError, match=message):
            from_mlx(layers, shape)
    for size in (0, shape.nbytes - 1, shape.nbytes + 1):
        with pytest.raises(PageError, match=f"has {shape.nbytes} bytes, got {size}$"):
            to_mlx(bytes(size), shape)


@given(tensors())
def test_vllm_finds_each_element_where_its_kernel_writes_it(tensor: np.ndarray) -> None:
    """Against the index arithmetic of vLLM's reshape_and_cache, csrc/cache_kernels.cu, one element at a time."""
    heads, block_size, head_size = tensor.shape
    x = 16 // tensor.itemsize
    keys, values = (np.zeros(tensor.size, tensor.dtype) for _ in "kv")
    for (head, token, offset), element in np.ndenumerate(tensor):
        key_start = head * (head_size // x) * block_size * x
        keys[key_start + offset // x * block_size * x + token * x + offset % x] = element
        values[head * head_size * block_size + offset * block_size + token] = element
    assert keys_to_vllm(tensor).shape == (heads, head_size // x, block_size, x)
    assert values_to_vllm(tensor).shape == (heads, head_size, block_size)
    assert keys_to_vllm(tensor).tobytes() == keys.tobytes()
    assert values_to_vllm(tensor).tobytes() == values.tobytes()


@given(tensors())
def test_vllm_and_back_is_exact_in_both_directions(tensor: np.ndarray) -> None:
    assert np.array_equal(keys_from_vllm(keys_to_vllm(tensor)), tensor)
    assert np.array_equal(values_from_vllm(values_to_vllm(tensor)), tensor)
    keys, values = (np.ascontiguousarray(to(tensor)) for to in (keys_to_vllm, values_to_vllm))
    assert np.array_equal(keys_to_vllm(keys_from_vllm(keys)), keys)
    assert np.array_equal(values_to_vllm(values_from_vllm(values)), values)


@given(tensors())
def test_views_are_made_wherever_strides_permit(tensor: np.ndarray) -> None:
    assert np.shares_memory(keys_to_vllm(tensor), tensor)
    assert np.shares_memory(values_to_vllm(tensor), tensor)
    assert np.shares_memory(keys_from_vllm(keys_to_vllm(tensor)), tensor)
    values = np.ascontiguousarray(values_to_vllm(tensor))
    assert np.shares_memory(values_from_vllm(values), values)


def test_many_blocks_go_through_at_once() -> None:
    blocks = np.arange(7 * 2 * 16 * 64, dtype=np.uint16).reshape(7, 2, 16, 64)
    keys, values = keys_to_vllm(blocks), values_to_vllm(blocks)
    assert keys.shape == (7, 2, 8, 16, 8)
    assert values.shape == (7, 2, 64, 16)
    for i, block in enumerate(blocks):
        assert np.array_equal(keys[i], keys_to_vllm(block))
        assert np.array_equal(values[i], values_to_vllm(block))


@pytest.mark.parametrize(("itemsize", "x"), [(1, 16), (2, 8), (4, 4)])
def test_a_row_that_vllm_cannot_group_is_refused(itemsize: int, x: int) -> None:
    with pytest.raises(PageError, match=f"^head_dim must be a multiple of {x} for vLLM, .* got {x + 1}$"):
        keys_to_vllm(np.zeros((2, 3, x + 1), f"u{itemsize}"))
    with pytest.raises(PageError, match=f"^vLLM keeps 16 bytes of a key together, got {x * 2} of {itemsize}$"):
        keys_from_vllm(np.zeros((2, 3, 4, x * 2), f"u{itemsize}"))


def test_planes_of_odd_size_do_not_shift_the_next() -> None:
    """An 8-bit plane of odd size puts the 16-bit one after it on an odd address."""
    shape = BlockShape(1, 1, 1, (Plane(KVType.K, DType.UINT8, 3), Plane(KVType.V, DType.BFLOAT16, 2)))
    (layer,) = to_mlx(bytes(range(7)), shape)
    assert layer[0].tolist() == [[[0, 1, 2]]]
    assert layer[1].tolist() == [[[0x0403, 0x0605]]]
