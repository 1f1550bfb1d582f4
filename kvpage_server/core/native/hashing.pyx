"""XXH3-64 of bytes, in one call or incrementally.

On processors with AVX2, the functions of `avx2` are used. Code for all x86-64 processors uses narrower
registers, and is two to three times as slow.
"""

cimport cython

from kvpage_server.core.native cimport avx2

cdef extern from "xxhash.h" nogil:
    ctypedef int XXH_errorcode
    unsigned long long XXH3_64bits(const void *, size_t)
    unsigned long long XXH3_64bits_withSeed(const void *, size_t, unsigned long long)
    XXH3_state_t *XXH3_createState()
    XXH_errorcode XXH3_freeState(XXH3_state_t *)
    XXH_errorcode XXH3_64bits_reset(XXH3_state_t *)
    XXH_errorcode XXH3_64bits_update(XXH3_state_t *, const void *, size_t)
    unsigned long long XXH3_64bits_digest(const XXH3_state_t *)

cdef bint IS_WIDE = avx2.can_run()


cdef unsigned long long digest_of(const void *text, size_t size) noexcept nogil:
    return avx2.digest_of(text, size) if IS_WIDE else XXH3_64bits(text, size)


cdef unsigned long long seeded_digest_of(const void *text, size_t size, unsigned long long seed) noexcept nogil:
    return avx2.seeded_digest_of(text, size, seed) if IS_WIDE else XXH3_64bits_withSeed(text, size, seed)


@cython.final
@cython.no_gc
cdef class Digest:
    """Incremental XXH3-64 of bytes in several pieces."""

    def __dealloc__(self):
        XXH3_freeState(self.state)

    cdef int allocate(self) except -1:
        """Allocate the memory, unless there is some. Raise MemoryError."""
        if self.state == NULL:
            self.state = XXH3_createState()
            if self.state == NULL:
                raise MemoryError("the system has no memory to hash what is received")
        return 0

    cdef int begin(self) except -1:
        """Start a new hash. Raise MemoryError."""
        self.allocate()
        self.reset()
        return 0

    cdef void reset(self) noexcept nogil:
        """Start a new hash, after `allocate`."""
        XXH3_64bits_reset(self.state)

    cdef void add(self, const void *text, size_t size) noexcept nogil:
        if IS_WIDE:
            avx2.update(self.state, text, size)
        else:
            XXH3_64bits_update(self.state, text, size)

    cdef unsigned long long value(self) noexcept nogil:
        return XXH3_64bits_digest(self.state)
