"""A block as one value: all pages of one (req_id, page_id), written and read together.

A block that was written whole is in an extent, and is one borrowed piece of a reply. A block whose pages were written
one by one is put together when it is read. It is complete when every layer up to its last has every plane and head up
to the last, all pages have the same number of rows, and the pages of each plane have the same dtype and dimension.
Whether it is complete is computed once, and again after one of its pages has changed. Costs: O(1) for an extent, else
O(pages of the block).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

from kvpage_server.core.piece import END, Piece, frame
from kvpage_server.page import MAX_BLOCK_PAGES, BlockShape, DType, Plane, header_fields
from kvpage_server.store.disk.fetching import Loans
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import Page, has_bytes
from kvpage_server.store.memory.index import Block

AT_ONCE = 256  # pages that are looked at before others may have their turn
_TRIES = 4  # times to look at all pages while some come or go
_GEOMETRY = header_fields("dtype", "kv_type", "page_size", "head_dim")
_Geometry = tuple[int, int, int, int]  # dtype, page_size, head_dim, bytes
_NONE: _Geometry = (0, 0, 0, 0)

T = TypeVar("T")


class Gathered(NamedTuple):
    """The pages of a block in the order of its body, and its shape if it is complete."""

    pages: list[Page]
    shape: BlockShape | None


Steps = Generator[tuple[()], None, T]  # others may have their turn after each


def read_block(keyspace: Keyspace, block: Block | None, lent: Loans) -> Steps[tuple[Piece, ...] | None]:
    """A complete block's bulk string, in pieces; None if it is not complete. Counts as a use, and a hit or a miss.

    It must be in memory, or `lent` as a whole. If the disk cannot be read, it is a miss.
    """
    found = None if block is None else (yield from gathered(keyspace, block))
    if block is None or found is None or found.shape is None:
        keyspace.counters.misses += 1
        return None
    keyspace.use_block(block)
    if block.extent is not None:
        slot = block.extent.slot
        if isinstance(slot, Cold):
            return lent[slot].pieces([slot]) if slot in lent else None
        return (slot,)
    pieces: list[Piece] = [frame(found.shape.nbytes)]
    for some in in_parts(found.pages):
        if not all(map(has_bytes, some)):
            return None
        pieces += [page.part(0, page.size) for page in some]
        yield ()
    pieces.append(END)
    return (*pieces,)


def has_block(keyspace: Keyspace, block: Block | None) -> Steps[bool]:
    """Whether a block is complete, without counting it as a use."""
    return block is not None and (yield from gathered(keyspace, block)).shape is not None


def gathered(keyspace: Keyspace, block: Block) -> Steps[Gathered]:
    """The pages of a block, some a step; none if it was stored whole. Overdue pages must have been removed.

    If it changes meanwhile, all pages are looked at again, in the end without steps.
    """
    for left in reversed(range(_TRIES)):
        version, pages, planes = block.version, list[Page](), dict[int, _Geometry]()
        keys = block.page_keys() if block.extent is None else iter(())
        while (some := keyspace.pages_at(islice(keys, AT_ONCE))) and block.version == version:
            pages += some
            if not block.shape_known:
                _note_geometries(some, planes)
            if left:
                yield ()
                if keyspace.index.block(block.req_id, block.page) is not block:
                    return Gathered([], None)
        if block.version == version:
            break
    if not block.shape_known:
        block.shape = _shape_of(block, planes) if block.is_full else None
        block.shape_known = True
    return Gathered(pages, block.shape)


def in_parts(pages: list[Page]) -> Iterator[list[Page]]:
    """Some pages at a time."""
    return (pages[start : start + AT_ONCE] for start in range(0, len(pages), AT_ONCE))


def _note_geometries(pages: Iterable[Page], planes: dict[int, _Geometry]) -> None:
    """Note each plane's common geometry, or `_NONE` if its pages differ."""
    for page in pages:
        dtype, kv_type, rows, columns = _GEOMETRY.unpack_from(page.header)
        geometry = dtype, rows, columns, page.size
        if planes.setdefault(kv_type, geometry) != geometry:
            planes[kv_type] = _NONE


def _shape_of(block: Block, planes: Mapping[int, _Geometry]) -> BlockShape | None:
    """The shape of a full block, if its pages agree on one."""
    if _NONE in planes.values() or len({rows for _, rows, _, _ in planes.values()}) > 1:
        return None
    if block.pages > MAX_BLOCK_PAGES:
        return None
    layers, heads, _ = block.measure()
    shape = BlockShape(
        layers=layers,
        heads=heads,
        page_size=next(iter(planes.values()))[1],
        planes=tuple(Plane(kind, DType(dtype), columns) for kind, (dtype, _, columns, _) in sorted(planes.items())),
    )
    as_declared = all(planes[plane.kv_type][-1] == shape.page_nbytes(plane) for plane in shape.planes)
    return shape if as_declared else None
