from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint16_t, uint64_t


cdef struct SizeClass:  # slots of one size and the chunks they are cut from
    Py_ssize_t pitch  # bytes from one slot to the next
    Py_ssize_t lead  # bytes before the first of a chunk
    Py_ssize_t held  # bytes of its chunks
    Chunk *open  # those with a free slot; the first is cut first


cdef struct Chunk:  # some memory in slots of one size
    PyObject *arena  # borrowed: each slot that is in use has a reference
    PyObject *stretch  # owned: where the memory comes from
    SizeClass *size_class
    char *start  # of the first slot
    Py_ssize_t size  # bytes
    Py_ssize_t slots
    Py_ssize_t cut  # so many of the first have been in use
    Py_ssize_t free  # so many of these are not now
    uint16_t *places  # which
    Chunk *before  # among those with a free slot
    Chunk *behind
    Chunk *empty_before  # among those that are empty
    Chunk *empty_behind


cdef class Arena:
    cdef readonly Py_ssize_t used  # bytes of slots in use
    cdef Py_ssize_t in_chunks  # bytes of chunks
    cdef Py_ssize_t in_empty_chunks
    cdef object regions
    cdef SizeClass *classes
    cdef Chunk *empty  # chunks that are
    cdef Slot take(self, Py_ssize_t size)  # raises MemoryError
    cdef Chunk *map_chunk(self, Py_ssize_t index) except NULL
    cdef int let_go(self) except -1


cdef class Slot:
    cdef Chunk *chunk  # what the memory goes back to
    cdef char *at  # the body's first byte; its frame stands before it, its CRLF behind it
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
