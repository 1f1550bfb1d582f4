cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from kvpage_server.core.native.slots cimport Slot


cdef struct Word:  # a word of a `Packed`
    uint32_t at  # start of a short word in the text; index of a long word in the slots
    int32_t size  # bytes of a short word; -1 for a long one


@cython.final
cdef class Words:
    """Consecutive words of a long command. A short word becomes a Python object only when it is read."""

    cdef Packed packed  # all words of the command
    cdef Py_ssize_t first  # index of the first one of these words
    cdef readonly Py_ssize_t count  # number of these words


@cython.final
cdef class Packed:  # all words of a long command, in three arrays: `text`, `words`, `slots`
    cdef char *text  # the short words, one after the other
    cdef Word *words
    cdef Py_ssize_t count  # number of words
    cdef list slots  # the long words
    cdef Py_ssize_t size  # bytes of the text
    cdef Py_ssize_t text_room, words_room  # allocated bytes of text, and allocated number of words
    cdef int grow(self, Py_ssize_t size) except -1
    cdef int add_slot(self, Slot slot) except -1

    cdef inline int add(self, const char *text, Py_ssize_t size) except -1:
        """Append a short word. Raise MemoryError."""
        if self.count == self.words_room or self.size + size >= self.text_room:
            self.grow(size)
        self.words[self.count].at = <uint32_t>self.size
        self.words[self.count].size = <int32_t>size
        memcpy(self.text + self.size, text, size)
        self.size += size
        self.count += 1
        return 0


cdef Words all_of(Packed packed)
cdef Words view_of(Packed packed, Py_ssize_t first, Py_ssize_t count)
cdef object object_at(Words words, Py_ssize_t i)


cdef inline const char *word_at(object command, Py_ssize_t i, Py_ssize_t *size, void **slot) except? NULL:
    """Return the bytes of word `i` of a list or `Words`; NULL if it is neither bytes nor a Slot. Raise IndexError.

    `size` is set to its bytes, `slot` to its Slot, borrowed, or NULL.
    """
    cdef void *word
    cdef Word at
    slot[0] = NULL
    if type(command) is Words:
        if not 0 <= i < (<Words>command).count or (<Words>command).first + i >= (<Words>command).packed.count:
            raise IndexError("there is no such word")
        at = (<Words>command).packed.words[(<Words>command).first + i]
        if at.size >= 0:
            size[0] = at.size
            return (<Words>command).packed.text + at.at
        word = <void *>PyList_GET_ITEM((<Words>command).packed.slots, at.at)
    else:
        if not 0 <= i < PyList_GET_SIZE(<list?>command):
            raise IndexError("there is no such word")
        word = <void *>PyList_GET_ITEM(command, i)
        if PyBytes_CheckExact(<object>word):
            size[0] = PyBytes_GET_SIZE(<object>word)
            return PyBytes_AS_STRING(<object>word)
    if type(<object>word) is not Slot:
        return NULL
    slot[0] = word
    size[0] = (<Slot>word).size
    return (<Slot>word).at
