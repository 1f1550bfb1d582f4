"""Pages on their way out. `core/python/bodies.py` says what it does."""

import sys

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpage_server.core.native.hashing cimport digest_of
from kvpage_server.core.native.memory cimport Memory
from kvpage_server.core.native.page_keys cimport (
    Name,
    PageKeys,
    put_frame,
    put_key,
    put_name,
    put_number_word,
    room_for,
)

from kvpage_server.core.python.bodies import SEND_BYTES as _SEND_BYTES
from kvpage_server.core.python.bodies import PAGES_PER_CHUNK as _PAGES_PER_CHUNK
from kvpage_server.page import FIELD_AT, DType, HEADER_SIZE, MAX_U32, pack_header

if sys.byteorder != "little":
    raise ImportError("headers are little-endian, this machine is not")

cdef enum:
    HEADER = 64
    NUMBERS = 128  # bytes that the numbers of a page need at most, and the frame of its body
assert HEADER == HEADER_SIZE

cdef Py_ssize_t PAGES_PER_CHUNK = _PAGES_PER_CHUNK
cdef Py_ssize_t SEND_BYTES = _SEND_BYTES
cdef Py_ssize_t MAX_BODY = MAX_U32

cdef int DTYPE = FIELD_AT["dtype"], KV_TYPE = FIELD_AT["kv_type"]
cdef int PAGE_SIZE = FIELD_AT["page_size"], HEAD_DIM = FIELD_AT["head_dim"]
cdef int LAYER = FIELD_AT["layer"], HEAD = FIELD_AT["head"], PAGE = FIELD_AT["page"]
cdef int BODY_SIZE = FIELD_AT["body_size"], CHECKSUM = FIELD_AT["checksum"]

cdef int[256] ITEMSIZES
for _dtype in DType:
    ITEMSIZES[<uint8_t>_dtype] = _dtype.itemsize

cdef struct Shape:
    uint32_t dtype  # 0 for a shape that no page has
    uint32_t page_size
    uint32_t head_dim


cdef bint fill_shape(Shape *shape, object dtype, object page_size, object head_dim) except -1:
    """Whether it is one that a page can have."""
    cdef int64_t kind, rows, columns
    try:
        kind, rows, columns = dtype, page_size, head_dim
    except OverflowError:
        return False
    if not (0 < kind < 256 and ITEMSIZES[kind] and 0 < rows <= 0xFFFFFFFF and 0 < columns <= 0xFFFFFFFF):
        return False
    shape.dtype, shape.page_size, shape.head_dim = <uint32_t>kind, <uint32_t>rows, <uint32_t>columns
    return True


