"""The description of a value on disk, as bytes: a record of its own, or a row in a sheet of its block.

The functions of this module convert between bytes and objects. They access neither files nor the index in memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from kvpage_server.page import FIELD_AT, HEADER_SIZE, MAX_REQ_ID, checksum, header_fields

# -- record ------------------------------------------------------------------------------------------------------------
#
# A record describes a value on disk: its name, its expiry, the place of its body, and digests of description and body.
#
# A name is `k` and the key of a string or a page, or `b` and the request and page id of an extent. LMDB allows keys of
# up to 511 bytes. So a name of more than 500 bytes is stored under its hash, and the record contains the name.
#
#     [8: XXH3-64 of all that follows and of the database key][head][meta][name, if longer than 500 bytes]
#     [body, if at most 1 KiB and not coded; 8: bytes of the code, if the body is coded]
#
# All numbers are little-endian. `meta` is a page's 64-byte header, a block's shape, or empty. A longer body is cut into
# pieces with consecutive numbers, each a value of its own in LMDB. The pieces of a coded body have its code, see
# docs/page-code.md.

INLINE = 1024  # bytes of the longest body that is stored within its record
PIECE = 64 * 4096 - 16  # bytes of a piece; with LMDB's 16 bytes it fills 64 consecutive pages of the file
SHORT_PIECE = 4096 - 16  # bytes of a piece if the file has no 64 consecutive free pages
SHARED = 2022  # bytes of the longest piece that shares a page of the file with others
_SHORT = 1 << 63  # flag in the number of the first piece: the pieces are short
_LONGEST_KEY = 500  # bytes of a name that is its own database key
_DIGEST = struct.Struct("<Q")
_HEAD = struct.Struct("<HIQQQQQ")  # sizes of meta and name; expires, used, size, digest, first
_CODED = struct.Struct("<Q")


class Damaged(Exception):
    """Error: data on disk is damaged. The message describes the symptom."""


def name_of_key(key: bytes) -> bytes:
    """Return the name on disk of a string or a page: `k` and its key."""
    return b"k" + key


def name_of_block(req_id: bytes, page: int) -> bytes:
    """Return the name on disk of a block: `b`, its request id, a colon, its page id. Only an extent has a record."""
    return b"b%b:%d" % (req_id, page)


def database_key(name: bytes) -> bytes:
    """Return the key in LMDB for a name: the name itself, or its hash if the name has more than 500 bytes."""
    return name if len(name) <= _LONGEST_KEY else b"h" + blake2b(name, digest_size=32).digest()


class Body(NamedTuple):
    """The place of a body: `inline` in its record, or in consecutive pieces from number `first` on.

    `size` is in bytes, `digest` is the body's XXH3-64. `first` has a flag for short pieces, see `first_of`; it is 0 for
    a body without pieces. `coded` has the bytes of the body's code, 0 if it is not coded.
    """

    size: int
    digest: int
    first: int
    inline: bytes = b""
    coded: int = 0

    @property
    def stored(self) -> int:
        """Bytes that are stored: of the code, or of the body if it is not coded."""
        return self.coded or self.size

    @property
    def pieces(self) -> range:
        """The numbers of the body's pieces, which are consecutive; empty without pieces."""
        number = self.first & ~_SHORT
        return range(number, number - (-self.stored // self.piece)) if self.first else range(0)

    @property
    def piece(self) -> int:
        """Bytes of each piece except the last."""
        return SHORT_PIECE if self.first & _SHORT else PIECE


def first_of(number: int, piece: int) -> int:
    """Return `Body.first` for pieces of `piece` bytes whose numbers start with `number`."""
    return number | _SHORT if piece == SHORT_PIECE else number


@dataclass(slots=True)
class Record:
    """A value on disk. `expires` and `used`, its last use if known, are in unix milliseconds, 0 for never."""

    name: bytes
    meta: bytes
    expires: int
    used: int
    body: Body

    def __bytes__(self) -> bytes:
        stored_under, (size, digest, first, inline, coded) = database_key(self.name), self.body
        name = b"" if stored_under == self.name else self.name
        head = _HEAD.pack(len(self.meta), len(name), self.expires, self.used, size, digest, first)
        rest = b"".join((head, self.meta, name, _CODED.pack(coded) if coded else inline))
        return _DIGEST.pack(checksum(rest + stored_under)) + rest

    @classmethod
    def parse(cls, stored_under: bytes, data: Buffer) -> Record:
        """Return the record with the database key `stored_under`.

        Raise Damaged if `data` does not match its checksum.
        """
        raw = bytes(data)
        start = _DIGEST.size + _HEAD.size
        if len(raw) < start or _DIGEST.unpack_from(raw)[0] != checksum(raw[_DIGEST.size :] + stored_under):
            raise Damaged("its record does not match the record's checksum")
        meta_size, name_size, expires, used, size, digest, first = _HEAD.unpack_from(raw, _DIGEST.size)
        after_meta = start + meta_size
        after_name = after_meta + name_size
        name = raw[after_meta:after_name] if name_size else stored_under
        inline, coded = raw[after_name:], 0
        if first and inline:
            inline, (coded,) = b"", _CODED.unpack(inline)
        return cls(name, raw[start:after_meta], expires, used, Body(size, digest, first, inline, coded))


def footprint(name: bytes, size: int) -> int:
    """Return the approximate bytes on disk of a string or an extent whose body has `size` bytes, coded or not."""
    return room_for(64 + len(name), size)


def room_for(described: int, size: int) -> int:
    """Return the approximate bytes on disk of a body of `size` bytes and its description of `described` bytes.

    LMDB stores a long body in 4 KiB pages of its own. Short bodies and descriptions share pages of the file, which are
    two thirds full on average. A commit that changes a value copies its whole page, so scattered changes need space for
    each of these pages twice. Therefore bytes in shared pages count three times (1.5 times 2). Two or three bodies of 1
    to 2 KiB share a page, and count one page each, which has the same effect.
    """
    if size <= INLINE:
        return 3 * (described + size)
    whole, rest = divmod(size, PIECE)
    return 3 * described + 4096 * (64 * whole + -(-(rest + 16) // 4096 if rest else 0))


# -- sheet -------------------------------------------------------------------------------------------------------------
#
# A sheet describes the single pages of up to 16 layers and 64 heads of a block, with one row for each page.
#
# Single pages are written, loaded and evicted by block, and a block may have a thousand of them. They share sheets, so
# that a server that starts reads only a few kilobytes for each block.
#
#     [8: XXH3-64 of all that follows and of the database key][8: the soonest expiry of a row][rows]
#     row: [64: the page's header][expires: 8][used: 8][XXH3-64 of the body: 8][first piece: 8, 0 for an empty body]
#
# The reserved field of the header, which is 0 outside of a sheet, has the bytes of a coded body's code.
#
# All numbers are little-endian. Times are in unix milliseconds, 0 for never.

_LAYERS, _HEADS = 16, 64  # layers and heads in one sheet: they limit the rows that are rewritten when a page changes
_NAME = re.compile(rb"kkv:([^:]{1,256}):(0|[1-9]\d{0,4}):(0|[1-9]\d{0,4}):(0|[1-9]\d{0,9}):([0-5])\Z", re.DOTALL)
_START = struct.Struct("<QQ")  # digest, soonest
_SHEET_DIGEST = 8
_TIMES = struct.Struct("<QQQQ")  # a row after its header: expires, used, digest, first
_ROW = struct.Struct(header_fields("kv_type", "layer", "head", "body_size", "reserved").format + _TIMES.format[1:])
ROW = _ROW.size  # bytes
_SHEET_OVERHEAD = 64  # bytes that a sheet with one row takes in addition to the row, its piece and the request id
_KV_TYPE, _PAGE, _SIZE, _USED = FIELD_AT["kv_type"], FIELD_AT["page"], FIELD_AT["body_size"], HEADER_SIZE + 8
_CODED_AT = FIELD_AT["reserved"]
_NEVER = bytes(8)  # the expiry of a row without one
_PLACE = struct.Struct("<II")  # layer and head; in a header, the page id follows
_COLUMNS = np.dtype(
    {
        "names": ["size", "coded", "expires"],
        "formats": ["<u4", "<u4", "<u8"],
        "offsets": [_SIZE, _CODED_AT, HEADER_SIZE],
        "itemsize": ROW,
    }
)

Spot = tuple[int, int, int]  # kv_type, layer, head
PREFIX = b"p"


def place_of(name: bytes) -> tuple[bytes, Spot] | None:
    """Return the database key of a page's sheet, and the page's spot; None if it is no name of a page."""
    found = _NAME.match(name)
    if found is None:
        return None
    req_id, *numbers = found.groups()
    layer, head, page, kv_type = map(int, numbers)
    return b"p%b:%d:%d:%d" % (req_id, page, layer // _LAYERS, head // _HEADS), (kv_type, layer, head)


def is_in(name: bytes, key: bytes) -> bool:
    """Return whether the page with this name has its row in the sheet with this database key."""
    place = place_of(name)
    return place is not None and place[0] == key


def block_of(key: bytes) -> tuple[bytes, bytes, int]:
    """Return the name, the request id and the page id of the block of a sheet with this database key."""
    name = key[1:].rsplit(b":", 2)[0]
    req_id, _, page = name.rpartition(b":")
    return b"b" + name, req_id, int(page)


def pack(key: bytes, rows: Mapping[Spot, bytes]) -> bytes:
    """Return the bytes of a sheet with these rows. `key` is its database key."""
    body = b"".join(rows.values())
    expiries = {row[HEADER_SIZE:_USED] for row in rows.values()} - {_NEVER}
    soonest = min(expiries, key=lambda expires: expires[::-1], default=_NEVER)  # numbers in big-endian order
    rest = soonest + body
    return checksum(rest + key).to_bytes(8, "little") + rest


def unpack(key: bytes, raw: Buffer) -> tuple[int, bytes]:
    """Return a sheet's soonest expiry and its rows. Raise Damaged if the sheet does not match its checksum."""
    data = bytes(raw)
    if len(data) < _START.size or (len(data) - _START.size) % ROW:
        raise Damaged("its record has a wrong length")
    digest, soonest = _START.unpack_from(data)
    if digest != checksum(data[_SHEET_DIGEST:] + key):
        raise Damaged("its record does not match the record's checksum")
    return soonest, data[_START.size :]


def by_spot(rows: bytes) -> dict[Spot, bytes]:
    """Split the rows of a sheet. Return each row by its spot: kv_type, layer and head."""
    starts = range(0, len(rows), ROW)
    return {_ROW.unpack_from(rows, i)[:3]: rows[i : i + ROW] for i in starts}


def bodies(key: bytes, rows: bytes) -> dict[bytes, Body]:
    """Return the place of each page's body, by the page's name."""
    _, req_id, page = block_of(key)
    before, between = name_of_key(b"kv:%b:" % req_id), b":%d:" % page
    return {
        b"%b%d:%d%b%d" % (before, layer, head, between, kv_type): Body(size, digest, first, b"", coded)
        for kv_type, layer, head, size, coded, _, _, digest, first in _ROW.iter_unpack(rows)
    }


def body_of(rows: bytes, spot: Spot) -> Body | None:
    """Return the place of a page's body; None if the page has no row.

    It searches for the bytes of layer, head and page id, which are consecutive in a header, and unpacks only rows with
    these bytes.
    """
    kv_type, layer, head = spot
    pattern = _PLACE.pack(layer, head) + rows[_PAGE : _PAGE + 8]
    found = rows.find(pattern)
    while found >= 0:
        start = found - _PAGE + _PLACE.size
        if start % ROW == 0 and rows[start + _KV_TYPE] == kv_type:
            return body_in(rows[start : start + ROW])
        found = rows.find(pattern, found + 1)
    return None


def row_of(header: bytes, expires: int, used: int, body: Body) -> bytes:
    """Return the description of a page as a row of a sheet."""
    if body.coded:
        header = _with_coded(header, body.coded)
    return header + _TIMES.pack(expires, used, body.digest, body.first)


def body_in(row: bytes) -> Body:
    """Return the place of the body of a page's row."""
    _, _, _, size, coded, _, _, digest, first = _ROW.unpack(row)
    return Body(size, digest, first, b"", coded)


def record_of(name: bytes, row: bytes) -> Record:
    """Return the contents of a page's row as a record with this name."""
    body, (expires, used, _, _) = body_in(row), _TIMES.unpack_from(row, HEADER_SIZE)
    header = _with_coded(row[:HEADER_SIZE], 0) if body.coded else row[:HEADER_SIZE]
    return Record(name, header, expires, used, body)


def _with_coded(header: bytes, coded: int) -> bytes:
    """Return a page's header with this number in its reserved field, which is 0 outside of a sheet."""
    return header[:_CODED_AT] + coded.to_bytes(4, "little") + header[_CODED_AT + 4 :]


def pages(req_id: bytes, page: int, rows: bytes) -> Iterator[tuple[bytes, Spot, int, int]]:
    """Yield each page's key, spot, expiry and last use, both in unix milliseconds, in the order of the rows."""
    before, between = b"kv:%b:" % req_id, b":%d:" % page
    for kv_type, layer, head, _, _, expires, used, _, _ in _ROW.iter_unpack(rows):
        yield b"%b%d:%d%b%d" % (before, layer, head, between, kv_type), (kv_type, layer, head), expires, used


def headers(rows: bytes) -> Iterator[bytes]:
    """Yield the 64-byte header of each page."""
    found = (rows[start : start + HEADER_SIZE] for start in range(0, len(rows), ROW))
    return (_with_coded(header, 0) for header in found) if _columns(rows)["coded"].any() else found


def size_of(header: bytes) -> int:
    """Return the size of a page's body in bytes, from its header."""
    return int.from_bytes(header[_SIZE : _SIZE + 4], "little")


def records(key: bytes, rows: bytes) -> Iterator[Record]:
    """Yield the contents of each row of a sheet as a record. `key` is the sheet's database key."""
    _, req_id, page = block_of(key)
    for i, (name, *_) in enumerate(pages(req_id, page, rows)):
        yield record_of(name_of_key(name), rows[i * ROW : (i + 1) * ROW])


def expires_of(rows: bytes, spot: Spot) -> int:
    """Return the expiry of a page; 0 if it has none, or no row. O(rows)."""
    found = (row[5] for row in _ROW.iter_unpack(rows) if row[:3] == spot)
    return next(found, 0)


def expiring(rows: bytes) -> tuple[int, bytes]:
    """Return the number of pages that have an expiry, which is not 0, and the row of the page that expires first."""
    expires = _columns(rows)["expires"]
    some = np.flatnonzero(expires)
    first = int(some[expires[some].argmin()])
    return len(some), rows[first * ROW : (first + 1) * ROW]


def used(rows: bytes) -> int:
    """Return the last use of the page in the first row, in unix milliseconds."""
    return int.from_bytes(rows[_USED : _USED + 8], "little")


@lru_cache(maxsize=1024)  # the pages of a model have few sizes
def footprint_of(id_size: int, size: int) -> int:
    """Return the approximate bytes on disk of a page whose body has `size` bytes, coded or not, and a request id of
    `id_size` bytes.

    The page may be the only one of its sheet, so the parts of a sheet that its rows share are included.
    """
    return room_for(ROW + _SHEET_OVERHEAD + id_size, size)


# Upper bound: n pages with bodies of `size` bytes together have at most a footprint of size + size / 4096 + n *
# PAGE_BOUND bytes.
PAGE_BOUND = 3 * (ROW + _SHEET_OVERHEAD + MAX_REQ_ID) + 2 * INLINE + 8192


def sheet_footprint(id_size: int, rows: bytes) -> int:
    """Return the sum of `footprint_of` for the pages of some rows."""
    sizes, counts = np.unique(_stored(rows), return_counts=True)
    return sum(footprint_of(id_size, int(size)) * int(count) for size, count in zip(sizes, counts, strict=True))


def stored_sizes(rows: bytes) -> list[int]:
    """Return the bytes that are stored of each page's body: of its code, or of the body if it is not coded."""
    sizes: list[int] = _stored(rows).tolist()
    return sizes


def _stored(rows: bytes) -> NDArray[np.uint32]:
    columns = _columns(rows)
    return np.where(columns["coded"] > 0, columns["coded"], columns["size"])


def _columns(rows: bytes) -> NDArray[np.void]:
    return np.frombuffer(rows, _COLUMNS)
