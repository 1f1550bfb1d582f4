"""`OnDisk`, the placeholder of a value whose bytes are on disk only."""

from __future__ import annotations

from kvpage_server.core import Part, Slot


class NotLoaded(Exception):
    """Error in the server: a command uses the bytes of a value that is on disk only. Its `needs` should load it."""

    def __init__(self, name: bytes) -> None:
        super().__init__(f"{name!r} lies on disk")


class OnDisk:
    """Placeholder of the slot of a page, a long string, or a block's body that is on disk only.

    `name` is the value's name on disk, `size` the bytes of its body. `header` is a page's 64-byte header, empty for
    other values. `unit` is the block of a page or a body, None for a string. `expires` is in unix milliseconds, 0 for
    never; `used`, the last use, in monotonic seconds. `borrowed_at` is the number of bytes that all replies had
    borrowed from disk when a reply last borrowed this value; -1 if none has. `failing` is the error of the last attempt
    to read it from disk, empty after a success. `temporary_slot` has the bytes as long as a client with CLIENT NO-TOUCH
    holds the value: its reads must not change the order of eviction.
    """

    __slots__ = ("borrowed_at", "expires", "failing", "header", "name", "size", "temporary_slot", "unit", "used")

    footprint = 0  # bytes of memory in the arena

    def __init__(
        self, name: bytes, size: int, *, expires: int = 0, header: bytes = b"", unit: object = None, used: int = 0
    ) -> None:
        self.name = name
        self.size = size
        self.expires = expires
        self.header = header
        self.unit = unit
        self.used = used
        self.borrowed_at = -1
        self.failing = ""
        self.temporary_slot: Slot | None = None

    @property
    def slot(self) -> Slot:
        """The temporary slot. This and all properties and methods below raise NotLoaded without one."""
        if self.temporary_slot is None:
            raise NotLoaded(self.name)
        return self.temporary_slot

    @property
    def body(self) -> memoryview:
        return self.slot.body

    def part(self, start: int, stop: int) -> Part:
        return self.slot.part(start, stop)
