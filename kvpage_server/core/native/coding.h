/* The lossless code of docs/page-code.md. The reference implementation is core/python/coding.py.

   Rows are coded in groups of eight. All loops work on bytes or words of a row or group, without branches, so that
   compilers vectorise them for every processor. Only escapes are handled one by one; they are 1 to 2 % of the values of a
   KV cache. `code` is a constant in each instance of these functions. `n` is the number of channels, a multiple of 8.
   Memory has `pages` matrices of n / pages channels, one after the other. A row of all of them is coded as one row. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum {
    BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3,
    BITS = 3,     /* of the code of an exponent */
    ESCAPE = 7,   /* the code of an exponent that is not within seven below the base */
    ROWS = 8,     /* of a group; their codes are whole bytes */
    STRIPE = 64,  /* values of a loop that the compiler unrolls */
    USUAL = 4,    /* escapes of 64 codes that are written without a branch */
    TRIED = 4,    /* bases that are tried for each channel */
    SAMPLES = 32, /* the most rows that are examined for a base */
    PER_CHANNEL = SAMPLES + TRIED + 1, /* bytes of scratch memory */
};

/* Elements at any address: callers may have memory that is not aligned. */
typedef uint16_t __attribute__((aligned(1), may_alias)) Half;
typedef uint32_t __attribute__((aligned(1), may_alias)) Full;

#define INLINE static inline __attribute__((always_inline))
#define EACH(count) _Pragma("GCC ivdep") for (size_t i = 0; i < (count); i++) /* no two arrays overlap */
#define EACH_WORD(count) _Pragma("GCC ivdep") for (size_t i = 0; i < (count); i += 8)
#define IN_ALL_BYTES(byte) (UINT64_C(0x0101010101010101) * (uint64_t)(byte))

INLINE size_t element_size(int code) { return code == FLOAT32 ? 4 : 2; }

/* Bytes of an element that are stored unchanged. */
INLINE size_t plain_bytes(int code) { return code == FLOAT32 ? 3 : 1; }

/* Numbers of three bits of an element that are packed: the code of its exponent, and the other bits of a float16. */
INLINE size_t packed_numbers(int code) { return code == FLOAT16 ? 2 : 1; }

INLINE size_t packed_bytes(size_t rows) { return (BITS * rows + 7) / 8; }

/* Return the bytes of coded rows without their escapes. */
INLINE size_t fixed_size(size_t rows, size_t n, int code) {
    size_t packed = rows / ROWS * BITS + packed_bytes(rows % ROWS);
    return (rows * plain_bytes(code) + packed * packed_numbers(code)) * n;
}

INLINE void exponents_of(const void *values, size_t m, int code, uint8_t *restrict exponent) {
    const Half *half = values;
    const Full *full = values;
    if (code == BFLOAT16)
        EACH(m) exponent[i] = (uint8_t)(half[i] >> 7);
    else if (code == FLOAT16)
        EACH(m) exponent[i] = (uint8_t)(half[i] >> 10 & 0x1f);
    else
        EACH(m) exponent[i] = (uint8_t)(full[i] >> 23);
}

#ifdef __AVX2__
/* The two functions below for 32 values of bfloat16: compilers do not vectorise them well. */
INLINE void split_32(const void *values, const uint8_t *base, uint8_t *exponent, uint8_t *codes, uint8_t *plain) {
    const __m256i byte = _mm256_set1_epi16(0xff), mantissa = _mm256_set1_epi16(0x7f), sign = _mm256_set1_epi16(0x80);
    __m256i a = _mm256_loadu_si256((const __m256i *)values), b = _mm256_loadu_si256((const __m256i *)values + 1);
    __m256i e = _mm256_packus_epi16(
        _mm256_and_si256(_mm256_srli_epi16(a, 7), byte), _mm256_and_si256(_mm256_srli_epi16(b, 7), byte)
    );
    __m256i rest = _mm256_packus_epi16(
        _mm256_or_si256(_mm256_and_si256(a, mantissa), _mm256_and_si256(_mm256_srli_epi16(a, 8), sign)),
        _mm256_or_si256(_mm256_and_si256(b, mantissa), _mm256_and_si256(_mm256_srli_epi16(b, 8), sign))
    );
    e = _mm256_permute4x64_epi64(e, 0xd8); /* packus takes turns between the halves of a and b */
    __m256i below = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)base), e);
    _mm256_storeu_si256((__m256i *)exponent, e);
    _mm256_storeu_si256((__m256i *)codes, _mm256_min_epu8(below, _mm256_set1_epi8(ESCAPE)));
    _mm256_storeu_si256((__m256i *)plain, _mm256_permute4x64_epi64(rest, 0xd8));
}

