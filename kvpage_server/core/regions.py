"""Memory from the system: few large mappings, from which chunks are cut and to which they return.

A mapping takes no memory until it is written to. Then the system zeroes it, which costs more than all else that is done
with it. So memory that returns is spare, and is cut again at once, for chunks of any size. Memory that was spare for a
while is returned to the system. If no spare memory is large enough for an allocation, the same amount of spare memory
is returned to the system.

Memory is handed back in whole huge pages, so that none is split where the system uses them. The server does not ask for
them (`MADV_HUGEPAGE`). The system zeroes a small page just before a value is written to it, so it is in the processor's
cache then. Of two megabytes that are zeroed at once, most have left the cache by then.

A thread hands memory back, since that takes milliseconds for large values.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

from kvpage_server.page import HEADER_SIZE

# -- sizes -------------------------------------------------------------------------------------------------------------
#
# How large slots and chunks are.
#
# A slot holds a value in wire format, so that a reply is one borrowed piece of memory:
#
#     [64: header]["$<n>\r\n"][body: n bytes]["\r\n"]
#
# The header is a page's, unused for plain strings. Slots are of few sizes, four a doubling: powers of two, as pages
# are, fit without waste.

SUFFIX = 2  # bytes of the CRLF behind a body
LARGEST = 1 << 47  # bytes of a body: no processor addresses more
SMALLEST_CHUNK, LARGEST_CHUNK = 64 << 10, 4 << 20  # bytes, but for slots that are larger
_SHORT_FRAME, _LONG_FRAME = 8, 16  # bytes kept before a body for its length; the former has room for five digits
IN_PLACE = 32 << 10  # bytes of a body that the kernel writes into its slot: it does so faster where slots are aligned


class SlotShape(NamedTuple):
    """Geometry of slots of one size: bytes from a slot to the next, and before the first one in a chunk."""

    capacity: int  # bytes of the longest body
    pitch: int
    lead: int


class ChunkShape(NamedTuple):
    """How many bytes a chunk has, and how many slots."""

    nbytes: int
    slots: int


def capacity_for(size: int) -> int:
    """Return the smallest of 4 steps a doubling that holds `size`."""
    step = 1 << max((size - 1).bit_length() - 3, 4)
    return max(round_up(size, step), 64)


def slot_shape(capacity: int) -> SlotShape:
    """Slots for bodies of up to `capacity` bytes."""
    before = HEADER_SIZE + (_SHORT_FRAME if capacity < 100_000 else _LONG_FRAME)
    align = 16 if capacity < IN_PLACE else 64
    return SlotShape(capacity, round_up(before + capacity + SUFFIX, align), -before % align)


def chunk_shape(slots: SlotShape, held: int) -> ChunkShape:
    """Return the next chunk of a size whose chunks have `held` bytes: as many again, within bounds."""
    wanted = min(max(held, SMALLEST_CHUNK), LARGEST_CHUNK)
    count = max((wanted - slots.lead) // slots.pitch, 1)
    return ChunkShape(round_up(slots.lead + count * slots.pitch, mmap.PAGESIZE), count)


def round_up(size: int, step: int) -> int:
    """Return the least multiple of `step` that is not less."""
    return -(-size // step) * step


SPARE_FOR = 20.0  # seconds; twice as long at most
SMALLEST_REGION, LARGEST_REGION = 64 << 20, 1 << 30
HUGE = 2 << 20  # bytes of a huge page

_UNUSED = 4 if sys.platform == "linux" else 5  # madvise(2): MADV_DONTNEED; elsewhere MADV_FREE
_RETURNED_BYTES_PER_CALL = 16 << 20  # bytes: other threads that change mappings wait meanwhile
_TOO_SMALL = 16 << 20  # bytes that may be spare, but too small for an allocation
_SPANS_PER_STEP = 256  # spans that are handed back before others have their turn
_madvise = ctypes.CDLL(None).madvise  # which lets other threads run meanwhile; `mmap.madvise` does not
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Spans:
    """Parts of a region, from start to stop, in order, none touching another."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self._spans = list(spans)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    def cut(self, size: int) -> int | None:
        """Return where so many bytes begin, which are taken out; None when they are not there side by side."""
        for i, (start, stop) in enumerate(self._spans):
            if start + size <= stop:
                self._spans[i : i + 1] = [(start + size, stop)] if start + size < stop else []
                return start
        return None

    def cut_pages(self, most: int) -> tuple[int, int] | None:
        """Return a span of whole huge pages, of up to `most` bytes, which is taken out; None when there is none."""
        for i, (start, stop) in enumerate(self._spans):
            first = round_up(start, HUGE)
            last = min(stop // HUGE * HUGE, first + most)
            if first < last:
                self._spans[i : i + 1] = [span for span in ((start, first), (last, stop)) if span[0] < span[1]]
                return first, last
        return None

    def add(self, start: int, stop: int) -> None:
        """Have a part more, which is not there."""
        i = bisect_left(self._spans, (start, stop))
        if i < len(self._spans) and self._spans[i][0] == stop:
            stop = self._spans.pop(i)[1]
        if i and self._spans[i - 1][1] == start:
            i -= 1
            start = self._spans.pop(i)[0]
        self._spans.insert(i, (start, stop))


class Region:
    """One mapping, of whole huge pages. Memory that is not allocated is `fresh`, or `spare` if it may have been
    written.

    Raises MemoryError when the system has no more.
    """

    def __init__(self, size: int) -> None:
        try:
            memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system has no {size} bytes more") from error
        first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE
        self.memory = memoryview(memory)[first : first + size]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.size = size
        self.fresh = Spans((0, size))
        self.spare = Spans()

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is cut or spare."""
        return [*self.fresh] == [(0, self.size)]


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
        self.spare = 0  # bytes
        self._least = 0  # that were spare all the time
        self._since = monotonic()
        self._regions: list[Region] = []
        self._leaving: SimpleQueue[Stretch | None] = SimpleQueue()
        self._returned: deque[Stretch] = deque()  # by the thread
        self._begun = False

    def __del__(self) -> None:
        self._leaving.put(None)

    def take(self, size: int) -> Stretch:
        """So many bytes. Raises MemoryError when the system has no more."""
        self._take_back()
        found = self._cut(size)
        if found is None:
            self._shrink(min(size, self.spare - _TOO_SMALL))
            self._have_more(round_up(size, HUGE))
            found = self._cut(size)
            assert found is not None
        self._least = min(self._least, self.spare)
        return found

    def put(self, stretch: Stretch) -> None:
        """Nobody refers to its bytes any more."""
        stretch.region.spare.add(stretch.start, stretch.start + stretch.size)
        self.spare += stretch.size

    def rest(self) -> None:
        """Return memory that was spare for long enough; the rest of a large amount in the next call."""
        now = monotonic()
        if now - self._since >= SPARE_FOR:
            gone = self._shrink(self._least)
            self._least -= gone
            if not gone:
                self._least, self._since = self.spare, now

    def _cut(self, size: int) -> Stretch | None:
        for region in self._regions:
            start = region.spare.cut(size)
            if start is not None:
                self.spare -= size
                return Stretch(region, start, size)
        return None

    def _have_more(self, size: int) -> None:
        """Have so many bytes more to cut from, side by side."""
        for region in self._regions:
            start = region.fresh.cut(size)
            if start is not None:
                break
        else:
            region = self._map(size)
            start = region.fresh.cut(size)
            assert start is not None
        self.put(Stretch(region, start, size))

    def _map(self, size: int) -> Region:
        """Return a new region with room for `size` bytes: a large one, as far as the system allows it."""
        mapped = sum(region.size for region in self._regions)
        large = min(max(mapped, SMALLEST_REGION), LARGEST_REGION)
        while True:
            try:
                region = Region(max(round_up(large, HUGE), size))
                self._regions.append(region)
                return region
            except MemoryError:
                if large <= size:
                    raise
                large //= 2

    def _shrink(self, most: int) -> int:
        """Hand up to so many bytes back that are spare, some of them; how many."""
        wanted = left = max(most, 0) // HUGE * HUGE
        spans = 0
        for region in reversed(self._regions):
            while left > 0 and spans < _SPANS_PER_STEP and (span := region.spare.cut_pages(left)):
                stretch = Stretch(region, span[0], span[1] - span[0])
                self.spare -= stretch.size
                left -= stretch.size
                spans += 1
                self._hand_over(stretch)
        return wanted - left

    def _hand_over(self, stretch: Stretch) -> None:
        """Have the thread hand it back to the system."""
        if not self._begun:
            thread = threading.Thread(target=_hand_all_back, args=(self._leaving, self._returned), daemon=True)
            thread.name = "kvpage-memory"
            try:
                thread.start()
            except RuntimeError:  # the system has no memory for one
                _hand_back(stretch, self._returned)
                return
            self._begun = True
        self._leaving.put(stretch)

    def _take_back(self) -> None:
        """Memory that the thread has returned to the system becomes fresh. A region without used memory is unmapped."""
        while self._returned:
            stretch = self._returned.popleft()
            region = stretch.region
            region.fresh.add(stretch.start, stretch.start + stretch.size)
            if region.is_whole and len(self._regions) > 1:
                self._regions.remove(region)


def _hand_all_back(leaving: SimpleQueue[Stretch | None], returned: deque[Stretch]) -> None:
    while (stretch := leaving.get()) is not None:
        _hand_back(stretch, returned)
        del stretch  # or its region would stay until the next


def _hand_back(stretch: Stretch, returned: deque[Stretch]) -> None:
    """Hand memory back to the system."""
    for at in range(0, stretch.size, _RETURNED_BYTES_PER_CALL):
        _madvise(stretch.address + at, min(_RETURNED_BYTES_PER_CALL, stretch.size - at), _UNUSED)
    returned.append(stretch)
