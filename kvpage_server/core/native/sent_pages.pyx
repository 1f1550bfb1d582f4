"""Pages to send. The reference implementation is in `core/python/bodies.py`."""

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
    Part,
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
    NUMBERS = 128  # most bytes of the numbers of a page and the frame of its body
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
    uint32_t dtype  # 0 for an invalid shape
    uint32_t page_size
    uint32_t head_dim


cdef bint fill_shape(Shape *shape, object dtype, object page_size, object head_dim) except -1:
    """Set a shape. Return whether it is valid for a page."""
    try:
        return put_shape(shape, dtype, page_size, head_dim)
    except OverflowError:
        return False


cdef bint put_shape(Shape *shape, int64_t kind, int64_t rows, int64_t columns) noexcept:
    if not (0 < kind < 256 and ITEMSIZES[kind] and 0 < rows <= 0xFFFFFFFF and 0 < columns <= 0xFFFFFFFF):
        return False
    shape.dtype, shape.page_size, shape.head_dim = <uint32_t>kind, <uint32_t>rows, <uint32_t>columns
    return True


cdef class SentPages:
    """Pages to write to a server: for each a key, a body, and a shape."""

    cdef readonly PageKeys names
    cdef readonly Memory bodies
    cdef SentPages whole  # of a part: the object that owns the shapes
    cdef Shape *held  # all shapes; NULL in a part
    cdef Shape *shapes  # the first shape; in a part, it points into `held` of `whole`
    cdef readonly Py_ssize_t count  # number of pages

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
            page = <tuple>given if isinstance(given, tuple) else tuple(given)  # a Page is a tuple already
            key, body, dtype, page_size, head_dim = page
            keys.append(key)
            bodies.append(body)
            if not fill_shape(self.shapes + i, dtype, page_size, head_dim):
                self.shapes[i].dtype = 0
        self.names = PageKeys(keys)
        self.bodies = Memory(bodies)
        self.count = len(some)

    @staticmethod
    def of_blocks(names, bytes layout, bodies):
        cdef SentPages some = SentPages.__new__(SentPages)
        cdef const Part *parts = <const Part *>PyBytes_AS_STRING(layout)
        cdef Py_ssize_t width = PyBytes_GET_SIZE(layout) // sizeof(Part), i
        cdef const Part *part
        some.names, some.bodies = PageKeys.of_blocks(names, layout), Memory(bodies)
        some.shapes = some.held = <Shape *>PyMem_Malloc(max(some.names.count, 1) * sizeof(Shape))
        if some.shapes == NULL:
            raise MemoryError
        if some.bodies.count != some.names.count:
            raise ValueError(f"{some.names.count} pages need as many bodies, got {some.bodies.count}")
        for i in range(some.names.count):
            part = parts + i % width
            if not put_shape(some.shapes + i, part.dtype, part.page_size, part.head_dim):
                some.shapes[i].dtype = 0
        some.count = some.names.count
        return some

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
        return self.encode(start, b"", b"\r\n", ttl, None)

    def as_blobs(self, Py_ssize_t start, bytes before, bytes after, unsigned long long ttl, unsigned long long created):
        return self.encode(start, before, after, ttl, pack_header(0, 0, 0, 0, 0, 0, 0, created, ttl, 0, 0))

    cdef Chunk encode(self, Py_ssize_t start, bytes before, bytes after, uint64_t ttl, bytes header):
        """Return a chunk from page `start` on: words of a page command, or with a `header` keys and blobs.

        `header` has the fields that all pages share.
        """
        cdef Py_ssize_t stop = start, i, room = PyBytes_GET_SIZE(after), nbytes = 0
        cdef Chunk chunk = Chunk.__new__(Chunk)
        cdef const char *opening = PyBytes_AS_STRING(before)
        cdef const char *closing = PyBytes_AS_STRING(after)
        cdef const char *common = NULL if header is None else PyBytes_AS_STRING(header)
        cdef Py_ssize_t opened = PyBytes_GET_SIZE(before), closed = PyBytes_GET_SIZE(after)
        cdef char *to
        cdef Py_buffer *body
        # Select the pages of the chunk, and allocate memory for their text.
        while stop < self.count and stop - start < PAGES_PER_CHUNK and nbytes < SEND_BYTES:
            room += room_for(self.names.names + stop) + opened + closed + HEADER + NUMBERS
            nbytes += self.bodies.buffers[stop].len
            stop += 1
        chunk.make(room, self.bodies[start:stop], stop)
        to = chunk.text
        # Write the text. For blobs this hashes the bodies.
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
    """Write the words of a page, up to the frame of its body, at `to`. Return the address behind them."""
    to = put_name(to, name)
    to = put_number_word(to, shape.dtype)
    to = put_number_word(to, shape.page_size)
    to = put_number_word(to, shape.head_dim)
    to = put_number_word(to, ttl)
    return put_frame(to, body.len)


cdef char *put_blob(
    char *to, const Name *name, const Shape *shape, const char *common, const Py_buffer *body
) noexcept nogil:
    """Write a page's key, and its blob up to the body, at `to`. Return the address behind them."""
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
    """Encoded pages: texts and bodies alternate; a text is first and last."""

    def __dealloc__(self):
        PyMem_Free(self.text)
        PyMem_Free(self.ends)

    cdef int make(self, Py_ssize_t room, Memory bodies, Py_ssize_t stop) except -1:
        """Allocate `room` bytes of text, and an end for each text. Raise MemoryError."""
        self.text = <char *>PyMem_Malloc(max(room, 1))
        self.ends = <Py_ssize_t *>PyMem_Malloc((bodies.count + 1) * sizeof(Py_ssize_t))
        if self.text == NULL or self.ends == NULL:
            raise MemoryError
        self.bodies, self.stop = bodies, stop
        return 0
