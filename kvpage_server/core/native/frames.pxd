cimport cython
from kvpage_server.core.native.long_word cimport LongWord
from kvpage_server.core.native.slots cimport Arena
from kvpage_server.core.native.sockets cimport iovec
from kvpage_server.core.native.words cimport Packed


@cython.final
cdef class Scratch:
    cdef char *memory  # SCRATCH_SIZE bytes
    cdef void *owner  # borrowed: the Parser whose unparsed bytes are in the memory; NULL if there is none


@cython.final
cdef class Parser:
    cdef readonly object limits
    cdef readonly bint trusted  # whether the client has authenticated
    cdef readonly Py_ssize_t receiving  # bytes of slots of the current command
    cdef readonly Py_ssize_t received  # bytes of slots of the command that `next` returned last
    cdef readonly Py_ssize_t taken_bytes  # bytes of memory of the command that `next` returned last
    cdef object hashed  # names of commands whose long words are hashed while they are received
    cdef bint hashes  # whether those of the current command are
    cdef Arena arena
    cdef Scratch scratch
    # The unparsed bytes are `data[pos:end]`. `data` is the scratch memory while this parser is its owner, and otherwise
    # the parser's memory `own` of `own_room` bytes.
    cdef char *data
    cdef char *own
    cdef Py_ssize_t own_room, pos, end
    cdef Py_ssize_t scanned  # bytes after `pos` that have no end of a line
    # The current command. Its complete words are in `args`, or in `packed` if it has more than MOST_LISTED. Both are
    # None if there is no current command.
    cdef list args
    cdef Packed packed
    cdef Py_ssize_t missing  # number of its words that are not complete
    cdef Py_ssize_t size  # bytes of its words, including the one whose line was parsed last
    cdef Py_ssize_t length  # bytes of the current word; -1 until its line was parsed
    cdef Py_ssize_t most_words, most_bytes  # limits for this client: words of a command, and bytes of a word
    cdef Py_ssize_t max_command  # limit of the bytes of a command
    cdef LongWord word  # the current word, if it is long
    cdef bint were_long  # whether the last long word had IN_PLACE bytes or more
    cdef object fault  # the error that `next` has to raise, or None

    cdef Py_ssize_t receive_once(self, int descriptor, Py_ssize_t *most, bint again) except -2
    cdef bint completes(self) except -1
    cdef bint is_whole(self) except -1
    cdef int keep(self, Py_ssize_t more) except -1
    cdef int set_buffer(self, iovec *room) except -1
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
