"""Borrowed reads: values on disk that one reply sends, without loading them into the store's memory.

Small values are copied into memory outside of the store's arena, one after the other and framed as bulk strings, so
that many of them are one piece of the reply. Large values are sent from the map of the file, see `Mapped`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import add, attrgetter
from time import monotonic
from typing import Protocol, cast
from weakref import ref

from kvpage_server.core import Arena
from kvpage_server.core.pieces import END, Piece, frame
from kvpage_server.store.memory.index import OnDisk

_SIZE = attrgetter("size")
VALUES_PER_COPY = 16  # values in one slot, which stays in use until the last of them is sent


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
# LONGEST: pieces that a slow client has not received by then are copied to memory.

LONGEST = 1.0  # seconds until the bytes of a borrowed read are copied to memory
COPIED_PER_STEP = 16 * 1024**2  # bytes that one call copies, in some milliseconds; it may copy one piece more
MOST = 256  # reads at a time, because each uses an entry of LMDB's reader table; another one ends the oldest


class Mapped:
    """Borrowed read of several bodies. It ends with the last reference to it and its pieces, or when all are copied.

    `txn` is the transaction that keeps the views of the map valid. `pieces` refer to those pieces that a reply may
    still send: of other pieces nothing is copied.
    """

    __slots__ = ("__weakref__", "_txn", "pieces", "since")

    def __init__(self, txn: object) -> None:
        self.since = monotonic()
        self._txn = txn
        self.pieces: list[ref[MappedPiece]] = []

    def copy_to_memory(self, most: int) -> int:
        """Replace views by copies in memory until these have `most` bytes. Return their bytes.

        End the transaction when no view is left.
        """
        copied = 0
        while self.pieces and copied < most:
            piece = self.pieces.pop()()
            if piece is not None:
                piece.view = memoryview(bytes(piece.view))
                copied += piece.size
        if not self.pieces:
            self._txn = None
        return copied

    @property
    def is_copied(self) -> bool:
        """Whether no view of the map is left."""
        return not self.pieces


class MappedPiece:
    """Piece of a reply: one piece of a body. Its `view` is of the map, or of a copy in memory."""

    __slots__ = ("__weakref__", "_read", "size", "view")

    def __init__(self, read: Mapped, view: memoryview) -> None:
        self._read = read  # keeps the view valid
        self.view = view
        self.size = len(view)


class MappedBody:
    """One intact body of a `Mapped` read. `views` are those of its pieces in the map."""

    __slots__ = ("_pieces", "_value")

    def __init__(self, read: Mapped, value: OnDisk, views: Sequence[memoryview]) -> None:
        self._value = value
        self._pieces = [MappedPiece(read, view) for view in views]
        read.pieces += map(ref, self._pieces)

    def pieces(self, values: Sequence[object]) -> tuple[Piece, ...] | None:
        """Return the frame of the body, its pieces and its end, see `BorrowedRead`."""
        return (frame(self._value.size), *self._pieces, END) if [*values] == [self._value] else None


class MappedReads:
    """All current borrowed reads from the map. `moved` is called after their bytes have moved to memory."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._reads: deque[ref[Mapped]] = deque()  # the oldest first
        self._moved = moved

    def add(self, read: Mapped) -> None:
        self._reads.append(ref(read))
        if len(self._reads) > MOST:
            self._drop_ended()
            self._copy(len(self._reads) - MOST, sys.maxsize)

    def copy_old_to_memory(self) -> None:
        """Copy bytes of reads that are older than `LONGEST` to memory, up to COPIED_PER_STEP. Call it repeatedly."""
        since = monotonic() - LONGEST
        self._drop_ended()
        old = takewhile(lambda reference: (read := reference()) is not None and read.since < since, self._reads)
        self._copy(sum(1 for _ in old), COPIED_PER_STEP)

    def copy_to_memory(self) -> None:
        """Copy the bytes of all reads to memory, and end them."""
        self._copy(len(self._reads), sys.maxsize)

    def _copy(self, count: int, most: int) -> None:
        """Copy up to `most` bytes of the oldest `count` reads to memory, and forget the reads that have ended so."""
        left = most
        for _ in range(count):
            read = self._reads[0]()
            if read is not None:
                left -= read.copy_to_memory(left)
                if not read.is_copied:
                    break
            self._reads.popleft()
        if left < most:
            self._moved()

    def _drop_ended(self) -> None:
        self._reads = deque(reference for reference in self._reads if reference() is not None)
