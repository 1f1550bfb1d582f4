cimport cython
from kvpage_server.core.native.long_word cimport LongWord
from kvpage_server.core.native.slots cimport Arena
from kvpage_server.core.native.sockets cimport iovec
from kvpage_server.core.native.words cimport Packed


@cython.final
cdef class Scratch:
    cdef char *memory  # SCRATCH_SIZE bytes
    cdef void *owner  # borrowed: the Parser that has unparsed bytes in the memory; NULL for none


@cython.final
cdef class Parser:
    cdef readonly object limits
    cdef readonly bint trusted  # whether the client has authenticated
    cdef readonly Py_ssize_t receiving  # bytes of the arena that the current command has
    cdef readonly Py_ssize_t received  # bytes of the arena that the last returned command has
    cdef readonly Py_ssize_t taken_bytes  # bytes of memory that the last returned command has
    cdef object hashed  # names of commands whose long words get a digest
    cdef Arena arena
    cdef Scratch scratch
    # Received bytes that were not parsed: `data[pos:end]`. `data` is the scratch memory while this parser is its owner,
    # and otherwise `own`, with `own_room` bytes.
    cdef char *data
    cdef char *own
    cdef Py_ssize_t own_room, pos, end
    cdef Py_ssize_t scanned  # bytes after `pos` that were searched for the end of a line without success
    # The current command. Its complete words are in `args`, or in `packed` if there are many; both None without one.
    cdef list args
    cdef Packed packed
    cdef Py_ssize_t missing  # number of its words that are not complete
    cdef Py_ssize_t size  # bytes of its words, the one whose line was read last included
    cdef Py_ssize_t length  # bytes of the current word; -1 until its line was read
    cdef Py_ssize_t most_words, most_bytes  # limits for this client: words of a command, and bytes of a word
    cdef Py_ssize_t max_command  # limit of the bytes of a command
    cdef LongWord word  # the current word, if it is long
    cdef bint were_long  # whether the last words were long enough to be received into their slots
    cdef object fault  # the error that `next` has to raise, or None

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
