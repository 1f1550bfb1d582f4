"""Memory for values, in slots of a few sizes, recycled.

A slot holds a value the way it goes over the wire, so that a reply is one borrowed piece of memory:

    [64: header]["$<n>\\r\\n"][body: n bytes]["\\r\\n"]

The header is a page's, unused for plain strings; the body's CRLF is where the client's own CRLF was received.

Most slots are cut from chunks; a size class has its own chunks, so a freed slot fits the next value of its size and
memory neither fragments nor is zeroed again. A chunk whose last slot is freed is kept for a while, for the next values
of its class, as long as those that are kept take no more than `MOST_SPARE` together; the one that has been empty for
longest goes first. For new memory costs the system more than filling it does. Bodies of some kilobytes and more are
64-byte aligned there.

The pages of a batch are received together into a slab and stay where they arrived, slots of its memory: the arguments
that stood before a body make room for its header. A slab that is less than half in use is sparse: the owner moves what
is left of it to slots of its own, so that no more than half of what is held is wasted.

Who owns a slot? Whoever refers to the `Slot` object: the index, a parser that is filling it, a session that is sending
it. The last reference to go returns the memory, so a buffer in flight is never recycled and an aborted upload leaks
nothing. (CPython counts references: it happens at once.)
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from time import monotonic
from typing import Any, NamedTuple, cast
from weakref import WeakSet

from kvpage_server.page import HEADER_SIZE
from kvpage_server.store.ahead import Ahead

_SUFFIX = 2
_SMALL = 4096  # bytes of a body; what is shorter is packed closer
_CLOSE = 16, HEADER_SIZE + 16  # alignment, and room before a body for header and frame
_WIDE = 64, HEADER_SIZE + 64
_BESIDE = HEADER_SIZE + 16  # bytes of a slab that a body takes beside its own
_CHUNK_SLOTS = 64
_SMALLEST_CHUNK, _LARGEST_CHUNK = 64 * 1024, 4 * 1024 * 1024
MOST_SPARE = 128 * 1024 * 1024
SPARE_FOR = 5.0  # seconds


class SizeClass:
    """Slots of one size and the chunks they are cut from."""

    __slots__ = ("capacity", "chunk_size", "chunks", "offsets", "open", "slot_size", "slots")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # bytes of the longest body
        align, before = _CLOSE if capacity < _SMALL else _WIDE
        self.slot_size = _round_up(before + capacity + _SUFFIX, align)
        size = max(min(_CHUNK_SLOTS * self.slot_size, _LARGEST_CHUNK), _SMALLEST_CHUNK)
        few = max(size // self.slot_size, 1) * self.slot_size
        self.chunk_size = _round_up(few, mmap.PAGESIZE)
        self.slots = self.chunk_size // self.slot_size  # a chunk
        self.offsets = [i * self.slot_size + before for i in reversed(range(self.slots))]  # of a chunk's bodies
        self.chunks = 0
        self.open: list[Chunk] = []  # chunks with a free slot; the last is cut first


class Chunk:
    """One mapping. `free` are the offsets that bodies of new values can have, the lowest last."""

    __slots__ = ("arena", "free", "size_class", "slots", "view")

    def __init__(self, arena: Arena, size_class: SizeClass, memory: mmap.mmap) -> None:
        self.arena = arena
        self.size_class = size_class
        self.view = memoryview(memory)
        self.slots = size_class.slots
        self.free = size_class.offsets.copy()

    def release(self, slot: Slot) -> None:
        """Take a slot back."""
        self.arena.release(self, slot)

    def footprint(self, slot: Slot) -> int:
        """Bytes that a slot occupies."""
        return self.size_class.slot_size


class Slab:
    """Memory that a run of values was received into. It goes back with the last of its slots."""

    __slots__ = ("__weakref__", "_arena", "_memory", "keys", "live", "sparse_from", "view")

    def __init__(self, arena: Arena, memory: Slot) -> None:
        self._arena = arena
        self._memory = memory
        self.sparse_from = 0  # bytes of its slots, when there will be no more of them
        self.view = memory.room
        self.live = 0  # bytes of its slots
        self.keys: list[bytes] = []  # what the owner stored its slots under

    def cut(self, starts: range, size: int, digests: Iterable[int]) -> list[Slot]:
        """The slots of bodies that were received there, each with its CRLF, and its length before it."""
        self.live += len(starts) * (size + _BESIDE)
        return [Slot(self, start, size, digest) for start, digest in zip(starts, digests, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of memory it occupies."""
        return self._memory.footprint

    def close(self) -> None:
        """Nothing more is cut from it."""
        self.sparse_from = len(self.view) // 2
        self.note_if_sparse()

    def footprint(self, slot: Slot) -> int:
        """Bytes that a slot occupies."""
        return slot.size + _BESIDE

    def note_if_sparse(self) -> None:
        """Have the owner move what is left, where that is little."""
        if 0 < self.live < self.sparse_from:
            self.sparse_from = 0
            self._arena.sparse.add(self)


