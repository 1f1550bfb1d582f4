"""The arena: memory for values, in slots of a few sizes.

**Data structure.** Slots are cut from chunks, and each size class has its own chunks. So a freed slot fits the next
value of its size, and memory does not become fragmented. A chunk without a slot in use is returned to its region by
`Arena.trim`, or before a new chunk is allocated. `regions` describes how long the region keeps the memory.

**Lifetime.** A slot is freed when the last reference to its `Slot` object, or to a view of its memory, is dropped. The
index has such a reference, and so have a parser that fills the slot, a session that sends it, and a thread that writes
it to disk. So memory is not reused while it is sent or received, and an aborted upload leaks nothing.

**Cost.** O(1) to allocate and to free a slot.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from kvpage_server.core.regions import (
    LARGEST,
    SUFFIX,
    Region,
    Regions,
    SlotShape,
    Stretch,
    capacity_for,
    chunk_shape,
    slot_shape,
)
from kvpage_server.page import HEADER_SIZE

_CHUNKS_PER_STEP = 256  # chunks returned in one call, because other clients wait meanwhile


class SizeClass:
    """The slots of one size, and the chunks that they are cut from."""

    __slots__ = ("held", "open", "shape")

    def __init__(self, shape: SlotShape) -> None:
        self.shape = shape
        self.held = 0  # bytes of all chunks of this size
        self.open: dict[SlotChunk, None] = {}  # chunks with a free slot; the last one provides the next slot


class SlotChunk:
    """Memory for `slots` slots of one size. `free` is a stack of the starts of free slots in the region."""

    __slots__ = ("arena", "free", "size_class", "slots", "stretch")

    def __init__(self, arena: Arena, size_class: SizeClass, stretch: Stretch, slots: int) -> None:
        _, pitch, lead = size_class.shape
        self.arena = arena
        self.size_class = size_class
        self.stretch = stretch
        self.slots = slots
        self.free = [stretch.start + lead + i * pitch for i in reversed(range(slots))]


class _Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """A part of a slot's memory.

    A memoryview refers to this object, and this object to the slot, which stays in use.
    """

    slot: Slot


class Slot:
    """The memory of one value: header, frame, body and CRLF, see `core.regions`.

    `expires` is in unix milliseconds, 0 for never. `unit` is the block of a page, None for a string. `digest` is the
    XXH3-64 of the body if it was hashed while it was received and is not stored yet, otherwise 0.
    """

    __slots__ = ("_chunk", "_start", "at", "digest", "expires", "size", "unit")

    def __init__(self, chunk: SlotChunk, start: int, size: int) -> None:
        frame = b"$%d\r\n" % size
        self._chunk = chunk
        self._start = start  # start of the header in the region
        self.at = start + HEADER_SIZE + len(frame)  # start of the body in the region
        self.size = size  # bytes of the body
        self.digest = 0
        self.expires = 0
        self.unit: object = None
        memory = chunk.stretch.region.memory
        memory[self.at - len(frame) : self.at] = frame
        memory[self.at + size : self.at + size + SUFFIX] = b"\r\n"

    def __del__(self) -> None:
        self._chunk.arena.returned.append((self._chunk, self._start))

    def _memory(self, start: int, stop: int) -> memoryview:
        memory = np.ndarray.__new__(_Memory, stop - start, np.uint8, self._chunk.stretch.region.memory, start)
        memory.slot = self
        return memoryview(memory)  # type: ignore[arg-type]

    @property
    def room(self) -> memoryview:
        """The memory of the body and its CRLF, writable: a parser receives a word into it."""
        return self._memory(self.at, self.at + self.size + SUFFIX)

    @property
    def body(self) -> memoryview:
        """The value's bytes, writable."""
        return self._memory(self.at, self.at + self.size)

    @property
    def header(self) -> memoryview:
        """The 64 bytes before the frame, writable: a page's header."""
        return self._memory(self._start, self._start + HEADER_SIZE)

    @property
    def view(self) -> memoryview:
        """The body as a bulk string: frame, bytes, CRLF."""
        return self._memory(self._start + HEADER_SIZE, self.at + self.size + SUFFIX)

    @property
    def borrowed(self) -> memoryview:
        """The same bytes as `view`, without a reference to the slot: valid as long as the caller refers to the slot."""
        return self._chunk.stretch.region.memory[self._start + HEADER_SIZE : self.at + self.size + SUFFIX]

    @property
    def blob(self) -> tuple[bytes, Part, bytes]:
        """Header and body as one bulk string, in pieces."""
        return b"$%d\r\n%b" % (HEADER_SIZE + self.size, bytes(self.header)), self.part(0, self.size), b"\r\n"

    def part(self, start: int, stop: int) -> Part:
        """Return the bytes of the body from `start` to before `stop`, as a piece of a reply."""
        return Part(self, start, stop)

    @property
    def place(self) -> tuple[Region, int]:
        """The region that contains the slot, and the offset of the body in its mapping."""
        region = self._chunk.stretch.region
        return region, region.offset + self.at

    @property
    def footprint(self) -> int:
        """Bytes of memory that the slot takes, more than its body has."""
        return self._chunk.size_class.shape.pitch


