from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint16_t, uint64_t


cdef struct SizeClass:  # the slots of one size, and the chunks that they are cut from
    Py_ssize_t pitch  # bytes from one slot to the next
    Py_ssize_t lead  # bytes before the first slot of a chunk
    Py_ssize_t held  # bytes of all chunks of this size
    Chunk *open  # list of the chunks with a free slot; the next slot is taken from the first chunk


# Memory for slots of one size, which are numbered. The slots from `cut` on were not used since the chunk was last
# empty. The free slots before `cut` are in the stack `places`. So a new chunk needs no list of all its slots. A chunk
# may be in two doubly linked lists: the chunks of its size class with a free slot, and the arena's chunks without a
# slot in use.
cdef struct Chunk:
    PyObject *arena  # borrowed: each slot in use has a reference to it
    PyObject *stretch  # owned: the `Stretch` with the memory
    SizeClass *size_class
    char *start  # of the first slot
    Py_ssize_t size  # bytes
    Py_ssize_t slots  # number of slots
    Py_ssize_t cut  # number of the first slot that was not used since the chunk was last empty
    Py_ssize_t free  # number of free slots before `cut`
    uint16_t *places  # stack of the numbers of these free slots
    Chunk *before  # the neighbours in the list of chunks with a free slot
    Chunk *behind
    Chunk *empty_before  # the neighbours in the list of chunks without a slot in use
    Chunk *empty_behind


cdef class Arena:
    cdef readonly Py_ssize_t used  # bytes of slots in use
    cdef Py_ssize_t in_chunks  # bytes of all chunks
    cdef Py_ssize_t in_empty_chunks  # bytes of chunks without a slot in use
    cdef readonly object regions  # the `Regions` that the chunks' memory is taken from
    cdef SizeClass *classes  # by `class_of`
    cdef Chunk *empty  # list of the chunks without a slot in use
    cdef Slot take(self, Py_ssize_t size)  # raises MemoryError
    cdef Chunk *map_chunk(self, Py_ssize_t index) except NULL
    cdef int free_empty_chunks(self) except -1


cdef class Slot:
    cdef Chunk *chunk  # the chunk that contains the slot
    cdef char *at  # the body's first byte; header and frame are before it, and the CRLF is behind the body
    cdef readonly Py_ssize_t size  # bytes of the body
    cdef public uint64_t digest
    cdef public int64_t expires
    cdef public object unit


cdef class Part:
    cdef readonly Slot slot
    cdef Py_ssize_t start
    cdef readonly Py_ssize_t size


cdef int frame_size(Py_ssize_t size) noexcept nogil  # bytes of "$<size>\r\n"


cdef char *header_of(Slot slot) noexcept  # the 64 bytes before the frame