class Slot:
    """A value's memory. `expires` is a unix time in milliseconds, 0 for never; `unit` is what eviction knows it by.

    `digest` is the XXH3-64 of a body that was hashed as it arrived, until it is stored, and else 0.
    """

    __slots__ = ("chunk", "digest", "expires", "offset", "size", "unit")

    def __init__(self, chunk: Chunk | Slab, offset: int, size: int, digest: int = 0) -> None:
        self.chunk = chunk
        self.offset = offset
        self.size = size  # bytes of the body
        self.digest = digest
        self.expires = 0
        self.unit: object = None

    def __del__(self) -> None:
        chunk = self.chunk
        if type(chunk) is Slab:  # the usual one, without another call
            chunk.live -= self.size + _BESIDE
            if chunk.live < chunk.sparse_from:
                chunk.note_if_sparse()
        else:
            cast(Chunk, chunk).release(self)

    @property
    def room(self) -> memoryview:
        """Writable: body and CRLF."""
        start = self.offset
        return self.chunk.view[start : start + self.size + _SUFFIX]

    @property
    def body(self) -> memoryview:
        """The value's bytes, 64-byte aligned."""
        start = self.offset
        return self.chunk.view[start : start + self.size]

    @property
    def header(self) -> memoryview:
        """Writable: the 64 bytes before the frame."""
        start = self.offset - room_before(self.size)
        return self.chunk.view[start : start + HEADER_SIZE]

    def part(self, start: int, stop: int) -> Part:
        """The bytes of the body from `start` to before `stop`."""
        return Part(self, start, stop)

    @property
    def view(self) -> memoryview:
        """The body as a bulk string: frame, bytes, CRLF. Only after `seal`."""
        start = self.offset
        return self.chunk.view[start - _frame_size(self.size) : start + self.size + _SUFFIX]

    @property
    def footprint(self) -> int:
        """Bytes of memory it occupies."""
        return self.chunk.footprint(self)

    def seal(self) -> None:
        """Write frame and CRLF around the body. In a slab, they are there."""
        if type(self.chunk) is Slab:
            return
        frame = b"$%d\r\n" % self.size
        start = self.offset
        view = self.chunk.view
        view[start - len(frame) : start] = frame
        view[start + self.size : start + self.size + _SUFFIX] = b"\r\n"


_SLOTS, _SIZE = {Slot}, attrgetter("size")


class Part:
    """Some of a slot's bytes, as a piece of a reply. Keeps the slot."""

    __slots__ = ("slot", "start", "stop")

    def __init__(self, slot: Slot, start: int, stop: int) -> None:
        self.slot = slot
        self.start = start
        self.stop = stop

    @property
    def size(self) -> int:
        """How many they are."""
        return self.stop - self.start

    @property
    def view(self) -> memoryview:
        """The bytes."""
        start = self.slot.offset
        return self.slot.chunk.view[start + self.start : start + self.stop]


def views(pieces: Sequence[Any]) -> list[bytes | memoryview]:
    """The `view` of each piece of a reply, of bytes they themselves. Slots of one size are asked together, sooner."""
    first = int(isinstance(pieces[0], bytes))
    slots = pieces[first:]
    if {*map(type, slots)} != _SLOTS or len(sizes := {*map(_SIZE, slots)}) > 1:
        return [piece if isinstance(piece, bytes) else piece.view for piece in pieces]
    size = sizes.pop()
    before, behind = _frame_size(size), size + _SUFFIX
    return [*pieces[:first], *[slot.chunk.view[(at := slot.offset) - before : at + behind] for slot in slots]]


class Lent(NamedTuple):
    """Some of a slot's memory as a piece of a reply, with `size` bytes of its body. Keeps the slot."""

    view: memoryview
    size: int
    slot: Slot


