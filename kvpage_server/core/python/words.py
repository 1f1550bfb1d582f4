"""The words of a long command: a sequence of which a part is a view, and no copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import overload

from kvpage_server.core.python.slots import Slot

Argument = bytes | Slot
Command = list[Argument]


class Words:
    """Some of the words of a command, one after the other. They are not changed, but the last ones can be dropped."""

    __slots__ = ("_all", "_range")

    def __init__(self, words: list[Argument], places: range | None = None) -> None:
        self._all = words
        self._range = range(len(words)) if places is None else places

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[Argument]:
        return map(self._all.__getitem__, self._range)

    @overload
    def __getitem__(self, where: int) -> Argument: ...

    @overload
    def __getitem__(self, where: slice) -> Words | list[Argument]: ...

    def __getitem__(self, where: int | slice) -> Argument | Words | list[Argument]:
        if isinstance(where, int):
            return self._all[self._range[where]]
        places = self._range[where]
        return Words(self._all, places) if places.step == 1 else [self._all[place] for place in places]

    def __add__(self, others: Iterable[Argument]) -> list[Argument]:
        return [*self, *others]

    def __radd__(self, others: Iterable[Argument]) -> list[Argument]:
        return [*others, *self]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Words | list):
            return NotImplemented
        return [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Words({[*self]})"

    def __delitem__(self, where: slice) -> None:
        """Drop the last of the command's words: who frees some at a time keeps nobody waiting."""
        places = self._range[where]
        if places.step != 1 or places.stop != len(self._all):
            raise TypeError("only the last words of a command can be dropped")
        del self._all[places.start :]
        self._range = range(self._range.start, min(self._range.stop, places.start))