cdef class SentPages:
    """Pages to be written."""

    cdef readonly PageKeys names
    cdef readonly Memory bodies
    cdef SentPages whole  # that these are a part of, and keep alive
    cdef Shape *held  # NULL in a part
    cdef Shape *shapes
    cdef readonly Py_ssize_t count

    def __init__(self, pages):
        cdef Py_ssize_t i
        cdef list some = list(pages)
        cdef list keys = [], bodies = []
        cdef tuple page
        if self.shapes != NULL:
            raise RuntimeError("SentPages are made once")
        self.shapes = self.held = <Shape *>PyMem_Malloc(max(len(some), 1) * sizeof(Shape))
        if self.shapes == NULL:
            raise MemoryError
        for i in range(len(some)):
            given = some[i]
            page = <tuple>given if isinstance(given, tuple) else tuple(given)  # a Page is one: it needs no iterator
            key, body, dtype, page_size, head_dim = page
            keys.append(key)
            bodies.append(body)
            if not fill_shape(self.shapes + i, dtype, page_size, head_dim):
                self.shapes[i].dtype = 0
        self.names = PageKeys(keys)
        self.bodies = Memory(bodies)
        self.count = len(some)

    def __dealloc__(self):
        PyMem_Free(self.held)

    def __len__(self):
        return self.count

    def __getitem__(self, part):
        cdef SentPages some = SentPages.__new__(SentPages)
        some.names, some.bodies = self.names[part], self.bodies[part]
        some.whole = self
        some.shapes = self.shapes + <Py_ssize_t>part.indices(self.count)[0]
        some.count = some.names.count
        return some

    def misfit(self):
        cdef Py_ssize_t i, nbytes
        cdef Shape *shape
        for i in range(self.count):
            shape, nbytes = self.shapes + i, self.bodies.buffers[i].len
            if not shape.dtype or nbytes > MAX_BODY:
                return i
            if <uint64_t>shape.page_size * shape.head_dim != <uint64_t>nbytes // ITEMSIZES[shape.dtype]:
                return i
            if nbytes % ITEMSIZES[shape.dtype]:
                return i
        return -1

    def as_words(self, Py_ssize_t start, unsigned long long ttl):
        return self.spelt(start, b"", b"\r\n", ttl, None)

    def as_blobs(self, Py_ssize_t start, bytes before, bytes after, unsigned long long ttl, unsigned long long created):
        return self.spelt(start, before, after, ttl, pack_header(0, 0, 0, 0, 0, 0, 0, created, ttl, 0, 0))

    cdef Chunk spelt(self, Py_ssize_t start, bytes before, bytes after, uint64_t ttl, bytes header):
        """A chunk from `start` on: as words of a page command, or if there is a `header` for all as keys and blobs."""
        cdef Py_ssize_t stop = start, i, room = PyBytes_GET_SIZE(after), nbytes = 0
        cdef Chunk chunk = Chunk.__new__(Chunk)
        cdef const char *opening = PyBytes_AS_STRING(before)
        cdef const char *closing = PyBytes_AS_STRING(after)
        cdef const char *common = NULL if header is None else PyBytes_AS_STRING(header)
        cdef Py_ssize_t opened = PyBytes_GET_SIZE(before), closed = PyBytes_GET_SIZE(after)
        cdef char *to
        cdef Py_buffer *body
        while stop < self.count and stop - start < PAGES_PER_CHUNK and nbytes < SEND_BYTES:
            room += room_for(self.names.names + stop) + opened + closed + HEADER + NUMBERS
            nbytes += self.bodies.buffers[stop].len
            stop += 1
        chunk.make(room, self.bodies[start:stop], stop)
        to = chunk.text
        with nogil:
            for i in range(start, stop):
                body = self.bodies.buffers + i
                memcpy(to, opening, opened)
                to += opened
                if common == NULL:
                    to = put_page(to, self.names.names + i, self.shapes + i, ttl, body)
                else:
                    to = put_blob(to, self.names.names + i, self.shapes + i, common, body)
                chunk.ends[i - start] = to - chunk.text
                memcpy(to, closing, closed)
                to += closed
            chunk.ends[stop - start] = to - chunk.text
        return chunk


cdef char *put_page(char *to, const Name *name, const Shape *shape, uint64_t ttl, const Py_buffer *body) noexcept nogil:
    """The arguments of a page up to its body."""
    to = put_name(to, name)
    to = put_number_word(to, shape.dtype)
    to = put_number_word(to, shape.page_size)
    to = put_number_word(to, shape.head_dim)
    to = put_number_word(to, ttl)
    return put_frame(to, body.len)


cdef char *put_blob(
    char *to, const Name *name, const Shape *shape, const char *common, const Py_buffer *body
) noexcept nogil:
    """A page's key, and its blob up to the body."""
    cdef uint64_t page = name.page, digest = digest_of(body.buf, body.len)
    cdef uint32_t size = <uint32_t>body.len
    to = put_frame(put_key(to, name), HEADER + body.len)
    memcpy(to, common, HEADER)
    to[DTYPE] = <char>shape.dtype
    to[KV_TYPE] = <char>name.kv_type
    memcpy(to + PAGE_SIZE, &shape.page_size, 4)
    memcpy(to + HEAD_DIM, &shape.head_dim, 4)
    memcpy(to + LAYER, &name.layer, 4)
    memcpy(to + HEAD, &name.head, 4)
    memcpy(to + PAGE, &page, 8)
    memcpy(to + BODY_SIZE, &size, 4)
    memcpy(to + CHECKSUM, &digest, 8)
    return to + HEADER


cdef class Chunk:
    """Text and bodies in turn, ending with text."""

    def __dealloc__(self):
        PyMem_Free(self.text)
        PyMem_Free(self.ends)

    cdef int make(self, Py_ssize_t room, Memory bodies, Py_ssize_t stop) except -1:
        self.text = <char *>PyMem_Malloc(max(room, 1))
        self.ends = <Py_ssize_t *>PyMem_Malloc((bodies.count + 1) * sizeof(Py_ssize_t))
        if self.text == NULL or self.ends == NULL:
            raise MemoryError
        self.bodies, self.stop = bodies, stop
        return 0
