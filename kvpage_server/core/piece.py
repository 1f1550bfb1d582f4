"""What is sent is pieces: bytes, or memory that somebody else keeps."""

from __future__ import annotations

from typing import Protocol


class Span(Protocol):
    """Memory that holds part of a reply as it goes over the wire. It is not reused while the object lives."""

    @property
    def view(self) -> memoryview:
        """The bytes."""

    @property
    def size(self) -> int:
        """How many of them are a value's."""


Piece = bytes | Span
