from kvpage_server.core.native.hashing cimport Digest
from kvpage_server.core.native.slots cimport Slot


cdef class LongWord:
    cdef Slot slot  # None when no long word is under way
    cdef Py_ssize_t filled, digested  # bytes of it that are there, its CRLF among them, and that are hashed
    cdef bint hashes  # whether its digest is wanted
    cdef Digest digest

    cdef int begin(self, Slot slot, bint hashes) except -1
    cdef Py_ssize_t missing(self) noexcept
    cdef char *place(self) noexcept
    cdef Py_ssize_t fill(self, const char *data, Py_ssize_t count) except -1
    cdef int arrived(self, Py_ssize_t count) except -1
    cdef Slot end(self)
