"""The receiver of bodies. The reference implementation, in `core/python/bodies.py`, documents the class."""

import sys

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memmove, memset

from kvpage_server.core.native.hashing cimport digest_of
from kvpage_server.core.native.memory cimport Memory
from kvpage_server.core.native.page_keys cimport Name, PageKeys, put_number
from kvpage_server.core.native.sockets cimport iovec, msghdr, recvmsg

from kvpage_server.core import pieces
from kvpage_server.core.pieces import ErrorAnswer, WrongAnswer, wrong_answer
from kvpage_server.core.python import bodies as reference
from kvpage_server.page import FIELD_AT, HEADER_SIZE
from kvpage_server.page import MAGIC as _MAGIC
from kvpage_server.page import VERSION as _VERSION

if sys.byteorder != "little":
    raise ImportError("headers are little-endian, this machine is not")

cdef enum:
    HEADER = 64
assert HEADER == HEADER_SIZE

cdef enum Next:  # state of the parser: the part of the reply that the next bytes belong to
    OPENING  # the line of the array
    ERROR  # the line of an error
    LINE  # the line of an item
    HEADER_OF  # the header of a blob
    BODY  # the body of an item
    DROPPED  # the bytes of an item of the wrong size
    CRLF  # the CRLF of an item
    NOTHING  # no part: the reply is complete
    WRONG  # no part: the bytes are not the expected reply

cdef enum Reason:  # of a missing item
    FOUND  # the item is not missing
    ABSENT
    SIZE
    HEADER_WRONG
    CHECKSUM_WRONG

REASONS = (None, "absent", "size", "header", "checksum")

cdef Py_ssize_t SCRATCH_BYTES = reference.SCRATCH_BYTES, LONG_BYTES = reference.LONG_BYTES
cdef Py_ssize_t LARGEST_STEP_BYTES = reference.LARGEST_STEP_BYTES, ITEMS_AHEAD = reference.ITEMS_AHEAD
cdef Py_ssize_t MAX_LINE = pieces.MAX_LINE, MAX_FRAME = pieces.MAX_FRAME
cdef uint64_t MAX_BULK = pieces.MAX_BULK
cdef int AT_MAGIC = FIELD_AT["magic"], AT_VERSION = FIELD_AT["version"], AT_KV_TYPE = FIELD_AT["kv_type"]
cdef int AT_FLAGS = FIELD_AT["flags"], AT_LAYER = FIELD_AT["layer"], AT_HEAD = FIELD_AT["head"]
cdef int AT_PAGE = FIELD_AT["page"], AT_BODY_SIZE = FIELD_AT["body_size"], AT_RESERVED = FIELD_AT["reserved"]
cdef int AT_CHECKSUM = FIELD_AT["checksum"]
cdef bytes MAGIC_TEXT = _MAGIC
cdef const char *MAGIC = PyBytes_AS_STRING(MAGIC_TEXT)
cdef uint8_t VERSION = _VERSION


