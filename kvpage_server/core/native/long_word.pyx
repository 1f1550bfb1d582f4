"""A long word on its way into its slot: copied there or received there, piece by piece, and hashed as it comes."""

cimport cython
from libc.string cimport memcpy

from kvpage_server.core.native.hashing cimport Digest, digest_of
from kvpage_server.core.native.slots cimport Slot
from kvpage_server.core.native.unlocked cimport UNLOCKED_FROM

from kvpage_server.core import protocol
from kvpage_server.core.protocol import ProtocolError


@cython.final
@cython.no_gc
cdef class LongWord:
    def __cinit__(self):
        self.digest = Digest.__new__(Digest)

    cdef int begin(self, Slot slot, bint hashes) except -1:
        self.slot = slot
        self.hashes = hashes
        self.filled = self.digested = 0
        return 0

    cdef Py_ssize_t missing(self) noexcept:
        """Bytes still to come."""
        return self.slot.size + 2 - self.filled

    cdef char *place(self) noexcept:
        """Where these belong."""
        return self.slot.at + self.filled

    cdef Py_ssize_t fill(self, const char *data, Py_ssize_t count) except -1:
        """Copy there what belongs to it; so many bytes."""
        count = min(count, self.missing())
        cdef char *place = self.place()
        if count >= UNLOCKED_FROM:
            with nogil:
                memcpy(place, data, count)
        elif count:
            memcpy(place, data, count)
        self.arrived(count)
        return count

    cdef int arrived(self, Py_ssize_t count) except -1:
        """So many bytes more are there. They are hashed now, if that is wanted: they are in the processor's cache."""
        self.filled += count
        if not self.hashes:
            return 0
        cdef Slot slot = self.slot
        cdef Py_ssize_t end = min(self.filled, slot.size)
        count = end - self.digested
        cdef const char *text = slot.at + self.digested
        cdef Digest digest = self.digest
        if count == slot.size:
            if count >= UNLOCKED_FROM:
                with nogil:
                    slot.digest = digest_of(text, count)
            else:
                slot.digest = digest_of(text, count)
        elif count:
            if not self.digested:
                digest.begin()
            if count >= UNLOCKED_FROM:
                with nogil:
                    digest.add(text, count)
            else:
                digest.add(text, count)
            if end == slot.size:
                slot.digest = digest.value()
        self.digested = end
        return 0

    cdef Slot end(self):
        """The slot, which is whole. Raises ProtocolError where no CRLF stands behind it."""
        cdef Slot slot = self.slot
        if slot.at[slot.size] != b"\r" or slot.at[slot.size + 1] != b"\n":
            raise ProtocolError(protocol.NO_CRLF)
        self.slot = None
        return slot
