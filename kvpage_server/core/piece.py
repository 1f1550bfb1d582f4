"""What is sent is pieces: bytes, or memory that somebody else keeps.

A value is sent with its frame before it and `END` behind it, as a slot holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

END = b"\r\n"


class Span(Protocol):
    """Memory that holds part of a reply as it goes over the wire. It is not reused while the object lives."""

    @property
    def view(self) -> memoryview:
        """The bytes."""

    @property
    def size(self) -> int:
        """How many of them are a value's."""


Piece = bytes | Span


def lent(pieces: Iterable[Piece]) -> int:
    """Bytes of values that they borrow."""
    return sum([piece.size for piece in pieces if not isinstance(piece, bytes)])


def frame(size: int) -> bytes:
    """What stands before a value of `size` bytes."""
    return b"$%d\r\n" % size
