"""The lossless code for x86-64 processors with AVX2. If the compiler is not GCC, `can_run` is false."""

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    #pragma GCC push_options
    #pragma GCC target("avx2")
    #include "coding.h"
    #pragma GCC pop_options
    static int avx2_can_run(void) { return __builtin_cpu_supports("avx2") != 0; }
    #else
    #include "coding.h"
    static int avx2_can_run(void) { return 0; }
    #endif
    """
    bint avx2_can_run() nogil
    ctypedef struct Coder:
        pass
    const Coder CODERS[3]


cdef bint can_run() noexcept nogil:
    return avx2_can_run()


cdef const void *coder_of(int code) noexcept nogil:
    """Return the Coder of bfloat16, 1, float16, 2, or float32, 3."""
    return &CODERS[code - 1]
