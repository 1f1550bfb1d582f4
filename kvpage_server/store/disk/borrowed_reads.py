"""Borrowed reads: values that one reply sends from the map of the file, without loading them into memory.

Small values are copied side by side into memory of their own, in the form in which they are sent. So many of them are
one piece of the reply. Large ones are sent from where they lie, see `mapped`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, islice
from operator import add, attrgetter
from time import monotonic
from typing import Protocol, cast
from weakref import ref

from kvpage_server.core import Arena
from kvpage_server.core.pieces import END, Piece, frame
from kvpage_server.store.memory.cold import Cold

_SIZE = attrgetter("size")


class BorrowedRead(Protocol):
    """Values for a reply. They last as long as the loan or a piece of it."""

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Values as bulk strings in a row; None if not all of them were lent here, side by side."""


class Copies:
    """Memory for `values` as bulk strings, to be filled.

    It is freed with the last reference to this and its pieces. Raises MemoryError.
    """

    __slots__ = ("_intact", "_memory", "_starts", "_values")

    def __init__(self, arena: Arena, values: Sequence[Cold]) -> None:
        self._values = list(values)
        self._intact: frozenset[object] = frozenset()
        sizes = [*map(_SIZE, values)]
        spelt = {size: END + frame(size) for size in set(sizes)}  # the end of the value before, and its frame
        frames = [*map(spelt.__getitem__, sizes)]
        self._starts = [*accumulate(map(add, map(len, frames), sizes), initial=0)]  # where frames start, and the end
        self._memory = arena.allocate(self._starts[-1] + len(END))
        view = self._memory.body
        for start, text in zip(self._starts, frames, strict=False):
            view[start : start + len(text)] = text
        view[-len(END) :] = END

    @property
    def bodies(self) -> list[memoryview]:
        """The memory for each value's bytes."""
        view = self._memory.body
        return [view[end - value.size : end] for value, end in zip(self._values, self._starts[1:], strict=True)]

    def filled(self, intact: Sequence[Cold]) -> None:
        """Say which of them were filled. There will be no more."""
        self._intact = frozenset(intact)

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """See `BorrowedRead`. They are one piece."""
        if values[0] not in self._intact:
            return None
        at = self._values.index(cast(Cold, values[0]))
        end = at + len(values)
        if self._values[at:end] != values or not self._intact.issuperset(values):
            return None
        return (self._memory.part(self._starts[at] + len(END), self._starts[end] + len(END)),)


# -- mapped ------------------------------------------------------------------------------------------------------------
#
# Loans of values in the map of the disk's file, which are sent from there without a copy.
#
# Such a loan keeps a read transaction open. LMDB does not reuse space that was freed since it began, so bytes stay as
# they were when they were checked, and the file can only grow. So a borrowed read ends after a while: the bytes that a
# slow client has not received by then are copied to memory.

LONGEST = 1.0  # seconds after which a loan is called in
ENDED_PER_STEP = 4  # old loans that are called in at once: some milliseconds of copying
MOST = 256  # loans at a time, since each takes one of LMDB's places for readers; then the oldest is called in


class Mapped:
    """Bodies that were found intact, each in some views of the map. `reading` keeps the views valid.

    It ends with the last reference to this and its pieces.
    """

    __slots__ = ("__weakref__", "_reading", "_values", "_views", "since")

    def __init__(self, reading: object, bodies: Mapping[Cold, Sequence[memoryview]]) -> None:
        self.since = monotonic()
        self._reading = reading
        self._views: list[memoryview] = []
        self._values: dict[Cold, range] = {}  # the places of each value's views
        for value, views in bodies.items():
            self._values[value] = range(len(self._views), len(self._views) + len(views))
            self._views += views

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """See `BorrowedRead`."""
        if not self._values.keys() >= set(values):
            return None
        return (*chain.from_iterable(map(self._spell, cast("Sequence[Cold]", values))),)

    def _spell(self, value: Cold) -> list[Piece]:
        return [frame(value.size), *(MappedPiece(self, at) for at in self._values[value]), END]

    def call_in(self) -> None:
        """Copy the bytes to memory."""
        self._views = [memoryview(bytes(view)) for view in self._views]
        self._reading = None

    def view(self, at: int) -> memoryview:
        """Return where the bytes of a piece are now."""
        return self._views[at]


class MappedPiece:
    """A part of a value."""

    __slots__ = ("_at", "_loan")

    def __init__(self, loan: Mapped, at: int) -> None:
        self._loan = loan
        self._at = at

    @property
    def view(self) -> memoryview:
        """The bytes. They are elsewhere once the loan was called in."""
        return self._loan.view(self._at)

    @property
    def size(self) -> int:
        return len(self.view)


class MappedLoans:
    """The current loans. `moved` is called when some were called in."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._loans: deque[ref[Mapped]] = deque()  # the oldest first
        self._moved = moved

    def add(self, loan: Mapped) -> None:
        self._loans.append(ref(loan))
        if len(self._loans) > MOST:
            self._drop_ended()
            self.call_in(len(self._loans) - MOST)

    def call_in_old(self) -> None:
        """End some of the oldest borrowed reads."""
        since = monotonic() - LONGEST
        self._drop_ended()
        first = [known() for known in islice(self._loans, ENDED_PER_STEP)]
        self.call_in(sum(loan is not None and loan.since < since for loan in first))

    def call_in(self, count: int | None = None) -> None:
        """Call in the oldest `count`, or all."""
        called_in = [self._loans.popleft()() for _ in range(len(self._loans) if count is None else count)]
        for loan in filter(None, called_in):
            loan.call_in()
        if called_in:
            self._moved()

    def _drop_ended(self) -> None:
        self._loans = deque(known for known in self._loans if known() is not None)
