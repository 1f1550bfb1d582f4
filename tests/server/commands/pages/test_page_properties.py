"""The page codec over all of its input space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.page import (
    HEADER_SIZE,
    MAX_TTL,
    BlockShape,
    DType,
    KVType,
    PageError,
    PageHeader,
    PageKey,
    Plane,
    decode_page,
    encode_page,
)

u16, u32 = (st.integers(0, 2**bits - 1) for bits in (16, 32))
req_ids = st.binary(min_size=1, max_size=256).map(
    lambda raw: bytes(b for b in raw if b > 32 and b not in b":\x7f") or b"r"
)
keys = st.builds(PageKey, req_ids, u16, u16, u32, st.sampled_from(KVType))
dtypes = st.sampled_from(DType)
bodies = st.binary(max_size=300)
blobs = st.builds(
    encode_page,
    keys,
    bodies,
    dtype=dtypes,
    page_size=st.integers(1, 2**32 - 1),
    head_dim=st.integers(1, 2**32 - 1),
    ttl=st.integers(0, MAX_TTL),
    created_ms=st.integers(0, 2**63 - 1),
    with_checksum=st.booleans(),
)


@given(keys)
def test_a_key_is_parsed_from_its_own_spelling(key: PageKey) -> None:
    assert PageKey.parse(bytes(key)) == key


@given(st.binary(max_size=40) | keys.map(bytes).flatmap(lambda key: st.permutations(list(key)).map(bytes)))
def test_every_parsed_key_is_canonical(spelling: bytes) -> None:
    try:
        key = PageKey.parse(spelling)
    except PageError:
        return
    assert bytes(key) == spelling


@given(keys, keys)
def test_two_pages_never_share_a_key(one: PageKey, other: PageKey) -> None:
    assert (bytes(one) == bytes(other)) == (one == other)


@given(blobs)
def test_decoding_and_encoding_again_gives_the_same_bytes(blob: bytes) -> None:
    header, body = decode_page(blob)
    assert bytes(header) + bytes(body) == blob


@given(blobs, st.data())
def test_a_damaged_blob_is_refused_or_unchanged_in_meaning(blob: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(blob) - 1))
    damaged = bytearray(blob)
    damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        header, body = decode_page(damaged)
    except PageError:
        return
    assert bytes(header) + bytes(body) == damaged
    if position >= HEADER_SIZE:  # a flip in the body passes only where no checksum was written
        assert header.checksum == 0


@given(blobs, st.integers(0, 2**16))
def test_a_truncated_blob_is_never_accepted(blob: bytes, size: int) -> None:
    with pytest.raises(PageError):
        decode_page(blob[: size % len(blob)])


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_page_error(noise: bytes) -> None:
    for blob in (noise, b"KVPG\x02" + noise):
        try:
            PageHeader.parse(blob)
        except PageError:
            continue


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 9),
    st.dictionaries(st.sampled_from(KVType), st.tuples(dtypes, st.integers(1, 9)), min_size=1),
)
def test_pages_of_a_block_are_at_their_tensor_positions(
    layers: int, heads: int, page_size: int, kinds: dict[KVType, tuple[DType, int]]
) -> None:
    planes = tuple(Plane(kv_type, dtype, dim) for kv_type, (dtype, dim) in sorted(kinds.items()))
    shape = BlockShape(layers, heads, page_size, planes)
    body = np.arange(shape.nbytes) % 251
    layer_bytes = body.reshape(layers, -1)
    for layer in range(layers):
        start = 0
        for plane in planes:
            row = plane.head_dim * plane.dtype.itemsize
            size = heads * page_size * row
            tensor = layer_bytes[layer, start : start + size].reshape(heads, page_size, row)
            start += size
            for head in range(heads):
                page = body[shape.page_span(layer, head, plane.kv_type)]
                assert np.array_equal(page.reshape(page_size, row), tensor[head])
