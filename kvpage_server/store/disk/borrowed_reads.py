"""Borrowed reads: values on disk that one reply sends, without loading them into the store's memory.

Small values are copied next to each other into separate memory, framed as bulk strings, so many of them are one piece
of the reply. Large values are sent from the map of the file, see `Mapped`.
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
from kvpage_server.store.memory.on_disk import OnDisk

_SIZE = attrgetter("size")


class BorrowedRead(Protocol):
    """Values that a reply borrows. They are valid as long as this object or one of its pieces exists."""

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Return values as consecutive bulk strings; None if this read does not have all of them in this order."""


class Copies:
    """Copies of `values` as bulk strings, in memory that a reader thread fills.

    The memory is freed with the last reference to this object and its pieces. Raises MemoryError.
    """

    __slots__ = ("_intact", "_memory", "_starts", "_values")

    def __init__(self, arena: Arena, values: Sequence[OnDisk]) -> None:
        self._values = list(values)
        self._intact: frozenset[object] = frozenset()
        sizes = [*map(_SIZE, values)]
        spelt = {size: END + frame(size) for size in set(sizes)}  # the end of the preceding value, and the frame
        frames = [*map(spelt.__getitem__, sizes)]
        self._starts = [*accumulate(map(add, map(len, frames), sizes), initial=0)]  # offsets of frames, and of the end
        self._memory = arena.allocate(self._starts[-1] + len(END))
        view = self._memory.body
        for start, text in zip(self._starts, frames, strict=False):
            view[start : start + len(text)] = text
        view[-len(END) :] = END

    @property
    def bodies(self) -> list[memoryview]:
        """Memory for the bytes of each value."""
        view = self._memory.body
        return [view[end - value.size : end] for value, end in zip(self._values, self._starts[1:], strict=True)]

    def filled(self, intact: Sequence[OnDisk]) -> None:
        """Set the values whose memory was filled with intact bytes. The others are never available."""
        self._intact = frozenset(intact)

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Return one piece with the values, see `BorrowedRead`."""
        if values[0] not in self._intact:
            return None
        at = self._values.index(cast(OnDisk, values[0]))
        end = at + len(values)
        if self._values[at:end] != values or not self._intact.issuperset(values):
            return None
        return (self._memory.part(self._starts[at] + len(END), self._starts[end] + len(END)),)


# -- Borrowed reads from the map of the LMDB file, without a copy ------------------------------------------------------
#
# Such a read keeps an LMDB read transaction open. LMDB does not reuse space that was freed since the transaction began,
# so the checked bytes do not change, but the file grows. So the transaction ends after a while: bytes that a slow
# client has not received by then are copied to memory.

LONGEST = 1.0  # seconds until the bytes of a borrowed read are copied to memory
ENDED_PER_STEP = 4  # old reads whose bytes are copied in one step: some milliseconds
MOST = 256  # reads at a time, because each uses an entry of LMDB's reader table; more of them end the oldest


class Mapped:
    """Borrowed read of intact bodies, each in one or more views of the map.

    `reading` is the transaction that keeps the views valid. It ends with the last reference to this object and its
    pieces, or with `copy_to_memory`.
    """

    __slots__ = ("__weakref__", "_reading", "_values", "_views", "since")

    def __init__(self, reading: object, bodies: Mapping[OnDisk, Sequence[memoryview]]) -> None:
        self.since = monotonic()
        self._reading = reading
        self._views: list[memoryview] = []
        self._values: dict[OnDisk, range] = {}  # indexes of each value's views
        for value, views in bodies.items():
            self._values[value] = range(len(self._views), len(self._views) + len(views))
            self._views += views

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Return a frame, the views and an end for each value, see `BorrowedRead`."""
        if not self._values.keys() >= set(values):
            return None
        return (*chain.from_iterable(map(self._spell, cast("Sequence[OnDisk]", values))),)

    def _spell(self, value: OnDisk) -> list[Piece]:
        return [frame(value.size), *(MappedPiece(self, at) for at in self._values[value]), END]

    def copy_to_memory(self) -> None:
        """Copy the bytes to memory, and end the transaction."""
        self._views = [memoryview(bytes(view)) for view in self._views]
        self._reading = None

    def view(self, at: int) -> memoryview:
        """Return the view with this index, of the map or of the copy in memory."""
        return self._views[at]


class MappedPiece:
    """Piece of a reply: one view of a borrowed value."""

    __slots__ = ("_at", "_loan")

    def __init__(self, loan: Mapped, at: int) -> None:
        self._loan = loan
        self._at = at

    @property
    def view(self) -> memoryview:
        """Bytes of the piece. Their address changes with `Mapped.copy_to_memory`."""
        return self._loan.view(self._at)

    @property
    def size(self) -> int:
        return len(self.view)


class MappedReads:
    """All current borrowed reads from the map. `moved` is called after bytes were copied to memory."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._loans: deque[ref[Mapped]] = deque()  # the oldest first
        self._moved = moved

    def add(self, loan: Mapped) -> None:
        self._loans.append(ref(loan))
        if len(self._loans) > MOST:
            self._drop_ended()
            self.copy_to_memory(len(self._loans) - MOST)

    def copy_old_to_memory(self) -> None:
        """End the oldest borrowed reads that exceed `LONGEST`, at most `ENDED_PER_STEP`."""
        since = monotonic() - LONGEST
        self._drop_ended()
        first = [known() for known in islice(self._loans, ENDED_PER_STEP)]
        self.copy_to_memory(sum(loan is not None and loan.since < since for loan in first))

    def copy_to_memory(self, count: int | None = None) -> None:
        """End the oldest `count` borrowed reads, or all."""
        called_in = [self._loans.popleft()() for _ in range(len(self._loans) if count is None else count)]
        for loan in filter(None, called_in):
            loan.copy_to_memory()
        if called_in:
            self._moved()

    def _drop_ended(self) -> None:
        self._loans = deque(known for known in self._loans if known() is not None)