def blobs(slots: Iterable[Slot]) -> Iterator[bytes | Lent]:
    """The bulk strings of headers and bodies."""
    for slot in slots:
        memory, start, size = slot.chunk.view, slot.offset, slot.size
        header = start - room_before(size)
        yield b"$%d\r\n%b" % (HEADER_SIZE + size, bytes(memory[header : header + HEADER_SIZE]))
        yield Lent(memory[start : start + size + _SUFFIX], size, slot)


class Arena:
    """Slots for values of any size. `used` and `spare` are bytes: of slots in use, of empty chunks."""

    def __init__(self) -> None:
        self.used = 0
        self._mapped = 0
        self.spare = 0
        self._empty: dict[Chunk, float] = {}  # and since when, in monotonic seconds; the oldest first
        self.sparse: WeakSet[Slab] = WeakSet()  # slabs less than half in use
        self._classes: dict[int, SizeClass] = {}
        self._ahead = Ahead()

    @property
    def held(self) -> int:
        """Bytes that were taken from the system, those being made ready too."""
        return self._mapped + self._ahead.bytes

    def allocate(self, size: int) -> Slot:
        """A slot for a body of `size` bytes. Raises MemoryError when the system has no more."""
        size_class = self._class_for(size)
        if not size_class.open:
            self._map_chunk(size_class)
        chunk = size_class.open[-1]
        if len(chunk.free) == chunk.slots:
            self.spare -= size_class.chunk_size
            self._empty.pop(chunk, None)
        offset = chunk.free.pop()
        if not chunk.free:
            size_class.open.pop()
        self.used += size_class.slot_size
        return Slot(chunk, offset, size_class.capacity if size == size_class.capacity else size)

    def slab(self, size: int) -> Slab:
        """Memory for a run of values, `size` bytes with all that stands between them. Raises MemoryError."""
        return Slab(self, self.allocate(size))

    def release(self, chunk: Chunk, slot: Slot) -> None:
        """Take a slot back; called by the slot itself."""
        size_class = chunk.size_class
        self.used -= size_class.slot_size
        if not chunk.free:
            size_class.open.append(chunk)
        chunk.free.append(slot.offset)
        if len(chunk.free) == chunk.slots:
            self.spare += size_class.chunk_size
            self._empty[chunk] = monotonic()
            while self.spare > MOST_SPARE:
                self._unmap_chunk(next(iter(self._empty)))

    def rest(self) -> None:
        """Give back a chunk that has been empty for long enough, if there is one."""
        if self._empty:
            chunk, since = next(iter(self._empty.items()))
            if monotonic() - since > SPARE_FOR:
                self._unmap_chunk(chunk)

    def _class_for(self, size: int) -> SizeClass:
        capacity = _capacity_for(size)
        found = self._classes.get(capacity)
        if found is None:
            found = self._classes[capacity] = SizeClass(capacity)
        return found

    def _map_chunk(self, size_class: SizeClass) -> None:
        size = size_class.chunk_size
        try:
            memory = self._ahead.take(size) or mmap.mmap(-1, size)
        except OSError as error:
            raise MemoryError(f"the system has no {size} bytes more") from error
        size_class.open.append(Chunk(self, size_class, memory))
        size_class.chunks += 1
        self._mapped += size
        self.spare += size
        if size_class.chunks > 2 and size <= _LARGEST_CHUNK:  # it grows, and a chunk more is little
            self._ahead.want(size)

    def _unmap_chunk(self, chunk: Chunk) -> None:
        """Give an empty chunk back; its mapping goes with the last reference to it."""
        del self._empty[chunk]
        size_class = chunk.size_class
        size_class.open.remove(chunk)
        size_class.chunks -= 1
        self._mapped -= size_class.chunk_size
        self.spare -= size_class.chunk_size
        self._ahead.drop()

    def classes(self) -> Iterator[SizeClass]:
        """The size classes in use."""
        return (c for c in self._classes.values() if c.chunks)


def _capacity_for(size: int) -> int:
    """The smallest of 4 steps a doubling that holds `size`: powers of two, as pages are, fit without waste."""
    step = 1 << max((size - 1).bit_length() - 3, 4)
    return max(_round_up(size, step), 64)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


@lru_cache(maxsize=1024)
def _frame_size(size: int) -> int:
    return len(str(size)) + 3


@lru_cache(maxsize=1024)
def room_before(size: int) -> int:
    """Bytes from the beginning of a slot's header to that of its body of `size` bytes."""
    return HEADER_SIZE + _frame_size(size)
