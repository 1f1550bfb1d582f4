from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef struct Row:  # of a block's pages
    uint32_t number  # one more than the row's, 0 for none
    uint64_t heads  # a bit each


cdef class PageSet:
    cdef readonly bytes req_id
    cdef readonly uint32_t page
    cdef public Py_ssize_t pages, footprint
    cdef public int64_t soonest
    cdef public object extent, shape
    cdef public bint shape_known
    cdef readonly uint64_t version
    cdef Row one
    cdef Row *rows
    cdef uint32_t taken  # rows with a number
    cdef int bits_of_room  # the table has room for two to the power of that
    cdef void drop_rows(self) noexcept
    cdef Row *row(self, uint32_t number) noexcept
    cdef int grow(self) except -1
    cdef Row *row_to_fill(self, uint32_t number) except NULL
    cdef bytes sorted_rows(self)
    cdef void change(self) noexcept
    cdef int add_page(self, uint32_t layer, uint32_t head, uint32_t kv_type) except -1


cdef struct Place:  # what the words of a page say beside its key
    int64_t expires
    uint32_t page
    uint16_t layer
    uint16_t head
    uint16_t req_id  # bytes of it, in the key
    uint8_t kv_type


cdef class PageNames:
    cdef readonly list keys
    cdef Place *places
    cdef Py_ssize_t room  # places there are
    cdef Py_ssize_t count  # of them that are filled
    cdef int make_room(self, words, Py_ssize_t first, Py_ssize_t most, Py_ssize_t width) except -1
    cdef int check(self, Py_ssize_t i) except -1
    cdef const char *key(self, Py_ssize_t i) noexcept
    cdef bint is_same_block(self, Py_ssize_t i, Py_ssize_t j) noexcept
    cdef tuple block_name(self, Py_ssize_t i)
