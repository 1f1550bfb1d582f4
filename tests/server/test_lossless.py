"""The lossless code of arrays: exact for all values, smaller for those of KV caches, and safe for damaged bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash
from cores import CORES
from hypothesis import given, strategies

from kvpage_server.lossless import decode_body, decode_lossless, encode_block_body, encode_lossless, encode_page_body
from kvpage_server.page import BlockShape, DType, PageError, Plane

WORDS = {DType.BFLOAT16: np.uint16, DType.FLOAT16: np.uint16, DType.FLOAT32: np.uint32}
CODES = {1: DType.BFLOAT16, 2: DType.FLOAT16, 3: DType.FLOAT32}


def like_a_cache(rows: int, channels: int, dtype: DType, seed: int = 0) -> np.ndarray:
    """Return values with a normal distribution, whose magnitude depends on the channel."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, channels)) * np.exp(rng.standard_normal(channels))).astype(np.float32)
    if dtype is DType.FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    words = values.view(np.uint32)
    return words if dtype is DType.FLOAT32 else (words >> 16).astype(np.uint16)


def hashed(coded: bytes) -> bytes:
    """Return coded bytes with the checksum that suits them."""
    digest = xxhash.xxh3_64_intdigest(coded[16:], int.from_bytes(coded[:8], "little"))
    return coded[:8] + digest.to_bytes(8, "little") + coded[16:]


