"""A block as one string: what it is, the headers of its pages, then its body.

    64 bytes                what the block is: `opening`
    64 bytes a page         the pages' headers, as everywhere, in the order of the body
    the body                layer, plane, head, token, dim

A page of it is two ranges of the string, and has its digest in its header. The whole string has one, too, so that a
block is checked in one go.

The opening, little-endian:

    0   4   magic KVPB
    4   1   version, 1
    5   1   planes
    6   2   reserved, 0
    8   4   layers
    12  4   heads
    16  4   page_size
    20  36  planes, 6 bytes each: kv_type, dtype, head_dim (4 bytes); zeros for those that it has not
    56  8   XXH3-64 of the 56 bytes before, of the pages' headers and of the body
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import numpy as np

from kvpage_server.client.page import BlockName
from kvpage_server.core import digest, fill_digests
from kvpage_server.page import (
    FIELD_AT,
    HEADER_SIZE,
    MAX_KV_TYPE,
    BlockShape,
    DType,
    PageError,
    PageKey,
    Plane,
    pack_header,
)

OPENING_SIZE = 64
_MAGIC, _VERSION = b"KVPB", 1
_FIELDS, _PLANE, _DIGEST = struct.Struct("<4sBBHIII"), struct.Struct("<BBI"), struct.Struct("<Q")
_DIGEST_AT = OPENING_SIZE - _DIGEST.size
assert _FIELDS.size + (MAX_KV_TYPE + 1) * _PLANE.size == _DIGEST_AT
_OF_A_WRITE = ("page", "created", "ttl", "checksum")  # fields of a header that the shape does not say
_HEADERS = np.dtype(
    {"names": _OF_A_WRITE, "formats": ["<u8"] * 4, "offsets": [FIELD_AT[f] for f in _OF_A_WRITE], "itemsize": 64}
)
Headers = np.ndarray[Any, Any]


def block_key(name: BlockName) -> bytes:
    return b"kv:%b:block:%d" % name


def head_size(shape: BlockShape) -> int:
    """The number of bytes before the body."""
    return OPENING_SIZE + HEADER_SIZE * shape.pages


def head(page: int, shape: BlockShape, body: Sequence[memoryview], ttl: int, created_ms: int) -> bytes:
    """The bytes before a body. If the body is in several pieces, each must hold whole pages."""
    headers = _blank_headers(shape).copy()
    fields = headers.view(_HEADERS)
    fields["page"], fields["created"], fields["ttl"] = page, created_ms, ttl
    fill_digests(headers.data, body)
    before = _opening(shape)
    return before + _DIGEST.pack(digest([before, headers.data, *body])) + headers.tobytes()


def amiss(page: int, shape: BlockShape, found: memoryview, body: memoryview, *, verify: bool) -> str | None:
    """What is wrong with a block: header, checksum, or None. `found` are the bytes before its body."""
    before, table = found[:_DIGEST_AT], found[OPENING_SIZE:]
    headers, given = _blank_headers(shape).copy(), np.frombuffer(table, _HEADERS)
    fields = headers.view(_HEADERS)
    fields["page"] = page
    for name in ("created", "ttl", "checksum"):
        fields[name] = given[name]
    if before != _opening(shape) or headers.tobytes() != table:
        return "header"
    if verify and found[_DIGEST_AT:OPENING_SIZE] != _DIGEST.pack(digest([before, table, body])):
        return "checksum"
    return None


def shape_of(opening: bytes | memoryview) -> BlockShape | None:
    """The shape of the block whose value begins with `opening`; None if it is not a block."""
    if len(opening) != OPENING_SIZE:
        return None
    magic, version, planes, reserved, layers, heads, page_size = _FIELDS.unpack_from(opening)
    if (magic, version, reserved) != (_MAGIC, _VERSION, 0) or not 1 <= planes <= MAX_KV_TYPE + 1:
        return None
    found = list(_PLANE.iter_unpack(opening[_FIELDS.size : _FIELDS.size + planes * _PLANE.size]))
    try:
        of_planes = tuple(Plane(kv_type, DType(dtype), head_dim) for kv_type, dtype, head_dim in found)
        return BlockShape(layers, heads, page_size, of_planes)
    except ValueError:  # a PageError is one
        return None


def ranges_of_page(key: PageKey, shape: BlockShape) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The first and last byte of a page's header, and of its body; None if the block has no such page."""
    try:
        span = shape.page_span(key.layer, key.head, key.kv_type)
    except PageError:
        return None
    plane = [plane.kv_type for plane in shape.planes].index(key.kv_type)
    header = OPENING_SIZE + HEADER_SIZE * ((key.layer * len(shape.planes) + plane) * shape.heads + key.head)
    before = head_size(shape)
    return (header, header + HEADER_SIZE - 1), (before + span.start, before + span.stop - 1)


def whole_pages(shape: BlockShape, body: Sequence[memoryview]) -> Sequence[memoryview]:
    """The body in pieces of whole pages: unchanged, or joined if a page is cut."""
    if len(body) == 1:
        return body
    bounds = {0, *(span.stop for span in _spans(shape))}
    return body if all(end in bounds for end in accumulate(map(len, body))) else [memoryview(b"".join(body))]


@lru_cache(16)
def _spans(shape: BlockShape) -> tuple[slice, ...]:
    return tuple(shape.page_spans())


@lru_cache(16)
def _opening(shape: BlockShape) -> bytes:
    planes = b"".join(_PLANE.pack(plane.kv_type, plane.dtype, plane.head_dim) for plane in shape.planes)
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(shape.planes), 0, shape.layers, shape.heads, shape.page_size)
    return (fields + planes).ljust(_DIGEST_AT, b"\0")


@lru_cache(16)
def _blank_headers(shape: BlockShape) -> Headers:
    """The pages' headers without the fields that differ from write to write."""

    def header(layer: int, plane: Plane, head: int) -> bytes:
        about = plane.dtype, plane.kv_type, shape.page_size, plane.head_dim, layer, head
        return pack_header(*about, 0, 0, 0, shape.page_nbytes(plane), 0)

    pages = product(range(shape.layers), shape.planes, range(shape.heads))
    return np.frombuffer(b"".join(header(*page) for page in pages), np.uint8)
