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
    Chunk *older  # among those that are empty
    Chunk *newer
    double since  # when it became empty


cdef class Arena:
    cdef readonly Py_ssize_t used  # bytes of slots in use
    cdef readonly Py_ssize_t spare  # bytes of empty chunks
    cdef readonly Py_ssize_t held  # bytes that were taken from the system
    cdef object regions
    cdef SizeClass *classes
    cdef Chunk *oldest  # of the empty ones
    cdef Chunk *newest
    cdef double now  # when it last rested, in monotonic seconds: it need not be told at every slot
    cdef Slot take(self, Py_ssize_t size)  # raises MemoryError
    cdef Chunk *map_chunk(self, Py_ssize_t index) except NULL
    cdef int give_back(self, double since) except -1


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
