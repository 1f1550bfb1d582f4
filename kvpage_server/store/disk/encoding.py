"""The changes that a transaction makes on disk, the encoding of values, and the sheets of a transaction."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import lmdb

from kvpage_server.core import Slot
from kvpage_server.lossless import encode_block_body, encode_page_body
from kvpage_server.page import HEADER_SIZE, BlockShape, DType, PageError, Plane, header_fields, unix_ms
from kvpage_server.store import records
from kvpage_server.store.memory.index import Block, Extent, ExtentPage, OnDisk
from kvpage_server.store.records import Damaged, Record, Spot


@dataclass(slots=True)
class Write:
    """Change that stores a value.

    `meta` is the header of a page, the encoded shape of an extent, or empty for a string. `expires` and `used`, the
    last use, are in unix milliseconds, 0 for never. `digest` is the body's XXH3-64; 0 if it has to be computed.
    """

    name: bytes
    meta: bytes
    body: memoryview | bytes
    expires: int = 0
    used: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Change that deletes a value."""

    name: bytes


@dataclass(frozen=True, slots=True)
class SetExpiry:
    """Change of a value's expiry, in unix milliseconds, 0 for never."""

    name: bytes
    expires: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Change that moves a value to the quarantine: lookups miss it, but it can be inspected."""

    name: bytes


class Clear:
    """Change that deletes all values."""


Change = Write | Delete | SetExpiry | Quarantine | Clear

# The name of a unit's lifetime is `l` and the unit's name. The body of its `Write` is a `Lifetime`.

LIFETIME = b"l"
_LIFETIME = struct.Struct("<QIH")  # end, seconds, length of the tenant's name


class Lifetime(NamedTuple):
    """The lifetime of a unit: its end in unix milliseconds, its length, and its tenant."""

    unit: bytes  # the unit's name
    ends: int
    seconds: int
    tenant: bytes

    def pack(self) -> bytes:
        return _LIFETIME.pack(self.ends, self.seconds, len(self.tenant)) + self.tenant + self.unit

    @classmethod
    def unpack(cls, data: bytes) -> Lifetime:
        ends, seconds, size = _LIFETIME.unpack_from(data)
        start = _LIFETIME.size
        return cls(data[start + size :], ends, seconds, data[start : start + size])


# -- Encoding of values, and decoding of extents after a restart -------------------------------------------------------
#
# The `meta` of a string is empty. That of a page is its header. That of an extent is its shape:
#
#     [layers: 4][heads: 4][page_size: 4][created, unix ms: 8][ttl, seconds: 8], then for each plane
#     [kv_type: 1][dtype: 1][head_dim: 4]

_SHAPE = struct.Struct("<IIIQQ")
_PLANE = struct.Struct("<BBI")
_CHECKSUM = header_fields("checksum")
_MATRIX = header_fields("dtype", "page_size", "head_dim")


class Corrupt:
    """Marker that the queue has in place of a value that was found damaged."""


ShortText = tuple[bytes, int]  # the bytes and the expiry of a string
Value = Slot | ExtentPage | Extent | ShortText | OnDisk | Corrupt | SetExpiry | Lifetime


def change_of(name: bytes, value: Value) -> Change:
    """Return the change that stores a value. For a value that is on disk only, it changes the expiry."""
    if type(value) is Slot or type(value) is ExtentPage:
        header = bytes(value.header) if type(value.unit) is Block else b""
        return Write(name, header, value.body, value.expires, unix_ms(), _CHECKSUM.unpack(header)[0] if header else 0)
    if isinstance(value, SetExpiry):
        return value
    if isinstance(value, Lifetime):
        return Write(name, b"", value.pack())
    if isinstance(value, tuple):
        return Write(name, b"", value[0], value[1], unix_ms())
    if isinstance(value, Extent):
        return Write(name, _encode_shape(value), value.slot.body, value.expires, unix_ms(), value.digest)
    if isinstance(value, OnDisk):
        return SetExpiry(name, value.expires)
    return Quarantine(name)


def _encode_shape(extent: Extent) -> bytes:
    shape = extent.shape
    head = _SHAPE.pack(shape.layers, shape.heads, shape.page_size, extent.created, extent.ttl)
    return head + b"".join(_PLANE.pack(plane.kv_type, plane.dtype, plane.head_dim) for plane in shape.planes)


def extent_of(record: Record, block: Block, used: int) -> Extent:
    """Return the extent of a record, with its body on disk only. `used` is in monotonic seconds. Raises Damaged."""
    try:
        shape = _shape_of(record.meta)
        created, ttl = _SHAPE.unpack_from(record.meta)[3:]
    except (struct.error, PageError, ValueError) as error:
        raise Damaged(f"its shape cannot be read: {error}") from None
    if shape.nbytes != record.body.size:
        raise Damaged("its body has another length than its shape")
    body = OnDisk(record.name, record.body.size, unit=block, used=used, stored=record.body.stored)
    extent = Extent(shape, body, record.body.digest, created, ttl)
    extent.expires = record.expires
    return extent


def _shape_of(meta: bytes) -> BlockShape:
    """Return the shape in the `meta` of an extent. Raises struct.error, PageError or ValueError."""
    layers, heads, page_size, _, _ = _SHAPE.unpack_from(meta)
    planes = [Plane(kv_type, DType(dtype), dim) for kv_type, dtype, dim in _PLANE.iter_unpack(meta[_SHAPE.size :])]
    return BlockShape(layers, heads, page_size, tuple(planes))


def code_of(write: Write) -> memoryview | bytes | None:
    """Return the code of a page's or an extent's body (docs/page-code.md), or None.

    None means that the body stays as it is: it is a string, or the code would save less than a tenth of it.
    """
    try:
        if write.name[:1] == b"b":
            return encode_block_body(write.body, _shape_of(write.meta))
        if len(write.meta) == HEADER_SIZE:
            dtype, page_size, head_dim = _MATRIX.unpack(write.meta)
            return encode_page_body(write.body, DType(dtype), page_size, head_dim)
    except (struct.error, ValueError):  # no page of ours
        pass
    return None


def code_for_disk(write: Write) -> memoryview | bytes | None:
    """Return the code of a body, see `code_of`; None also if it would save no page of the file."""
    code = code_of(write)
    if code is None:
        return None
    saves = len(code) <= records.SHARED or records.room_for(0, len(code)) < records.room_for(0, len(write.body))
    return code if saves else None


# -- The sheets that a transaction changes -----------------------------------------------------------------------------


_PAGE_NAME = records.name_of_key(b"kv:")  # beginning of the names of pages


class Sheets:
    """Sheets of a write transaction: read at their first use, changed in memory, and written once by `flush`."""

    def __init__(self, txn: lmdb.Transaction[bytes], records: lmdb._Database) -> None:
        self._txn = txn
        self._records = records
        self._rows: dict[bytes, dict[Spot, bytes]] = {}  # by database key and spot
        # Whether a record may have the name of a page: then it is the record of a stray.
        cursor = txn.cursor(records)
        self.any_strays = cursor.set_range(_PAGE_NAME) and cursor.key().startswith(_PAGE_NAME)
        self.damaged = False  # whether a sheet was damaged, so that the pieces of its pages are unknown

    def of(self, key: bytes) -> dict[Spot, bytes]:
        """Return the rows of a sheet by spot, which the caller may change. A damaged or missing sheet has no rows."""
        rows = self._rows.get(key)
        if rows is None:
            data = self._txn.get(key, db=self._records)
            try:
                rows = {} if data is None else records.by_spot(records.unpack(key, data)[1])
            except Damaged:
                rows, self.damaged = {}, True
            self._rows[key] = rows
        return rows

    def clear(self) -> None:
        """Discard all changes, because the transaction deletes all records."""
        self._rows.clear()

    def flush(self) -> None:
        """Write the sheets to the transaction, and delete empty ones."""
        for key, rows in self._rows.items():
            if rows:
                self._txn.put(key, records.pack(key, rows), db=self._records)
            else:
                self._txn.delete(key, db=self._records)
