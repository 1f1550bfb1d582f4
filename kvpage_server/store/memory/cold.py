"""A value whose bytes are on disk only."""

from __future__ import annotations

from kvpage_server.core import Part, Slot


class Absent(Exception):
    """The bytes of a value are used that was not fetched first. A command's `needs` prevent this."""

    def __init__(self, name: bytes) -> None:
        super().__init__(f"{name!r} lies on disk")


class Cold:
    """Stands in place of a slot: for a page, a long string, or the body of a block.

    `name` is the value's name on disk. `header` is a page's, empty for other values. `unit` is the block that it
    belongs to. `expires` is in unix milliseconds, 0 for never, and `used`, the last use, in monotonic seconds.
    `lent` is the number of bytes that had been lent before it was lent last; -1 if it was not lent since it is
    cold. `failing` is why the disk could not be read for it; empty if it could. `shown` has the bytes for a client
    that must not change anything, as long as it holds them.
    """

    __slots__ = ("expires", "failing", "header", "lent", "name", "shown", "size", "unit", "used")

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
        self.failing = ""
        self.shown: Slot | None = None

    @property
    def slot(self) -> Slot:
        """Return the slot that was loaded to be shown. Raises Absent, as do all methods below."""
        if self.shown is None:
            raise Absent(self.name)
        return self.shown

    @property
    def body(self) -> memoryview:
        return self.slot.body

    def part(self, start: int, stop: int) -> Part:
        return self.slot.part(start, stop)