INLINE void join_32(void *values, const uint8_t *exponent, const uint8_t *plain) {
    __m256i e = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)exponent), 0xd8);
    __m256i rest = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)plain), 0xd8);
    __m256i sign = _mm256_and_si256(rest, _mm256_set1_epi8((char)0x80)), zero = _mm256_setzero_si256();
    __m256i mantissa = _mm256_add_epi8(rest, rest); /* without the sign, one bit too high, as is the exponent below */
    __m256i low = _mm256_srli_epi16(_mm256_unpacklo_epi8(mantissa, e), 1);
    __m256i high = _mm256_srli_epi16(_mm256_unpackhi_epi8(mantissa, e), 1);
    _mm256_storeu_si256((__m256i *)values, _mm256_or_si256(low, _mm256_unpacklo_epi8(zero, sign)));
    _mm256_storeu_si256((__m256i *)values + 1, _mm256_or_si256(high, _mm256_unpackhi_epi8(zero, sign)));
}
#endif

INLINE void codes_of(const uint8_t *exponent, size_t m, const uint8_t *base, uint8_t *restrict codes) {
    EACH(m) {
        uint8_t below = (uint8_t)(base[i] - exponent[i]);
        codes[i] = below < ESCAPE ? below : ESCAPE;
    }
}

INLINE void exponents_below(const uint8_t *base, size_t m, uint8_t *codes) {
    EACH(m) codes[i] = (uint8_t)(base[i] - codes[i]);
}

/* Write the exponents of m values, their codes, their plain bytes, and their other bits. The plain bytes have an array
   for each byte of a value; these are `apart` bytes apart. */
INLINE void split(
    const void *values, size_t m, int code, const uint8_t *base, uint8_t *restrict exponent, uint8_t *restrict codes,
    uint8_t *restrict plain, size_t apart, uint8_t *restrict other
) {
    const Half *half = values;
    const Full *full = values;
    uint8_t *restrict middle = plain + apart, *restrict high = plain + 2 * apart;
#ifdef __AVX2__
    if (code == BFLOAT16)
        for (; m >= 32; m -= 32, half += 32, base += 32, exponent += 32, codes += 32, plain += 32)
            split_32(half, base, exponent, codes, plain);
    values = half;
#endif
    exponents_of(values, m, code, exponent);
    codes_of(exponent, m, base, codes);
    if (code == BFLOAT16) {
        EACH(m) plain[i] = (uint8_t)((half[i] & 0x7f) | (half[i] >> 8 & 0x80));
    } else if (code == FLOAT16) {
        EACH(m) plain[i] = (uint8_t)half[i];
        EACH(m) other[i] = (uint8_t)((half[i] >> 8 & 3) | (half[i] >> 13 & 4));
    } else {
        EACH(m) plain[i] = (uint8_t)full[i];
        EACH(m) middle[i] = (uint8_t)(full[i] >> 8);
        EACH(m) high[i] = (uint8_t)((full[i] >> 16 & 0x7f) | (full[i] >> 24 & 0x80));
    }
}

