"""Values as they are stored on disk, and their places in memory after a restart.

A string has no `meta`. A page has its header. A block stored whole has its shape:

    [layers: 4][heads: 4][page_size: 4][created, unix ms: 8][ttl, seconds: 8], then for each plane
    [kv_type: 1][dtype: 1][head_dim: 4]
"""

from __future__ import annotations

import struct

from kvpage_server.core import Slot
from kvpage_server.page import BlockShape, DType, PageError, Plane, header_fields, unix_ms
from kvpage_server.store.disk.file.change import Change, Quarantine, Retime, Write
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.extent import Extent, ExtentPage
from kvpage_server.store.memory.index import Block
from kvpage_server.store.records.record import Damaged, Record

_SHAPE = struct.Struct("<IIIQQ")
_PLANE = struct.Struct("<BBI")
_CHECKSUM = header_fields("checksum")


class Corrupt:
    """Stands for a value that was found damaged."""


ShortText = tuple[bytes, int]  # a string and when it expires
Value = Slot | ExtentPage | Extent | ShortText | Cold | Corrupt | Retime


def change_of(name: bytes, value: Value) -> Change:
    """The change that stores a value. If the value is on disk already, only its expiry changes."""
    if isinstance(value, Retime):
        return value
    if isinstance(value, tuple):
        return Write(name, b"", value[0], value[1], unix_ms())
    if isinstance(value, Extent):
        return Write(name, _spell_shape(value), value.slot.body, value.expires, unix_ms(), value.digest)
    if isinstance(value, Cold):
        return Retime(name, value.expires)
    if isinstance(value, Corrupt):
        return Quarantine(name)
    if type(value.unit) is not Block:
        return Write(name, b"", value.body, value.expires, unix_ms())
    header = bytes(value.header)
    return Write(name, header, value.body, value.expires, unix_ms(), _CHECKSUM.unpack(header)[0])


def _spell_shape(extent: Extent) -> bytes:
    shape = extent.shape
    head = _SHAPE.pack(shape.layers, shape.heads, shape.page_size, extent.created, extent.ttl)
    return head + b"".join(_PLANE.pack(plane.kv_type, plane.dtype, plane.head_dim) for plane in shape.planes)


def extent_of(record: Record, block: Block, used: int) -> Extent:
    """A block stored whole, whose body stays on disk. It was `used` at these monotonic seconds. Raises Damaged."""
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
