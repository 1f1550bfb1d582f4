from kvpage_server.core.native.memory cimport Memory


cdef class Chunk:
    cdef char *text  # all texts, one after the other
    cdef Py_ssize_t *ends  # end of each text: body i is sent after the text that ends at `ends[i]`
    cdef Memory bodies
    cdef readonly Py_ssize_t stop  # index after the last of its pages

    cdef int make(self, Py_ssize_t room, Memory bodies, Py_ssize_t stop) except -1
