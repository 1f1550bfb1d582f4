from libc.stdint cimport uint32_t


cdef struct Name:
    const char *req_id
    Py_ssize_t req_size
    uint32_t layer
    uint32_t head
    uint32_t page
    uint32_t kv_type


cdef class PageKeys:
    cdef PageKeys whole  # that this is a part of, and keeps alive
    cdef list req_ids  # what the names point into
    cdef Name *held  # NULL in a part
    cdef Name *names
    cdef readonly Py_ssize_t count

    cdef bytes spelt(self, char *(*put)(char *, const Name *) noexcept nogil)


# A number, a frame, a word, a number as a word, the words and the key of a page at `to`; where they end.
cdef char *put_number(char *to, unsigned long long value) noexcept nogil
cdef char *put_word(char *to, const char *text, Py_ssize_t size) noexcept nogil
cdef char *put_frame(char *to, Py_ssize_t size) noexcept nogil
cdef char *put_number_word(char *to, unsigned long long value) noexcept nogil
cdef char *put_name(char *to, const Name *name) noexcept nogil
cdef char *put_key(char *to, const Name *name) noexcept nogil
cdef Py_ssize_t room_for(const Name *name) noexcept nogil  # bytes that either of the last two needs at most
