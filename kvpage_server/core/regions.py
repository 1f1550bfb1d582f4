"""Memory from the operating system: a few large mappings, the regions, from which stretches are cut for chunks of
slots.

A page of a mapping takes no memory until it is written to. Then the system zeroes it, which costs more than to write a
value into it. So a freed stretch stays in memory as *spare* memory, from which the next stretches of any size are cut.
Memory that was spare for SPARE_FOR is returned to the system, and becomes *fresh*. If no spare part is large enough for
a stretch, it is cut from fresh memory, and up to the same amount of spare memory is returned to the system.

Memory is returned in whole huge pages, so that the system does not have to split one. The server does not request huge
pages (`MADV_HUGEPAGE`): the system zeroes a small page just before a value is written to it, so the write finds it in
the processor's cache, but most of a zeroed huge page has left the cache before it is written.

A thread returns the memory, because that takes milliseconds for large amounts.

If the server has a unix socket, its regions are *shared*: other processes on the machine can map them to read values in
place (KVMAP). Before a region's descriptor leaves the server, the region is *sealed*: only mappings that existed before
can write to it. The system then returns no part of its memory either, so a sealed region is unmapped as a whole when
none of its bytes is in use.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

from kvpage_server.page import HEADER_SIZE

# -- sizes -------------------------------------------------------------------------------------------------------------
#
# A slot contains a value in wire format, so that a reply borrows one piece of memory:
#
#     [64: header]["$<n>\r\n"][body: n bytes]["\r\n"]
#
# The header is that of a page. Plain strings do not use it. There are four sizes of slots for each doubling, with the
# powers of two among them, because the bodies of pages usually are powers of two.

SUFFIX = 2  # bytes of the CRLF after a body
LARGEST = 1 << 47  # bytes of the largest body: no processor addresses more
SMALLEST_CHUNK, LARGEST_CHUNK = 64 << 10, 4 << 20  # bytes; only a chunk with a single larger slot is larger
_SHORT_FRAME, _LONG_FRAME = 8, 16  # bytes reserved for the frame; 8 are enough for a length of five digits
IN_PLACE = 32 << 10  # the kernel writes bodies of as many bytes into their slots, which are aligned for that


class SlotShape(NamedTuple):
    """The geometry of the slots of one size class."""

    capacity: int  # bytes of the longest body
    pitch: int  # bytes from one slot to the next
    lead: int  # bytes before the first slot of a chunk


class ChunkShape(NamedTuple):
    """The size of a chunk in bytes and in slots."""

    nbytes: int
    slots: int


def capacity_for(size: int) -> int:
    """Return the capacity in bytes of the smallest slots for a body of `size` bytes.

    Capacities are 64, and four steps for each doubling: 80, 96, 112, 128, 160, and so on.
    """
    return max(round_up(size, capacity_step(size)), 64)


def capacity_step(size: int) -> int:
    """Return the bytes between two capacities near `size`: capacities from 64 on are multiples of it."""
    return 1 << max((size - 1).bit_length() - 3, 4)


def slot_shape(capacity: int) -> SlotShape:
    """Return the geometry of slots for bodies of up to `capacity` bytes.

    Bodies are aligned to 16 bytes; from a capacity of IN_PLACE bytes on, to 64 bytes.
    """
    before = HEADER_SIZE + (_SHORT_FRAME if capacity < 100_000 else _LONG_FRAME)
    align = 16 if capacity < IN_PLACE else 64
    return SlotShape(capacity, round_up(before + capacity + SUFFIX, align), -before % align)


def chunk_shape(slots: SlotShape, held: int) -> ChunkShape:
    """Return the size of the next chunk of slots, whose existing chunks have `held` bytes together.

    The chunk is as large as these together, but between SMALLEST_CHUNK and LARGEST_CHUNK, and has at least one slot.
    """
    nbytes = min(max(held, SMALLEST_CHUNK), LARGEST_CHUNK)
    count = max((nbytes - slots.lead) // slots.pitch, 1)
    return ChunkShape(round_up(slots.lead + count * slots.pitch, mmap.PAGESIZE), count)


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


SPARE_FOR = 20.0  # seconds after which spare memory is returned to the system; it may take up to twice as long
SMALLEST_REGION, LARGEST_REGION = 64 << 20, 1 << 30  # bytes; only a region for a single larger stretch is larger
HUGE = 2 << 20  # bytes of a huge page

_UNUSED = 4 if sys.platform == "linux" else 5  # advice for madvise(2): MADV_DONTNEED on Linux, elsewhere MADV_FREE
_REMOVE = 9  # advice for madvise(2) for shared memory: MADV_REMOVE, on Linux
_RETURNED_BYTES_PER_CALL = 16 << 20  # bytes of one madvise(2): other threads that change mappings wait for it
_TOO_SMALL = 16 << 20  # bytes of spare memory that `take` does not return, although no part was large enough
_SPANS_PER_STEP = 256  # spans returned in one call, because other clients wait meanwhile
_madvise = ctypes.CDLL(None).madvise  # releases the interpreter's lock; `mmap.madvise` does not
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Spans:
    """Sorted list of separate byte ranges (start, stop) of a region. Every operation is O(ranges)."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self._spans = list(spans)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges together."""
        return sum(stop - start for start, stop in self._spans)

    def cut(self, size: int) -> int | None:
        """Remove `size` consecutive bytes from the first range that has them. Return their start.

        Return None if no range has them.
        """
        for i, (start, stop) in enumerate(self._spans):
            if start + size <= stop:
                self._spans[i : i + 1] = [(start + size, stop)] if start + size < stop else []
                return start
        return None

    def cut_pages(self, most: int) -> tuple[int, int] | None:
        """Remove whole huge pages, of up to `most` bytes, from the first range that has one. Return (start, stop).

        Return None if no range has a whole huge page.
        """
        for i, (start, stop) in enumerate(self._spans):
            first = round_up(start, HUGE)
            last = min(stop // HUGE * HUGE, first + most)
            if first < last:
                self._spans[i : i + 1] = [span for span in ((start, first), (last, stop)) if span[0] < span[1]]
                return first, last
        return None

    def add(self, start: int, stop: int) -> None:
        """Add a range that overlaps no other. It is merged with ranges that it touches."""
        i = bisect_left(self._spans, (start, stop))
        if i < len(self._spans) and self._spans[i][0] == stop:
            stop = self._spans.pop(i)[1]
        if i and self._spans[i - 1][1] == start:
            i -= 1
            start = self._spans.pop(i)[0]
        self._spans.insert(i, (start, stop))


# -- shared memory: the small part that differs between systems --------------------------------------------------------

_ADD_SEALS = 1033  # fcntl(2) commands and seals of Linux, which `fcntl` has from Python 3.12 on
_NO_EXEC = 8  # flag of memfd_create(2): MFD_NOEXEC_SEAL
_NO_MORE_SEALS, _NO_SHRINK, _NO_GROW, _NO_NEW_WRITER = 1, 2, 4, 16


def _open_sealed(size: int) -> tuple[int, int]:
    """Create shared memory of `size` bytes on Linux, which nobody can resize. Return a descriptor to write, and -1: the
    memory has to be sealed before it is opened for reading.

    Raise OSError.
    """
    if _never_overcommits():
        raise OSError(errno.ENOMEM, "vm.overcommit_memory is 2")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("kvpage", flags | _NO_EXEC)
    except OSError:  # Linux before 6.3
        descriptor = os.memfd_create("kvpage", flags)
    try:
        os.fchmod(descriptor, 0o600)  # others that get a descriptor for reading cannot open it for writing
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, _ADD_SEALS, _NO_SHRINK | _NO_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, -1


def _open_unlinked(size: int) -> tuple[int, int]:
    """Create shared memory of `size` bytes on macOS, without a name, by which it could be opened again. Return a
    descriptor to write and one to read.

    Raise OSError, or ImportError on a system without POSIX shared memory.
    """
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/kvpage-{secrets.token_hex(8)}"
    descriptor = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return descriptor, _posixshmem.shm_open(name, os.O_RDONLY, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    finally:
        _posixshmem.shm_unlink(name)


_open_shared = _open_sealed if sys.platform == "linux" else _open_unlinked


@cache
def _never_overcommits() -> bool:
    """Return whether Linux refuses memory beyond its limit (vm.overcommit_memory is 2).

    It refuses private memory when it is mapped. But it refuses shared memory when it is first written to, and ends the
    process with SIGBUS.
    """
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2"
    except OSError:
        return False


class Region:
    """A mapping of whole huge pages.

    Each of its bytes is in exactly one of: a stretch that is in use or is being returned, `fresh`, `spare`. Fresh bytes
    take no memory: they were never written to, or were returned to the system. Spare bytes may take memory. The
    constructor raises MemoryError if the system has no memory. With `shared`, other processes can map the region,
    unless the system refuses shared memory; the region is private then.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        self.number = 0  # of a shared region: random, so that no other region has it; 0 for a private one
        self.is_sealed = False
        self._descriptor = self._reading = -1
        try:
            memory = self._map_shared(size + HUGE) if shared else None
            if memory is None:
                memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system has no {size} bytes more") from error
        self.file_size = size + HUGE
        self.offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE  # of the first byte in the mapping
        self.memory = memoryview(memory)[self.offset : self.offset + size]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.size = size
        self.fresh = Spans((0, size))
        self.spare = Spans()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close the descriptors of shared memory. The mapping stays."""
        for descriptor in (self._descriptor, self._reading):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._reading = -1

    def _map_shared(self, size: int) -> mmap.mmap | None:
        """Map shared memory of `size` bytes, and give the region its number. Return None if the system refuses it."""
        try:
            self._descriptor, self._reading = _open_shared(size)
            memory = mmap.mmap(self._descriptor, size)
        except (OSError, ImportError):
            self._close()
            return None
        self.number = secrets.randbits(62) | 1
        self.is_sealed = self._reading >= 0  # unlinked memory: no part of it is returned to the system
        return memory

    def descriptor_to_read(self) -> int:
        """Seal a shared region, and return its descriptor for other processes, which stays open with the region.

        Raise OSError if the system cannot seal it, as Linux before 5.1, or has no free descriptor. A later call may
        succeed then.
        """
        if not self.is_sealed:
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _NO_NEW_WRITER | _NO_MORE_SEALS)
            self.is_sealed = True
        if self._reading < 0:
            self._reading = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        return self._reading

    @property
    def advice(self) -> int:
        """The advice to madvise(2) that returns memory of the region."""
        return _REMOVE if self.number and sys.platform == "linux" else _UNUSED

    @property
    def is_whole(self) -> bool:
        """Whether all bytes of the region are fresh."""
        return [*self.fresh] == [(0, self.size)]


class Area:
    """Shared memory of one client, into which the server copies values for it: at least `size` bytes.

    Other clients never have it. So the client may write to it, but can neither resize it nor keep its memory: that is
    returned to the system when the object is deleted, even if the client still maps it (on Linux). The constructor
    raises OSError.
    """

    def __init__(self, size: int) -> None:
        self.size = round_up(size, mmap.PAGESIZE)
        descriptor, self._reading = _open_shared(self.size)
        try:
            if self._reading < 0:
                fcntl.fcntl(descriptor, _ADD_SEALS, _NO_MORE_SEALS)  # with others, it could keep its memory
                self._reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            self._memory = mmap.mmap(descriptor, self.size)
        except OSError:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_memory"):
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            _madvise(address, self.size, _REMOVE if sys.platform == "linux" else _UNUSED)
        self.close()

    @property
    def descriptor(self) -> int:
        """The descriptor to read, for the client, until `close`."""
        return self._reading

    def close(self) -> None:
        """Close the descriptor, when the client has it. The mapping stays."""
        if getattr(self, "_reading", -1) >= 0:
            os.close(self._reading)
            self._reading = -1

    def copy(self, source: memoryview, at: int) -> None:
        """Copy bytes to index `at`."""
        self._memory[at : at + len(source)] = source


class Stretch:
    """Allocated bytes of a region: `size` bytes from `start` on."""

    __slots__ = ("region", "size", "start")

    def __init__(self, region: Region, start: int, size: int) -> None:
        self.region = region
        self.start = start
        self.size = size

    @property
    def address(self) -> int:
        """The address of the first byte. It is valid as long as the object exists."""
        return self.region.address + self.start


class Regions:
    """Allocator of stretches of any size. Only its owner's thread may call it.

    A second thread returns memory to the system. It starts with the first stretch to return, and ends when the
    allocator is deleted.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.spare = 0  # bytes of the spare parts of all regions
        self._shared = shared  # whether other processes may map the regions
        self._least = 0  # the minimum of `spare` since `_since`: bytes that were not needed for that long
        self._since = monotonic()
        self._regions: list[Region] = []
        self._to_return: SimpleQueue[Stretch | None] = SimpleQueue()  # to the thread: stretches to return; None ends it
        self._returned: deque[tuple[Stretch, bool]] = (
            deque()
        )  # from the thread: stretches, and whether it returned them
        self._has_thread = False  # whether the thread was started

    def __del__(self) -> None:
        self._to_return.put(None)

    @property
    def shared(self) -> dict[int, Region]:
        """The regions that other processes can map, by number."""
        return {region.number: region for region in self._regions if region.number}

    def take(self, size: int) -> Stretch:
        """Allocate a stretch of `size` bytes, from spare memory if possible. O(spare parts).

        Raise MemoryError if the system has no memory.
        """
        self._collect_returned()
        found = self._cut(size)
        if found is None:
            # Return as much spare memory as is added, so that spare parts that are too small do not accumulate.
            self._shrink(min(size, self.spare - _TOO_SMALL))
            self._add_spare(round_up(size, HUGE))
            found = self._cut(size)
            assert found is not None
        self._least = min(self._least, self.spare)
        return found

    def put(self, stretch: Stretch) -> None:
        """Free a stretch, whose memory is not used any longer. It becomes spare memory."""
        stretch.region.spare.add(stretch.start, stretch.start + stretch.size)
        self.spare += stretch.size

    def trim(self) -> None:
        """Return memory to the system that was spare for SPARE_FOR, in at most _SPANS_PER_STEP parts.

        The owner calls this regularly.
        """
        if self._shared:
            self._collect_returned()  # otherwise a sealed region that has such a stretch would stay
        now = monotonic()
        if now - self._since >= SPARE_FOR:
            returned = self._shrink(self._least)
            self._least -= returned
            if not returned:
                self._least, self._since = self.spare, now

    def _cut(self, size: int) -> Stretch | None:
        """Cut a stretch from spare memory; return None if no spare part is large enough."""
        for region in self._regions:
            start = region.spare.cut(size)
            if start is not None:
                self.spare -= size
                return Stretch(region, start, size)
        return None

    def _add_spare(self, size: int) -> None:
        """Make `size` consecutive fresh bytes spare. Map a region if no region has them."""
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
        """Map a region of at least `size` bytes, and return it. Raise MemoryError if the system has no memory.

        The region is as large as all others together, but between SMALLEST_REGION and LARGEST_REGION bytes. If the
        system refuses that, try smaller sizes.
        """
        mapped = sum(region.size for region in self._regions)
        large = min(max(mapped, SMALLEST_REGION), LARGEST_REGION)
        while True:
            try:
                region = Region(max(round_up(large, HUGE), size), shared=self._shared)
                self._regions.append(region)
                return region
            except MemoryError:
                if large <= size:
                    raise
                large //= 2

    def _shrink(self, most: int) -> int:
        """Return up to `most` spare bytes to the system, in at most _SPANS_PER_STEP parts. Return their number."""
        goal = left = max(most, 0) // HUGE * HUGE
        spans = 0
        for region in reversed(self._regions):
            if region.is_sealed:
                left -= self._drop_sealed(region, left)
                continue
            while left > 0 and spans < _SPANS_PER_STEP and (span := region.spare.cut_pages(left)):
                stretch = Stretch(region, span[0], span[1] - span[0])
                self.spare -= stretch.size
                left -= stretch.size
                spans += 1
                self._pass_to_thread(stretch)
        return goal - left

    def _drop_sealed(self, region: Region, most: int) -> int:
        """Unmap a sealed region with at most `most` spare bytes if none of its bytes is in use. Return the spare bytes.

        Other processes may still map it; its memory is free when the last of them unmaps it.
        """
        spare = region.spare.nbytes
        if len(self._regions) == 1 or not 0 < spare <= most or spare + region.fresh.nbytes < region.size:
            return 0
        self._regions.remove(region)
        self.spare -= spare
        return spare

    def _pass_to_thread(self, stretch: Stretch) -> None:
        """Pass a stretch to the thread, which returns its memory to the system. The first call starts the thread."""
        if not self._has_thread:
            thread = threading.Thread(target=_return_all, args=(self._to_return, self._returned), daemon=True)
            thread.name = "kvpage-memory"
            try:
                thread.start()
            except RuntimeError:  # the system has no memory for a thread
                _return_to_system(stretch, self._returned)
                return
            self._has_thread = True
        self._to_return.put(stretch)

    def _collect_returned(self) -> None:
        """Mark stretches as fresh that the thread has returned to the system. If that failed, they are spare again.

        Unmap completely fresh regions but one.
        """
        while self._returned:
            stretch, is_fresh = self._returned.popleft()
            region = stretch.region
            if not is_fresh:  # it was sealed meanwhile
                self.put(stretch)
                continue
            region.fresh.add(stretch.start, stretch.start + stretch.size)
            if region.is_whole and len(self._regions) > 1:
                self._regions.remove(region)


def _return_all(to_return: SimpleQueue[Stretch | None], returned: deque[tuple[Stretch, bool]]) -> None:
    """Run the thread that returns memory: process stretches from the queue `to_return` until it returns None."""
    while (stretch := to_return.get()) is not None:
        _return_to_system(stretch, returned)
        del stretch  # otherwise its region would stay mapped until the next stretch


def _return_to_system(stretch: Stretch, returned: deque[tuple[Stretch, bool]]) -> None:
    """Return the memory of a stretch to the system with madvise(2). Append the stretch, and whether that succeeded, to
    `returned`.
    """
    steps = range(0, stretch.size, _RETURNED_BYTES_PER_CALL)
    sizes = [min(_RETURNED_BYTES_PER_CALL, stretch.size - at) for at in steps]
    advice = stretch.region.advice
    failed = [_madvise(stretch.address + at, size, advice) for at, size in zip(steps, sizes, strict=True)]
    returned.append((stretch, not any(failed)))
