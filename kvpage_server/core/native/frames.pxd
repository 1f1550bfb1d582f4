cimport cython
from kvpage_server.core.native.long_word cimport LongWord
from kvpage_server.core.native.slots cimport Arena
from kvpage_server.core.native.sockets cimport iovec
from kvpage_server.core.native.words cimport Packed


@cython.final
cdef class Scratch:
    cdef char *memory
    cdef void *owner  # the Parser whose bytes lie there, borrowed; NULL when they are nobody's


@cython.final
cdef class Parser:
    cdef readonly object limits
    cdef readonly bint trusted
    cdef readonly Py_ssize_t receiving  # bytes of the arena's memory that the command under way has
    cdef readonly Py_ssize_t received  # and that the command has that was taken last
    cdef readonly Py_ssize_t taken_bytes  # all bytes of memory of that command
    cdef object hashed
    cdef Arena arena
    cdef Scratch scratch
    # What was received and is not parsed yet, `data[pos:end]`: in the scratch, or in memory of its own.
    cdef char *data
    cdef char *own
    cdef Py_ssize_t own_room, pos, end
    cdef Py_ssize_t scanned  # bytes of it that hold no end of a line
    # The command under way: its words so far, in a list or packed, and the word under way.
    cdef list args
    cdef Packed packed
    cdef Py_ssize_t missing  # words still to come
    cdef Py_ssize_t size  # bytes of the words so far
    cdef Py_ssize_t length  # of the next word, once its line was read; -1 before
    cdef Py_ssize_t most_words, most_bytes  # that this client may announce
    cdef Py_ssize_t max_command
    cdef LongWord word  # the word under way if it is long
    cdef bint were_long  # the last words were as long as those that are received into their slots
    cdef object fault  # that `next` is to raise

    cdef Py_ssize_t receive_once(self, int descriptor, Py_ssize_t *most, bint again) except -2
    cdef bint completes(self) except -1
    cdef bint is_whole(self) except -1
    cdef int keep(self, Py_ssize_t more) except -1
    cdef int make_room(self, iovec *room) except -1
    cdef int begin_command(self) except -1
    cdef int take_words(self) except -1
    cdef int take_short_words(self) except -1
    cdef int read_length(self) except -1
    cdef int begin_long_word(self) except -1
    cdef int end_long_word(self) except -1
    cdef int inline(self) except -1
    cdef bint skip_blank(self) noexcept
    cdef Py_ssize_t line(self, str too_long) except -2
    cdef object taken(self)
    cdef object take(self)
