from kvpage_server.core.native.hashing cimport Digest
from kvpage_server.core.native.slots cimport Slot


cdef class LongWord:
    cdef Slot slot  # the slot of the current long word; None without one
    cdef Py_ssize_t filled, digested  # bytes that were received, including the CRLF, and bytes that were hashed
    cdef bint hashes  # whether the slot gets a digest
    cdef Digest digest  # the hash of a word that is received in several parts

    cdef int begin(self, Slot slot, bint hashes) except -1
    cdef Py_ssize_t missing(self) noexcept
    cdef char *place(self) noexcept nogil
    cdef Py_ssize_t fill(self, const char *data, Py_ssize_t count) noexcept
    cdef void arrived(self, const char *data, Py_ssize_t count) noexcept
    cdef void put(self, const char *data, Py_ssize_t count) noexcept nogil
    cdef Slot end(self)
