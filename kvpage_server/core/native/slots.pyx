# cython: auto_pickle=False
"""The arena. The reference implementation, `core/python/slots.py`, documents the classes.

Chunks and their lists are C structures, so that allocating or freeing a slot takes two or three dozen instructions:
O(1). No Python code runs between a read and a change of them, so the interpreter's lock protects them, and any thread
may drop the last reference to a slot.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport calloc, free, malloc

from kvpage_server.core.regions import Regions
from kvpage_server.core.regions import LARGEST as _LARGEST
from kvpage_server.core.regions import chunk_shape, slot_shape
from kvpage_server.page import HEADER_SIZE

cdef extern from * nogil:
    int __builtin_clzll(unsigned long long)

cdef Py_ssize_t HEADER = HEADER_SIZE
cdef Py_ssize_t LARGEST = _LARGEST
cdef int CHUNKS_PER_STEP = 256  # chunks returned in one call, because other clients wait meanwhile


# -- sizes -------------------------------------------------------------------------------------------------------------


cdef int frame_size(Py_ssize_t size) noexcept nogil:
    """Return the bytes of the frame of a body of `size` bytes: a dollar sign, the digits, CRLF."""
    cdef int digits = 1
    while size >= 10:
        size //= 10
        digits += 1
    return digits + 3


cdef inline Py_ssize_t class_of(Py_ssize_t size) noexcept nogil:
    """Return the index of the size class for a body of `size` bytes. From 64 on, there are four for each doubling."""
    if size <= 64:
        return 0
    cdef int doubled = 64 - __builtin_clzll(size - 1)  # number of bits of size - 1
    return 4 * (doubled - 7) + ((size - 1) >> (doubled - 3)) - 3


cdef Py_ssize_t CLASSES = class_of(LARGEST) + 1  # number of size classes


cdef Py_ssize_t capacity_of(Py_ssize_t index) noexcept nogil:
    """Return the bytes of the longest body in a size class."""
    if index == 0:
        return 64
    return (5 + ((index - 1) & 3)) << (((index - 1) >> 2) + 4)


# -- chunks ------------------------------------------------------------------------------------------------------------


cdef inline void open_chunk(Chunk *chunk) noexcept nogil:
    """Insert a chunk at the front of the list of chunks with a free slot."""
    cdef SizeClass *size_class = chunk.size_class
    chunk.before, chunk.behind = NULL, size_class.open
    if chunk.behind != NULL:
        chunk.behind.before = chunk
    size_class.open = chunk


cdef inline void close_chunk(Chunk *chunk) noexcept nogil:
    """Remove a chunk from the list of chunks with a free slot."""
    if chunk.before != NULL:
        chunk.before.behind = chunk.behind
    else:
        chunk.size_class.open = chunk.behind
    if chunk.behind != NULL:
        chunk.behind.before = chunk.before


cdef inline Py_ssize_t in_use(Chunk *chunk) noexcept nogil:
    """Return the number of slots in use."""
    return chunk.cut - chunk.free


cdef inline void note_empty(Arena arena, Chunk *chunk) noexcept:
    """Insert a chunk at the front of the list of chunks without a slot in use."""
    arena.in_empty_chunks += chunk.size
    chunk.empty_before, chunk.empty_behind = NULL, arena.empty
    if chunk.empty_behind != NULL:
        chunk.empty_behind.empty_before = chunk
    arena.empty = chunk


cdef inline void note_not_empty(Arena arena, Chunk *chunk) noexcept:
    """Remove a chunk from the list of chunks without a slot in use."""
    arena.in_empty_chunks -= chunk.size
    if chunk.empty_before != NULL:
        chunk.empty_before.empty_behind = chunk.empty_behind
    else:
        arena.empty = chunk.empty_behind
    if chunk.empty_behind != NULL:
        chunk.empty_behind.empty_before = chunk.empty_before


cdef Chunk *new_chunk(object regions, Py_ssize_t size, Py_ssize_t slots) except NULL:
    """Allocate a chunk of `size` bytes for `slots` slots, which is in no list. Raise MemoryError."""
    cdef Chunk *chunk = <Chunk *>calloc(1, sizeof(Chunk))
    cdef uint16_t *places = <uint16_t *>malloc(slots * sizeof(uint16_t))
    cdef Py_ssize_t address
    try:
        if chunk == NULL or places == NULL:
            raise MemoryError
        stretch = regions.take(size)
        address = stretch.address
    except:
        free(chunk)
        free(places)
        raise
    Py_INCREF(stretch)
    chunk.stretch = <PyObject *>stretch
    chunk.start = <char *>address
    chunk.size = size
    chunk.slots = slots
    chunk.places = places
    return chunk


cdef void free_chunk(Chunk *chunk) noexcept:
    """Free the structure of a chunk, which is in no list, and its reference to the stretch."""
    Py_DECREF(<object>chunk.stretch)
    free(chunk.places)
    free(chunk)


# -- slots -------------------------------------------------------------------------------------------------------------


@cython.final
@cython.no_gc
@cython.freelist(1024)  # a batch of pages drops and creates hundreds of objects
cdef class Slot:
    """The memory of one value.

    `expires` is in unix milliseconds, 0 for never. `unit` is the block of a page, None for a string. `digest` is the
    XXH3-64 of a body that was hashed while it was received and is not stored yet, and 0 otherwise.

    The garbage collector does not track slots. So `unit` must not refer to the slot, neither directly nor through other
    objects.
    """

    def __init__(self):
        raise TypeError("an arena allocates slots")

    def __dealloc__(self):
        cdef Chunk *chunk = self.chunk
        if chunk == NULL:
            return
        cdef Arena arena = <Arena>chunk.arena
        cdef Py_ssize_t pitch = chunk.size_class.pitch
        # Push the slot on the stack of free slots. A full chunk gets a free slot.
        if in_use(chunk) == chunk.slots:
            open_chunk(chunk)
        chunk.places[chunk.free] = <uint16_t>((self.at - chunk.start) // pitch)
        chunk.free += 1
        arena.used -= pitch
        if in_use(chunk) == 0:
            chunk.cut = chunk.free = 0  # the next slot is the first one of the chunk
            note_empty(arena, chunk)
        Py_DECREF(arena)

    @property
    def room(self):
        """Body and CRLF, writable."""
        return view_of(self, 0, self.size + 2)

    @property
    def body(self):
        """The value's bytes, writable."""
        return view_of(self, 0, self.size)

    @property
    def header(self):
        """The 64 bytes before the frame, writable."""
        return view_of(self, -frame_size(self.size) - HEADER, HEADER)

    @property
    def view(self):
        """The body as a bulk string: frame, bytes, CRLF."""
        cdef int frame = frame_size(self.size)
        return view_of(self, -frame, frame + self.size + 2)

    @property
    def blob(self):
        """Header and body as one bulk string, in pieces."""
        return b"$%d\r\n%b" % (HEADER + self.size, header_of(self)[:HEADER]), Part(self, 0, self.size), b"\r\n"

    def part(self, Py_ssize_t start, Py_ssize_t stop):
        """Return the bytes of the body from `start` to before `stop`, as a piece of a reply."""
        return Part(self, start, stop)

    @property
    def place(self):
        """The region that contains the slot, and the offset of the body in its mapping."""
        region = (<object>self.chunk.stretch).region
        cdef Py_ssize_t start = region.address - region.offset
        return region, <Py_ssize_t>self.at - start

    @property
    def footprint(self):
        """Bytes of memory that the slot takes."""
        return self.chunk.size_class.pitch