@pytest.mark.parametrize(
    ("dtype", "rows", "ratio"),
    [
        (DType.BFLOAT16, 16, 1.33),
        (DType.BFLOAT16, 128, 1.4),
        (DType.BFLOAT16, 1024, 1.4),
        (DType.FLOAT16, 1024, 1.111),
        (DType.FLOAT32, 128, 1.16),
    ],
)
def test_a_cache_takes_fewer_bytes(dtype: DType, rows: int, ratio: float) -> None:
    array = like_a_cache(rows, 64, dtype)
    coded = encode_lossless(array, dtype)
    assert coded is not None
    assert array.nbytes / len(coded) > ratio
    assert decode_lossless(coded) == array.tobytes()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_each_value_of_16_bits_is_exact_in_each_channel(dtype: DType) -> None:
    """Each page of 128 rows has 16 rows with values of all kinds; the others are those of a cache."""
    everything = np.arange(65536, dtype=np.uint16)
    for first in range(16):
        array = like_a_cache(65536 // 16 * 16, 16, dtype, seed=first)
        channel = (np.arange(65536) + first) % 16
        array[np.arange(0, 65536), channel] = everything
        coded = encode_lossless(array, dtype)
        if dtype is DType.BFLOAT16:
            assert coded is not None
        if coded is not None:
            assert decode_lossless(coded) == array.tobytes()


@given(
    code=strategies.sampled_from([1, 2, 3]),
    rows=strategies.integers(1, 40),
    channels=strategies.sampled_from([8, 24, 64, 72]),
    spread=strategies.sampled_from([0, 1, 8, 40]),
    pages=strategies.sampled_from([1, 1, 2, 8]),
    seed=strategies.integers(0, 2**32),
)
def test_both_cores_write_the_same_code(
    code: int, rows: int, channels: int, spread: int, pages: int, seed: int
) -> None:
    """With any number of escapes: `spread` is the largest difference of exponents."""
    rng = np.random.default_rng(seed)
    mantissa, most, word = {1: (7, 255, np.uint16), 2: (10, 31, np.uint16), 3: (23, 255, np.uint32)}[code]
    exponents = np.clip(
        rng.integers(0, most + 1, channels) + rng.integers(-spread, spread + 1, (rows, channels)), 0, most
    )
    rest = rng.integers(0, 1 << 31, (rows, channels)) & ~(most << mantissa)
    array = (rest | exponents << mantissa).astype(word)
    coded = []
    for core in CORES:
        out = bytearray(2 * array.nbytes + channels)
        coded.append(bytes(out[: core.encode_matrix(code, channels, array, out, pages)]))
    assert len(set(coded)) == 1
    one = np.ascontiguousarray(array.reshape(pages, rows, -1).swapaxes(0, 1))
    assert CORES[0].encode_matrix(code, channels, one, out) == len(coded[0])
    assert out[: len(coded[0])] == coded[0]
    for core in CORES:
        out = bytearray(array.nbytes)
        assert core.decode_matrix(code, channels, coded[0], out, pages)
        assert out == array.tobytes()
        for other in (coded[0][:-1], coded[0] + b"\0", coded[0][: channels - 1]):
            assert not core.decode_matrix(code, channels, other, out, pages)
        assert core.encode_matrix(code, channels, array, bytearray(len(coded[0]) - 1), pages) == 0
        whole = core.encode_array(bytes(20), code, channels, one, 20 + len(coded[0]))
        assert whole == hashed(bytes(20) + coded[0])
        assert core.encode_array(bytes(20), code, channels, one, 19 + len(coded[0])) is None
        assert core.encode_array(bytes(20), code, channels, one, 0) is None
        with pytest.raises(ValueError, match=r"channels cannot be those of \d+ pages"):
            core.decode_matrix(code, channels, coded[0], out, channels + 8)


@pytest.mark.parametrize("core", CORES, ids=[core.__name__ for core in CORES])
def test_changed_bytes_stay_within_their_bounds(core: object) -> None:
    """The bases, codes and escapes are any bytes. Under a sanitizer, the test sees each wrong access."""
    rng = random.Random(5)
    for code, dtype in CODES.items():
        array = like_a_cache(30, 24, dtype)
        out = bytearray(2 * array.nbytes)
        size = core.encode_matrix(code, 24, array, out)  # type: ignore[attr-defined]
        for _ in range(300):
            changed = bytearray(out[:size])
            for _ in range(rng.randrange(1, 40)):
                changed[rng.randrange(size)] = rng.choice([0, 255, rng.randrange(256)])
            del changed[rng.randrange(size) if rng.random() < 0.3 else size :]
            core.decode_matrix(code, 24, changed, bytearray(array.nbytes))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 8), np.uint16),
        np.zeros((1, 8), np.uint16),
        np.zeros((128, 12), np.uint16),
        np.random.default_rng(0).integers(0, 65536, (128, 64)).astype(np.uint16),
    ],
    ids=["empty", "one row", "twelve channels", "noise"],
)
def test_an_array_that_does_not_shrink_stays_raw(array: np.ndarray) -> None:
    assert encode_lossless(array, DType.BFLOAT16) is None


def test_other_dtypes_stay_raw() -> None:
    for dtype in set(DType) - set(WORDS):
        assert encode_lossless(np.zeros((128, 64), f"u{dtype.itemsize}"), dtype) is None


def test_items_of_another_size_are_refused() -> None:
    with pytest.raises(PageError, match="bfloat16 has items of 2 bytes, got 1"):
        encode_lossless(bytes(4096), DType.BFLOAT16)


def test_damaged_codes_are_refused() -> None:
    coded = encode_lossless(like_a_cache(128, 64, DType.BFLOAT16), DType.BFLOAT16)
    assert coded is not None
    rng = random.Random(3)
    for _ in range(200):
        at = rng.randrange(len(coded))
        with pytest.raises(PageError):
            decode_lossless(coded[:at] + bytes([coded[at] ^ 1 << rng.randrange(8)]) + coded[at + 1 :])
        with pytest.raises(PageError):
            decode_lossless(coded[:at])


