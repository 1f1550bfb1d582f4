from libc.stdint cimport int32_t, uint32_t

from kvpage_server.core.native.slots cimport Slot


cdef struct Word:
    uint32_t at  # where it starts in the text; of a long one, its place among the slots
    int32_t size  # bytes; -1 for a long one


cdef class Words:
    """The words of a long command, packed: no object for a word that nobody looks at."""

    cdef Packed packed
    cdef Py_ssize_t first  # of the packed ones
    cdef readonly Py_ssize_t count


cdef class Packed:
    cdef char *text
    cdef Word *words
    cdef Py_ssize_t count
    cdef list slots
    cdef Py_ssize_t size  # bytes of the text
    cdef Py_ssize_t text_room, words_room  # that there is memory for
    cdef int add(self, const char *text, Py_ssize_t size) except -1
    cdef int add_slot(self, Slot slot) except -1


cdef Words all_of(Packed packed)


# The bytes of a command's word, whether the command is a list or Words; NULL for what is neither bytes nor a Slot.
# `slot` is the Slot that it lies in, borrowed, or NULL.
cdef const char *word_at(object command, Py_ssize_t i, Py_ssize_t *size, void **slot) except? NULL
