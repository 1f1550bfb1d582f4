cdef bint can_run() noexcept nogil
cdef const void *coder_of(int code) noexcept nogil