/* Write m values from exponents, plain bytes and other bits. */
INLINE void join(
    void *values, size_t m, int code, const uint8_t *exponent, const uint8_t *plain, size_t apart, const uint8_t *other
) {
    Half *half = values;
    Full *full = values;
    const uint8_t *middle = plain + apart, *high = plain + 2 * apart;
#ifdef __AVX2__
    if (code == BFLOAT16)
        for (; m >= 32; m -= 32, half += 32, exponent += 32, plain += 32) join_32(half, exponent, plain);
#endif
    if (code == BFLOAT16)
        EACH(m) half[i] = (uint16_t)((plain[i] & 0x80) << 8 | exponent[i] << 7 | (plain[i] & 0x7f));
    else if (code == FLOAT16)
        EACH(m) half[i] = (uint16_t)((other[i] & 4) << 13 | (exponent[i] & 0x1f) << 10 | (other[i] & 3) << 8 | plain[i]);
    else
        EACH(m) full[i] = (uint32_t)(high[i] & 0x80) << 24 | (uint32_t)exponent[i] << 23
            | (uint32_t)(high[i] & 0x7f) << 16 | (uint32_t)middle[i] << 8 | plain[i];
}

INLINE uint64_t word_of(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

INLINE void set_word(uint8_t *bytes, uint64_t word) { memcpy(bytes, &word, 8); }

/* Pack eight rows of numbers. Bit b of the number in row r is bit 3 * r + b of the three bytes of its column. */
INLINE void pack_rows(const uint8_t *number, size_t n, size_t rows, uint8_t *out) {
    size_t bytes = packed_bytes(rows);
    EACH_WORD(n) {
        const uint8_t *a = number + i;
        uint64_t a2 = word_of(a + 2 * n), a5 = word_of(a + 5 * n);
        set_word(out + i, word_of(a) | word_of(a + n) << 3 | (a2 & IN_ALL_BYTES(3)) << 6);
        if (bytes > 1) set_word(
            out + n + i,
            (a2 >> 2 & IN_ALL_BYTES(1)) | word_of(a + 3 * n) << 1 | word_of(a + 4 * n) << 4 | (a5 & IN_ALL_BYTES(1)) << 7
        );
        if (bytes > 2)
            set_word(out + 2 * n + i, (a5 >> 1 & IN_ALL_BYTES(3)) | word_of(a + 6 * n) << 2 | word_of(a + 7 * n) << 5);
    }
}

INLINE void unpack_rows(const uint8_t *in, size_t n, size_t rows, uint8_t *number) {
    size_t bytes = packed_bytes(rows);
    EACH_WORD(n) {
        uint64_t x = word_of(in + i), y = bytes > 1 ? word_of(in + n + i) : 0, z = bytes > 2 ? word_of(in + 2 * n + i) : 0;
        uint8_t *a = number + i;
        set_word(a, x & IN_ALL_BYTES(7));
        set_word(a + n, x >> 3 & IN_ALL_BYTES(7));
        set_word(a + 2 * n, (x >> 6 & IN_ALL_BYTES(3)) | (y << 2 & IN_ALL_BYTES(4)));
        set_word(a + 3 * n, y >> 1 & IN_ALL_BYTES(7));
        set_word(a + 4 * n, y >> 4 & IN_ALL_BYTES(7));
        set_word(a + 5 * n, (y >> 7 & IN_ALL_BYTES(1)) | (z << 1 & IN_ALL_BYTES(6)));
        set_word(a + 6 * n, z >> 2 & IN_ALL_BYTES(7));
        set_word(a + 7 * n, z >> 5 & IN_ALL_BYTES(7));
    }
}

/* Eight rows are the usual case, for which the compiler vectorises. */
INLINE void pack(const uint8_t *number, size_t n, size_t rows, uint8_t *out) {
    if (rows == ROWS) pack_rows(number, n, ROWS, out);
    else pack_rows(number, n, rows, out);
}

INLINE void unpack(const uint8_t *in, size_t n, size_t rows, uint8_t *number) {
    if (rows == ROWS) unpack_rows(in, n, ROWS, number);
    else unpack_rows(in, n, rows, number);
}

/* Return a word with a bit for each of the next 64 codes, or of `left` if there are fewer: whether it is an escape. */
INLINE uint64_t escapes_in(const uint8_t *codes, size_t left) {
    uint64_t found = 0;
#ifdef __AVX2__
    if (left >= 64) {
        const __m256i escape = _mm256_set1_epi8(ESCAPE);
        __m256i low = _mm256_loadu_si256((const __m256i *)codes), high = _mm256_loadu_si256((const __m256i *)(codes + 32));
        return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, escape))
            | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, escape)) << 32;
    }
