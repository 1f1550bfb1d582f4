"""A block as one value: every page of one (req_id, page_id), written whole and read whole.

What was written whole lies in an extent and is one borrowed piece of a reply. A block whose pages were written one by
one is gathered as it is read; it is complete when every layer up to its last has every plane and head up to the last,
all pages have as many rows, and the pages of a plane are of one dtype and dimension. Whether it is is found out once
and remembered until one of its pages changes. Costs: O(1) for an extent, else O(pages of the block).
"""

from __future__ import annotations

from kvpage_server.page import BlockShape, DType, Plane, header_fields
from kvpage_server.resp.reply import Piece
from kvpage_server.store.cold import Cold
from kvpage_server.store.entry import Page, is_cold
from kvpage_server.store.extent import ExtentPage
from kvpage_server.store.fetching import Lent
from kvpage_server.store.index import Block
from kvpage_server.store.memory import Keyspace

_GEOMETRY = header_fields("dtype", "kv_type", "page_size", "head_dim")


def read_block(keyspace: Keyspace, req_id: bytes, page: int, lent: Lent) -> tuple[Piece, ...] | None:
    """A complete block's bulk string, in pieces; None when the block is not complete. A use, and a hit or a miss.

    It is in memory, or as a whole `lent`; or the disk cannot be read, and it is a miss.
    """
    block = keyspace.block(req_id, page)
    shape = None if block is None else shape_of(keyspace, block)
    if block is None or shape is None:
        keyspace.counters.misses += 1
        return None
    keyspace.use_block(block)
    if block.extent is not None:
        slot = block.extent.slot
        if type(slot) is Cold:
            return lent[slot].pieces([slot]) if slot in lent else None
        return (slot,)
    pages = keyspace.pages_of(block)
    if any(map(is_cold, pages)):
        return None
    return (b"$%d\r\n" % shape.nbytes, *(page.part(0, page.size) for page in pages), b"\r\n")


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
    pages = keyspace.pages_of(block)
    for page in pages:
        kv_type, geometry = _geometry(page)
        if planes.setdefault(kv_type, geometry) != geometry:
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
    as_declared = all(page.size == span.stop - span.start for page, span in zip(pages, shape.page_spans(), strict=True))
    return shape if as_declared else None


def _geometry(page: Page) -> tuple[int, tuple[int, int, int]]:
    """A page's kv_type, dtype, page_size and head_dim; that of an extent's without computing its header."""
    if isinstance(page, ExtentPage):
        plane = page.extent.shape.plane(page.kv_type)
        return page.kv_type, (plane.dtype, page.extent.shape.page_size, plane.head_dim)
    dtype, kv_type, page_size, head_dim = _GEOMETRY.unpack_from(page.header)
    return kv_type, (dtype, page_size, head_dim)
