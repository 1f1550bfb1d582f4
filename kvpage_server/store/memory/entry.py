"""What a key can have as its value: a short string, a long one, a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from kvpage_server.core import Slot
from kvpage_server.page import PageError, PageHeader, PageKey
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.extent import ExtentPage
from kvpage_server.store.memory.index import Block

TEXT_OVERHEAD = 200  # bytes a short string costs beside its own: dict entry, key, objects


class Text:
    """A short plain string. `expires` is a unix time in milliseconds, 0 for never."""

    __slots__ = ("data", "expires")

    unit: object = None  # it is no page

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.expires = 0

    @property
    def size(self) -> int:
        """Bytes of the string."""
        return len(self.data)


Page = Slot | ExtentPage | Cold
Entry = Text | Page  # a Slot, or a Cold one, is a page when a block is its unit, and otherwise a long string


_COLD = {Cold}


def is_page(entry: Entry | None) -> TypeGuard[Page]:
    """Whether a value is a page."""
    return (type(entry) is Slot or type(entry) is ExtentPage or type(entry) is Cold) and type(entry.unit) is Block


def is_cold(page: Page) -> bool:
    """Whether the bytes of a page lie on disk alone."""
    return type(page) is Cold or (type(page) is ExtentPage and type(page.extent.slot) is Cold)


def cold_body(entry: Entry) -> Cold | None:
    """What stands for the bytes that a value lies in, if they lie on disk alone."""
    body = entry.extent.slot if type(entry) is ExtentPage else entry
    return body if type(body) is Cold else None


def has_bytes(page: Page) -> bool:
    """Whether the bytes of a page are in memory, if only for who looks at them."""
    cold = cold_body(page)
    return cold is None or cold.shown is not None


def are_cold(entries: Sequence[Entry | None]) -> TypeGuard[list[Cold]]:
    """Whether the bytes of all of them lie on disk alone."""
    return {*map(type, entries)} == _COLD


def page_named(key: bytes) -> PageKey | None:
    """The page that a key names; None for the key of anything else."""
    try:
        return PageKey.parse(key)
    except PageError:
        return None


def header_of(page: Page) -> PageHeader:
    """A page's header."""
    return PageHeader.parse(page.header)
