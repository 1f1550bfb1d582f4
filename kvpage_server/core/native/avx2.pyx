"""XXH3-64 and the lossless code for x86-64 processors with AVX2. If the compiler is not GCC, `can_run` is false."""

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    #pragma GCC push_options
    #pragma GCC target("avx2,bmi,popcnt")
    #define XXH_VECTOR XXH_AVX2
    #include <xxhash.h>
    #include "coding.h"
    static unsigned long long avx2_digest_of(const void *text, size_t size) { return XXH3_64bits(text, size); }
    static unsigned long long avx2_seeded_digest_of(const void *text, size_t size, unsigned long long seed) {
        return XXH3_64bits_withSeed(text, size, seed);
    }
    static void avx2_update(void *state, const void *text, size_t size) { XXH3_64bits_update(state, text, size); }
    #pragma GCC pop_options
    static int avx2_can_run(void) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
    }
    #else
    #include "coding.h"
    static unsigned long long avx2_digest_of(const void *text, size_t size) { return 0; }
    static unsigned long long avx2_seeded_digest_of(const void *text, size_t size, unsigned long long seed) { return 0; }
    static void avx2_update(void *state, const void *text, size_t size) {}
    static int avx2_can_run(void) { return 0; }
    #endif
    """
    bint avx2_can_run() nogil
    unsigned long long avx2_digest_of(const void *, size_t) nogil
    unsigned long long avx2_seeded_digest_of(const void *, size_t, unsigned long long) nogil
    void avx2_update(void *, const void *, size_t) nogil
    ctypedef struct Coder:
        pass
    const Coder CODERS[3]


cdef bint can_run() noexcept nogil:
    return avx2_can_run()


cdef unsigned long long digest_of(const void *text, size_t size) noexcept nogil:
    return avx2_digest_of(text, size)


cdef unsigned long long seeded_digest_of(const void *text, size_t size, unsigned long long seed) noexcept nogil:
    return avx2_seeded_digest_of(text, size, seed)


cdef void update(void *state, const void *text, size_t size) noexcept nogil:
    avx2_update(state, text, size)


cdef const void *coder_of(int code) noexcept nogil:
    """Return the Coder of bfloat16, 1, float16, 2, or float32, 3."""
    return &CODERS[code - 1]
