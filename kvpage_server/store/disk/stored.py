"""The values on disk, and the changes that wait to be written. Every value is written to disk."""

from __future__ import annotations

from collections.abc import Sequence

from kvpage_server.core import Slot
from kvpage_server.store.disk.file.change import Retime
from kvpage_server.store.disk.file.encoding import ShortText, Value
from kvpage_server.store.disk.file.write_behind import WriteBehind
from kvpage_server.store.disk.usage import DiskUsage
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Text
from kvpage_server.store.memory.extent import Extent, ExtentPage
from kvpage_server.store.memory.index import Block
from kvpage_server.store.records import sheet
from kvpage_server.store.records.record import footprint, name_of_key

_RETIME = 100  # bytes, roughly, that a change of an expiry takes until it is written


class DiskCounters:
    """What has happened between memory and disk since the start."""

    fetched = 0
    dropped = 0  # values whose bytes left memory
    evicted = 0  # values that were evicted from the disk
    corrupt = 0
    repaired = 0  # damaged on disk, and written again from memory


class Stored:
    """Values on disk and their changes. `maxdisk` is in bytes, 0 for no limit."""

    behind: WriteBehind[Value]  # set when the loop runs

    def __init__(self, maxdisk: int) -> None:
        self.maxdisk = maxdisk
        self.usage = DiskUsage(counts_blocks=maxdisk > 0)
        self.counts = DiskCounters()

    def has(self, name: bytes) -> bool:
        """Whether a value is on disk or waits to be written."""
        return name in self.usage or self.behind.waits(name)

    def keeps(self, name: bytes) -> bool:
        """Whether a value will be on disk when all that waits is written."""
        waiting = self.behind.waiting(name)
        return name in self.usage if waiting is None else waiting[0] is not None

    def store(self, name: bytes, value: Entry | Extent) -> None:
        """Write a value as it is now."""
        if self.maxdisk and not isinstance(value, Cold):
            self.usage.expect(name, takes(name, value))
        if isinstance(value, Text):
            self.behind.note(name, (value.data, value.expires), value.size + TEXT_OVERHEAD)
        elif isinstance(value, Extent):
            self.behind.note(name, value, value.slot.footprint)
        else:
            self.behind.note(name, value, value.footprint)

    def store_pages(self, keys: Sequence[bytes], pages: Sequence[Slot | ExtentPage]) -> None:
        names = [*map(name_of_key, keys)]
        if self.maxdisk:
            for name, page in zip(names, pages, strict=True):
                self.usage.expect(name, takes(name, page))
        self.behind.note_all(names, pages, [page.footprint for page in pages])

    def retime(self, name: bytes, value: Entry) -> None:
        """Write a value's new expiry if the value is on disk, or on its way. All of it only if that waits anyway."""
        if not self.keeps(name):
            return
        waiting = self.behind.waiting(name)
        is_whole = waiting is not None and not isinstance(waiting[0], Retime)
        if is_whole and (type(value) is Text or self.behind.waits_again(name)):
            self.store(name, value)
        else:
            self.behind.note(name, Retime(name, value.expires), len(name) + _RETIME)

    def remove(self, name: bytes, *, replaced: bool = False) -> None:
        """Remove a value from the disk, if it is there. One that is `replaced` goes only when the others are there."""
        if self.has(name):
            if self.maxdisk:
                self.usage.expect(name, 0, replaced=replaced)
            self.behind.note(name, None, 0)

    def clear(self) -> None:
        """Remove everything from the disk."""
        self.behind.clear()
        self.usage.clear()


def takes(name: bytes, value: Entry | Extent | ShortText) -> int:
    """Roughly the bytes that a value takes on disk."""
    if (type(value) is Slot or type(value) is ExtentPage) and type(value.unit) is Block:
        return sheet.footprint_of(len(value.unit.req_id), value.size)
    if isinstance(value, tuple):
        return footprint(name, len(value[0]))
    return footprint(name, value.slot.size if isinstance(value, Extent) else value.size)
