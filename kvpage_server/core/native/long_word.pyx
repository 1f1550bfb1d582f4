"""A long word on its way into its slot: copied there or received there, piece by piece, and hashed as it comes."""

cimport cython
from libc.string cimport memcpy

from kvpage_server.core.native.slots cimport Slot

from kvpage_server.core import protocol
from kvpage_server.core.protocol import ProtocolError

cdef extern from "xxhash.h" nogil:
    ctypedef int XXH_errorcode
    unsigned long long XXH3_64bits(const void *, size_t)
    XXH3_state_t *XXH3_createState()
    XXH_errorcode XXH3_freeState(XXH3_state_t *)
    XXH_errorcode XXH3_64bits_reset(XXH3_state_t *)
    XXH_errorcode XXH3_64bits_update(XXH3_state_t *, const void *, size_t)
    unsigned long long XXH3_64bits_digest(const XXH3_state_t *)

cdef Py_ssize_t ALONE = 16 * 1024  # bytes copied or hashed without the interpreter's lock


@cython.final
@cython.no_gc
cdef class LongWord:
    def __dealloc__(self):
        XXH3_freeState(self.digest)

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
        if count >= ALONE:
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
        cdef XXH3_state_t *digest = self.digest
        if count == slot.size:
            if count >= ALONE:
                with nogil:
                    slot.digest = XXH3_64bits(text, count)
            else:
                slot.digest = XXH3_64bits(text, count)
        elif count:
            if digest == NULL:
                digest = self.digest = XXH3_createState()
                if digest == NULL:
                    raise MemoryError("the system has no memory to hash what is received")
            if not self.digested:
                XXH3_64bits_reset(digest)
            if count >= ALONE:
                with nogil:
                    XXH3_64bits_update(digest, text, count)
            else:
                XXH3_64bits_update(digest, text, count)
            if end == slot.size:
                slot.digest = XXH3_64bits_digest(digest)
        self.digested = end
        return 0

    cdef Slot end(self):
        """The slot, which is whole. Raises ProtocolError where no CRLF stands behind it."""
        cdef Slot slot = self.slot
        if slot.at[slot.size] != b"\r" or slot.at[slot.size + 1] != b"\n":
            raise ProtocolError(protocol.NO_CRLF)
        self.slot = None
        return slot
