"""What is on disk, what will be once all that waits is written, and in which order it goes when there is no more room.

Units that lie on disk alone go first: what was dropped from memory, or read, the longest ago before the others. Then
go those that memory has, too: what was stored or fetched the longest ago first. Whole blocks at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class DiskUsage:
    """Names of values with their footprints, and the units that they belong to. `used` is bytes of the disk, nearly.

    `expected` is what that will be when all that waits is written. A unit is named as a string, or as a block stored
    whole, is. Every operation is O(1). What each block takes is known if it `counts_blocks`.
    """

    def __init__(self, *, counts_blocks: bool = True) -> None:
        self.used = 0
        self.expected = 0
        self._sizes: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}  # of what waits to be written, 0 for what is to go
        self._blocks: dict[bytes, int] = {}  # sizes of those whose pages are values of their own
        self._counts_blocks = counts_blocks
        self._alone: dict[bytes, None] = {}  # units that memory has not; the next to go is first
        self._in_memory: dict[bytes, None] = {}  # units of which it has some; the next to go is first

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def has_all(self, names: Iterable[bytes]) -> bool:
        """Whether all of some values are there."""
        return self._sizes.keys() >= set(names)

    def expect(self, name: bytes, size: int) -> None:
        """A value is about to be written, or to go: then its footprint is 0."""
        self.expected += size - self.size_of(name)
        self._expected[name] = size

    def size_of(self, name: bytes) -> int:
        """The footprint that a value will have when all that waits is written; 0 when it will not be there."""
        size = self._expected.get(name)
        return self._sizes.get(name, 0) if size is None else size

    def size_of_unit(self, unit: bytes) -> int:
        """Bytes of the disk that a unit takes. Of a block, as long as nobody has asked for one of its pages: 0."""
        return self._sizes.get(unit, 0) + self._blocks.get(unit, 0)

    def add(self, name: bytes, unit: bytes, size: int) -> None:
        """A value was written."""
        self._settle(name, size)
        grown = size - self._sizes.get(name, 0)
        self.used += grown
        self._sizes[name] = size
        self._grow(name, unit, grown)
        self.is_in_memory(unit)

    def remove(self, name: bytes, unit: bytes) -> None:
        """A value is gone."""
        self._settle(name, 0)
        size = self._sizes.pop(name, 0)
        self.used -= size
        self._grow(name, unit, -size)

    def _grow(self, name: bytes, unit: bytes, size: int) -> None:
        if unit == name or not self._counts_blocks:
            return
        left = self._blocks.get(unit, 0) + size
        if left > 0:
            self._blocks[unit] = left
        else:
            self._blocks.pop(unit, None)

    def _settle(self, name: bytes, size: int) -> None:
        """What was expected has happened, unless something else is expected by now."""
        if self._expected.get(name) == size:
            del self._expected[name]
        elif name not in self._expected:
            self.expected += size - self._sizes.get(name, 0)

    def found(self, units: Iterable[bytes], in_memory: Collection[bytes], size: int) -> None:
        """Units were there at the start, those first that are to go first; they take so many bytes."""
        for unit in units:
            (self._in_memory if unit in in_memory else self._alone)[unit] = None
        self.used = self.expected = size

    def know(self, name: bytes, unit: bytes, size: int) -> None:
        """One of the values that were there at the start."""
        self._sizes[name] = size
        self._grow(name, unit, size)

    def remove_unit(self, unit: bytes) -> None:
        """Nothing of a unit is left."""
        self._alone.pop(unit, None)
        self._in_memory.pop(unit, None)

    def use(self, unit: bytes) -> None:
        """A unit is the last to go of its kind, if it is there."""
        for order in (self._alone, self._in_memory):
            if unit in order:
                del order[unit]
                order[unit] = None

    def is_alone(self, unit: bytes) -> None:
        """Memory has nothing of a unit any more."""
        self.remove_unit(unit)
        self._alone[unit] = None

    def is_in_memory(self, unit: bytes) -> None:
        """Memory has some of a unit, or all."""
        self.remove_unit(unit)
        self._in_memory[unit] = None

    def lies_alone(self, unit: bytes) -> bool:
        """Whether memory has nothing of a unit that is there."""
        return unit in self._alone

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self._alone) + len(self._in_memory)

    def first(self, *, alone: bool) -> bytes | None:
        """The unit that is the next to go; of those that memory has not, if it has to be `alone`."""
        found = next(iter(self._alone), None)
        return found if found is not None or alone else next(iter(self._in_memory), None)

    def was_cleared(self) -> None:
        """Everything that was written is gone from the disk; what is expected is that still."""
        for name in list(self._sizes):
            self.remove(name, name)
        self._blocks.clear()
        self._alone.clear()
        self._in_memory.clear()

    def clear(self) -> None:
        """Everything is about to go, and nothing is expected."""
        self._sizes.clear()
        self._expected.clear()
        self._blocks.clear()
        self._alone.clear()
        self._in_memory.clear()
        self.used = self.expected = 0
