"""The fast path. The reference implementation, `core/python/calls.py`, documents the classes."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.list cimport PyList_Append, PyList_GET_ITEM, PyList_GET_SIZE, PyList_GetSlice
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_GET_SIZE
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memcpy

from kvpage_server.core.native.frames cimport Parser
from kvpage_server.core.native.slots cimport Slot
from kvpage_server.core.native.words cimport Words, object_at, view_of

from kvpage_server.core.python.calls import PLAIN_REPLY_PIECES as _PLAIN_REPLY_PIECES, CallAgain
from kvpage_server.core.python.bodies import SEND_BYTES as _SEND_BYTES

cdef Py_ssize_t PLAIN_REPLY_PIECES = _PLAIN_REPLY_PIECES
cdef Py_ssize_t SEND_BYTES = _SEND_BYTES

cdef extern from "Python.h":
    PyObject *PyDict_GetItemWithError(object, object) except? NULL

cdef extern from *:
    """
    #include <time.h>
    #ifdef __APPLE__
    #define KVPAGE_CLOCK CLOCK_UPTIME_RAW
    #else
    #define KVPAGE_CLOCK CLOCK_MONOTONIC
    #endif
    static long long kvpage_monotonic_ns(void) {
        struct timespec now;
        clock_gettime(KVPAGE_CLOCK, &now);
        return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    """
    long long monotonic_ns "kvpage_monotonic_ns"() noexcept nogil  # the clock of time.monotonic_ns
    int __builtin_clzll(unsigned long long) noexcept nogil

cdef enum:
    FRAME = 24  # bytes of memory for a line with a number; the longest one takes 22
    BUCKETS = 64  # bits of a duration in nanoseconds


cdef class Callee:
    """Row of the fast path: the function for a command's name."""

    cdef readonly object spec, name, function
    cdef readonly Py_ssize_t fewest, most
    cdef readonly bint asks
    cdef readonly Py_ssize_t place
    cdef readonly bytes ending

    def __init__(
        self, spec, str name not None, function, Py_ssize_t fewest, Py_ssize_t most, bint asks, Py_ssize_t place=0,
        bytes ending not None=b"",
    ):
        if not 0 <= place < max(fewest, 1):
            raise ValueError(f"a row has at least {fewest} words, got place {place}")
        self.spec, self.name, self.function = spec, name, function
        self.fewest, self.most, self.asks, self.place, self.ending = fewest, most, asks, place, ending

    cdef bint refuses(self, words):
        """Return whether the word at `place` ends in `ending`."""
        if self.place == 0:
            return False
        word = words[self.place]
        if not PyBytes_CheckExact(word):
            return False
        cdef Py_ssize_t size = PyBytes_GET_SIZE(self.ending), before = PyBytes_GET_SIZE(word) - size
        return before >= 0 and memcmp(PyBytes_AS_STRING(word) + before, PyBytes_AS_STRING(self.ending), size) == 0


cdef class Caller:
    """The fast path of one client: it takes commands from a parser, and calls the functions of its table."""

    cdef object client, may_run, note_slow
    cdef Parser parser
    cdef dict rows
    cdef Py_ssize_t lent  # bytes that `pieces` borrow because of replies that were added here

    def __init__(self, client, Parser parser not None, dict rows not None, may_run, note_slow):
        self.client, self.parser, self.rows = client, parser, rows
        self.may_run, self.note_slow = may_run, note_slow

    def make(
        self,
        list pieces not None,
        list pushed not None,
        counts_of,
        *,
        first,
        bint ask,
        long long slow_from,
        Py_ssize_t left,
        long long deadline,
    ):
        """Make up to `left` calls of complete commands, and append their replies to `pieces`."""
        cdef Callee row = None, before = None
        cdef list histogram = None
        cdef PyObject *found
        cdef Py_ssize_t count
        cdef long long started, took, ended = 0
        cdef int bucket
        client = self.client
        words, counts = first, None
        if not PyList_GET_SIZE(pieces):
            self.lent = 0
        try:
            while left > 0 and self.lent < SEND_BYTES:
                # Take the next command, unless `first` is one.
                if words is None:
                    words = self.parser.take()
                    if words is None:
                        return None
                # Find its row. Return a command that needs a decision of the session.
                if type(words) is list:
                    count = PyList_GET_SIZE(words)
                    found = PyDict_GetItemWithError(self.rows, <object>PyList_GET_ITEM(words, 0))
                else:
                    count = (<Words?>words).count
                    name = object_at(<Words>words, 0)
                    found = PyDict_GetItemWithError(self.rows, name)
                if found == NULL:
                    return left, words, None, None, None
                row = <Callee>found
                if not row.fewest <= count <= row.most or row.refuses(words):
                    return left, words, None, None, None
                if (ask or row.asks) and not self.may_run(client, row.spec, words):
                    return left, words, None, None, None
                # Call it, and count the call. For consecutive calls of one row, its attributes are read once.
                if row is not before:
                    client.last_command = row.name
                    counts = counts_of[row.name]
                    histogram = counts.histogram
                    before = row
                left -= 1
                args = PyList_GetSlice(words, 1, count) if type(words) is list else view_of((<Words>words).packed, 1, count - 1)
                reply = error = None
                started = monotonic_ns()
                try:
                    reply = row.function(client, args)
                except Exception as raised:
                    error = raised
                ended = monotonic_ns()
                took = ended - started
                counts.nanoseconds += took
                bucket = BUCKETS - __builtin_clzll(took) if took > 0 else 0
                histogram[bucket] += error is None or not isinstance(error, CallAgain)
                if took >= slow_from:
                    self.note_slow(client, row.spec, words, took)
                if ended > deadline:
                    left = 0
                # Add its reply. Return a result that the session has to process.
                if error is not None or PyList_GET_SIZE(pushed) or not client.fast_path_ok:
                    return left, words, row, reply, error
                if not self.encode_reply(reply, pieces):
                    return left, words, row, reply, None
                words = None
            return None if self.parser.is_idle else (left, None, None, None, None)
        finally:
            if ended:
                client.finished = ended

    cdef bint encode_reply(self, reply, list pieces) except -1:
        """Append a plain reply in wire format; a subclass of bytes has that format already.

        Return False for other replies.
        """
        if PyBytes_CheckExact(reply):
            PyList_Append(pieces, bulk(<bytes>reply))
        elif PyBytes_Check(reply):
            PyList_Append(pieces, reply)
        elif reply is None:
            PyList_Append(pieces, b"_\r\n" if self.client.protocol == 3 else b"$-1\r\n")
        elif PyLong_CheckExact(reply):
            PyList_Append(pieces, b":%d\r\n" % reply)
        elif PyTuple_CheckExact(reply) and PyTuple_GET_SIZE(reply) <= PLAIN_REPLY_PIECES:
            for piece in <tuple>reply:
                PyList_Append(pieces, piece)
                if type(piece) is Slot:
                    self.lent += (<Slot>piece).size
                elif not PyBytes_Check(piece):
                    self.lent += piece.size
        else:
            return False
        return True


cdef bytes bulk(bytes text):
    """Return `text` as a bulk string."""
    cdef char line[FRAME]
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text), begun = snprintf(line, FRAME, "$%zd\r\n", size)
    cdef bytes encoded = PyBytes_FromStringAndSize(NULL, begun + size + 2)
    cdef char *to = PyBytes_AS_STRING(encoded)
    memcpy(to, line, begun)
    memcpy(to + begun, PyBytes_AS_STRING(text), size)
    to[begun + size], to[begun + size + 1] = c"\r", c"\n"
    return encoded
