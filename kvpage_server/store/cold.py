"""A value whose bytes lie on disk alone: what is known of it without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


class Absent(Exception):
    """Bytes are needed that have to be fetched first."""

    def __init__(self, values: Sequence[Cold]) -> None:
        super().__init__(f"{len(values)} values lie on disk")
        self.values = values


class Cold:
    """Stands where a slot would: for a page, a long string, or the body of a block.

    `name` is what it is stored as. `header` is a page's, empty for other values. `unit` is the block that it belongs
    to, `expires` a unix time in milliseconds, 0 for never, and `used` a unix time in seconds, of its last use. `lent`
    is how much had been lent before it was the last time, in bytes; -1 when it was not since it is cold.
    """

    __slots__ = ("expires", "header", "lent", "name", "size", "unit", "used")

    footprint = 0  # bytes of memory

    def __init__(
        self, name: bytes, size: int, *, expires: int = 0, header: bytes = b"", unit: object = None, used: int = 0
    ) -> None:
        self.name = name
        self.size = size
        self.expires = expires
        self.header = header
        self.unit = unit
        self.used = used
        self.lent = -1

    @property
    def body(self) -> NoReturn:
        """Raises Absent."""
        raise Absent([self])

    @property
    def view(self) -> NoReturn:
        """Raises Absent."""
        raise Absent([self])

    def seal(self) -> NoReturn:
        """Raises Absent."""
        raise Absent([self])

    def part(self, start: int, stop: int) -> NoReturn:
        """Raises Absent."""
        raise Absent([self])
