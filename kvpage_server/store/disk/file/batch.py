"""Changes that are committed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_AT_ONCE = 256  # values that are let go of together

T = TypeVar("T")


@dataclass(slots=True)
class Batch(Generic[T]):
    """The last change of each value, None for its removal, with the bytes it takes while it waits."""

    changes: dict[bytes, tuple[T | None, int]] = field(default_factory=dict)
    size: int = 0
    clears: bool = False  # before all else
    removed: dict[bytes, None] = field(default_factory=dict)  # the values that have no other change than that
    position: int = 0  # of the last change
    began: float = 0.0  # monotonic

    def note(self, name: bytes, value: T | None, size: int) -> None:
        """A value has changed, or is gone."""
        old = self.changes.get(name)
        self.size += size - (old[1] if old is not None else 0)
        self.changes[name] = (value, size)
        if value is None:
            self.removed[name] = None
        elif old is not None:
            self.removed.pop(name, None)

    def note_all(self, names: Sequence[bytes], values: Sequence[T], sizes: Sequence[int]) -> None:
        """Values have changed."""
        changes = self.changes
        get, grown = changes.get, sum(sizes)
        for name, value, size in zip(names, values, sizes, strict=True):
            if (old := get(name)) is not None:
                grown -= old[1]
            changes[name] = (value, size)
        self.size += grown
        if self.removed:
            for name in names:
                self.removed.pop(name, None)

    def forget(self, name: bytes) -> None:
        """The last change of a value was made."""
        self.size -= self.changes.pop(name)[1]
        self.removed.pop(name, None)

    def freed(self) -> Iterator[None]:
        """Let go of its values, in steps: on the loop, not where the thread does."""
        changes = self.changes
        while changes:
            for _ in range(min(len(changes), _AT_ONCE)):
                changes.popitem()
            yield
