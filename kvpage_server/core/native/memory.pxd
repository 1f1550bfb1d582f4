cdef class Memory:
    cdef Memory whole  # that this is a part of, and keeps alive
    cdef list given
    cdef Py_buffer *held  # NULL in a part
    cdef Py_buffer *buffers
    cdef readonly Py_ssize_t count

    cdef int hold(self, object given, Py_ssize_t i, bint writable) except -1