def test_another_code_and_length_are_refused() -> None:
    """Arrays of two codes may have the same size, so the checksum covers code and length, too."""
    coded = encode_lossless(like_a_cache(16, 24, DType.BFLOAT16), DType.BFLOAT16)
    assert coded is not None
    for code in (2, 3):
        for nbytes in range(48, 2000, 16):
            with pytest.raises(PageError, match="checksum"):
                decode_lossless(bytes([code]) + coded[1:4] + nbytes.to_bytes(4, "little") + coded[8:])


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (0, b"\x09", "from 1 to 3"),
        (1, b"\x02", "begins with"),
        (2, b"\x04", "begins with"),
        (3, b"\x01", "begins with"),
        (4, b"\xff\xff\xff\xff", "does not have a code"),
        (4, b"\x00\x40\x00\x01", "does not have a code|more or fewer"),
        (4, b"\x01\x40\x00\x00", "no whole rows"),
        (16, b"\x07\x00\x00\x00", "multiple of 8"),
        (16, b"\x00\x00\x00\x00", "multiple of 8"),
        (16, b"\x80\x00\x00\x00", "more or fewer"),
        (16, b"\xf8\xff\xff\xff", "no whole rows"),
    ],
)
def test_wrong_fields_with_a_right_checksum_are_refused(offset: int, value: bytes, match: str) -> None:
    coded = encode_lossless(like_a_cache(128, 64, DType.BFLOAT16), DType.BFLOAT16)
    assert coded is not None
    with pytest.raises(PageError, match=match):
        decode_lossless(hashed(coded[:offset] + value + coded[offset + len(value) :]))


# -- bodies of pages and blocks ----------------------------------------------------------------------------------------


def block_of(shape: BlockShape, seed: int) -> bytes:
    """Return the body of a block: values of a cache, or random bytes if the dtype has no code."""
    parts = []
    for number in range(shape.layers):
        for plane in shape.planes:
            for head in range(shape.heads):
                one = seed + 1000 * number + 10 * head + plane.kv_type
                if plane.dtype in WORDS:
                    parts.append(like_a_cache(shape.page_size, plane.head_dim, plane.dtype, one).tobytes())
                else:
                    parts.append(random.Random(one).randbytes(shape.page_nbytes(plane)))
    return b"".join(parts)


def decoded(coded: bytes | memoryview, size: int, shape: BlockShape | None = None) -> bytes:
    into = bytearray(size)
    decode_body(coded, memoryview(into), shape)
    return bytes(into)


KINDS = strategies.tuples(
    strategies.sampled_from([*WORDS, DType.BFLOAT16, DType.BFLOAT16, DType.UINT32, DType.UINT8]),
    strategies.sampled_from([2, 8, 64, 80]),
)


@given(
    strategies.integers(1, 4),
    strategies.integers(1, 5),
    strategies.sampled_from([1, 7, 16, 33, 128]),
    strategies.lists(KINDS, min_size=1, max_size=4),
    strategies.integers(0, 2**20),
)
def test_blocks_of_any_shape_are_exact(
    layers: int, heads: int, page_size: int, kinds: list[tuple[DType, int]], seed: int
) -> None:
    planes = tuple(Plane(number, dtype, dim) for number, (dtype, dim) in enumerate(kinds))
    shape = BlockShape(layers, heads, page_size, planes)
    body = block_of(shape, seed)
    coded = encode_block_body(body, shape)
    if coded is not None:
        assert len(coded) <= 0.9 * len(body) + 1
        assert decoded(coded, len(body), shape) == body
    elif all(dtype is DType.BFLOAT16 and dim == 64 for dtype, dim in kinds):
        assert page_size < 16


def test_large_blocks_are_coded_in_several_parts() -> None:
    shape = BlockShape(6, 5, 512, (Plane(0, DType.BFLOAT16, 128), Plane(1, DType.BFLOAT16, 128)))
    body = block_of(shape, 1)
    coded = encode_block_body(body, shape)
    assert coded is not None
    assert len(body) > 7 << 20
    assert len(body) / len(coded) > 1.4
    assert decoded(coded, len(body), shape) == body


