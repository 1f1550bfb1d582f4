"""The output queue of the Python client. The reference implementation is `core/python/outgoing.py`."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memcpy, memset

from kvpage_server.core.native.memory cimport Memory
from kvpage_server.core.native.sent_pages cimport Chunk
from kvpage_server.core.native.sockets cimport MSG_NOSIGNAL, iovec, msghdr, sendmsg

from kvpage_server.core.python.bodies import SEND_BYTES as _SEND_BYTES
from kvpage_server.core.python.outgoing import RECORD_BYTES as _RECORD_BYTES

cdef enum:
    PIECES = 1024  # IOV_MAX

cdef Py_ssize_t SEND_BYTES = _SEND_BYTES
cdef Py_ssize_t RECORD_BYTES = _RECORD_BYTES


cdef class Outgoing:
    """Queue of output: buffers, and `Chunk`s of pages."""

    cdef readonly bint done  # whether everything was sent
    cdef object pieces  # iterator of the output that was not taken yet
    cdef Chunk chunk  # the chunk of which only a part is in `next`, or None
    cdef Py_ssize_t at  # index of the first text of `chunk` that is not in `next`
    cdef list held  # owners of the memory that `next` points to
    cdef iovec[PIECES] next  # the next pieces to send: those from `first` to before `count`
    cdef int first
    cdef int count

    def __init__(self, pieces):
        self.pieces = iter(pieces)
        self.fill()

    def send(self, int fd):
        cdef msghdr message
        cdef ssize_t sent
        cdef int trouble
        memset(&message, 0, sizeof(message))
        while True:
            message.msg_iov = self.next + self.first
            message.msg_iovlen = self.count - self.first
            with nogil:
                sent = sendmsg(fd, &message, MSG_NOSIGNAL)
                trouble = errno
            if sent >= 0:
                self.pass_over(sent)
                return sent
            if trouble == EAGAIN:
                return -1
            if trouble != EINTR:
                PyErr_SetFromErrno(OSError)
            PyErr_CheckSignals()

    def record(self):
        cdef Py_ssize_t nbytes = 0, size
        cdef int i
        cdef char *to
        for i in range(self.first, self.count):
            nbytes += self.next[i].iov_len
        nbytes = min(nbytes, RECORD_BYTES)
        text = PyBytes_FromStringAndSize(NULL, nbytes)
        to = PyBytes_AS_STRING(text)
        for i in range(self.first, self.count):
            size = min(<Py_ssize_t>self.next[i].iov_len, nbytes)
            memcpy(to, self.next[i].iov_base, size)
            to += size
            nbytes -= size
        return text

    def sent(self, Py_ssize_t count):
        self.pass_over(count)

    cdef int pass_over(self, size_t count) except -1:
        """Remove `count` bytes that were sent."""
        cdef iovec *piece
        while self.first < self.count and count >= self.next[self.first].iov_len:
            count -= self.next[self.first].iov_len
            self.first += 1
        if self.first == self.count:
            self.fill()
        elif count:
            piece = self.next + self.first
            piece.iov_base = <char *>piece.iov_base + count
            piece.iov_len -= count
        return 0

    cdef int fill(self) except -1:
        """Take the next pieces from the iterator, as many as one call can send. Set `done` if there are none."""
        cdef Py_ssize_t nbytes = 0
        cdef Memory memory
        self.held = []
        self.first = self.count = 0
        if self.chunk is not None:
            self.held.append(self.chunk)
        while self.count + 2 <= PIECES and nbytes < SEND_BYTES:
            if self.chunk is not None:
                nbytes += self.take_of_chunk()
                continue
            piece = next(self.pieces, None)
            if piece is None:
                break
            self.held.append(piece)
            if isinstance(piece, Chunk):
                self.chunk, self.at = piece, 0
            elif isinstance(piece, bytes):
                nbytes += self.take(PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece))
            else:
                memory = Memory([piece])
                self.held.append(memory)
                nbytes += self.take(memory.buffers.buf, memory.buffers.len)
        self.done = self.count == 0
        return 0

    cdef Py_ssize_t take_of_chunk(self):
        """Append the next text of the chunk and the body after it. Return their bytes."""
        cdef Py_ssize_t i = self.at, nbytes
        cdef Py_ssize_t begin = self.chunk.ends[i - 1] if i else 0
        cdef Py_buffer *body
        nbytes = self.take(self.chunk.text + begin, self.chunk.ends[i] - begin)
        if i == self.chunk.bodies.count:
            self.chunk = None
            return nbytes
        self.at += 1
        body = self.chunk.bodies.buffers + i
        return nbytes + self.take(body.buf, body.len)

    cdef inline Py_ssize_t take(self, void *at, Py_ssize_t size) noexcept:
        """Append a piece. Return its bytes."""
        if size:
            self.next[self.count].iov_base = at
            self.next[self.count].iov_len = size
            self.count += 1
        return size