cdef class Bodies:
    """Receiver of the reply to a read of pages."""

    cdef Memory memory  # owner of `places`
    cdef PageKeys names  # owner of `expected`
    cdef Py_buffer *places  # the memory for each body
    cdef const Name *expected  # the expected keys of blobs; NULL for bodies without headers
    cdef Py_ssize_t count  # number of items
    cdef bint array  # whether the reply is an array
    cdef bint verify  # whether bodies must match their checksums
    cdef Next next
    cdef Py_ssize_t item  # index of the current item; in the state WRONG, the item of the error
    cdef Py_ssize_t left  # missing bytes of the current part: header, body or CRLF
    cdef char[32] opening  # the expected line of the array
    cdef Py_ssize_t opening_size
    cdef char[HEADER] header  # the header of the current blob
    cdef char *scratch  # SCRATCH_BYTES bytes, of which those from `start` to `end` were received and not parsed
    cdef Py_ssize_t start
    cdef Py_ssize_t end
    cdef uint8_t *reasons  # a `Reason` for each item
    cdef Py_ssize_t missed  # number of missing items
    cdef Py_ssize_t error_size  # bytes of an error's line, including the '-'
    cdef object error  # the text of an error reply, or None

    def __init__(self, Memory places, *, bint array, PageKeys names=None, bint verify=False):
        if self.scratch != NULL:
            raise RuntimeError("Bodies are made once")
        self.memory, self.names = places, names
        self.places, self.count = places.buffers, places.count
        if names is not None:
            if names.count != places.count:
                raise ValueError(f"{places.count} places have {names.count} names")
            self.expected = names.names
        self.array, self.verify = array, verify
        self.next = OPENING if array else LINE
        self.opening[0] = b"*"
        self.opening_size = put_number(self.opening + 1, self.count) - self.opening
        memcpy(self.opening + self.opening_size, b"\r\n", 2)
        self.opening_size += 2
        self.reasons = <uint8_t *>PyMem_Malloc(max(self.count, 1))
        self.scratch = <char *>PyMem_Malloc(SCRATCH_BYTES)
        if self.reasons == NULL or self.scratch == NULL:
            raise MemoryError
        memset(self.reasons, FOUND, max(self.count, 1))

    def __dealloc__(self):
        PyMem_Free(self.reasons)
        PyMem_Free(self.scratch)

    @property
    def done(self):
        return self.next == NOTHING

    def result(self):
        cdef Py_ssize_t i
        if self.error is not None:
            raise ErrorAnswer(self.error)
        if not self.missed:
            return {}
        return {i: REASONS[self.reasons[i]] for i in range(self.count) if self.reasons[i]}

    def receive(self, int fd):
        cdef Py_ssize_t count = 0, some = 1
        with nogil:
            while some > 0 and count < LARGEST_STEP_BYTES and self.next < NOTHING:
                some = self.receive_once(fd)
                count += max(some, 0)
        if not count and some < 0:
            return self.failed(-some)
        self.finish_reply()
        return count

    cdef Py_ssize_t receive_once(self, int fd) noexcept nogil:
        """Receive and parse the bytes of one recvmsg(2). Return their number, or the negative errno.

        The rest of a long body is received in its place, and bytes after it into the scratch memory.
        """
        cdef msghdr message
        cdef iovec[2] into
        cdef Py_ssize_t count, direct = 0
        memset(&message, 0, sizeof(message))
        message.msg_iov = into
        self.move_to_start()
        if self.next == BODY and self.left >= LONG_BYTES:
            direct = min(self.left, LARGEST_STEP_BYTES)
            into[0].iov_base = <char *>self.places[self.item].buf + self.places[self.item].len - self.left
            into[0].iov_len = direct
            message.msg_iovlen = 1
        into[message.msg_iovlen].iov_base = self.scratch + self.end
        into[message.msg_iovlen].iov_len = min(SCRATCH_BYTES - self.end, self.ahead(direct))
        message.msg_iovlen += 1
        count = recvmsg(fd, &message, 0)
        if count < 0:
            return -errno
        direct = min(direct, count)
        if direct:
            self.left -= direct
            if not self.left:
                self.arrived()
        self.end += count - direct
        self.take()
        return count

    cdef failed(self, int trouble):
        """Return -1 if the error `trouble` of recvmsg(2) only means that no bytes are available.

        Otherwise raise OSError.
        """
        if trouble == EAGAIN:
            return -1
        if trouble != EINTR:
            errno = trouble
            PyErr_SetFromErrno(OSError)
        PyErr_CheckSignals()
        return -1

    def feed(self, bytes data):
        cdef const char *rest = PyBytes_AS_STRING(data)
        cdef Py_ssize_t left = PyBytes_GET_SIZE(data), some
        while left:
            self.move_to_start()
            some = min(left, SCRATCH_BYTES - self.end)
            memcpy(self.scratch + self.end, rest, some)
            self.end += some
            rest += some
            left -= some
            self.take()
            self.finish_reply()

    cdef int finish_reply(self) except -1:
        """Do the steps at the end of a reply that need the interpreter: copy an error's text, or raise WrongAnswer."""
        cdef Py_ssize_t size
        cdef char *there = self.scratch + self.start
        if self.next == NOTHING and self.error_size and self.error is None:
            self.error = PyBytes_FromStringAndSize(there - 2 - self.error_size, self.error_size)[1:]
        if self.next != WRONG:
            return 0
        if self.item == -2:
            raise WrongAnswer(f"an error is longer than {MAX_LINE} bytes")
        raise wrong_answer(self.item, self.count, PyBytes_FromStringAndSize(there, min(40, self.end - self.start)))

    # -- buffers for the next bytes ----------------------------------------------------------------------------------

    cdef void move_to_start(self) noexcept nogil:
        """Move the unparsed bytes, at most a line, to the beginning of the scratch memory."""
        memmove(self.scratch, self.scratch + self.start, self.end - self.start)
        self.end -= self.start
        self.start = 0

    cdef Py_ssize_t ahead(self, Py_ssize_t direct) noexcept nogil:
        """Return the number of bytes to receive into the scratch memory: up to the next long body.

        `direct` bytes of the current body are received in its place.
        """
        cdef Py_ssize_t size = MAX_FRAME, i = self.item, stop
        if self.next == BODY or self.next == DROPPED or self.next == CRLF:
            size += self.left - direct + 2
            i += 1
        stop = min(self.count, i + ITEMS_AHEAD)
        while i < stop:
            size += MAX_FRAME + (0 if self.expected == NULL else HEADER)
            if self.places[i].len >= LONG_BYTES:
                return size
            size += self.places[i].len
            i += 1
        return SCRATCH_BYTES

    # -- parsers: each parses bytes at `at`, and returns their number, or -1 if it needs more ------------------------

    cdef void take(self) noexcept nogil:
        """Parse the bytes in the scratch memory, except an incomplete line at the end."""
        cdef char *at = self.scratch + self.start
        cdef char *end = self.scratch + self.end
        cdef Py_ssize_t taken
        while True:
            if self.next == LINE:
                taken = self.take_line(at, end - at)
            elif self.next == BODY:
                taken = self.take_body(at, end - at)
            elif self.next == CRLF:
                taken = self.take_crlf(at, end - at)
            elif self.next == HEADER_OF:
                taken = self.take_header(at, end - at)
            elif self.next == DROPPED:
                taken = self.take_dropped(at, end - at)
            elif self.next == OPENING:
                taken = self.take_opening(at, end - at)
            elif self.next == ERROR:
                taken = self.take_error(at, end - at)
            else:
                taken = self.take_nothing(at, end - at)
            if taken < 0:
                break
            at += taken
        self.start = at - self.scratch

    cdef Py_ssize_t take_opening(self, char *at, Py_ssize_t size) noexcept nogil:
        if size and at[0] == b"-":
            self.next = ERROR
            return 0
        if memcmp(at, self.opening, min(size, self.opening_size)):
            return self.wrong(-1)
        if size < self.opening_size:
            return -1
        self.next = LINE
        self.end_if_complete()
        return self.opening_size

    cdef Py_ssize_t take_error(self, char *at, Py_ssize_t size) noexcept nogil:
        cdef Py_ssize_t end = crlf(at, min(size, MAX_LINE + 2))
        if end < 0:
            return self.wrong(-2) if size > MAX_LINE + 1 else -1
        self.next = NOTHING
        self.error_size = end
        return end + 2

    cdef Py_ssize_t take_line(self, char *at, Py_ssize_t size) noexcept nogil:
        cdef Py_ssize_t end, i
        cdef uint64_t length = 0
        if not size:
            return -1
        if at[0] == b"-" and not self.item and not self.array:
            self.next = ERROR
            return 0
        end = crlf(at, min(size, MAX_FRAME))
        if (at[0] != b"$" and at[0] != b"_") or (end < 0 and size >= MAX_FRAME):
            return self.wrong(self.item)
        if end < 0:
            return -1
        if (at[0] == b"_" and end == 1) or (end == 3 and at[0] == b"$" and at[1] == b"-" and at[2] == b"1"):
            self.miss(ABSENT)
            self.go_on()
            return end + 2
        if at[0] == b"_" or end == 1 or end > 11:
            return self.wrong(self.item)
        for i in range(1, end):
            if not b"0" <= at[i] <= b"9":
                return self.wrong(self.item)
            length = 10 * length + (at[i] - 48)
        if length > MAX_BULK:
            return self.wrong(self.item)
        self.left = length
        if self.left != (0 if self.expected == NULL else HEADER) + self.places[self.item].len:
            self.miss(SIZE)
            self.next = DROPPED
        elif self.expected == NULL:
            self.next = BODY
        else:
            self.next = HEADER_OF
            self.left = HEADER
        return end + 2

    cdef Py_ssize_t take_header(self, char *at, Py_ssize_t size) noexcept nogil:
        if not size:
            return -1
        size = min(size, self.left)
        memcpy(self.header + HEADER - self.left, at, size)
        self.left -= size
        if not self.left:
            self.next = BODY
            self.left = self.places[self.item].len
        return size

    cdef Py_ssize_t take_body(self, char *at, Py_ssize_t size) noexcept nogil:
        cdef Py_buffer *place = self.places + self.item
        if self.left and not size:
            return -1
        size = min(size, self.left)
        memcpy(<char *>place.buf + place.len - self.left, at, size)
        self.left -= size
        if not self.left:
            self.arrived()
        return size

    cdef Py_ssize_t take_dropped(self, char *at, Py_ssize_t size) noexcept nogil:
        if self.left and not size:
            return -1
        size = min(size, self.left)
        self.left -= size
        if not self.left:
            self.next = CRLF
            self.left = 2
        return size

    cdef Py_ssize_t take_crlf(self, char *at, Py_ssize_t size) noexcept nogil:
        if not size:
            return -1
        if at[0] != (c"\r" if self.left == 2 else c"\n"):
            return self.wrong(self.item)
        self.left -= 1
        if not self.left:
            self.go_on()
        return 1

    cdef Py_ssize_t take_nothing(self, char *at, Py_ssize_t size) noexcept nogil:
        return self.wrong(self.count) if size else -1

    cdef Py_ssize_t wrong(self, Py_ssize_t item) noexcept nogil:
        """Note unexpected bytes instead of `item`: -1 for the array's line, -2 for an error that is too long."""
        self.next = WRONG
        self.item = item
        return -1

    cdef void miss(self, Reason reason) noexcept nogil:
        """Note that the current item is missing."""
        self.reasons[self.item] = reason
        self.missed += 1

    cdef void arrived(self) noexcept nogil:
        """Check a complete blob, and expect its CRLF."""
        cdef Reason reason
        self.next = CRLF
        self.left = 2
        if self.expected != NULL:
            reason = mismatch(self.expected + self.item, self.header, self.places + self.item, self.verify)
            if reason != FOUND:
                self.miss(reason)

    cdef void go_on(self) noexcept nogil:
        """Begin with the next item."""
        self.item += 1
        self.next = LINE
        self.end_if_complete()

    cdef void end_if_complete(self) noexcept nogil:
        """Expect no more bytes if all items were received."""
        if self.item == self.count:
            self.next = NOTHING


