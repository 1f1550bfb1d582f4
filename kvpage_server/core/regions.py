"""Memory from the system: few large mappings, from which chunks are cut and to which they return.

A mapping costs the system nothing until it is written to. What is cut from it is written from then on; what returns is
handed back to the system at once and can be cut again. Where the system has huge pages, it is asked for them: the first
touch of fresh memory costs half as much so, and it has to be touched sooner or later.

Memory is handed back by a thread, since that takes milliseconds for large values.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from bisect import bisect_left
from collections import deque
from queue import SimpleQueue

SMALLEST_REGION, LARGEST_REGION = 64 << 20, 1 << 30
ALONE = 16 << 20  # bytes: a chunk of at least as many has a mapping of its own

_IS_LINUX = sys.platform == "linux"
_IN_HUGE_PAGES = 14  # madvise(2): MADV_HUGEPAGE, of Linux alone
_GIVE_BACK = 4 if _IS_LINUX else 5  # MADV_DONTNEED; elsewhere MADV_FREE
_madvise = ctypes.CDLL(None).madvise  # which lets other threads run meanwhile; `mmap.madvise` does not
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    """One mapping. `free` are the parts of it that can be cut, from start to stop, in order, none touching another.

    Raises MemoryError when the system has no more.
    """

    def __init__(self, size: int) -> None:
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system has no {size} bytes more") from error
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.size = size
        self.free = [(0, size)]
        if _IS_LINUX:
            _madvise(self.address, size, _IN_HUGE_PAGES)  # or pages of the usual size, where it refuses

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is cut."""
        return self.free == [(0, self.size)]

    def cut(self, size: int) -> int | None:
        """Where so many bytes begin that are no longer free; None when they are not there side by side."""
        for i, (start, stop) in enumerate(self.free):
            if start + size <= stop:
                self.free[i : i + 1] = [(start + size, stop)] if start + size < stop else []
                return start
        return None

    def put_back(self, start: int, stop: int) -> None:
        """A part of it is free again."""
        i = bisect_left(self.free, (start, stop))
        if i < len(self.free) and self.free[i][0] == stop:
            stop = self.free.pop(i)[1]
        if i and self.free[i - 1][1] == start:
            i -= 1
            start = self.free.pop(i)[0]
        self.free.insert(i, (start, stop))


class Stretch:
    """Some bytes of a region, from `start` on."""

    __slots__ = ("region", "size", "start")

    def __init__(self, region: Region, start: int, size: int) -> None:
        self.region = region
        self.start = start
        self.size = size

    @property
    def address(self) -> int:
        """Where its bytes are. They stay there as long as this is referred to."""
        return self.region.address + self.start


class Regions:
    """Stretches of any size. Its owner's thread calls it; the thread that it has ends with it."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._leaving: SimpleQueue[Stretch | None] = SimpleQueue()
        self._returned: deque[Stretch] = deque()  # by the thread
        self._begun = False

    def __del__(self) -> None:
        self._leaving.put(None)

    def give(self, stretch: Stretch) -> None:
        """Nobody refers to its bytes any more."""
        if not self._begun:
            thread = threading.Thread(target=_give_all_back, args=(self._leaving, self._returned), daemon=True)
            thread.name = "kvpage-memory"
            try:
                thread.start()
            except RuntimeError:  # the system has no memory for one
                _give_back(stretch, self._returned)
                return
            self._begun = True
        self._leaving.put(stretch)

    def take(self, size: int) -> Stretch:
        """So many bytes. Raises MemoryError when the system has no more."""
        if size >= ALONE:
            return Stretch(Region(size), 0, size)
        self._take_back()
        for region in self._regions:
            start = region.cut(size)
            if start is not None:
                return Stretch(region, start, size)
        region = self._map(size)
        start = region.cut(size)
        assert start is not None
        return Stretch(region, start, size)

    def _map(self, size: int) -> Region:
        """A new region with room for `size` bytes: a large one, as far as the system allows it."""
        mapped = sum(region.size for region in self._regions)
        large = min(max(mapped, SMALLEST_REGION), LARGEST_REGION)
        while True:
            try:
                region = Region(max(large, size))
                self._regions.append(region)
                return region
            except MemoryError:
                if large <= size:
                    raise
                large //= 2

    def _take_back(self) -> None:
        """What the thread has given back to the system can be cut again. A region of which nothing is cut goes."""
        while self._returned:
            stretch = self._returned.popleft()
            region = stretch.region
            region.put_back(stretch.start, stretch.start + stretch.size)
            if region.is_whole and len(self._regions) > 1:
                self._regions.remove(region)


def _give_all_back(leaving: SimpleQueue[Stretch | None], returned: deque[Stretch]) -> None:
    while (stretch := leaving.get()) is not None:
        _give_back(stretch, returned)
        del stretch  # or a mapping of its own would stay until the next


def _give_back(stretch: Stretch, returned: deque[Stretch]) -> None:
    """Hand memory back to the system; a mapping of its own ends with it."""
    _madvise(stretch.address, stretch.size, _GIVE_BACK)
    if stretch.size < ALONE:
        returned.append(stretch)
