"""Digests of data in several pieces. The reference implementation is in `core/python/bodies.py`."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #if defined(__SSE2__)
    #include <emmintrin.h>
    /* Copies as memcpy does. The C library's memcpy is a single instruction for such sizes, which some processors
       execute at half the speed if the two addresses differ in their last bits. */
    static void copy_part(char *to, const char *from, size_t size) {
        for (; size >= 64; to += 64, from += 64, size -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
            _mm_storeu_si128((__m128i *)to, a);
            _mm_storeu_si128((__m128i *)to + 1, b);
            _mm_storeu_si128((__m128i *)to + 2, c);
            _mm_storeu_si128((__m128i *)to + 3, d);
        }
        memcpy(to, from, size);
    }
    #else
    #define copy_part memcpy
    #endif
    """
    void copy_part(char *, const char *, size_t) nogil

from kvpage_server.core.native.hashing cimport Digest, digest_of
from kvpage_server.core.native.memory cimport Memory

from kvpage_server.core.python.bodies import MISFIT
from kvpage_server.page import FIELD_AT, HEADER_SIZE

cdef enum:
    HEADER = 64
    COPIED = 4096  # bytes that are hashed while they are in the processor's nearest cache
assert HEADER == HEADER_SIZE

cdef int BODY_SIZE = FIELD_AT["body_size"], CHECKSUM = FIELD_AT["checksum"]


def digest(pieces not None):
    cdef Memory memory = Memory(pieces)
    cdef Digest found = Digest.__new__(Digest)
    cdef Py_ssize_t i
    found.begin()
    with nogil:
        for i in range(memory.count):
            found.add(memory.buffers[i].buf, memory.buffers[i].len)
    return found.value()


def copy_hashed(source, target):
    cdef Memory into = Memory([target], writable=True), view = Memory([source])
    cdef Digest found = Digest.__new__(Digest)
    cdef Py_ssize_t at = 0, some, left = view.buffers[0].len
    cdef char *copy = <char *>into.buffers[0].buf
    if left != into.buffers[0].len:
        raise ValueError(f"{left} bytes do not fit into {into.buffers[0].len}")
    found.begin()
    with nogil:
        while left:
            some = min(left, COPIED)
            copy_part(copy + at, <const char *>view.buffers[0].buf + at, some)
            found.add(copy + at, some)
            at, left = at + some, left - some
    return found.value()


def fill_digests(headers not None, pieces not None):
    cdef Memory table = Memory([headers], writable=True), bodies = Memory(pieces)
    cdef bint fits
    with nogil:
        fits = fill(<char *>table.buffers[0].buf, table.buffers[0].len, bodies.buffers, bodies.count)
    if not fits:
        raise ValueError(MISFIT)


cdef bint fill(char *header, Py_ssize_t size, const Py_buffer *piece, Py_ssize_t pieces) noexcept nogil:
    """Write each page's digest into its header. Return whether the pieces have the sizes of the headers."""
    cdef const Py_buffer *last = piece + pieces
    cdef Py_ssize_t at = 0
    cdef uint32_t nbytes
    cdef uint64_t found
    if size % HEADER:
        return False
    while size:
        while piece < last and at == piece.len:
            piece, at = piece + 1, 0
        memcpy(&nbytes, header + BODY_SIZE, sizeof(nbytes))
        if piece == last or piece.len - at < nbytes:
            return False
        found = digest_of(<const char *>piece.buf + at, nbytes)
        memcpy(header + CHECKSUM, &found, sizeof(found))
        header, size, at = header + HEADER, size - HEADER, at + nbytes
    while piece < last and at == piece.len:
        piece, at = piece + 1, 0
    return piece == last
