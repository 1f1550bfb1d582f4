cdef bint can_run() noexcept nogil  # here: on this processor
cdef unsigned long long digest_of(const void *text, size_t size) noexcept nogil
cdef void update(void *state, const void *text, size_t size) noexcept nogil
