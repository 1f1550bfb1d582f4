"""A value whose bytes lie on disk alone: what is known of it without them."""

from __future__ import annotations

from kvpage_server.core import Part, Slot


class Absent(Exception):
    """Bytes are used that were not fetched first. A command's `needs` see to it that this does not happen."""

    def __init__(self, name: bytes) -> None:
        super().__init__(f"{name!r} lies on disk")


class Cold:
    """Stands where a slot would: for a page, a long string, or the body of a block.

    `name` is what it is stored as. `header` is a page's, empty for other values. `unit` is the block that it belongs
    to, `expires` a unix time in milliseconds, 0 for never, and `used` a unix time in seconds, of its last use. `lent`
    is how much had been lent before it was the last time, in bytes; -1 when it was not since it is cold. `failing` is
    why the disk could not be read for it the last time, empty when it could. `shown` has the bytes for a moment, for
    somebody who only looks: to everybody else they are on disk alone.
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
        """What is shown. Raises Absent, as all that follows."""
        if self.shown is None:
            raise Absent(self.name)
        return self.shown

    @property
    def body(self) -> memoryview:
        """The bytes."""
        return self.slot.body

    def part(self, start: int, stop: int) -> Part:
        """Some of them."""
        return self.slot.part(start, stop)
