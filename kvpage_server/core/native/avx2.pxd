cdef bint can_run() noexcept nogil  # whether this processor has AVX2, and the functions were compiled for it
cdef unsigned long long digest_of(const void *text, size_t size) noexcept nogil
cdef unsigned long long seeded_digest_of(const void *text, size_t size, unsigned long long seed) noexcept nogil
cdef void update(void *state, const void *text, size_t size) noexcept nogil
cdef const void *coder_of(int code) noexcept nogil
