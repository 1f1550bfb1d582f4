from libc.stdint cimport uint32_t


cdef struct Name:
    const char *req_id
    Py_ssize_t req_size
    uint32_t layer
    uint32_t head
    uint32_t page
    uint32_t kv_type


cdef struct Part:  # of a layout, as the caller packs it: a page of each block
    uint32_t layer
    uint32_t head
    uint32_t kv_type
    uint32_t dtype
    uint32_t page_size
    uint32_t head_dim


cdef class PageKeys:
    cdef PageKeys whole  # of a part: the object that owns the names
    cdef list req_ids  # owners of the memory that the names point to
    cdef Name *held  # all names; NULL in a part
    cdef Name *names  # the first name; in a part, it points into `held` of `whole`
    cdef readonly Py_ssize_t count  # number of names

    cdef bytes encoded(self, char *(*put)(char *, const Name *) noexcept nogil)


# Each function writes at `to`, and returns the end of the text: a number; a word; the frame of a word of `size` bytes;
# a number as a word; the five words of a page's key; a page's key as one word.
cdef char *put_number(char *to, unsigned long long value) noexcept nogil
cdef char *put_word(char *to, const char *text, Py_ssize_t size) noexcept nogil
cdef char *put_frame(char *to, Py_ssize_t size) noexcept nogil
cdef char *put_number_word(char *to, unsigned long long value) noexcept nogil
cdef char *put_name(char *to, const Name *name) noexcept nogil
cdef char *put_key(char *to, const Name *name) noexcept nogil
cdef Py_ssize_t room_for(const Name *name) noexcept nogil  # the most bytes that `put_name` and `put_key` write
