"""The long word that a parser receives: its bytes are copied to its slot, or received there, and hashed part by part.
"""

cimport cython

cdef extern from *:
    """
    #include <string.h>
    #if defined(__SSE2__)
    #include <emmintrin.h>
    #define PAST_CACHES 8192  /* bytes; shorter copies gain nothing */
    /* Copies as memcpy does, but writes long data past the processor's caches. With memcpy, the processor first reads
       each line that it writes from memory, and the line replaces another one in its caches: 16 KiB into a store of
       800 MiB take 1.7 us, past the caches 1.0 us. */
    static void copy_past_caches(char *to, const char *from, size_t size) {
        if (size >= PAST_CACHES) {
            size_t head = -(size_t)to & 63;  /* up to the first whole line */
            memcpy(to, from, head);
            for (to += head, from += head, size -= head; size >= 64; to += 64, from += 64, size -= 64) {
                __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
                __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
                _mm_stream_si128((__m128i *)to, a);
                _mm_stream_si128((__m128i *)to + 1, b);
                _mm_stream_si128((__m128i *)to + 2, c);
                _mm_stream_si128((__m128i *)to + 3, d);
            }
            _mm_sfence();  /* the lines are in memory before a later write, such as that of a lock, is visible */
        }
        memcpy(to, from, size);
    }
    #else
    #define copy_past_caches memcpy
    #endif
    """
    void copy_past_caches(char *, const char *, size_t) nogil

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
        """Begin with an empty slot. With `hashes`, hash its bytes. Raise MemoryError."""
        if hashes:
            self.digest.allocate()
        self.slot = slot
        self.hashes = hashes
        self.filled = self.digested = 0
        return 0

    cdef Py_ssize_t missing(self) noexcept:
        """Return the number of missing bytes, including the CRLF."""
        return self.slot.size + 2 - self.filled

    cdef char *place(self) noexcept nogil:
        """Return the address of the next byte to receive."""
        return self.slot.at + self.filled

    cdef Py_ssize_t fill(self, const char *data, Py_ssize_t count) noexcept:
        """Copy up to `count` bytes of `data` that belong to the word. Return their number."""
        count = min(count, self.missing())
        self.arrived(data, count)
        return count

    cdef void arrived(self, const char *data, Py_ssize_t count) noexcept:
        """Add `count` bytes. If `data` is NULL, they are in the slot already, otherwise they are copied."""
        if count >= UNLOCKED_FROM:
            with nogil:
                self.put(data, count)
        elif count:
            self.put(data, count)

    cdef void put(self, const char *data, Py_ssize_t count) noexcept nogil:
        """Do the work of `arrived`, and hash the bytes now, while they are in the processor's cache."""
        if data != NULL:
            copy_past_caches(self.place(), data, count)
        self.filled += count
        if not self.hashes:
            return
        cdef Py_ssize_t end = min(self.filled, self.slot.size)
        cdef const char *text = data if data != NULL else self.slot.at + self.digested
        count = end - self.digested
        # Hash a word that was received in one part with one call, and another one incrementally.
        if count == self.slot.size:
            self.slot.digest = digest_of(text, count)
        elif count:
            if not self.digested:
                self.digest.reset()
            self.digest.add(text, count)
            if end == self.slot.size:
                self.slot.digest = self.digest.value()
        self.digested = end

    cdef Slot end(self):
        """Return the slot of a complete word, which ends. Raise ProtocolError if no CRLF follows the word."""
        cdef Slot slot = self.slot
        if slot.at[slot.size] != b"\r" or slot.at[slot.size + 1] != b"\n":
            raise ProtocolError(protocol.NO_CRLF)
        self.slot = None
        return slot
