from libc.stdint cimport int64_t, uint64_t


cdef class Arena:
    cdef readonly Py_ssize_t used  # bytes of slots in use
    cdef Slot take(self, Py_ssize_t size)  # raises MemoryError


cdef class Slot:
    cdef object chunk  # what the memory goes back to
    cdef char *at  # the body's first byte; its frame stands before it, its CRLF behind it
    cdef readonly Py_ssize_t size  # bytes of the body
    cdef public uint64_t digest
    cdef public int64_t expires
    cdef public object unit


cdef char *header_of(Slot slot)  # the 64 bytes before the frame
