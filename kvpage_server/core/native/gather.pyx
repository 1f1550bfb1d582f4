# cython: auto_pickle=False
"""The output queue of a session. The reference implementation is `Outbox` in `core/python/bodies.py`.

The memory of a slot, of a part of one, and of bytes is read without a memoryview. Consecutive short pieces of type
bytes are joined when they are added, because that costs less than passing each of them to the kernel.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove, memset

from kvpage_server.core.native.slots cimport Part, Slot, frame_size
from kvpage_server.core.native.sockets cimport MSG_DONTWAIT, iovec, msghdr, sendmsg
from kvpage_server.core.native.unlocked cimport UNLOCKED_FROM

from kvpage_server.core.pieces import COPIED_FROM as _COPIED_FROM
from kvpage_server.core.python.bodies import SEND_BYTES as _SEND_BYTES
from kvpage_server.core.python.bodies import SEND_TURN as _SEND_TURN

cdef enum:
    MOST_PIECES = 1024  # pieces in one system call: IOV_MAX

cdef Py_ssize_t SEND_BYTES = _SEND_BYTES
cdef Py_ssize_t SEND_TURN = _SEND_TURN
cdef Py_ssize_t SHORT = 512  # a piece with fewer bytes is joined with others
cdef Py_ssize_t JOINED = 64 * 1024  # the most bytes of joined pieces
cdef Py_ssize_t COPIED_FROM = _COPIED_FROM
cdef Py_ssize_t KEPT_PIECES = 64  # most pieces for which an empty queue keeps its memory


cdef struct Waiting:  # a piece of the queue
    char *at  # its memory
    Py_ssize_t size  # bytes
    PyObject *piece  # owned: the object with the memory
    PyObject *view  # owned: the memoryview of a piece of another type than bytes, Slot and Part; otherwise NULL


@cython.final
cdef class Outbox:
    """Output queue of a session. Amortised O(1) for each piece. Borrowed memory is not copied."""

    cdef readonly Py_ssize_t nbytes  # bytes in the queue
    cdef Waiting *pieces  # array with memory for `room` pieces; the queue is from `first` to before `count`
    cdef Py_ssize_t first
    cdef Py_ssize_t count
    cdef Py_ssize_t room
    cdef Py_ssize_t begun  # bytes of the first piece that were sent
    cdef Py_ssize_t fresh  # pieces that were added since the last `copy_parts`, including those that were sent

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.first, self.count):
            Py_XDECREF(self.pieces[i].piece)
            Py_XDECREF(self.pieces[i].view)
        free(self.pieces)

    def add(self, pieces):
        """Append pieces to the queue: bytes, and objects with a `view`. After an error the queue is unchanged."""
        cdef Py_ssize_t count = self.count, nbytes = self.nbytes
        cdef Py_ssize_t joined = 0, short = 0  # bytes and number of the short pieces before the current one
        cdef Py_ssize_t size, i = 0
        if not isinstance(pieces, (list, tuple)):
            pieces = list(pieces)
        try:
            for piece in pieces:
                size = PyBytes_GET_SIZE(piece) if PyBytes_Check(piece) else SHORT
                if size < SHORT and joined + size <= JOINED:
                    joined += size
                    short += 1
                else:
                    self.add_joined(pieces, i - short, short, joined)
                    if size < SHORT:
                        joined, short = size, 1
                    else:
                        joined = short = 0
                        self.add_one(piece)
                i += 1
            self.add_joined(pieces, i - short, short, joined)
        except:
            self.drop_from(count)
            self.nbytes = nbytes
            raise

    cdef int add_joined(self, pieces, Py_ssize_t start, Py_ssize_t count, Py_ssize_t size) except -1:
        """Append `count` short pieces from index `start` on, with `size` bytes together, as one piece."""
        cdef Py_ssize_t i, at = 0
        if size == 0:
            return 0
        if count == 1:
            return self.add_one(pieces[start])
        text = PyBytes_FromStringAndSize(NULL, size)
        for i in range(start, start + count):
            piece = pieces[i]
            memcpy(PyBytes_AS_STRING(text) + at, PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece))
            at += PyBytes_GET_SIZE(piece)
        return self.add_one(text)

    cdef int add_one(self, piece) except -1:
        """Append a piece, unless it is empty."""
        cdef Waiting waiting
        locate(piece, &waiting)
        if waiting.size == 0:
            Py_XDECREF(waiting.view)
            return 0
        if self.count == self.room:
            try:
                self.grow()
            except:
                Py_XDECREF(waiting.view)
                raise
        Py_INCREF(piece)
        waiting.piece = <PyObject *>piece
        self.pieces[self.count] = waiting
        self.count += 1
        self.fresh += 1
        self.nbytes += waiting.size
        return 0

    def copy_parts(self):
        """Copy small parts of large values that wait."""
        cdef Py_ssize_t i = max(self.count - self.fresh, self.first), stop, size
        cdef Slot slot
        while i < self.count:
            stop, size = i + 1, self.pieces[i].size
            piece = <object>self.pieces[i].piece
            if type(piece) is Part:
                slot = (<Part>piece).slot
                while stop < self.count and self.belongs(stop, slot):
                    size += self.pieces[stop].size
                    stop += 1
                if size * COPIED_FROM < slot.size:
                    while i < stop:
                        self.copy(i)
                        i += 1
            i = stop
        self.fresh = 0

    cdef bint belongs(self, Py_ssize_t i, Slot slot) except -1:
        """Return whether a piece is a part of a slot, or bytes, which may be the frame of one."""
        piece = <object>self.pieces[i].piece
        return PyBytes_Check(piece) or (type(piece) is Part and (<Part>piece).slot is slot)

    cdef int copy(self, Py_ssize_t i) except -1:
        """Replace a piece of borrowed memory by bytes."""
        cdef Waiting *waiting = self.pieces + i
        cdef PyObject *before = waiting.piece
        if PyBytes_Check(<object>before):
            return 0
        text = PyBytes_FromStringAndSize(waiting.at, waiting.size)
        Py_INCREF(text)
        waiting.piece, waiting.at = <PyObject *>text, PyBytes_AS_STRING(text)
        Py_XDECREF(before)
        return 0

    cdef int grow(self) except -1:
        """Double the memory of the array. Raise MemoryError."""
        cdef Py_ssize_t room = max(2 * self.room, 4)
        cdef void *pieces = realloc(self.pieces, room * sizeof(Waiting))
        if pieces == NULL:
            raise MemoryError
        self.pieces = <Waiting *>pieces
        self.room = room
        return 0

    def send(self, int descriptor):
        """Send queued output until the socket's buffer is full or the turn is over. Return the bytes sent.

        Raise OSError if nothing was sent; after some bytes, the next call raises it.
        """
        cdef iovec pieces[MOST_PIECES]
        cdef msghdr message
        cdef Py_ssize_t sent = 0, count, size
        memset(&message, 0, sizeof(message))
        message.msg_iov = pieces
        while self.nbytes and sent < SEND_TURN:
            message.msg_iovlen = self.gather(pieces, &size)
            if size >= UNLOCKED_FROM:
                with nogil:
                    count = sendmsg(descriptor, &message, MSG_DONTWAIT)
            else:
                count = sendmsg(descriptor, &message, MSG_DONTWAIT)
            if count >= 0:
                self.remove_sent(count)
                sent += count
                if count < size:
                    break  # the socket's buffer is full
            elif errno == EINTR:
                PyErr_CheckSignals()
            elif errno == EAGAIN or sent:  # the next call raises another error
                break
            else:
                PyErr_SetFromErrno(OSError)
        return sent

    cdef Py_ssize_t gather(self, iovec *pieces, Py_ssize_t *size) noexcept:
        """Fill `pieces` with the next pieces to send: up to MOST_PIECES, with up to SEND_BYTES together.

        Return their number, and set `size` to their bytes.
        """
        cdef Py_ssize_t i = 0, here, begun = self.begun
        cdef Waiting *waiting = self.pieces + self.first
        size[0] = 0
        while i < MOST_PIECES and self.first + i < self.count and size[0] < SEND_BYTES:
            here = min(waiting[i].size - begun, SEND_BYTES - size[0])
            pieces[i].iov_base = waiting[i].at + begun
            pieces[i].iov_len = here
            size[0] += here
            begun = 0
            i += 1
        return i

    def next(self):
        """Return the next buffers to send."""
        cdef iovec pieces[MOST_PIECES]
        cdef Py_ssize_t size, i, start, count = self.gather(pieces, &size)
        cdef Waiting *waiting
        buffers = []
        for i in range(count):
            waiting = self.pieces + self.first + i
            piece = <object>waiting.piece
            start = 0 if i else self.begun
            if PyBytes_Check(piece):
                buffer = piece
            else:
                buffer = piece.view
            if <Py_ssize_t>pieces[i].iov_len < waiting.size:
                buffer = memoryview(buffer)[start : start + pieces[i].iov_len]
            buffers.append(buffer)
        return buffers

    def sent(self, Py_ssize_t count):
        """Remove `count` bytes that the kernel has accepted."""
        if not 0 <= count <= self.nbytes:
            raise ValueError(f"{self.nbytes} bytes wait to be sent, got {count}")
        self.remove_sent(count)

    cdef void remove_sent(self, Py_ssize_t count):
        """Remove `count` bytes from the front of the queue."""
        cdef Py_ssize_t left
        cdef PyObject *piece
        cdef PyObject *view
        self.nbytes -= count
        while count:
            left = self.pieces[self.first].size - self.begun
            if count < left:
                self.begun += count
                break
            count -= left
            piece, view = self.pieces[self.first].piece, self.pieces[self.first].view
            self.begun = 0
            self.first += 1
            Py_XDECREF(view)
            Py_XDECREF(piece)
        if self.first and 2 * self.first >= self.count:  # not earlier, because it moves all remaining pieces
            self.count -= self.first
            memmove(self.pieces, self.pieces + self.first, self.count * sizeof(Waiting))
            self.first = 0
            if self.count == 0 and self.room > KEPT_PIECES:
                free(self.pieces)
                self.pieces = NULL
                self.room = 0

    cdef void drop_from(self, Py_ssize_t count):
        """Drop the pieces from index `count` on."""
        while self.count > count:
            self.count -= 1
            Py_XDECREF(self.pieces[self.count].view)
            Py_XDECREF(self.pieces[self.count].piece)

    def renew(self):
        """Read the address of each piece's memory again, because it has moved.

        Raise ValueError if its size has changed.
        """
        cdef Py_ssize_t i
        cdef Waiting *waiting
        cdef Waiting now
        for i in range(self.first, self.count):
            waiting = self.pieces + i
            if waiting.view != NULL:
                locate(<object>waiting.piece, &now)
                if now.size != waiting.size:
                    Py_XDECREF(now.view)
                    raise ValueError(f"a piece of {waiting.size} bytes has become one of {now.size}")
                Py_XDECREF(waiting.view)
                waiting.at, waiting.view = now.at, now.view

    def clear(self):
        """Drop all queued output."""
        self.remove_sent(self.nbytes)


cdef int locate(piece, Waiting *waiting) except -1:
    """Set `at`, `size` and `view` of `waiting` for a piece."""
    cdef Slot slot
    cdef Part part
    cdef int frame
    cdef Py_buffer buffer
    waiting.view = NULL
    if PyBytes_Check(piece):
        waiting.at, waiting.size = PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece)
    elif type(piece) is Slot:
        slot = <Slot>piece
        frame = frame_size(slot.size)
        waiting.at, waiting.size = slot.at - frame, frame + slot.size + 2
    elif type(piece) is Part:
        part = <Part>piece
        waiting.at, waiting.size = part.slot.at + part.start, part.size
    else:
        view = piece.view
        PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
        waiting.at, waiting.size = <char *>buffer.buf, buffer.len
        PyBuffer_Release(&buffer)  # the view keeps the memory valid
        Py_INCREF(view)
        waiting.view = <PyObject *>view
    return 0
