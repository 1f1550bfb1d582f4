"""Memory for values, in slots of a few sizes, recycled.

Slots are cut from chunks; a size has its own chunks, so a freed slot fits the next value of its size and memory neither
fragments nor is made ready again. A chunk whose last slot is freed is returned to its region when the arena rests, or
when slots of another size need one: `regions` says how long its memory is kept.

Who owns a slot? Every holder of a reference to the `Slot` object or to a view of its memory: the index, a parser that
fills it, a session that sends it, a thread that writes it to disk. The last reference to go returns the memory, so a
buffer in flight is never recycled and an aborted upload leaks nothing.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from kvpage_server.core.regions import (
    LARGEST,
    SUFFIX,
    Regions,
    SlotShape,
    Stretch,
    capacity_for,
    chunk_shape,
    slot_shape,
)
from kvpage_server.page import HEADER_SIZE

_CHUNKS_PER_STEP = 256  # chunks that are returned before others have their turn


class SizeClass:
    """Slots of one size and the chunks they are cut from."""

    __slots__ = ("held", "open", "shape")

    def __init__(self, shape: SlotShape) -> None:
        self.shape = shape
        self.held = 0  # bytes of its chunks
        self.open: dict[SlotChunk, None] = {}  # those with a free slot; the last is cut first


class SlotChunk:
    """Some memory in slots of one size. `free` says where those begin that are not in use, the first one last."""

    __slots__ = ("arena", "free", "size_class", "slots", "stretch")

    def __init__(self, arena: Arena, size_class: SizeClass, stretch: Stretch, slots: int) -> None:
        _, pitch, lead = size_class.shape
        self.arena = arena
        self.size_class = size_class
        self.stretch = stretch
        self.slots = slots
        self.free = [stretch.start + lead + i * pitch for i in reversed(range(slots))]


class _Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """Some of a slot's memory. A view of it keeps this, and this keeps the slot."""

    slot: Slot


class Slot:
    """A value's memory. `expires` is a unix time in milliseconds, 0 for never; `unit` is its name in the eviction
    policy.

    `digest` is the XXH3-64 of a body that was hashed as it arrived, until it is stored, and else 0.
    """

    __slots__ = ("_chunk", "_start", "at", "digest", "expires", "size", "unit")

    def __init__(self, chunk: SlotChunk, start: int, size: int) -> None:
        frame = b"$%d\r\n" % size
        self._chunk = chunk
        self._start = start  # of the header, in the region
        self.at = start + HEADER_SIZE + len(frame)  # of the body, likewise
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
        """Writable: body and CRLF."""
        return self._memory(self.at, self.at + self.size + SUFFIX)

    @property
    def body(self) -> memoryview:
        """Writable: the value's bytes."""
        return self._memory(self.at, self.at + self.size)

    @property
    def header(self) -> memoryview:
        """Writable: the 64 bytes before the frame."""
        return self._memory(self._start, self._start + HEADER_SIZE)

    @property
    def view(self) -> memoryview:
        """The body as a bulk string: frame, bytes, CRLF."""
        return self._memory(self._start + HEADER_SIZE, self.at + self.size + SUFFIX)

    @property
    def borrowed(self) -> memoryview:
        """The same, faster. It does not keep the slot alive; the caller must."""
        return self._chunk.stretch.region.memory[self._start + HEADER_SIZE : self.at + self.size + SUFFIX]

    @property
    def blob(self) -> tuple[bytes, Part, bytes]:
        """Header and body as a bulk string, in pieces."""
        return b"$%d\r\n%b" % (HEADER_SIZE + self.size, bytes(self.header)), self.part(0, self.size), b"\r\n"

    def part(self, start: int, stop: int) -> Part:
        """Return the bytes of the body from `start` to before `stop`."""
        return Part(self, start, stop)

    @property
    def footprint(self) -> int:
        """Bytes of memory it occupies."""
        return self._chunk.size_class.shape.pitch


class Part:
    """Some of a slot's bytes, as a piece of a reply. Keeps the slot."""

    __slots__ = ("size", "slot", "start")

    def __init__(self, slot: Slot, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= slot.size:
            raise ValueError(f"a part is within the {slot.size} bytes of its slot, got {start} to {stop}")
        self.slot = slot
        self.start = start
        self.size = stop - start

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.slot.body[self.start : self.start + self.size]


class Arena:
    """Slots for values of any size. Its owner's thread calls it; the last reference to a slot may go in any."""

    def __init__(self) -> None:
        self.returned: deque[tuple[SlotChunk, int]] = deque()  # slots that nobody refers to, not yet taken back
        self._used = 0
        self._in_chunks = 0  # bytes
        self._empty: dict[SlotChunk, None] = {}
        self._classes: dict[int, SizeClass] = {}
        self._regions = Regions()

    @property
    def used(self) -> int:
        """Bytes of slots in use."""
        self._take_back()
        return self._used

    @property
    def spare(self) -> int:
        """Bytes of empty chunks, and of what can be cut into others."""
        self._take_back()
        return sum(chunk.stretch.size for chunk in self._empty) + self._regions.spare

    @property
    def held(self) -> int:
        """Bytes that were taken from the system."""
        return self._in_chunks + self._regions.spare

    def allocate(self, size: int) -> Slot:
        """Return a slot for a body of `size` bytes. Raises MemoryError when the system has no more."""
        if size < 0:
            raise ValueError(f"a slot has 0 bytes or more, got {size}")
        self._take_back()
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

    def rest(self) -> None:
        """Hand memory back to the system that was spare for long enough."""
        self._let_go()
        self._regions.rest()

    def _take_back(self) -> None:
        """Slots that nobody refers to can be cut again."""
        while self.returned:
            chunk, start = self.returned.popleft()
            size_class = chunk.size_class
            self._used -= size_class.shape.pitch
            size_class.open[chunk] = None
            chunk.free.append(start)
            if len(chunk.free) == chunk.slots:
                self._empty[chunk] = None

    def _class_for(self, size: int) -> SizeClass:
        if size > LARGEST:
            raise MemoryError(f"the system has no {size} bytes more")
        capacity = capacity_for(size)
        found = self._classes.get(capacity)
        if found is None:
            found = self._classes[capacity] = SizeClass(slot_shape(capacity))
        return found

    def _map_chunk(self, size_class: SizeClass) -> None:
        self._let_go()
        nbytes, slots = chunk_shape(size_class.shape, size_class.held)
        chunk = SlotChunk(self, size_class, self._regions.take(nbytes), slots)
        size_class.open[chunk] = None
        size_class.held += nbytes
        self._in_chunks += nbytes
        self._empty[chunk] = None

    def _let_go(self) -> None:
        """Return chunks that are empty, some of them: slots of other sizes may be cut from their memory."""
        self._take_back()
        for chunk in [*islice(self._empty, _CHUNKS_PER_STEP)]:
            del self._empty[chunk], chunk.size_class.open[chunk]
            chunk.size_class.held -= chunk.stretch.size
            self._in_chunks -= chunk.stretch.size
            self._regions.put(chunk.stretch)
