"""Keys of pages in wire format. The reference implementation is in `core/python/bodies.py`."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

from kvpage_server.page import MAX_PAGE as _MAX_PAGE
from kvpage_server.page import MAX_REQ_ID as _MAX_REQ_ID
from kvpage_server.page import NOT_IN_REQ_ID, PageKey

cdef Py_ssize_t MAX_REQ_ID = _MAX_REQ_ID
cdef long long MAX_PAGE = _MAX_PAGE
cdef bint[256] FORBIDDEN  # bytes that no request id has
for _byte in range(256):
    FORBIDDEN[_byte] = _byte in NOT_IN_REQ_ID


cdef class PageKeys:
    """The keys of some pages, in the caller's order."""

    def __init__(self, keys):
        cdef Py_ssize_t i
        cdef list some = list(keys)
        cdef bytes req_id
        cdef Name *name
        if self.names != NULL:
            raise RuntimeError("PageKeys are made once")
        self.names = self.held = <Name *>PyMem_Malloc(max(len(some), 1) * sizeof(Name))
        if self.names == NULL:
            raise MemoryError
        self.req_ids = [None] * len(some)
        for i in range(len(some)):
            key = some[i]
            name = self.names + i
            req_id = bytes_of(key.req_id)
            self.req_ids[i] = req_id
            name.req_id, name.req_size = PyBytes_AS_STRING(req_id), PyBytes_GET_SIZE(req_id)
            name.layer, name.head = <uint32_t>key.layer, <uint32_t>key.head
            name.page, name.kv_type = <uint32_t>key.page, <uint32_t>key.kv_type
        self.count = len(some)

    @staticmethod
    def of_blocks(names, bytes layout):
        cdef PageKeys some = PageKeys.__new__(PageKeys)
        cdef const Part *parts = <const Part *>PyBytes_AS_STRING(layout)
        cdef Py_ssize_t width = PyBytes_GET_SIZE(layout) // sizeof(Part), i, room
        cdef list blocks = list(names)
        cdef bytes req_id
        cdef Name *name
        room = len(blocks) * width
        some.names = some.held = <Name *>PyMem_Malloc(max(room, 1) * sizeof(Name))
        if some.names == NULL:
            raise MemoryError
        some.req_ids = []
        name = some.names
        for given, page in blocks:
            if not is_name(given, page):
                PageKey(given, 0, 0, page, 0)  # raises, unless the types are subclasses
            req_id = bytes_of(given)
            some.req_ids.append(req_id)
            for i in range(width):
                name.req_id, name.req_size = PyBytes_AS_STRING(req_id), PyBytes_GET_SIZE(req_id)
                name.layer, name.head = parts[i].layer, parts[i].head
                name.page, name.kv_type = <uint32_t>page, parts[i].kv_type
                name += 1
        some.count = room
        return some

    def __dealloc__(self):
        PyMem_Free(self.held)

    def __len__(self):
        return self.count

    def __getitem__(self, part):
        cdef PageKeys some = PageKeys.__new__(PageKeys)
        start, stop, step = part.indices(self.count)
        if step != 1:
            raise ValueError("a part of PageKeys has no gaps")
        some.whole = self
        some.names = self.names + <Py_ssize_t>start
        some.count = max(0, stop - start)
        return some

    def words(self):
        return self.encoded(put_name)

    def keys(self):
        return self.encoded(put_key)

    cdef bytes encoded(self, char *(*put)(char *, const Name *) noexcept nogil):
        """Return all keys, each written by `put`."""
        cdef Py_ssize_t i, room = 0
        cdef char *to
        for i in range(self.count):
            room += room_for(self.names + i)
        found = PyBytes_FromStringAndSize(NULL, room)
        to = PyBytes_AS_STRING(found)
        for i in range(self.count):
            to = put(to, self.names + i)
        return found[: to - PyBytes_AS_STRING(found)]


cdef inline bint is_name(req_id, page) except -1:
    """Return whether these are a valid request id and page id of the usual types."""
    cdef const unsigned char *text
    cdef Py_ssize_t size, i
    if type(req_id) is not bytes or type(page) is not int or not 0 <= page <= MAX_PAGE:
        return False
    text, size = <const unsigned char *>PyBytes_AS_STRING(req_id), PyBytes_GET_SIZE(req_id)
    for i in range(size):
        if FORBIDDEN[text[i]]:
            return False
    return 0 < size <= MAX_REQ_ID


cdef inline bytes bytes_of(req_id):
    return <bytes>req_id if type(req_id) is bytes else bytes(req_id)


cdef inline int digits_of(unsigned long long value) noexcept nogil:
    cdef int count = 1
    while value >= 10:
        value //= 10
        count += 1
    return count


cdef char *put_number(char *to, unsigned long long value) noexcept nogil:
    cdef char *end = to + digits_of(value)
    cdef char *at = end
    while True:
        at -= 1
        at[0] = <char>(48 + value % 10)
        if at == to:
            return end
        value //= 10


cdef char *put_frame(char *to, Py_ssize_t size) noexcept nogil:
    to[0] = b"$"
    to = put_number(to + 1, size)
    to[0], to[1] = b"\r", b"\n"
    return to + 2


cdef char *put_word(char *to, const char *text, Py_ssize_t size) noexcept nogil:
    to = put_frame(to, size)
    memcpy(to, text, size)
    to += size
    to[0], to[1] = b"\r", b"\n"
    return to + 2


cdef char *put_number_word(char *to, unsigned long long value) noexcept nogil:
    to = put_number(put_frame(to, digits_of(value)), value)
    to[0], to[1] = b"\r", b"\n"
    return to + 2


cdef char *put_name(char *to, const Name *name) noexcept nogil:
    to = put_word(to, name.req_id, name.req_size)
    to = put_number_word(to, name.layer)
    to = put_number_word(to, name.head)
    to = put_number_word(to, name.page)
    return put_number_word(to, name.kv_type)


cdef inline char *put_field(char *to, uint32_t value) noexcept nogil:
    to[0] = b":"
    return put_number(to + 1, value)


cdef char *put_key(char *to, const Name *name) noexcept nogil:
    cdef char[64] numbers
    cdef char *end = put_field(numbers, name.layer)
    end = put_field(end, name.head)
    end = put_field(end, name.page)
    end = put_field(end, name.kv_type)
    to = put_frame(to, 3 + name.req_size + (end - numbers))
    memcpy(to, b"kv:", 3)
    memcpy(to + 3, name.req_id, name.req_size)
    to += 3 + name.req_size
    memcpy(to, numbers, end - numbers)
    to += end - numbers
    to[0], to[1] = b"\r", b"\n"
    return to + 2


cdef Py_ssize_t room_for(const Name *name) noexcept nogil:
    return name.req_size + 128
