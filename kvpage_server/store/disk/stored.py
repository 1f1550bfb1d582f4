"""What is on disk or on its way there, and how a value gets on that way.

With `appendfsync` always or everysec, everything goes to disk. With no, what is stored and never asked for again wears
no SSD: it is *unproven* until it is used for a second time.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpage_server.core import Slot
from kvpage_server.store.contents import Contents
from kvpage_server.store.disk.file.encoding import ShortText, Value
from kvpage_server.store.disk.file.write_behind import WriteBehind
from kvpage_server.store.disk.usage import DiskUsage
from kvpage_server.store.eviction.policies import NO_EVICTION, VOLATILE_TTL
from kvpage_server.store.eviction.policy import Unit
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Text
from kvpage_server.store.memory.extent import Extent, ExtentPage
from kvpage_server.store.memory.index import Block
from kvpage_server.store.records import sheet
from kvpage_server.store.records.record import footprint, name_of_key


class DiskCounters:
    """What happened between memory and disk since the start."""

    fetched = 0
    dropped = 0  # values whose bytes memory has no more
    evicted = 0  # values that had to leave the disk
    corrupt = 0
    repaired = 0  # found damaged on disk, and written again from memory
    skipped = 0  # values that memory keeps to itself, since the disk could not keep up


class Stored:
    """Values on disk, and changes on their way there. `maxdisk` is in bytes, 0 for no limit."""

    behind: WriteBehind[Value]  # from when the loop runs

    def __init__(self, contents: Contents, maxdisk: int) -> None:
        self.maxdisk = maxdisk
        self.usage = DiskUsage(counts_blocks=maxdisk > 0)
        self.counts = DiskCounters()
        self.unproven: set[Unit] = set()  # written and not used since: not for the disk yet
        self._evictor = contents.evictor

    @property
    def keeps_all(self) -> bool:
        """Whether everything that is stored goes to disk, and not only what is used again."""
        return self.behind.mode != "no" or self._evictor.policy in (NO_EVICTION, VOLATILE_TTL)

    def has(self, name: bytes) -> bool:
        """Whether a value is on disk, or on its way there."""
        return name in self.usage or self.behind.waits(name)

    def store(self, name: bytes, value: Entry | Extent) -> None:
        """A value is to be on disk as it is now."""
        if self.maxdisk and not isinstance(value, Cold):
            self.usage.expect(name, takes(name, value))
        if isinstance(value, Text):
            self.behind.note(name, (value.data, value.expires), value.size + TEXT_OVERHEAD)
        elif isinstance(value, Extent):
            self.behind.note(name, value, value.slot.footprint)
        else:
            self.behind.note(name, value, value.footprint)

    def store_pages(self, keys: Sequence[bytes], pages: Sequence[Slot | ExtentPage]) -> None:
        """The same for pages."""
        names = [*map(name_of_key, keys)]
        if self.maxdisk:
            for name, page in zip(names, pages, strict=True):
                self.usage.expect(name, takes(name, page))
        self.behind.note_all(names, pages, [page.footprint for page in pages])

    def remove(self, name: bytes) -> None:
        """A value is to leave the disk, if it is there."""
        if self.has(name):
            if self.maxdisk:
                self.usage.expect(name, 0)
            self.behind.note(name, None, 0)

    def clear(self) -> None:
        """Everything is to leave it."""
        self.behind.clear()
        self.usage.clear()
        self.unproven.clear()


def takes(name: bytes, value: Entry | Extent | ShortText) -> int:
    """Bytes of the disk that a value takes, nearly."""
    if (type(value) is Slot or type(value) is ExtentPage) and type(value.unit) is Block:
        return sheet.footprint_of(value.size)
    if isinstance(value, tuple):
        return footprint(name, len(value[0]))
    return footprint(name, value.slot.size if isinstance(value, Extent) else value.size)
