"""Buffers of the caller. The reference implementation is in `core/python/bodies.py`."""

from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc

from kvpage_server.core.pieces import as_bytes


cdef class Memory:
    """The caller's buffers, whose memory stays valid while this object, or a slice of it, exists."""

    def __init__(self, buffers, *, bint writable=False):
        cdef Py_ssize_t i
        cdef list some = list(buffers)
        if self.buffers != NULL:
            raise RuntimeError("a Memory is made once")
        self.buffers = self.held = <Py_buffer *>PyMem_Malloc(max(len(some), 1) * sizeof(Py_buffer))
        if self.buffers == NULL:
            raise MemoryError
        self.given = some
        for i in range(len(some)):
            self.hold(some[i], i, writable)

    cdef int hold(self, object given, Py_ssize_t i, bint writable) except -1:
        """Open buffer `i`. Raise Unusable if it cannot be sent from or, with `writable`, not be received into."""
        cdef Py_buffer *buffer = self.buffers + i
        try:
            PyObject_GetBuffer(given, buffer, PyBUF_STRIDES)
        except (TypeError, ValueError, BufferError):
            PyObject_GetBuffer(as_bytes(given, i, writable=writable), buffer, PyBUF_STRIDES)
        self.count += 1
        if (writable and buffer.readonly) or not PyBuffer_IsContiguous(buffer, b"C"):
            as_bytes(given, i, writable=writable)
            raise AssertionError("memory that was refused for no reason")
        return 0

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.held != NULL:
            for i in range(self.count):
                PyBuffer_Release(self.held + i)
            PyMem_Free(self.held)

    def __len__(self):
        return self.count

    def __getitem__(self, part):
        cdef Memory some = Memory.__new__(Memory)
        start, stop, step = part.indices(self.count)
        if step != 1:
            raise ValueError("a part of Memory has no gaps")
        some.whole = self
        some.buffers = self.buffers + <Py_ssize_t>start
        some.count = max(0, stop - start)
        some.given = self.given[part]
        return some

    def sizes(self):
        cdef Py_ssize_t i
        return [self.buffers[i].len for i in range(self.count)]

    def views(self):
        return [as_bytes(buffer) for buffer in self.given]
