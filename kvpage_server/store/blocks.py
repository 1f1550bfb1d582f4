"""A block as one value: every page of one (req_id, page_id), written whole and read whole.

Today each of its pages lies in a slot of its own, and the block is gathered as it is read. Commands see none of that:
they write a body of a `BlockShape` and get the block's bulk string in pieces.

A block is complete when every layer up to its last has every plane and head up to the last, all pages have as many
rows, and the pages of a plane are of one dtype and dimension. Whether it is is found out once and remembered until one
of its pages changes. Costs: O(pages of the block).
"""

from __future__ import annotations

import struct

from kvpage_server.page import BlockShape, DType, PageError, Plane, checksum, pack_header
from kvpage_server.store.arena import Slot
from kvpage_server.store.index import Block
from kvpage_server.store.memory import Keyspace, PageName, header_of

_GEOMETRY = struct.Struct("<5x2Bx2I")  # of a page header: dtype, kv_type, page_size, head_dim


class PageBody:
    """A page's bytes as a piece of a block's reply. Keeps the slot."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.slot.body


def write_block(
    keyspace: Keyspace,
    req_id: bytes,
    page: int,
    shape: BlockShape,
    body: memoryview,
    *,
    created_ms: int,
    ttl: int,
    with_checksums: bool,
) -> None:
    """Store a block in place of whatever pages it had. `body` is `shape.nbytes` bytes in the order of `BlockShape`.

    `ttl` is in seconds, 0 for none. All arguments have been validated, and room has been made.
    """
    expires = created_ms + ttl * 1000 if ttl else 0
    start = 0
    for layer in range(shape.layers):
        for plane in shape.planes:
            size, dtype, kv_type = shape.page_nbytes(plane), plane.dtype, plane.kv_type
            for head in range(shape.heads):
                slot = keyspace.arena.allocate(size)
                slot.body[:] = body[start : start + size]
                start += size
                digest = checksum(slot.body) if with_checksums else 0
                header = pack_header(
                    dtype, kv_type, shape.page_size, plane.head_dim, layer, head, page, created_ms, ttl, size, digest
                )
                key = b"kv:%b:%d:%d:%d:%d" % (req_id, layer, head, page, kv_type)
                keyspace.set_page(PageName(key, req_id, layer, head, page, kv_type), header, slot, expires)
    block = keyspace.index.block(req_id, page)
    assert block is not None
    _remove_others(keyspace, block, shape)


def _remove_others(keyspace: Keyspace, block: Block, shape: BlockShape) -> None:
    """Remove the pages that a block had before and `shape` has not."""
    if block.pages == shape.pages:
        return
    for key, slot in zip(list(block.page_keys()), keyspace.slots_of(block), strict=True):
        header = header_of(slot)
        try:
            shape.page_span(header.layer, header.head, header.kv_type)
        except PageError:
            keyspace.delete(key)


def read_block(keyspace: Keyspace, req_id: bytes, page: int) -> tuple[bytes | PageBody, ...] | None:
    """A complete block's bulk string, in pieces; None when the block is not complete. A use, and a hit or a miss."""
    block = keyspace.block(req_id, page)
    shape = None if block is None else shape_of(keyspace, block)
    if block is None or shape is None:
        keyspace.counters.misses += 1
        return None
    keyspace.use_block(block)
    return (b"$%d\r\n" % shape.nbytes, *map(PageBody, keyspace.slots_of(block)), b"\r\n")


def has_block(keyspace: Keyspace, req_id: bytes, page: int) -> bool:
    """Whether a block is complete, without counting it as a use."""
    block = keyspace.block(req_id, page)
    return block is not None and shape_of(keyspace, block) is not None


def shape_of(keyspace: Keyspace, block: Block) -> BlockShape | None:
    """The shape of a complete block, None when it is not complete. What is overdue must have been swept."""
    if not block.shape_known:
        block.shape = _find_shape(keyspace, block) if block.is_full else None
        block.shape_known = True
    return block.shape


def _find_shape(keyspace: Keyspace, block: Block) -> BlockShape | None:
    """The shape that all pages of a full block agree on."""
    planes: dict[int, tuple[int, int, int]] = {}  # kv_type -> dtype, page_size, head_dim
    slots = keyspace.slots_of(block)
    for slot in slots:
        dtype, kv_type, page_size, head_dim = _GEOMETRY.unpack_from(slot.header)
        if planes.setdefault(kv_type, (dtype, page_size, head_dim)) != (dtype, page_size, head_dim):
            return None
    page_sizes = {page_size for _, page_size, _ in planes.values()}
    if len(page_sizes) > 1:
        return None
    shape = BlockShape(
        layers=block.layers,
        heads=block.heads,
        page_size=page_sizes.pop(),
        planes=tuple(Plane(kv_type, DType(planes[kv_type][0]), planes[kv_type][2]) for kv_type in sorted(planes)),
    )
    sizes = {plane.kv_type: shape.page_nbytes(plane) for plane in shape.planes}
    as_declared = all(slot.size == sizes[slot.header[6]] for slot in slots)
    return shape if as_declared else None
