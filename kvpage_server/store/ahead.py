"""Memory made before it is needed: mapped, and faulted in, by a thread.

The first touch of fresh memory costs a second a gigabyte and more, several times what it takes to fill it. While values
are received into one chunk, the next one of its size is made ready beside them, on another processor where there is
one. Linux alone can be asked for it (`MADV_POPULATE_WRITE`, since 5.14); elsewhere nothing is made ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from queue import SimpleQueue

_POPULATE_WRITE = 23  # madvise(2)
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


class Ahead:
    """One mapping of each size that was wanted last.

    Its owner's thread calls it; the thread that makes them ends with it.
    """

    def __init__(self) -> None:
        self._wanted: SimpleQueue[int | None] = SimpleQueue()
        self._asked: set[int] = set()
        self._ready: dict[int, mmap.mmap | None] = {}  # None: the system had no memory for it
        self._begun = False

    def __del__(self) -> None:
        self._wanted.put(None)

    @property
    def bytes(self) -> int:
        """How many were asked for and not taken, without those that the system refused."""
        return sum(size for size in self._asked if self._ready.get(size, True) is not None)

    def want(self, size: int) -> None:
        """Have a mapping of `size` bytes made, unless one is. One that was refused is tried again."""
        if self._ready.get(size, True) is None:
            self.take(size)
        if _madvise is None or size in self._asked:
            return
        if not self._begun:
            self._begun = True
            threading.Thread(target=_make, args=(self._wanted, self._ready), name="kvpage-ahead", daemon=True).start()
        self._asked.add(size)
        self._wanted.put(size)

    def take(self, size: int) -> mmap.mmap | None:
        """A mapping of `size` bytes, if one is ready."""
        if size not in self._ready:
            return None
        self._asked.discard(size)
        return self._ready.pop(size)

    def drop(self) -> None:
        """Give back what is ready."""
        for size in list(self._ready):
            self.take(size)


def _make(wanted: SimpleQueue[int | None], ready: dict[int, mmap.mmap | None]) -> None:
    """Make mappings of the sizes that are wanted, until none is any more."""
    while (size := wanted.get()) is not None:
        try:
            made = mmap.mmap(-1, size)
        except OSError:  # the system has none left: whoever needs it now will be told
            ready[size] = None
            continue
        _fault_in(made)
        ready[size] = made


def _fault_in(memory: mmap.mmap) -> None:
    """Have the system give the memory now. ctypes lets other threads run meanwhile; `mmap.madvise` does not.

    Where the system does not know how, it gives it at the first touch, as ever.
    """
    assert _madvise is not None
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _madvise(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), _POPULATE_WRITE)
