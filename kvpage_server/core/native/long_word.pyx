"""The long word that a parser receives: its bytes are copied to its slot, or received there, and hashed part by part.
"""

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
    """The current long word of a parser, or none."""

    def __cinit__(self):
        self.digest = Digest.__new__(Digest)

    cdef int begin(self, Slot slot, bint hashes) except -1:
        """Begin with an empty slot. With `hashes`, hash its bytes."""
        self.slot = slot
        self.hashes = hashes
        self.filled = self.digested = 0
        return 0

    cdef Py_ssize_t missing(self) noexcept:
        """Return the number of missing bytes, including the CRLF."""
        return self.slot.size + 2 - self.filled

    cdef char *place(self) noexcept:
        """Return the address of the next byte to receive."""
        return self.slot.at + self.filled

    cdef Py_ssize_t fill(self, const char *data, Py_ssize_t count) except -1:
        """Copy up to `count` bytes of `data` that belong to the word. Return their number."""
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
        """Count `count` bytes that were written to the slot. Hash them now, while they are in the processor's cache."""
        self.filled += count
        if not self.hashes:
            return 0
        cdef Slot slot = self.slot
        cdef Py_ssize_t end = min(self.filled, slot.size)
        count = end - self.digested
        cdef const char *text = slot.at + self.digested
        cdef Digest digest = self.digest
        # Hash a word that was received in one part with one call, and another one incrementally.
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
        """Return the slot of a complete word, which ends. Raise ProtocolError if no CRLF follows the word."""
        cdef Slot slot = self.slot
        if slot.at[slot.size] != b"\r" or slot.at[slot.size + 1] != b"\n":
            raise ProtocolError(protocol.NO_CRLF)
        self.slot = None
        return slot
