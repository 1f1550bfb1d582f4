"""The changes that can be made to values on disk."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import lmdb

from kvpage_server.core import Slot
from kvpage_server.page import BlockShape, DType, PageError, Plane, header_fields, unix_ms
from kvpage_server.store import records
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.index import Block, Extent, ExtentPage
from kvpage_server.store.records import Damaged, Record, Spot


@dataclass(slots=True)
class Write:
    """Store a value. `digest` is the body's XXH3-64, or 0 to have it computed."""

    name: bytes
    meta: bytes
    body: memoryview | bytes
    expires: int = 0
    used: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    name: bytes


@dataclass(frozen=True, slots=True)
class Retime:
    """Change a value's expiry."""

    name: bytes
    expires: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Move a value to the quarantine: lookups miss it, but it can be inspected."""

    name: bytes


class Clear:
    """Remove everything."""


Change = Write | Delete | Retime | Quarantine | Clear


# -- encoding ----------------------------------------------------------------------------------------------------------
#
# Values as they are stored on disk, and their places in memory after a restart.
#
# A string has no `meta`. A page has its header. A block stored whole has its shape:
#
#     [layers: 4][heads: 4][page_size: 4][created, unix ms: 8][ttl, seconds: 8], then for each plane
#     [kv_type: 1][dtype: 1][head_dim: 4]

_SHAPE = struct.Struct("<IIIQQ")
_PLANE = struct.Struct("<BBI")
_CHECKSUM = header_fields("checksum")


class Corrupt:
    """Stands for a value that was found damaged."""


ShortText = tuple[bytes, int]  # a string and when it expires
Value = Slot | ExtentPage | Extent | ShortText | Cold | Corrupt | Retime


def change_of(name: bytes, value: Value) -> Change:
    """Return the change that stores a value. If the value is on disk already, only its expiry changes."""
    if isinstance(value, Retime):
        return value
    if isinstance(value, tuple):
        return Write(name, b"", value[0], value[1], unix_ms())
    if isinstance(value, Extent):
        return Write(name, _encode_shape(value), value.slot.body, value.expires, unix_ms(), value.digest)
    if isinstance(value, Cold):
        return Retime(name, value.expires)
    if isinstance(value, Corrupt):
        return Quarantine(name)
    if type(value.unit) is not Block:
        return Write(name, b"", value.body, value.expires, unix_ms())
    header = bytes(value.header)
    return Write(name, header, value.body, value.expires, unix_ms(), _CHECKSUM.unpack(header)[0])


def _encode_shape(extent: Extent) -> bytes:
    shape = extent.shape
    head = _SHAPE.pack(shape.layers, shape.heads, shape.page_size, extent.created, extent.ttl)
    return head + b"".join(_PLANE.pack(plane.kv_type, plane.dtype, plane.head_dim) for plane in shape.planes)


def extent_of(record: Record, block: Block, used: int) -> Extent:
    """Return a block stored whole, whose body stays on disk. It was `used` at these monotonic seconds. Raises
    Damaged.
    """
    try:
        layers, heads, page_size, created, ttl = _SHAPE.unpack_from(record.meta)
        planes = [Plane(kv_type, DType(dtype), dim) for kv_type, dtype, dim in _PLANE.iter_unpack(record.meta[28:])]
        shape = BlockShape(layers, heads, page_size, tuple(planes))
    except (struct.error, PageError, ValueError) as error:
        raise Damaged(f"its shape cannot be read: {error}") from None
    if shape.nbytes != record.body.size:
        raise Damaged("its body has another length than its shape")
    body = Cold(record.name, record.body.size, unit=block, used=used)
    extent = Extent(shape, body, record.body.digest, created, ttl)
    extent.expires = record.expires
    return extent


# -- The sheets that a transaction changes -----------------------------------------------------------------------------


class Sheets:
    """They are read when needed, and written once, when the transaction has made all changes."""

    def __init__(self, txn: lmdb.Transaction[bytes], records: lmdb._Database) -> None:
        self._txn = txn
        self._records = records
        self._rows: dict[bytes, dict[Spot, bytes]] = {}
        self.damaged = False  # one of them was, so it is not known where its pages' pieces lie

    def of(self, key: bytes) -> dict[Spot, bytes]:
        """Return the rows of a sheet. A damaged one has none, since it is not known where its pages lie."""
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
        self._rows.clear()

    def flush(self) -> None:
        """Write the sheets."""
        for key, rows in self._rows.items():
            if rows:
                self._txn.put(key, records.pack(key, rows), db=self._records)
            else:
                self._txn.delete(key, db=self._records)
