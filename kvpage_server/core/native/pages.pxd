from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef struct Row:  # an entry of the hash table of a `PageSet`: a row of a block's pages, see `core/pieces.py`
    uint32_t number  # the row's number plus one; 0 for a free entry
    uint64_t heads  # a bit for each page; 0 if all pages of the row were removed


cdef class PageSet:
    cdef readonly bytes req_id
    cdef readonly uint32_t page
    cdef public Py_ssize_t pages, footprint
    cdef public int64_t soonest
    cdef public object extent, shape
    cdef public bint shape_known
    cdef readonly uint64_t version
    # The rows, in a hash table with open addressing and linear probing: a row is in the first entry from its hash on
    # that was free when it was added. The table has 2**bits_of_room entries, of which at most about three quarters are
    # taken, so a lookup is O(1). A row without pages keeps its entry until the table grows. Most blocks of single pages
    # have only one row, so the object contains a table of one entry.
    cdef Row one  # the table of one entry
    cdef Row *rows  # the table: `one`, or allocated memory
    cdef uint32_t taken  # number of entries with a row, including rows without pages
    cdef int bits_of_room  # binary logarithm of the number of entries
    cdef void drop_rows(self) noexcept
    cdef Row *row(self, uint32_t number) noexcept
    cdef int grow(self) except -1
    cdef Row *row_to_fill(self, uint32_t number) except NULL
    cdef bytes sorted_rows(self)
    cdef void change(self) noexcept
    cdef int add_page(self, uint32_t layer, uint32_t head, uint32_t kv_type) except -1


cdef struct Place:  # the parts of a page's key, and its expiry
    int64_t expires  # unix milliseconds, 0 for never; not set in `PageNames`
    uint32_t page
    uint16_t layer
    uint16_t head
    uint16_t req_id  # bytes of the request id, which begins at the fourth byte of the key
    uint8_t kv_type
    PyObject *old  # in `put`: the value that the page replaces; NULL for none


cdef class PageNames:
    cdef readonly list keys
    cdef Place *places  # array with the place of each key
    cdef Py_ssize_t room  # number of places in the array
    cdef Py_ssize_t count  # number of parsed pages
    cdef int allocate(self, words, Py_ssize_t first, Py_ssize_t most, Py_ssize_t width) except -1
    cdef int check(self, Py_ssize_t i) except -1
    cdef const char *key(self, Py_ssize_t i) noexcept
    cdef bint is_same_block(self, Py_ssize_t i, Py_ssize_t j) noexcept
    cdef tuple block_name(self, Py_ssize_t i)
