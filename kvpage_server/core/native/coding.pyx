"""Rows of the lossless code of docs/page-code.md. The reference implementation is in `core/python/coding.py`."""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint8_t

from kvpage_server.core.native cimport avx2
from kvpage_server.core.native.memory cimport Memory

from kvpage_server.core.python.coding import CODES, check_matrix

cdef extern from "coding.h" nogil:
    enum:
        PER_CHANNEL
        BFLOAT16
        FLOAT16
        FLOAT32
    ctypedef struct Coder:
        void (*choose_bases)(const char *, size_t, size_t, uint8_t *, uint8_t *) noexcept nogil
        size_t (*encode_rows)(const char *, size_t, size_t, const uint8_t *, uint8_t *, uint8_t *, size_t) noexcept nogil
        int (*decode_rows)(const uint8_t *, size_t, size_t, size_t, const uint8_t *, uint8_t *, char *) noexcept nogil
    const Coder CODERS[3]

assert sorted(CODES) == [BFLOAT16, FLOAT16, FLOAT32]
cdef bint IS_WIDE = avx2.can_run()


cdef const Coder *coder_of(int code) noexcept nogil:
    return <const Coder *>avx2.coder_of(code) if IS_WIDE else &CODERS[code - 1]


def encode_matrix(int code, Py_ssize_t channels, body not None, out not None):
    """Code a matrix ``[rows, channels]`` of elements of `code`.

    Return the bytes that were written to `out`, which are the bases and the rows, or 0 if `out` is too small.

    Raises ValueError for another code, another number of channels than a multiple of 8, or a body without whole rows.
    """
    cdef Memory memory = Memory([body]), room = Memory([out], writable=True)
    cdef size_t n = channels, rows = check_matrix(code, channels, memory.buffers.len), size
    cdef const char *values = <const char *>memory.buffers.buf
    cdef uint8_t *bases = <uint8_t *>room.buffers.buf
    cdef uint8_t *scratch
    if rows == 0 or <size_t>room.buffers.len < n:
        return 0
    scratch = <uint8_t *>PyMem_Malloc(n * PER_CHANNEL)
    if scratch == NULL:
        raise MemoryError
    with nogil:
        coder_of(code).choose_bases(values, rows, n, scratch, bases)
        size = coder_of(code).encode_rows(values, rows, n, bases, scratch, bases + n, room.buffers.len - n)
    PyMem_Free(scratch)
    return n + size if size else 0


def decode_matrix(int code, Py_ssize_t channels, coded not None, out not None):
    """Decode a matrix into `out`. Return whether `coded` has exactly its bytes; if not, `out` is undefined.

    Raises ValueError for another code, another number of channels than a multiple of 8, or an `out` without whole rows.
    """
    cdef Memory memory = Memory([coded]), values = Memory([out], writable=True)
    cdef size_t n = channels, rows = check_matrix(code, channels, values.buffers.len)
    cdef const uint8_t *bases = <const uint8_t *>memory.buffers.buf
    cdef uint8_t *scratch
    cdef bint fits
    if <size_t>memory.buffers.len < n:
        return False
    scratch = <uint8_t *>PyMem_Malloc(n * PER_CHANNEL)
    if scratch == NULL:
        raise MemoryError
    with nogil:
        fits = coder_of(code).decode_rows(
            bases + n, memory.buffers.len - n, rows, n, bases, scratch, <char *>values.buffers.buf
        )
    PyMem_Free(scratch)
    return fits
