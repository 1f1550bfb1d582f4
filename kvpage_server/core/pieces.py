"""Pieces of output: bytes, or borrowed memory.

A value is sent with its frame before it and `END` behind it, as a slot holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from typing_extensions import Buffer

from kvpage_server.page import MAX_HEAD, MAX_KV_TYPE

END = b"\r\n"


class Span(Protocol):
    """Memory that contains a part of a reply in wire format. It is not reused while the object lives."""

    @property
    def view(self) -> memoryview:
        """The bytes."""

    @property
    def size(self) -> int:
        """How many of them are a value's."""


Piece = bytes | Span


def lent(pieces: Iterable[Piece]) -> int:
    """Return bytes of values that they borrow."""
    return sum([piece.size for piece in pieces if not isinstance(piece, bytes)])


def frame(size: int) -> bytes:
    """Return the RESP header of a value of `size` bytes."""
    return b"$%d\r\n" % size


# -- Memory of the caller's as bytes: numpy arrays, mx.arrays, bytearrays, memoryviews, never copied -------------------


class Unusable(ValueError):
    """A buffer can't be sent from or received into: which one of several, and why not."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"buffer {index}: {why}")
        self.index = index
        self.why = why


def as_bytes(buffer: Buffer, index: int = 0, *, writable: bool = False) -> memoryview:
    """Return the bytes of a C-contiguous buffer of any element type. Raises Unusable."""
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

MAX_LINE = 64 * 1024  # bytes of an error
MAX_FRAME = 24  # and of a line before a body, CRLF included
MAX_BULK = 0xFFFF_FFFF + 64  # the longest blob


class WrongAnswer(ValueError):
    """Error: bytes that are not the expected reply."""


class ErrorAnswer(Exception):
    """An error line, without its '-'."""

    def __init__(self, line: bytes) -> None:
        super().__init__(line)
        self.line = line


def wrong_answer(item: int, count: int, found: bytes) -> WrongAnswer:
    """Return the error for unexpected bytes instead of reply `item`, or after the last of `count` replies."""
    if item < 0:
        return WrongAnswer(f"instead of {count} pages came {found[:40]!r}")
    if item == count:
        return WrongAnswer(f"behind the last of {count} pages came {found[:40]!r}")
    return WrongAnswer(f"instead of page {item} of {count} came {found[:40]!r}")


# -- rows --------------------------------------------------------------------------------------------------------------
#
# Which pages a block has, as rows of bits: one bit a head, in rows of up to 64 heads of a (layer, plane).
#
# That is a few bytes a page where models have eight heads, and enough to spell every page's key. Rows are numbered by
# layer, plane and head: the order of a block's body.

TYPES = MAX_KV_TYPE + 1
ROW_HEADS = 64
GROUPS = (MAX_HEAD + 1) // ROW_HEADS  # rows that the heads of one (layer, plane) may take


def row_of(layer: int, head: int, kv_type: int) -> int:
    """Return the row of a page."""
    return (layer * TYPES + kv_type) * GROUPS + head // ROW_HEADS


def bit_of(head: int) -> int:
    """Return the bit of a page in its row."""
    return 1 << head % ROW_HEADS
