"""Memory from the system: few large mappings, from which chunks are cut and to which they return.

A mapping costs the system nothing until it is written to. What is cut from it is written from then on; what returns is
handed back to the system at once and can be cut again.

The first touch of fresh memory costs a second a gigabyte and more, several times what it takes to fill it. So a thread
makes the next chunk ready while the last one is filled, on another processor where there is one, in pages of 2 MiB
where the system has them. It also hands memory back, since that takes milliseconds for large values.
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
HUGE = 2 << 20  # bytes of a huge page

_IS_LINUX = sys.platform == "linux"
_GIVE_BACK = 4 if _IS_LINUX else 5  # madvise(2): MADV_DONTNEED; elsewhere MADV_FREE
_IN_HUGE_PAGES, _POPULATE_WRITE = 14, 23  # of Linux alone, the latter since 5.14
_madvise = ctypes.CDLL(None).madvise
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

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is cut."""
        return self.free == [(0, self.size)]

    def cut(self, size: int) -> int | None:
        """Where so many bytes begin that are no longer free; None when they are not there side by side."""
        align = HUGE if size >= HUGE else mmap.PAGESIZE
        for i, (start, stop) in enumerate(self.free):
            at = start + -(self.address + start) % align
            if at + size <= stop:
                self.free[i : i + 1] = [part for part in ((start, at), (at + size, stop)) if part[0] < part[1]]
                return at
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


Job = tuple[Stretch, bool]  # whether to make it ready, or else to give it back


class Regions:
    """Stretches of any size. Its owner's thread calls it; the thread that it has ends with it."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._ready: dict[int, Stretch] = {}  # made before they are needed, one of a size
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._returned: deque[Stretch] = deque()  # by the thread
        self._begun = False

    def __del__(self) -> None:
        self._jobs.put(None)

    @property
    def ready(self) -> int:
        """Bytes that were made ready, or will be, and that nobody took."""
        return sum(self._ready)

    def take(self, size: int) -> Stretch:
        """So many bytes. Raises MemoryError when the system has no more."""
        return self._ready.pop(size, None) or self._cut(size)

    def want(self, size: int) -> None:
        """So many bytes will be needed: have them made ready."""
        if not _IS_LINUX or size in self._ready:
            return
        try:
            stretch = self._ready[size] = self._cut(size)
        except MemoryError:
            return  # whoever needs it will be told
        self._have_done(stretch, make_ready=True)

    def give(self, stretch: Stretch) -> None:
        """Nobody refers to its bytes any more. What was made ready beside it is not needed either."""
        for each in (stretch, *self._ready.values()):
            self._have_done(each, make_ready=False)
        self._ready.clear()

    def _have_done(self, stretch: Stretch, *, make_ready: bool) -> None:
        if not self._begun:
            args = self._jobs, self._returned
            thread = threading.Thread(target=_work, args=args, name="kvpage-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no memory for one
                _do(stretch, make_ready, self._returned)
                return
            self._begun = True
        self._jobs.put((stretch, make_ready))

    def _cut(self, size: int) -> Stretch:
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
                region = Region(max(large, size + HUGE))
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


def _work(jobs: SimpleQueue[Job | None], returned: deque[Stretch]) -> None:
    """Make stretches ready and give them back, in the order in which it was asked for."""
    while (job := jobs.get()) is not None:
        _do(*job, returned)
        del job  # or a mapping of its own would stay until the next


def _do(stretch: Stretch, make_ready: bool, returned: deque[Stretch]) -> None:
    """Make a stretch ready, or give it back.

    ctypes lets other threads run meanwhile; `mmap.madvise` does not. Where the system refuses, it makes memory ready at
    the first touch, as ever.
    """
    if not make_ready:
        _madvise(stretch.address, stretch.size, _GIVE_BACK)
        if stretch.size < ALONE:
            returned.append(stretch)
        return
    if stretch.size >= HUGE:
        _madvise(stretch.address, stretch.size, _IN_HUGE_PAGES)
    _madvise(stretch.address, stretch.size, _POPULATE_WRITE)
