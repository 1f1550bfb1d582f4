"""Definitions that both cores share: pieces of output, buffers of the caller, errors of replies, and rows of pages.

A piece of output is bytes or borrowed memory. A value is sent as a bulk string: its `frame`, which is the line with its
length, its bytes, and `END`. A slot contains all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from typing_extensions import Buffer

from kvpage_server.page import MAX_HEAD, MAX_KV_TYPE

T = TypeVar("T")

END = b"\r\n"
COPIED_FROM = 4  # times that a value is larger than the waiting parts of it together, from which they are copied


class Span(Protocol):
    """A part of a reply in wire format, in borrowed memory that is not reused while the object exists."""

    @property
    def view(self) -> memoryview:
        """The bytes of the reply."""

    @property
    def size(self) -> int:
        """The number of bytes that belong to a value, without frame and CRLF."""


Piece = bytes | Span


def borrowed_bytes(pieces: Iterable[Piece]) -> int:
    """Return the bytes of values that pieces borrow. A piece of type bytes counts as 0."""
    return sum([piece.size for piece in pieces if not isinstance(piece, bytes)])


def largest_value(pieces: Iterable[Piece]) -> int:
    """Return the bytes of the largest value that a piece borrows; 0 if none does."""
    return max([piece.size for piece in pieces if not isinstance(piece, bytes)], default=0)


def copied_parts(pieces: Sequence[T]) -> list[T | bytes]:
    """Return pieces with copies of the parts of each value that is more than COPIED_FROM times as large as its parts
    that follow each other.
    """
    found: list[Any] = list(pieces)
    start = 0
    while start < len(found):
        slot, stop = getattr(found[start], "slot", None), start + 1
        if slot is not None:
            while stop < len(found) and (isinstance(found[stop], bytes) or getattr(found[stop], "slot", None) is slot):
                stop += 1
            some = [piece if isinstance(piece, bytes) else piece.view for piece in found[start:stop]]
            if sum(map(len, some)) * COPIED_FROM < slot.size:
                found[start:stop] = map(bytes, some)
        start = stop
    return found


def frame(size: int) -> bytes:
    """Return the RESP header of a value of `size` bytes."""
    return b"$%d\r\n" % size


# -- Buffers of the caller as bytes, without a copy: numpy arrays, mx.arrays, bytearrays, memoryviews ------------------


class Unusable(ValueError):
    """Error: the caller's buffer cannot be sent from or received into.

    `index` is its position in the caller's list, `why` the reason.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"buffer {index}: {why}")
        self.index = index
        self.why = why


def as_bytes(buffer: Buffer, index: int = 0, *, writable: bool = False) -> memoryview:
    """Return the memory of a C-contiguous buffer of any element type as bytes, without a copy.

    Raise Unusable if the object has no such buffer, or if the buffer is read-only and `writable` is set. `index` is the
    position of the buffer in the caller's list, for the error.
    """
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise Unusable(index, f"{type(buffer).__name__} gives no access to its memory: {error}") from None
    if not view.c_contiguous:
        raise Unusable(index, f"the memory must be C-contiguous, got shape {view.shape} with strides {view.strides}")
    if writable and view.readonly:
        raise Unusable(index, f"cannot receive into this {type(buffer).__name__}: it is read-only")
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # bfloat16, empty shapes
        return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(bytearray())


# -- Replies other than bodies -----------------------------------------------------------------------------------------

MAX_LINE = 64 * 1024  # bytes of an error reply
MAX_FRAME = 24  # bytes of the line before a body, CRLF included
MAX_BULK = 0xFFFF_FFFF + 64  # bytes of the longest blob: header and body


class WrongAnswer(ValueError):
    """Error: received bytes are not the expected reply."""


class ErrorAnswer(Exception):
    """Error reply of the server. `line` is its text without the '-'."""

    def __init__(self, line: bytes) -> None:
        super().__init__(line)
        self.line = line


def wrong_answer(item: int, count: int, found: bytes) -> WrongAnswer:
    """Return the error for unexpected bytes `found` in a reply of `count` pages.

    `item` is the index of the page that was expected; -1 for the line of the array, `count` for the end of the reply.
    """
    if item < 0:
        return WrongAnswer(f"instead of {count} pages came {found[:40]!r}")
    if item == count:
        return WrongAnswer(f"behind the last of {count} pages came {found[:40]!r}")
    return WrongAnswer(f"instead of page {item} of {count} came {found[:40]!r}")


# -- rows --------------------------------------------------------------------------------------------------------------
#
# The set of a block's pages is a bitmap in rows. A row has 64 bits: one for each of 64 consecutive heads of one layer
# and plane. A bit is 1 if the set has the page.
#
# This takes a few bytes for each page of a model with eight heads. The key of a page is computed from its row and bit.
# Rows are numbered by layer, plane and group of 64 heads, which is the order of a block's body.

TYPES = MAX_KV_TYPE + 1  # planes of a layer
ROW_HEADS = 64  # heads in a row
GROUPS = (MAX_HEAD + 1) // ROW_HEADS  # most rows of one layer and plane


def row_of(layer: int, head: int, kv_type: int) -> int:
    """Return the number of the row that a page belongs to."""
    return (layer * TYPES + kv_type) * GROUPS + head // ROW_HEADS


def bit_of(head: int) -> int:
    """Return the mask of a page's bit in its row."""
    return 1 << head % ROW_HEADS
