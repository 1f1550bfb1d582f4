"""The words of a long command: a sequence of which a part is a view, and no copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from kvpage_server.core.python.slots import Slot

Word = bytes | Slot


class Words:
    """Some of the words of a command, one after the other. They are not changed."""

    __slots__ = ("_all", "_range")

    def __init__(self, words: list[Word], places: range | None = None) -> None:
        self._all = words
        self._range = range(len(words)) if places is None else places

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[Word]:
        return map(self._all.__getitem__, self._range)

    @overload
    def __getitem__(self, where: int) -> Word: ...

    @overload
    def __getitem__(self, where: slice) -> Sequence[Word]: ...

    def __getitem__(self, where: int | slice) -> Word | Sequence[Word]:
        if isinstance(where, int):
            return self._all[self._range[where]]
        places = self._range[where]
        return Words(self._all, places) if places.step == 1 else [self._all[place] for place in places]

    def __add__(self, others: Iterable[Word]) -> list[Word]:
        return [*self, *others]

    def __radd__(self, others: Iterable[Word]) -> list[Word]:
        return [*others, *self]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Words | list):
            return NotImplemented
        return [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Words({[*self]})"

    @property
    def slots(self) -> list[Word]:
        """What holds the words of the whole command: who drops some at a time keeps nobody waiting."""
        return self._all