#endif
    for (size_t i = 0; i < (left < 64 ? left : 64); i += 8) {
        uint64_t x = (word_of(codes + i) + IN_ALL_BYTES(1)) >> 3 & IN_ALL_BYTES(1);
        found |= (x * UINT64_C(0x0102040810204080)) >> 56 << i; /* one bit of each byte */
    }
    return found;
}

/* Choose the base of each channel of a matrix: the largest exponent, or one of the next three if fewer exponents of the
   examined rows are then escapes. */
INLINE void choose_bases(const char *in, size_t rows, size_t n, int code, uint8_t *scratch, uint8_t *restrict base) {
    size_t step = (rows + SAMPLES - 1) / SAMPLES, examined = (rows + step - 1) / step;
    uint8_t *exponents = scratch, *top = scratch + examined * n;
    uint8_t *restrict count0 = top + n, *restrict count1 = count0 + n;
    uint8_t *restrict count2 = count1 + n, *restrict count3 = count2 + n;
    memset(top, 0, (1 + TRIED) * n);
    for (size_t r = 0; r < examined; r++) {
        const uint8_t *exponent = exponents + r * n;
        exponents_of(in + r * step * n * element_size(code), n, code, exponents + r * n);
        EACH(n) top[i] = exponent[i] > top[i] ? exponent[i] : top[i];
    }
    for (size_t r = 0; r < examined; r++) {
        const uint8_t *exponent = exponents + r * n;
        EACH(n) {
            uint8_t below = (uint8_t)(top[i] - exponent[i]);
            count0[i] += below >= ESCAPE;
            count1[i] += (uint8_t)(below - 1) >= ESCAPE;
            count2[i] += (uint8_t)(below - 2) >= ESCAPE;
            count3[i] += (uint8_t)(below - 3) >= ESCAPE;
        }
    }
    EACH(n) {
        uint8_t down = 0, fewest = count0[i];
        down = count1[i] < fewest ? 1 : down, fewest = count1[i] < fewest ? count1[i] : fewest;
        down = count2[i] < fewest ? 2 : down, fewest = count2[i] < fewest ? count2[i] : fewest;
        down = count3[i] < fewest ? 3 : down;
        base[i] = (uint8_t)(top[i] - down);
    }
}

/* Code rows. Return the bytes, or 0 if there are more than `room`. */
INLINE size_t encode_rows(
    const char *in, size_t rows, size_t n, size_t pages, int code, uint8_t *scratch, uint8_t *out, size_t room
) {
    size_t fixed = n + fixed_size(rows, n, code), width = n / pages, escaped = 0;
    uint8_t *base = out, *escape = out + fixed;
    uint8_t *exponent = scratch, *codes = exponent + ROWS * n, *others = codes + ROWS * n;
    if (fixed > room) return 0;
    room -= fixed;
    for (size_t p = 0; p < pages; p++)
        choose_bases(in + p * rows * width * element_size(code), rows, width, code, scratch, base + p * width);
    out += n;
    for (size_t first = 0; first < rows; first += ROWS) {
        size_t count = rows - first < ROWS ? rows - first : ROWS, m = count * n;
        if (count < ROWS) memset(codes, 0, 2 * ROWS * n);
        for (size_t p = 0; p < pages; p++)
            for (size_t r = 0; r < count; r++) {
                const char *values = in + (p * rows + first + r) * width * element_size(code);
                size_t at = r * n + p * width;
                split(values, width, code, base + p * width, exponent + at, codes + at, out + at, m, others + at);
            }
        for (size_t i = 0; i < m; i += 64) {
            uint64_t found = escapes_in(codes + i, m - i);
            uint8_t *next = escape + escaped;
            escaped += (size_t)__builtin_popcountll(found);
            if (escaped > room) return 0;
            if (room - escaped >= USUAL) /* a loop with an end that no processor can predict takes longer */
                for (int k = 0; k < USUAL; k++, found &= found - 1)
                    *next++ = exponent[i + (size_t)__builtin_ctzll(found | UINT64_C(1) << 63)];
            for (; found; found &= found - 1) *next++ = exponent[i + (size_t)__builtin_ctzll(found)];
        }
        out += m * plain_bytes(code);
        pack(codes, n, count, out);
        out += packed_bytes(count) * n;
        if (packed_numbers(code) == 2) {
            pack(others, n, count, out);
            out += packed_bytes(count) * n;
        }
    }
    return fixed + escaped;
}

