"""How large slots and chunks are.

A slot holds a value the way it goes over the wire, so that a reply is one borrowed piece of memory:

    [64: header]["$<n>\\r\\n"][body: n bytes]["\\r\\n"]

The header is a page's, unused for plain strings. Slots are of few sizes, four a doubling: powers of two, as pages are,
fit without waste.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

from kvpage_server.page import HEADER_SIZE

SUFFIX = 2  # bytes of the CRLF behind a body
LARGEST = 1 << 47  # bytes of a body: no processor addresses more
SMALLEST_CHUNK, LARGEST_CHUNK = 64 << 10, 4 << 20  # bytes, but for slots that are larger
_SHORT_FRAME, _LONG_FRAME = 8, 16  # bytes kept before a body for its length; the former has room for five digits
IN_PLACE = 32 << 10  # bytes of a body that the kernel writes into its slot: it does so faster where slots are aligned


class SlotShape(NamedTuple):
    """Of the slots of one size: bytes from the first of one to that of the next, and before the first in a chunk."""

    capacity: int  # bytes of the longest body
    pitch: int
    lead: int


class ChunkShape(NamedTuple):
    """How many bytes a chunk has, and how many slots."""

    nbytes: int
    slots: int


def capacity_for(size: int) -> int:
    """The smallest of 4 steps a doubling that holds `size`."""
    step = 1 << max((size - 1).bit_length() - 3, 4)
    return max(round_up(size, step), 64)


def slot_shape(capacity: int) -> SlotShape:
    """Slots for bodies of up to `capacity` bytes."""
    before = HEADER_SIZE + (_SHORT_FRAME if capacity < 100_000 else _LONG_FRAME)
    align = 16 if capacity < IN_PLACE else 64
    return SlotShape(capacity, round_up(before + capacity + SUFFIX, align), -before % align)


def chunk_shape(slots: SlotShape, held: int) -> ChunkShape:
    """The next chunk of a size whose chunks have `held` bytes: as many again, within bounds."""
    wanted = min(max(held, SMALLEST_CHUNK), LARGEST_CHUNK)
    count = max((wanted - slots.lead) // slots.pitch, 1)
    return ChunkShape(round_up(slots.lead + count * slots.pitch, mmap.PAGESIZE), count)


def round_up(size: int, step: int) -> int:
    """The least multiple of `step` that is not less."""
    return -(-size // step) * step