class Part:
    """A range of a slot's body as a piece of a reply. The slot stays in use while this object exists."""

    __slots__ = ("size", "slot", "start")

    def __init__(self, slot: Slot, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= slot.size:
            raise ValueError(f"a part is within the {slot.size} bytes of its slot, got {start} to {stop}")
        self.slot = slot
        self.start = start
        self.size = stop - start

    @property
    def view(self) -> memoryview:
        """The bytes of the part."""
        return self.slot.body[self.start : self.start + self.size]


class Arena:
    """Allocator of slots. Only its owner's thread may call it, but any thread may drop the last reference to a slot."""

    def __init__(self, *, shared: bool = False) -> None:
        """Create an arena without memory. With `shared`, other processes can map its regions."""
        self.returned: deque[tuple[SlotChunk, int]] = deque()  # freed slots that are not in their chunk's `free` yet
        self._used = 0  # bytes of slots in use, including those in `returned`
        self._in_chunks = 0  # bytes of all chunks
        self._empty: dict[SlotChunk, None] = {}  # chunks without a slot in use; they are also in `open` of their size
        self._classes: dict[int, SizeClass] = {}  # by capacity
        self.regions = Regions(shared=shared)

    @property
    def used(self) -> int:
        """Bytes of slots in use, with their headers and rounding."""
        self._collect_freed()
        return self._used

    @property
    def spare(self) -> int:
        """Bytes of empty chunks, and of spare memory of the regions."""
        self._collect_freed()
        return sum(chunk.stretch.size for chunk in self._empty) + self.regions.spare

    @property
    def held(self) -> int:
        """Bytes of memory from the system: all chunks, and spare memory of the regions."""
        return self._in_chunks + self.regions.spare

    def allocate(self, size: int) -> Slot:
        """Allocate a slot for a body of `size` bytes. Raise MemoryError if the system has no memory."""
        if size < 0:
            raise ValueError(f"a slot has 0 bytes or more, got {size}")
        self._collect_freed()
        size_class = self._class_for(size)
        if not size_class.open:
            self._map_chunk(size_class)
        chunk = next(reversed(size_class.open))
        self._empty.pop(chunk, None)
        start = chunk.free.pop()
        if not chunk.free:
            del size_class.open[chunk]
        self._used += size_class.shape.pitch
        return Slot(chunk, start, size)

    def trim(self) -> None:
        """Return empty chunks to their regions, and memory that was spare for SPARE_FOR to the system.

        The owner calls this regularly.
        """
        self._free_empty_chunks()
        self.regions.trim()

    def _collect_freed(self) -> None:
        """Move freed slots from `returned` to their chunks, from which they can be allocated again."""
        while self.returned:
            chunk, start = self.returned.popleft()
            size_class = chunk.size_class
            self._used -= size_class.shape.pitch
            size_class.open[chunk] = None
            chunk.free.append(start)
            if len(chunk.free) == chunk.slots:
                self._empty[chunk] = None

    def _class_for(self, size: int) -> SizeClass:
        """Return the size class for a body of `size` bytes. Raise MemoryError above LARGEST."""
        if size > LARGEST:
            raise MemoryError(f"the system has no {size} bytes more")
        capacity = capacity_for(size)
        found = self._classes.get(capacity)
        if found is None:
            found = self._classes[capacity] = SizeClass(slot_shape(capacity))
        return found

    def _map_chunk(self, size_class: SizeClass) -> None:
        """Allocate a chunk for a size class, from a new stretch. Raise MemoryError."""
        self._free_empty_chunks()
        nbytes, slots = chunk_shape(size_class.shape, size_class.held)
        chunk = SlotChunk(self, size_class, self.regions.take(nbytes), slots)
        size_class.open[chunk] = None
        size_class.held += nbytes
        self._in_chunks += nbytes
        self._empty[chunk] = None

    def _free_empty_chunks(self) -> None:
        """Return up to _CHUNKS_PER_STEP empty chunks to their regions, for slots of any size."""
        self._collect_freed()
        for chunk in [*islice(self._empty, _CHUNKS_PER_STEP)]:
            del self._empty[chunk], chunk.size_class.open[chunk]
            chunk.size_class.held -= chunk.stretch.size
            self._in_chunks -= chunk.stretch.size
            self.regions.put(chunk.stretch)
