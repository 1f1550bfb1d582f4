"""Sheets describe pages that were stored one by one: one row each. A sheet has the rows of up to 16 layers of a block.

Such pages are written, fetched and evicted by the block, which may have a thousand. So they share a record, and a store
that starts reads a few kilobytes for each block.

    [8: XXH3-64 of all that follows and of the database key][8: no row expires before][rows]
    row: [64: the page's header][expires: 8][used: 8][XXH3-64 of the body: 8][first piece: 8, 0 for an empty body]

All numbers are little-endian, times in unix milliseconds, 0 for never.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

import numpy as np
from typing_extensions import Buffer

from kvpage_server.page import FIELD_AT, HEADER_SIZE, checksum, header_fields
from kvpage_server.store.records.record import Body, Damaged, Record, name_of_key, room_for

_LAYERS, _HEADS = 16, 64  # of a block in one sheet; few others are written with a page that changes alone
_NAME = re.compile(rb"kkv:([^:]{1,256}):(0|[1-9]\d{0,4}):(0|[1-9]\d{0,4}):(0|[1-9]\d{0,9}):([0-5])\Z", re.DOTALL)
_START = struct.Struct("<QQ")  # digest, soonest
_DIGEST = 8
_TIMES = struct.Struct("<QQQQ")  # expires, used, digest, first
_ROW = struct.Struct(header_fields("kv_type", "layer", "head", "body_size").format + _TIMES.format[1:])
ROW = _ROW.size
_BESIDE = 64  # bytes that a sheet of one row and its one piece take beside these, without the request's id
_KV_TYPE, _PAGE, _SIZE, _USED = FIELD_AT["kv_type"], FIELD_AT["page"], FIELD_AT["body_size"], HEADER_SIZE + 8
_PLACE = struct.Struct("<II")  # layer and head, before the page id
_COLUMNS = np.dtype(
    {"names": ["size", "expires"], "formats": ["<u4", "<u8"], "offsets": [_SIZE, HEADER_SIZE], "itemsize": ROW}
)

Spot = tuple[int, int, int]  # kv_type, layer, head
PREFIX = b"p"


def place_of(name: bytes) -> tuple[bytes, Spot] | None:
    """The database key of a page's sheet, and its spot there; None if the name is not a page's."""
    found = _NAME.match(name)
    if found is None:
        return None
    req_id, *numbers = found.groups()
    layer, head, page, kv_type = map(int, numbers)
    return b"p%b:%d:%d:%d" % (req_id, page, layer // _LAYERS, head // _HEADS), (kv_type, layer, head)


def is_in(name: bytes, key: bytes) -> bool:
    """Whether the page of that name has its row in this sheet."""
    place = place_of(name)
    return place is not None and place[0] == key


def block_of(key: bytes) -> tuple[bytes, bytes, int]:
    """The name, request and page of a sheet's block."""
    name = key[1:].rsplit(b":", 2)[0]
    req_id, _, page = name.rpartition(b":")
    return b"b" + name, req_id, int(page)


def pack(key: bytes, rows: Mapping[Spot, bytes]) -> bytes:
    """The bytes of a sheet with these rows."""
    body = b"".join(rows.values())
    expiries = np.frombuffer(body, _COLUMNS)["expires"]
    expiring = expiries[expiries > 0]
    rest = (int(expiring.min()) if len(expiring) else 0).to_bytes(8, "little") + body
    return checksum(rest + key).to_bytes(8, "little") + rest


def unpack(key: bytes, raw: Buffer) -> tuple[int, bytes]:
    """A sheet's soonest expiry and its rows. Raises Damaged."""
    data = bytes(raw)
    if len(data) < _START.size or (len(data) - _START.size) % ROW:
        raise Damaged("its record has a wrong length")
    digest, soonest = _START.unpack_from(data)
    if digest != checksum(data[_DIGEST:] + key):
        raise Damaged("its record does not match the record's checksum")
    return soonest, data[_START.size :]


def by_spot(rows: bytes) -> dict[Spot, bytes]:
    """The rows by their spots."""
    starts = range(0, len(rows), ROW)
    return {_ROW.unpack_from(rows, i)[:3]: rows[i : i + ROW] for i in starts}


