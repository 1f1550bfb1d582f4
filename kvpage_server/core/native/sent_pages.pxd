from kvpage_server.core.native.memory cimport Memory


cdef class Chunk:
    cdef char *text
    cdef Py_ssize_t *ends  # where in it each body belongs, and the text's own end
    cdef Memory bodies
    cdef readonly Py_ssize_t stop  # of the pages that it was made from

    cdef int make(self, Py_ssize_t room, Memory bodies, Py_ssize_t stop) except -1