cdef Py_ssize_t crlf(const char *at, Py_ssize_t size) noexcept nogil:
    """Return the index of the first CRLF; -1 if there is none."""
    cdef const char *found = at
    cdef const char *end = at + size
    while found + 1 < end:
        found = <const char *>memchr(found, b"\r", end - found - 1)
        if found == NULL:
            return -1
        if found[1] == b"\n":
            return found - at
        found += 1
    return -1


cdef Reason mismatch(const Name *name, const char *header, const Py_buffer *body, bint verify) noexcept nogil:
    """Return the reason why a blob does not belong to a page's key, or FOUND if it does."""
    cdef uint64_t digest
    if memcmp(header + AT_MAGIC, MAGIC, 4) or <uint8_t>header[AT_VERSION] != VERSION or header[AT_FLAGS]:
        return HEADER_WRONG
    if <uint8_t>header[AT_KV_TYPE] != name.kv_type or u32(header + AT_RESERVED):
        return HEADER_WRONG
    if u32(header + AT_LAYER) != name.layer or u32(header + AT_HEAD) != name.head:
        return HEADER_WRONG
    if u64(header + AT_PAGE) != name.page or u32(header + AT_BODY_SIZE) != <uint64_t>body.len:
        return HEADER_WRONG
    digest = u64(header + AT_CHECKSUM)
    if verify and digest and digest_of(body.buf, body.len) != digest:
        return CHECKSUM_WRONG
    return FOUND


cdef inline uint64_t u64(const char *at) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, at, 8)
    return value


cdef inline uint64_t u32(const char *at) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, at, 4)
    return value
