"""Borrowed reads: values on disk that one reply sends, without loading them into the store's memory.

Small values are copied into memory outside of the store's arena, one after the other and framed as bulk strings, so
that many of them are one piece of the reply. Large values are sent from the map of the file, see `Mapped`.
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
    """Values that a reply borrows. Their bytes stay valid as long as this object or one of its pieces exists."""

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Return values as consecutive bulk strings; None if this read does not have all of them in this order."""


class Copies:
    """Copies of `values` as bulk strings, in one slot of `arena`. A reader thread writes the bodies into `bodies`.

    The slot is freed with the last reference to this object and its pieces. Raises MemoryError.
    """

    __slots__ = ("_intact", "_memory", "_starts", "_values")

    def __init__(self, arena: Arena, values: Sequence[OnDisk]) -> None:
        self._values = list(values)
        self._intact: frozenset[object] = frozenset()
        sizes = [*map(_SIZE, values)]
        # Before each body: the end of the value before it, and its own frame.
        frame_of_size = {size: END + frame(size) for size in set(sizes)}
        frames = [*map(frame_of_size.__getitem__, sizes)]
        # Offsets of the frames, and of the end of the last body.
        self._starts = [*accumulate(map(add, map(len, frames), sizes), initial=0)]
        self._memory = arena.allocate(self._starts[-1] + len(END))
        view = self._memory.body
        for start, text in zip(self._starts, frames, strict=False):
            view[start : start + len(text)] = text
        view[-len(END) :] = END

    @property
    def bodies(self) -> list[memoryview]:
        """The memory of each value's body, in the order of `values`."""
        view = self._memory.body
        return [view[end - value.size : end] for value, end in zip(self._values, self._starts[1:], strict=True)]

    def filled(self, intact: Sequence[OnDisk]) -> None:
        """Note the values whose bodies were read and are intact. `pieces` returns only these."""
        self._intact = frozenset(intact)

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Return one piece with all values, see `BorrowedRead`."""
        if values[0] not in self._intact:
            return None
        at = self._values.index(cast(OnDisk, values[0]))
        end = at + len(values)
        if self._values[at:end] != values or not self._intact.issuperset(values):
            return None
        return (self._memory.part(self._starts[at] + len(END), self._starts[end] + len(END)),)


# -- Borrowed reads from the map of the LMDB file, without a copy ------------------------------------------------------
#
# Such a read keeps an LMDB read transaction open. While it is open, LMDB does not reuse pages of the file that later
# transactions free. So the checked bytes do not change, but the file grows. Therefore the transaction ends after
# LONGEST: bytes that a slow client has not received by then are copied to memory.

LONGEST = 1.0  # seconds until the bytes of a borrowed read are copied to memory
ENDED_PER_STEP = 4  # old reads whose bytes one call copies, in some milliseconds
MOST = 256  # reads at a time, because each uses an entry of LMDB's reader table; another one ends the oldest


class Mapped:
    """Borrowed read of intact bodies, each in one or more views of the map, one for each piece in LMDB.

    `txn` is the transaction that keeps the views valid. It ends with the last reference to this object and its pieces,
    or with `copy_to_memory`.
    """

    __slots__ = ("__weakref__", "_txn", "_values", "_views", "since")

    def __init__(self, txn: object, bodies: Mapping[OnDisk, Sequence[memoryview]]) -> None:
        self.since = monotonic()
        self._txn = txn
        self._views: list[memoryview] = []
        self._values: dict[OnDisk, range] = {}  # indexes of each value's views
        for value, views in bodies.items():
            self._values[value] = range(len(self._views), len(self._views) + len(views))
            self._views += views

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Return for each value its frame, its views and its end, see `BorrowedRead`."""
        if not self._values.keys() >= set(values):
            return None
        return (*chain.from_iterable(map(self._pieces_of, cast("Sequence[OnDisk]", values))),)

    def _pieces_of(self, value: OnDisk) -> list[Piece]:
        return [frame(value.size), *(MappedPiece(self, at) for at in self._values[value]), END]

    def copy_to_memory(self) -> None:
        """Replace the views by copies in memory, and end the transaction."""
        self._views = [memoryview(bytes(view)) for view in self._views]
        self._txn = None

    def view(self, at: int) -> memoryview:
        """Return the view with index `at`: of the map, or of the copy in memory."""
        return self._views[at]


class MappedPiece:
    """Piece of a reply: one view of a borrowed value."""

    __slots__ = ("_at", "_read")

    def __init__(self, read: Mapped, at: int) -> None:
        self._read = read
        self._at = at

    @property
    def view(self) -> memoryview:
        """Bytes of the piece. Their address changes with `Mapped.copy_to_memory`."""
        return self._read.view(self._at)

    @property
    def size(self) -> int:
        return len(self.view)


class MappedReads:
    """All current borrowed reads from the map. `moved` is called after their bytes have moved to memory."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._reads: deque[ref[Mapped]] = deque()  # the oldest first
        self._moved = moved

    def add(self, read: Mapped) -> None:
        self._reads.append(ref(read))
        if len(self._reads) > MOST:
            self._drop_ended()
            self.copy_to_memory(len(self._reads) - MOST)

    def copy_old_to_memory(self) -> None:
        """Copy the bytes of up to `ENDED_PER_STEP` reads to memory that are older than `LONGEST`.

        Call it repeatedly.
        """
        since = monotonic() - LONGEST
        self._drop_ended()
        first = [reference() for reference in islice(self._reads, ENDED_PER_STEP)]
        self.copy_to_memory(sum(read is not None and read.since < since for read in first))

    def copy_to_memory(self, count: int | None = None) -> None:
        """Copy the bytes of the oldest `count` reads to memory; of all reads with None."""
        ended = [self._reads.popleft()() for _ in range(len(self._reads) if count is None else count)]
        for read in filter(None, ended):
            read.copy_to_memory()
        if ended:
            self._moved()

    def _drop_ended(self) -> None:
        self._reads = deque(reference for reference in self._reads if reference() is not None)
