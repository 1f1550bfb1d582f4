"""The lossless code of docs/page-code.md. The reference implementation is in `core/python/coding.py`."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport Py_XDECREF, PyObject
from libc.stdint cimport uint8_t
from libc.string cimport memcpy

from kvpage_server.core.native cimport avx2
from kvpage_server.core.native.hashing cimport seeded_digest_of
from kvpage_server.core.native.memory cimport Memory

from kvpage_server.core.python.coding import CODES, check_matrix

cdef extern from "Python.h":
    PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t) except NULL
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1

cdef extern from "coding.h" nogil:
    enum:
        PER_CHANNEL
        BFLOAT16
        FLOAT16
        FLOAT32
    ctypedef struct Coder:
        size_t (*encode)(const char *, size_t, size_t, size_t, uint8_t *, uint8_t *, size_t) noexcept nogil
        int (*decode)(const uint8_t *, size_t, size_t, size_t, size_t, uint8_t *, char *) noexcept nogil
    const Coder CODERS[3]

assert sorted(CODES) == [BFLOAT16, FLOAT16, FLOAT32]
cdef bint IS_WIDE = avx2.can_run()


cdef const Coder *coder_of(int code) noexcept nogil:
    return <const Coder *>avx2.coder_of(code) if IS_WIDE else &CODERS[code - 1]


cdef Py_ssize_t rows_of(int code, Py_ssize_t channels, Py_ssize_t nbytes, Py_ssize_t pages) except -1:
    """Return the same as `check_matrix`, whose errors it raises."""
    cdef Py_ssize_t row
    if BFLOAT16 <= code <= FLOAT32 and 8 <= channels < 1 << 40 and not channels % 8 and pages > 0 and not channels % pages:
        row = channels * (4 if code == FLOAT32 else 2)
        if not nbytes % row:
            return nbytes // row
    return check_matrix(code, channels, nbytes, pages)


def encode_matrix(int code, Py_ssize_t channels, body not None, out not None, Py_ssize_t pages=1):
    """Code a matrix ``[rows, channels]`` of elements of `code`, or `pages` matrices ``[rows, channels / pages]`` that
    follow each other, side by side as one.

    Return the bytes that were written to `out`, which are the bases and the rows, or 0 if `out` is too small.

    Raises ValueError for another code, another number of channels than a multiple of 8 and of `pages`, or a body
    without whole rows.
    """
    cdef Memory memory = Memory([body]), room = Memory([out], writable=True)
    cdef size_t rows = rows_of(code, channels, memory.buffers.len, pages)
    return encode(
        code, <const char *>memory.buffers.buf, rows, channels, pages, <uint8_t *>room.buffers.buf, room.buffers.len
    )


cdef size_t encode(
    int code, const char *values, size_t rows, size_t channels, size_t pages, uint8_t *out, size_t room
) except? 0:
    cdef uint8_t *scratch
    cdef size_t size
    if rows == 0 or room < channels:
        return 0
    scratch = <uint8_t *>PyMem_Malloc(channels * PER_CHANNEL)
    if scratch == NULL:
        raise MemoryError
    with nogil:
        size = coder_of(code).encode(values, rows, channels, pages, scratch, out, room)
    PyMem_Free(scratch)
    return size


def encode_array(bytes head not None, int code, Py_ssize_t channels, body not None, Py_ssize_t most):
    """Return `head` and then the code of a matrix, see `encode_matrix`, or None if both have more than `most` bytes.

    `head` has at least 16 bytes. Bytes 8 to 15 are replaced by the XXH3-64 of all bytes after them, with the eight
    bytes before them as the seed.

    Raises ValueError as `encode_matrix`.
    """
    cdef Py_ssize_t begin = len(head), size
    cdef unsigned long long seed, digest
    cdef unsigned char *out
    cdef PyObject *coded
    cdef Py_buffer memory
    PyObject_GetBuffer(body, &memory, PyBUF_SIMPLE)
    try:
        rows = rows_of(code, channels, memory.len, 1)
        coded = PyBytes_FromStringAndSize(NULL, max(most, begin))
        try:
            out = <unsigned char *>PyBytes_AS_STRING(<bytes>coded)
            memcpy(out, PyBytes_AS_STRING(head), begin)
            size = encode(code, <const char *>memory.buf, rows, channels, 1, out + begin, max(most - begin, 0))
            if size == 0:
                return None
            memcpy(&seed, out, 8)
            with nogil:
                digest = seeded_digest_of(out + 16, begin + size - 16, seed)
            memcpy(out + 8, &digest, 8)
            _PyBytes_Resize(&coded, begin + size)
            return <bytes>coded
        finally:
            Py_XDECREF(coded)
    finally:
        PyBuffer_Release(&memory)


def decode_matrix(int code, Py_ssize_t channels, coded not None, out not None, Py_ssize_t pages=1):
    """Decode a matrix into `out`, or as `pages` matrices that follow each other, see `encode_matrix`. Return whether
    `coded` has exactly its bytes; if not, `out` is undefined.

    Raises ValueError for another code, another number of channels than a multiple of 8 and of `pages`, or an `out`
    without whole rows.
    """
    cdef Memory memory = Memory([coded]), values = Memory([out], writable=True)
    cdef size_t n = channels, rows = rows_of(code, channels, values.buffers.len, pages)
    cdef uint8_t *scratch
    cdef bint fits
    if <size_t>memory.buffers.len < n:
        return False
    scratch = <uint8_t *>PyMem_Malloc(n * PER_CHANNEL)
    if scratch == NULL:
        raise MemoryError
    with nogil:
        fits = coder_of(code).decode(
            <const uint8_t *>memory.buffers.buf, memory.buffers.len, rows, n, pages, scratch, <char *>values.buffers.buf
        )
    PyMem_Free(scratch)
    return fits