cdef char *header_of(Slot slot) noexcept:
    """Return the address of the 64 bytes before the frame."""
    return slot.at - frame_size(slot.size) - HEADER


@cython.final
cdef class Part:
    """Bytes of a slot's body as a piece of a reply. The slot stays in use while this object exists."""

    def __init__(self, Slot slot not None, Py_ssize_t start, Py_ssize_t stop):
        if not 0 <= start <= stop <= slot.size:
            raise ValueError(f"a part is within the {slot.size} bytes of its slot, got {start} to {stop}")
        self.slot = slot
        self.start = start
        self.size = stop - start

    @property
    def view(self):
        """The bytes."""
        return view_of(self.slot, self.start, self.size)


@cython.final
@cython.internal
cdef class Memory:
    """A part of a slot's memory.

    A memoryview refers to this object, and this object to the slot, which stays in use.
    """

    cdef Slot slot
    cdef char *start
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        Py_DECREF(None)  # Cython has set buffer.obj to None, and PyBuffer_FillInfo overwrites it
        PyBuffer_FillInfo(buffer, self, self.start, self.size, 0, flags)


cdef object view_of(Slot slot, Py_ssize_t start, Py_ssize_t size):
    """Return a view of `size` bytes from `start` on, counted from the body's first byte; `start` may be negative."""
    cdef Memory memory = Memory.__new__(Memory)
    memory.slot, memory.start, memory.size = slot, slot.at + start, size
    return PyMemoryView_FromObject(memory)


# -- the arena ---------------------------------------------------------------------------------------------------------


