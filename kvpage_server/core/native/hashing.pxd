cdef extern from "xxhash.h" nogil:
    ctypedef struct XXH3_state_t:
        pass


cdef unsigned long long digest_of(const void *text, size_t size) noexcept nogil
cdef unsigned long long seeded_digest_of(const void *text, size_t size, unsigned long long seed) noexcept nogil


cdef class Digest:
    cdef XXH3_state_t *state  # NULL before the first `allocate`

    cdef int allocate(self) except -1
    cdef int begin(self) except -1
    cdef void reset(self) noexcept nogil
    cdef void add(self, const void *text, size_t size) noexcept nogil
    cdef unsigned long long value(self) noexcept nogil
