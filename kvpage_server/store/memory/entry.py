"""The types of a value: a short string (`Text`), a long string (`Slot`), a page, and the placeholder `OnDisk`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from kvpage_server.core import Slot
from kvpage_server.page import PageHeader
from kvpage_server.store.memory.index import Block, ExtentPage, OnDisk

LONGEST_TEXT = 511  # bytes; a longer string has a slot, because the parser receives longer words into slots
TEXT_OVERHEAD = 200  # bytes of memory of a short string in addition to its key and bytes: dict entry, objects


class Text:
    """A short string. `expires` is in unix milliseconds, 0 for never."""

    __slots__ = ("data", "expires")

    unit: object = None  # a string belongs to no block

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.expires = 0

    @property
    def size(self) -> int:
        """Bytes of the string."""
        return len(self.data)


Page = Slot | ExtentPage | OnDisk
Entry = Text | Page  # a Slot or OnDisk is a page if its `unit` is a block, and a long string otherwise


_ONLY_ON_DISK = {OnDisk}


def is_page(entry: Entry | None) -> TypeGuard[Page]:
    """Return whether an entry is a page, and not a string or None."""
    return (type(entry) is Slot or type(entry) is ExtentPage or type(entry) is OnDisk) and type(entry.unit) is Block


def is_only_on_disk(page: Page) -> bool:
    """Return whether a page's bytes are on disk only."""
    return type(page) is OnDisk or (type(page) is ExtentPage and type(page.extent.slot) is OnDisk)


def body_on_disk(entry: Entry) -> OnDisk | None:
    """Return the placeholder that a value has instead of a slot; None if its bytes are in memory."""
    body = entry.extent.slot if type(entry) is ExtentPage else entry
    return body if type(body) is OnDisk else None


def coded_size_of(page: Page) -> int:
    """Return the bytes of a page's code in memory, or its share of its block's code; 0 if it has none."""
    body = body_on_disk(page)
    return 0 if body is None or body.code is None else body.code.size * page.size // body.size


def stored_size_of(entry: Entry) -> int:
    """Return the bytes that a value takes for its quota: of its code, if it is coded where it is stored."""
    if type(entry) is OnDisk:
        return entry.stored
    body = entry.extent.slot if type(entry) is ExtentPage else None
    return body.stored * entry.size // body.size if type(body) is OnDisk else entry.size


def has_bytes(page: Page) -> bool:
    """Return whether a page's bytes can be read: they are in memory, or loaded temporarily as `temporary_slot`."""
    placeholder = body_on_disk(page)
    return placeholder is None or placeholder.temporary_slot is not None


def are_on_disk(entries: Sequence[Entry | None]) -> TypeGuard[list[OnDisk]]:
    """Return whether all entries are placeholders of values on disk; False if there are no entries."""
    return {*map(type, entries)} == _ONLY_ON_DISK


def header_of(page: Page) -> PageHeader:
    """Parse and return the 64-byte header of a page. Raise NotLoaded if it needs bytes that are on disk only."""
    return PageHeader.parse(page.header)