def bodies(key: bytes, rows: bytes) -> dict[bytes, Body]:
    """Where each page's body is, by the page's name."""
    _, req_id, page = block_of(key)
    before, between = name_of_key(b"kv:%b:" % req_id), b":%d:" % page
    return {
        b"%b%d:%d%b%d" % (before, layer, head, between, kv_type): Body(size, digest, first)
        for kv_type, layer, head, size, _, _, digest, first in _ROW.iter_unpack(rows)
    }


def body_of(rows: bytes, spot: Spot) -> Body | None:
    """Where a page's body is; None if it has no row."""
    kv_type, layer, head = spot
    looked_for = _PLACE.pack(layer, head) + rows[_PAGE : _PAGE + 8]
    found = rows.find(looked_for)
    while found >= 0:
        start = found - _PAGE + _PLACE.size
        if start % ROW == 0 and rows[start + _KV_TYPE] == kv_type:
            _, _, _, size, _, _, digest, first = _ROW.unpack_from(rows, start)
            return Body(size, digest, first)
        found = rows.find(looked_for, found + 1)
    return None


def row_of(record: Record) -> bytes:
    """The row of a page. The record's meta is its header."""
    return record.meta + _TIMES.pack(record.expires, record.used, record.body.digest, record.body.first)


def record_of(name: bytes, row: bytes) -> Record:
    """The record that a row stands for."""
    _, _, _, size, expires, used, digest, first = _ROW.unpack(row)
    return Record(name, row[:HEADER_SIZE], expires, used, Body(size, digest, first))


def pages(req_id: bytes, page: int, rows: bytes) -> Iterator[tuple[bytes, Spot, int, int]]:
    """The key of each page, its spot, its expiry and its last use."""
    before, between = b"kv:%b:" % req_id, b":%d:" % page
    for kv_type, layer, head, _, expires, used, _, _ in _ROW.iter_unpack(rows):
        yield b"%b%d:%d%b%d" % (before, layer, head, between, kv_type), (kv_type, layer, head), expires, used


def headers(rows: bytes) -> Iterator[bytes]:
    return (rows[start : start + HEADER_SIZE] for start in range(0, len(rows), ROW))


def size_of(header: bytes) -> int:
    """Bytes of a page's body."""
    return int.from_bytes(header[_SIZE : _SIZE + 4], "little")


def records(key: bytes, rows: bytes) -> Iterator[Record]:
    """The records that the rows of a sheet stand for."""
    _, req_id, page = block_of(key)
    for i, (name, *_) in enumerate(pages(req_id, page, rows)):
        yield record_of(name_of_key(name), rows[i * ROW : (i + 1) * ROW])


def expires_of(rows: bytes, spot: Spot) -> int:
    """When a page expires; 0 for never, or if it has no row."""
    found = (row[4] for row in _ROW.iter_unpack(rows) if row[:3] == spot)
    return next(found, 0)


def expiring(rows: bytes) -> tuple[int, bytes]:
    """How many pages will expire, and the row of the first; there is at least one."""
    expires = np.frombuffer(rows, _COLUMNS)["expires"]
    some = np.flatnonzero(expires)
    first = int(some[expires[some].argmin()])
    return len(some), rows[first * ROW : (first + 1) * ROW]


def used(rows: bytes) -> int:
    """When the first page was used last."""
    return int.from_bytes(rows[_USED : _USED + 8], "little")


def footprint_of(id_size: int, size: int) -> int:
    """Roughly the bytes that a page takes on disk, if its request's id has `id_size` bytes.

    It may be alone in its sheet, so it counts one.
    """
    return room_for(ROW + _BESIDE + id_size, size)


def footprint(id_size: int, rows: bytes) -> int:
    """The same for the pages of these rows."""
    sizes, counts = np.unique(np.frombuffer(rows, _COLUMNS)["size"], return_counts=True)
    return sum(footprint_of(id_size, int(size)) * int(count) for size, count in zip(sizes, counts, strict=True))
