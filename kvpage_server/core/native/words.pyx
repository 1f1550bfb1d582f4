"""The words of a long command in a few arrays: short words one after the other in a text, long words in slots.

So a short word takes 8 bytes in addition to its own, and no Python object. The reference implementation is in
`core/python/frames.py`.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_GET_SIZE
from libc.stdint cimport UINT32_MAX
from libc.stdlib cimport free, realloc

from kvpage_server.core.native.slots cimport Slot

cdef Py_ssize_t FIRST_WORDS = 128  # words for which memory is allocated at first
cdef Py_ssize_t TEXT = 1024  # bytes of text that are allocated at first
cdef Py_ssize_t SPARE = 1024 * 1024  # unused bytes of a text that `drop_from` keeps


cdef class Packed:
    def __cinit__(self):
        self.slots = []

    def __dealloc__(self):
        free(self.text)
        free(self.words)

    cdef int grow(self, Py_ssize_t size) except -1:
        """Allocate memory for another word of `size` bytes. Raise MemoryError."""
        if self.size + size >= self.text_room:  # not `>`, so that the text is not NULL if all words are empty
            self.text = <char *>resized(self.text, &self.text_room, self.size + size, TEXT, 1)
        if self.count == self.words_room:
            self.words = <Word *>resized(self.words, &self.words_room, self.count + 1, FIRST_WORDS, sizeof(Word))
        return 0

    cdef int add_slot(self, Slot slot) except -1:
        """Append a long word. Raise MemoryError."""
        self.grow(0)
        self.words[self.count].at = <uint32_t>PyList_GET_SIZE(self.slots)
        self.words[self.count].size = -1
        self.slots.append(slot)
        self.count += 1
        return 0


cdef int drop_from(Packed packed, Py_ssize_t first) except -1:
    """Drop the words from index `first` on. Shrink the text if it exceeds twice the remaining bytes plus SPARE."""
    cdef Py_ssize_t i, slots = PyList_GET_SIZE(packed.slots)
    for i in range(packed.count - 1, first - 1, -1):
        if packed.words[i].size < 0:
            slots = packed.words[i].at
        else:
            packed.size = packed.words[i].at
    packed.count = first
    del packed.slots[slots:]
    if packed.text_room > 2 * (packed.size + SPARE):
        packed.text = <char *>resized(packed.text, &packed.text_room, packed.size + SPARE, TEXT, 1)
    return 0


cdef void *resized(void *memory, Py_ssize_t *room, Py_ssize_t needed, Py_ssize_t least, Py_ssize_t size) except NULL:
    """Reallocate an array for twice the `needed` items of `size` bytes, but at least `least`. Set `room` to the number.

    Raise MemoryError, also above UINT32_MAX items, because `Word.at` has 32 bits.
    """
    if needed > UINT32_MAX:
        raise MemoryError("the words of one command take too much memory")
    cdef Py_ssize_t count = max(2 * needed, least)
    memory = realloc(memory, count * size)
    if memory == NULL:
        raise MemoryError("the system has no memory for the words of a command")
    room[0] = count
    return memory


cdef Words all_of(Packed packed):
    """Return all words of a command."""
    return view_of(packed, 0, packed.count)


cdef Words view_of(Packed packed, Py_ssize_t first, Py_ssize_t count):
    cdef Words words = Words.__new__(Words)
    words.packed, words.first, words.count = packed, first, count
    return words


cdef object object_at(Words words, Py_ssize_t i):
    """Return word `i` as an object. Raise IndexError if it was dropped."""
    if words.first + i >= words.packed.count:
        raise IndexError("the word was dropped")
    cdef Word word = words.packed.words[words.first + i]
    if word.size < 0:
        return words.packed.slots[word.at]
    return PyBytes_FromStringAndSize(words.packed.text + word.at, word.size)


cdef class Words:
    def __len__(self):
        return self.count

    def __getitem__(self, where):
        cdef Py_ssize_t start, stop, step, i
        if isinstance(where, slice):
            start, stop, step = where.indices(self.count)
            if step == 1:
                return view_of(self.packed, self.first + start, max(stop - start, 0))
            return [object_at(self, i) for i in range(start, stop, step)]
        i = where
        if i < 0:
            i += self.count
        if not 0 <= i < self.count:
            raise IndexError("there is no such word")
        return object_at(self, i)

    def __add__(self, others):
        return [*self, *others]

    def __radd__(self, others):
        return [*others, *self]

    def __eq__(self, other):
        if not isinstance(other, (Words, list)):
            return NotImplemented
        return len(other) == self.count and all(one == another for one, another in zip(self, other))

    __hash__ = None

    def __repr__(self):
        return f"Words({[*self]})"

    def __delitem__(self, where):
        """Drop the last words of the command, so that the memory of many words can be freed in steps."""
        start, stop, step = where.indices(self.count)
        if step != 1 or self.first + stop != self.packed.count:
            raise TypeError("only the last words of a command can be dropped")
        if start < stop:
            drop_from(self.packed, self.first + start)
            self.count = start
