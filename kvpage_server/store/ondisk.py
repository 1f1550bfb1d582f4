"""What is on disk, and in which order it goes when the disk is full: what was stored, dropped from memory or fetched
the longest ago goes first, whole blocks at a time.
"""

from __future__ import annotations

from collections.abc import Iterable


class OnDisk:
    """Names of values with their footprints, and the units that they belong to. `used` is bytes of the disk, nearly.

    A unit is named as a string, or as a block stored whole, is. Every operation is O(1).
    """

    def __init__(self) -> None:
        self.used = 0
        self._sizes: dict[bytes, int] = {}
        self._order: dict[bytes, None] = {}  # units; the next to go is first

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def has_all(self, names: Iterable[bytes]) -> bool:
        """Whether all of some values are there."""
        return self._sizes.keys() >= set(names)

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self._order)

    def add(self, name: bytes, unit: bytes, size: int) -> None:
        """A value was written; its unit is the last to go."""
        self.used += size - self._sizes.get(name, 0)
        self._sizes[name] = size
        self._order.pop(unit, None)
        self._order[unit] = None

    def found(self, units: Iterable[bytes], size: int) -> None:
        """Units were there at the start, those first that are to go first; they take so many bytes."""
        self._order = dict.fromkeys(units)
        self.used = size

    def know(self, name: bytes, size: int) -> None:
        """One of the values that were there at the start."""
        self._sizes[name] = size

    def remove(self, name: bytes) -> int:
        """A value is gone; its footprint."""
        size = self._sizes.pop(name, 0)
        self.used -= size
        return size

    def remove_unit(self, unit: bytes) -> None:
        """Nothing of a unit is left."""
        self._order.pop(unit, None)

    def use(self, unit: bytes) -> None:
        """A unit is the last to go, if it is there."""
        if unit in self._order:
            del self._order[unit]
            self._order[unit] = None

    def first(self) -> bytes | None:
        """The unit that is the next to go."""
        return next(iter(self._order), None)

    def clear(self) -> None:
        """Everything is gone."""
        self._sizes.clear()
        self._order.clear()
        self.used = 0
