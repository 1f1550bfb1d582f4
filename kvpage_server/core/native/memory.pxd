cdef class Memory:
    cdef Memory whole  # of a part: the object that owns the buffers
    cdef list given  # the objects with the memory
    cdef Py_buffer *held  # all buffers; NULL in a part
    cdef Py_buffer *buffers  # the first buffer; in a part, it points into `held` of `whole`
    cdef readonly Py_ssize_t count  # number of buffers

    cdef int hold(self, object given, Py_ssize_t i, bint writable) except -1