@cython.final
cdef class Arena:
    """Allocator of slots. Only its owner's thread may call it, but any thread may drop the last reference to a slot."""

    def __cinit__(self, *, bint shared=False):
        self.regions = Regions(shared=shared)
        self.classes = <SizeClass *>calloc(CLASSES, sizeof(SizeClass))
        if self.classes == NULL:
            raise MemoryError

    def __dealloc__(self):
        """Free all chunks. They are empty, because each slot in use has a reference to the arena."""
        cdef Chunk *chunk = self.empty
        cdef Chunk *behind
        while chunk != NULL:
            behind = chunk.empty_behind
            free_chunk(chunk)
            chunk = behind
        free(self.classes)

    def allocate(self, Py_ssize_t size):
        """Return a slot for a body of `size` bytes. Raise MemoryError if the system has no memory."""
        if size < 0:
            raise ValueError(f"a slot has 0 bytes or more, got {size}")
        return self.take(size)

    @property
    def spare(self):
        """Bytes of empty chunks, and of spare memory of the regions."""
        return self.in_empty_chunks + self.regions.spare

    @property
    def held(self):
        """Bytes of memory from the system: all chunks, and spare memory of the regions."""
        return self.in_chunks + self.regions.spare

    def trim(self):
        """Return empty chunks to their regions, and memory that was spare for long enough to the system."""
        self.free_empty_chunks()
        self.regions.trim()

    cdef Slot take(self, Py_ssize_t size):
        """Allocate a slot for a body of `size` bytes. Raise MemoryError."""
        if size > LARGEST:
            raise MemoryError(f"the system has no {size} bytes more")
        # Select the first chunk of the size class with a free slot, or a new one.
        cdef Slot slot = Slot.__new__(Slot)
        cdef Py_ssize_t index = class_of(size)
        cdef SizeClass *size_class = &self.classes[index]
        cdef Chunk *chunk = size_class.open
        if chunk == NULL:
            chunk = self.map_chunk(index)
        if in_use(chunk) == 0:
            note_not_empty(self, chunk)
        # Take the slot that was freed last, because it may be in the processor's cache; otherwise an unused one.
        cdef Py_ssize_t place
        if chunk.free:
            chunk.free -= 1
            place = chunk.places[chunk.free]
        else:
            place = chunk.cut
            chunk.cut += 1
        if in_use(chunk) == chunk.slots:
            close_chunk(chunk)
        self.used += size_class.pitch
        Py_INCREF(self)
        slot.chunk = chunk
        slot.size = size
        write_frame(slot, chunk.start + place * size_class.pitch + HEADER)
        return slot

    cdef Chunk *map_chunk(self, Py_ssize_t index) except NULL:
        """Allocate an empty chunk for the size class `index`, and return it. Raise MemoryError."""
        cdef SizeClass *size_class = &self.classes[index]
        self.free_empty_chunks()
        shape = slot_shape(capacity_of(index))
        size_class.pitch, size_class.lead = shape.pitch, shape.lead
        nbytes, slots = chunk_shape(shape, size_class.held)
        cdef Chunk *chunk = new_chunk(self.regions, nbytes, slots)
        chunk.arena = <PyObject *>self
        chunk.size_class = size_class
        chunk.start += size_class.lead
        size_class.held += chunk.size
        self.in_chunks += chunk.size
        open_chunk(chunk)
        note_empty(self, chunk)
        return chunk

    cdef int free_empty_chunks(self) except -1:
        """Return up to CHUNKS_PER_STEP empty chunks to their regions, for slots of any size."""
        cdef int i
        cdef Chunk *chunk
        for i in range(CHUNKS_PER_STEP):
            chunk = self.empty
            if chunk == NULL:
                return 0
            note_not_empty(self, chunk)
            close_chunk(chunk)
            chunk.size_class.held -= chunk.size
            self.in_chunks -= chunk.size
            stretch = <object>chunk.stretch
            free_chunk(chunk)
            self.regions.put(stretch)
        return 0


cdef inline void write_frame(Slot slot, char *frame) noexcept:
    """Write a slot's frame at `frame`, and the CRLF behind its body. Set `at`, the start of the body."""
    cdef int size = frame_size(slot.size)
    cdef Py_ssize_t left = slot.size
    cdef int i = size - 3
    frame[0] = c'$'
    while True:
        frame[i] = <char>(c'0' + left % 10)
        left //= 10
        i -= 1
        if left == 0:
            break
    frame[size - 2] = c'\r'
    frame[size - 1] = c'\n'
    slot.at = frame + size
    slot.at[slot.size] = c'\r'
    slot.at[slot.size + 1] = c'\n'
