"""What the write-behind asks the store about changes, and what it tells the store of them: see `Owner` there."""

from __future__ import annotations

from collections.abc import Iterator

from kvpage_server.core import Slot
from kvpage_server.store.contents import Contents
from kvpage_server.store.disk.file.change import Change, Retime
from kvpage_server.store.disk.file.encoding import Corrupt, Value, change_of
from kvpage_server.store.disk.file.lmdb_file import DiskFull
from kvpage_server.store.disk.file.writer import Batch
from kvpage_server.store.disk.limit import DiskLimit
from kvpage_server.store.disk.naming import block_name_of, is_gone, name_of_unit, parse_block
from kvpage_server.store.disk.stored import Stored, takes
from kvpage_server.store.memory.cold import Cold
from kvpage_server.store.memory.extent import ExtentPage
from kvpage_server.store.memory.index import Block

_AT_ONCE = 256  # values that are noted before others have their turn


class Changes:
    def __init__(self, contents: Contents, stored: Stored, limit: DiskLimit) -> None:
        self._contents = contents
        self._stored = stored
        self._limit = limit

    def spell(self, name: bytes, value: Value) -> Change:
        """The change that stores a value. Called in the writing thread."""
        return change_of(name, value)

    def make_room(self, error: DiskFull, size: int) -> Iterator[None]:
        """Steps that make room, since the disk is full and so many bytes wait."""
        return self._limit.give_up(error, size)

    def is_gone(self, name: bytes) -> bool:
        """Whether the store has nothing of that name."""
        return is_gone(self._contents, name)

    def note_stored(self, batch: Batch[Value]) -> Iterator[None]:
        """Steps until it is known that a batch is on disk."""
        usage = self._stored.usage
        if batch.clears:
            usage.was_cleared()
        last: object = None
        unit = b""
        for number, (name, (value, _)) in enumerate(batch.changes.items(), start=1):
            if not number % _AT_ONCE:
                yield
            if isinstance(value, Cold | Retime):
                continue
            if value is None or isinstance(value, Corrupt):
                self._removed(name)
            elif isinstance(value, Slot | ExtentPage) and isinstance(value.unit, Block):
                if value.unit is not last:
                    last, unit = value.unit, name_of_unit(value.unit)
                usage.add(name, unit, takes(name, value), again=self._comes_again(name))
            else:
                if block := block_name_of(name):
                    usage.note_stray(name, block)
                usage.add(name, name, takes(name, value), again=self._comes_again(name))

    def _removed(self, name: bytes) -> None:
        """A value is gone. Forget its unit too if nothing of it is left."""
        usage = self._stored.usage
        unit = (not usage.is_stray(name) and block_name_of(name)) or name
        usage.remove(name, unit, again=self._comes_again(name))
        if unit[:1] != b"b" or not self._contents.index.has(*parse_block(unit)):
            usage.remove_unit(unit)

    def _comes_again(self, name: bytes) -> bool:
        """Whether a value is to be written again, where somebody counts what is expected."""
        return self._stored.maxdisk > 0 and self._stored.behind.waits_again(name)