def test_a_page_of_another_length_than_its_shape_stays() -> None:
    body = like_a_cache(128, 64, DType.BFLOAT16).tobytes()
    assert encode_page_body(body, DType.BFLOAT16, 128, 64) is not None
    for dtype, rows, channels in (
        (DType.BFLOAT16, 127, 64),
        (DType.FLOAT32, 128, 64),
        (DType.UINT8, 128, 128),
        (DType.BFLOAT16, 64 * 64, 2),
    ):
        assert encode_page_body(body, dtype, rows, channels) is None
    assert encode_page_body(b"", DType.BFLOAT16, 1, 0) is None


def test_a_code_is_not_decoded_into_memory_of_another_size() -> None:
    coded = encode_page_body(like_a_cache(128, 64, DType.BFLOAT16).tobytes(), DType.BFLOAT16, 128, 64)
    assert coded is not None
    for size in (0, 16383, 16385):
        with pytest.raises(PageError, match=f"16384 bytes, not of {size}"):
            decoded(coded, size)


def test_the_code_of_another_shape_is_refused() -> None:
    shape = BlockShape(2, 4, 16, (Plane(0, DType.BFLOAT16, 64), Plane(2, DType.FLOAT32, 8)))
    body = block_of(shape, 1)
    coded = encode_block_body(body, shape)
    assert coded is not None
    into = memoryview(bytearray(len(body)))
    decode_body(coded, into, shape)
    assert into == body
    others = [
        BlockShape(2, 4, 16, (Plane(0, DType.FLOAT16, 64), Plane(2, DType.FLOAT32, 8))),
        BlockShape(2, 4, 16, (Plane(0, DType.BFLOAT16, 64), Plane(2, DType.BFLOAT16, 16))),
        BlockShape(2, 4, 16, (Plane(0, DType.FLOAT32, 8), Plane(2, DType.BFLOAT16, 64))),
        BlockShape(2, 4, 32, (Plane(0, DType.BFLOAT16, 32), Plane(2, DType.FLOAT32, 4))),
        BlockShape(2, 2, 32, (Plane(0, DType.BFLOAT16, 64), Plane(2, DType.FLOAT32, 8))),
        BlockShape(4, 2, 16, (Plane(0, DType.BFLOAT16, 64), Plane(2, DType.FLOAT32, 8))),
    ]
    for other in others:
        assert other.nbytes == shape.nbytes
        with pytest.raises(PageError, match="another shape or dtype"):
            decode_body(coded, into, other)
    page = encode_page_body(body[: 16 * 64 * 2], DType.BFLOAT16, 16, 64)
    assert page is not None
    with pytest.raises(PageError, match="another shape or dtype"):
        decode_body(page, into[: 16 * 64 * 2], BlockShape(1, 1, 16, (Plane(0, DType.BFLOAT16, 64),)))


@given(strategies.integers(0, 2**32 - 1), strategies.data())
def test_wrong_parts_with_a_right_checksum_are_refused(value: int, data: strategies.DataObject) -> None:
    """Each number of a part's description is replaced. Nothing outside of the memory is read or written."""
    shape = BlockShape(1, 2, 16, (Plane(0, DType.BFLOAT16, 64), Plane(1, DType.FLOAT32, 64)))
    body = block_of(shape, 1)
    coded = encode_block_body(body, shape)
    assert coded is not None
    changed = bytearray(coded)
    at = data.draw(strategies.sampled_from([16, 17, 20, 24, 28, 32]))
    width = data.draw(strategies.sampled_from([1, 4]))
    changed[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    if changed != coded:
        with pytest.raises(PageError):
            decoded(hashed(bytes(changed)), len(body))


@pytest.mark.parametrize("size", [17, 30, 36, 100])
def test_a_block_that_ends_early_is_refused(size: int) -> None:
    shape = BlockShape(1, 2, 16, (Plane(0, DType.BFLOAT16, 64),))
    body = block_of(shape, 1)
    coded = encode_block_body(body, shape)
    assert coded is not None
    with pytest.raises(PageError, match="checksum"):
        decoded(coded[:size], len(body))
    with pytest.raises(PageError):
        decoded(hashed(bytes(coded[:size])), len(body))