/* Decode rows. Return whether `size` is the bytes that the rows and their escapes have. */
INLINE int decode_rows(
    const uint8_t *in, size_t size, size_t rows, size_t n, size_t pages, int code, uint8_t *scratch, char *out
) {
    size_t fixed = n + fixed_size(rows, n, code), width = n / pages;
    const uint8_t *base = in, *escape = in + fixed, *end = in + size;
    uint8_t *exponent = scratch, *others = exponent + ROWS * n;
    if (size < fixed) return 0;
    in += n;
    for (size_t first = 0; first < rows; first += ROWS) {
        size_t count = rows - first < ROWS ? rows - first : ROWS, m = count * n;
        const uint8_t *plain = in;
        in += m * plain_bytes(code);
        unpack(in, n, count, exponent);
        in += packed_bytes(count) * n;
        if (packed_numbers(code) == 2) {
            unpack(in, n, count, others);
            in += packed_bytes(count) * n;
        }
        for (size_t r = 0; r < count; r++) {
            uint8_t *row = exponent + r * n; /* codes, which become exponents */
            for (size_t i = 0; i < n; i += 64) {
                uint64_t found = escapes_in(row + i, n - i);
                if (n - i >= STRIPE) exponents_below(base + i, STRIPE, row + i);
                else exponents_below(base + i, n - i, row + i);
                for (; found; found &= found - 1) {
                    if (escape == end) return 0;
                    row[i + (size_t)__builtin_ctzll(found)] = *escape++;
                }
            }
        }
        for (size_t p = 0; p < pages; p++)
            for (size_t r = 0; r < count; r++) {
                char *values = out + (p * rows + first + r) * width * element_size(code);
                size_t at = r * n + p * width;
                join(values, width, code, exponent + at, plain + at, m, others + at);
            }
    }
    return escape == end;
}

/* The functions above for one kind of elements. */
typedef struct {
    size_t (*encode)(const char *, size_t, size_t, size_t, uint8_t *, uint8_t *, size_t);
    int (*decode)(const uint8_t *, size_t, size_t, size_t, size_t, uint8_t *, char *);
} Coder;

#define CODER(NAME, CODE)                                                                                              \
    static size_t NAME##_encode(                                                                                       \
        const char *in, size_t rows, size_t n, size_t pages, uint8_t *scratch, uint8_t *out, size_t room               \
    ) {                                                                                                                \
        return encode_rows(in, rows, n, pages, CODE, scratch, out, room);                                              \
    }                                                                                                                  \
    static int NAME##_decode(                                                                                          \
        const uint8_t *in, size_t size, size_t rows, size_t n, size_t pages, uint8_t *scratch, char *out               \
    ) {                                                                                                                \
        return decode_rows(in, size, rows, n, pages, CODE, scratch, out);                                              \
    }
CODER(bfloat16, BFLOAT16)
CODER(float16, FLOAT16)
CODER(float32, FLOAT32)
static const Coder CODERS[] = {
    {bfloat16_encode, bfloat16_decode},
    {float16_encode, float16_decode},
    {float32_encode, float32_decode},
};
