"""The parser of requests in RESP. The reference implementation, `core/python/frames.py`, documents the methods.

**Data structure.** Bytes are received into scratch memory that all connections of an event loop share, so that it stays
in the processor's cache, and parsed there. Before another connection receives, a parser copies its unparsed bytes to
memory of its own. These are usually few, because the received part of a long word is copied to its slot immediately.

**Cost.** Every byte is parsed a bounded number of times, and copied amortised O(1) times, however the input is cut into
packets.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcpy, memmove

from kvpage_server.core.native.long_word cimport LongWord
from kvpage_server.core.native.slots cimport Arena
from kvpage_server.core.native.sockets cimport iovec, readv
from kvpage_server.core.native.words cimport Packed, all_of

from kvpage_server.core import protocol
from kvpage_server.core.protocol import Limits, ProtocolError, count_of, inline_words, length_of
from kvpage_server.core.regions import IN_PLACE as _IN_PLACE

cdef Py_ssize_t MAX_LINE = protocol.MAX_LINE
cdef Py_ssize_t KEEP_FROM = protocol.KEEP_FROM
cdef Py_ssize_t MOST_LISTED = protocol.MOST_LISTED
cdef Py_ssize_t WORD = protocol.WORD
cdef Py_ssize_t SCRATCH_SIZE = protocol.SCRATCH_SIZE
cdef Py_ssize_t IN_PLACE = _IN_PLACE
cdef Py_ssize_t DIRECT = protocol.DIRECT
cdef Py_ssize_t AHEAD = protocol.AHEAD
cdef Py_ssize_t RECEIVE_TURN = protocol.RECEIVE_TURN
cdef Py_ssize_t RECEIVE_AGAIN_FROM = protocol.RECEIVE_AGAIN_FROM
cdef Py_ssize_t PIECE = 256 * 1024  # bytes received into a slot in one call: few, to hash them while in the cache
cdef Py_ssize_t SHORTEST = 6  # bytes of an empty word with its line
cdef Py_ssize_t LITTLE = 4096  # up to this number, unparsed bytes are moved to the scratch memory before a receive


@cython.no_gc
cdef class Scratch:
    """Receive buffer of SCRATCH_SIZE bytes that all parsers of a thread share."""

    def __cinit__(self):
        self.memory = <char *>malloc(SCRATCH_SIZE)
        if self.memory == NULL:
            raise MemoryError("the system has no memory to receive into")

    def __dealloc__(self):
        free(self.memory)


@cython.no_gc
cdef class Parser:
    """The parser of one connection's requests: bytes in, commands out."""

    def __cinit__(self, Arena arena not None, Scratch scratch=None, limits=None, hashed=frozenset()):
        self.arena = arena
        self.scratch = scratch or Scratch()
        self.limits = limits or Limits()
        self.hashed = hashed
        self.max_command = self.limits.max_command
        self.length = -1
        self.word = LongWord.__new__(LongWord)
        self.trust(True)

    def __dealloc__(self):
        if self.scratch is not None and self.scratch.owner == <void *>self:
            self.scratch.owner = NULL
        free(self.own)

    def trust(self, bint trusted):
        """Set whether the client has authenticated."""
        self.trusted = trusted
        self.most_words, self.most_bytes = self.limits.max_arguments, self.limits.max_bulk
        if not trusted:
            self.most_words = min(self.most_words, protocol.UNAUTHENTICATED_ARGUMENTS)
            self.most_bytes = min(self.most_bytes, protocol.UNAUTHENTICATED_BULK)

    @property
    def held(self):
        """Bytes of memory of received data that `next` did not return yet."""
        cdef Py_ssize_t words = len(self.args) if self.args is not None else 0
        if self.packed is not None:
            words = self.packed.count
        return self.end - self.pos + self.size + WORD * words

    @property
    def is_idle(self):
        """Whether `next` has returned all received bytes as commands."""
        return self.pos == self.end and self.missing == 0 and self.fault is None

    @property
    def is_partial(self):
        """Whether `next` needs more bytes, as far as `receive` has parsed them."""
        return self.fault is None and (self.missing > 0 or (self.args is None and self.packed is None))

    def give_up(self):
        """Drop all received bytes. Return the complete words of the current command."""
        self.word.slot = self.fault = None
        self.pos = self.end
        words = self.taken()
        return [] if words is None else words

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, int descriptor):
        """Receive until a command is complete, no bytes are available, or RECEIVE_TURN bytes were received."""
        cdef Py_ssize_t received = 0, count, room
        while received < RECEIVE_TURN:
            count = self.receive_once(descriptor, &room, received > 0)
            if count <= 0:
                return received or count
            received += count
            if self.completes() or (count < room and count < RECEIVE_AGAIN_FROM):
                break
        return received

    cdef Py_ssize_t receive_once(self, int descriptor, Py_ssize_t *most, bint again) except -2:
        """Receive with one system call, and return the number of bytes. Set `most` to the size of the buffers.

        Return 0 at the end of the stream, -1 if no bytes are available. Raise OSError. With `again`, bytes were
        received before in this turn: then return -1 instead, because the next turn raises the error.
        """
        cdef iovec room[2]
        cdef int rooms = 1
        cdef Py_ssize_t count, straight = 0
        self.set_buffer(room)
        # Select the buffers. Usually it is the scratch memory. If DIRECT bytes or more of a long word are missing, and
        # the scratch memory is empty, it is the word's slot, and for AHEAD bytes behind the word the scratch memory.
        cdef Py_ssize_t missing = 0 if self.word.slot is None else self.word.missing()
        if self.end or missing < DIRECT:
            room[0].iov_len = min(<Py_ssize_t>room[0].iov_len, missing + (AHEAD if self.were_long else SCRATCH_SIZE))
        else:
            rooms = 2 if missing <= PIECE else 1
            straight = min(missing, PIECE)
            room[1].iov_base, room[1].iov_len = room[0].iov_base, AHEAD
            room[0].iov_base, room[0].iov_len = self.word.place(), straight
        most[0] = room[0].iov_len + (room[1].iov_len if rooms == 2 else 0)
        with nogil:
            count = readv(descriptor, room, rooms)
        if count < 0:
            if again or errno == EAGAIN or errno == EINTR:
                return -1
            PyErr_SetFromErrno(OSError)
        # Count the bytes in the slot and in the scratch memory.
        straight = min(straight, count)
        if straight:
            self.word.arrived(NULL, straight)
        if count > straight:
            self.end += count - straight
            if self.word.slot is None:
                self.were_long = False
        return count

    cdef bint completes(self) except -1:
        """Return whether `next` has a result: a complete command or an error, which is kept for it."""
        try:
            return self.is_whole()
        except (ProtocolError, MemoryError) as fault:
            self.fault = fault
            return True

    def feed(self, const unsigned char[::1] data not None):
        """Add bytes that another function has received."""
        cdef Py_ssize_t count = data.shape[0], taken = 0
        if not count:
            return
        if self.word.slot is not None and self.pos == self.end:
            taken = self.word.fill(<const char *>&data[0], count)
        if taken < count:
            self.keep(count - taken)
            memcpy(self.data + self.end, &data[0] + taken, count - taken)
            self.end += count - taken

    cdef int set_buffer(self, iovec *room) except -1:
        """Set `room` to the buffer for the next bytes: the memory behind the unparsed bytes. Raise MemoryError."""
        # Many unparsed bytes stay in memory of their own, so that they are not copied for each packet.
        cdef Py_ssize_t rest = self.end - self.pos
        if rest > LITTLE:
            self.keep(rest)
            room.iov_base, room.iov_len = self.own + self.end, self.own_room - self.end
            return 0
        # Otherwise become the owner of the scratch memory, and move the unparsed bytes to its beginning.
        if self.scratch.owner != <void *>self:
            if self.scratch.owner != NULL:
                (<Parser>self.scratch.owner).keep(0)
            if rest:
                memcpy(self.scratch.memory, self.data + self.pos, rest)
            free(self.own)
            self.own, self.own_room = NULL, 0
            self.scratch.owner = <void *>self
        elif rest:
            memmove(self.scratch.memory, self.data + self.pos, rest)
        self.data, self.pos, self.end = self.scratch.memory, 0, rest
        room.iov_base, room.iov_len = self.data + rest, SCRATCH_SIZE - rest
        return 0

    cdef int keep(self, Py_ssize_t more) except -1:
        """Move the unparsed bytes to `own`, with space for `more` bytes behind them. Raise MemoryError.

        New memory has twice the size of the unparsed bytes, so that each byte is copied amortised O(1) times.
        """
        cdef Py_ssize_t rest = self.end - self.pos
        cdef char *larger
        if self.own != NULL and self.end + more <= self.own_room:
            return 0
        if rest + more > self.own_room:
            larger = <char *>malloc(2 * rest + more)
            if larger == NULL:
                raise MemoryError("the system has no memory for what was received")
            if rest:
                memcpy(larger, self.data + self.pos, rest)
            free(self.own)
            self.own, self.own_room = larger, 2 * rest + more
        elif rest:
            memmove(self.own, self.data + self.pos, rest)
        if self.scratch.owner == <void *>self:
            self.scratch.owner = NULL
        self.data, self.pos, self.end = self.own, 0, rest
        return 0

    # -- commands --------------------------------------------------------------------------------------------------

    def next(self):
        """Return the next complete command, or None if more bytes are needed. Raise ProtocolError or MemoryError."""
        return self.take()

    cdef object take(self):
        """Return the next complete command, see `next`."""
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        if self.is_whole():
            return self.taken()
        if self.pos == self.end and self.own != NULL:
            free(self.own)
            self.data = self.own = NULL
            self.own_room = self.pos = self.end = 0
        return None

    cdef bint is_whole(self) except -1:
        """Parse the available bytes. Return whether a command is complete."""
        while not self.missing or self.take_words():
            if self.args is not None or self.packed is not None:
                return True
            if self.pos == self.end or not self.begin_command():
                break
        return False

    cdef object taken(self):
        """Return the words of the current command, and begin with the next one.

        Return None without a current command.
        """
        cdef Py_ssize_t words = len(self.args) if self.args is not None else 0
        if self.packed is not None:
            words = self.packed.count
        command = self.args if self.packed is None else all_of(self.packed)
        self.taken_bytes = self.size + WORD * words
        self.args = self.packed = None
        self.received, self.receiving = self.receiving, 0
        self.missing = self.size = 0
        return command

    cdef int begin_command(self) except -1:
        """Parse the first line of a command, or an inline command. Return False if it is incomplete."""
        cdef Py_ssize_t count, end
        if self.data[self.pos] != b"*":
            return self.inline()
        count = announced(self, b"*", self.most_words)
        if count < 0:
            end = self.line(protocol.LONG_COUNT)
            if end < 0:
                return False
            count = count_of(self.data[self.pos : end], self.limits, self.trusted)
            self.pos, self.scanned = end + 2, 0
        self.missing = count
        if count > MOST_LISTED:
            self.packed = Packed()
        elif count:
            self.args = []
        return True

    cdef int inline(self) except -1:
        """Parse a command that is a line of words. Return False if it is incomplete."""
        if not self.scanned and self.skip_blank():
            return True
        cdef Py_ssize_t rest = self.end - self.pos
        cdef char *start = self.data + self.pos
        cdef char *end = <char *>memchr(start + self.scanned, b"\n", rest - self.scanned)
        self.scanned = rest if end == NULL else 0
        if (rest if end == NULL else end - start) > MAX_LINE:
            raise ProtocolError(protocol.LONG_INLINE)
        if end == NULL:
            return False
        words = inline_words(start[: end - start])
        self.pos += end - start + 1
        if len(words) > MOST_LISTED:
            self.packed = packed_of(words)
        elif words:
            self.args = words
        return True

    cdef bint skip_blank(self) noexcept:
        """Skip all lines without a word: a client may send a megabyte of them. Return whether there was one."""
        cdef char *start = self.data + self.pos
        cdef char *end = self.data + self.end
        cdef char *at = start
        cdef Py_ssize_t before = self.pos
        while at < end and at - start <= MAX_LINE:
            if at[0] == c"\n":
                self.pos = at + 1 - self.data
                start = at + 1
            elif at[0] != c" " and at[0] != c"\r" and at[0] != c"\t" and at[0] != c"\v" and at[0] != c"\f" and at[0]:
                break
            at += 1
        return self.pos > before

    cdef Py_ssize_t line(self, str too_long) except -2:
        """Return the index of the CRLF that ends the line at `pos`; -1 if the line is incomplete.

        Raise ProtocolError with the message `too_long` above MAX_LINE bytes.
        """
        if self.pos == self.end:
            return -1
        cdef char *start = self.data + self.pos
        cdef char *stop = self.data + self.end - 1  # the last byte, at which no complete CRLF begins
        cdef char *end = start + self.scanned
        while end < stop:
            end = <char *>memchr(end, b"\r", stop - end)
            if end == NULL:
                end = stop
            elif end[1] != b"\n":
                end += 1
            else:
                break
        self.scanned = max(end - start, 0)
        if self.scanned > MAX_LINE:
            raise ProtocolError(too_long)
        return end - self.data if end < stop else -1

    # -- words -----------------------------------------------------------------------------------------------------

    cdef int take_words(self) except -1:
        """Parse words until the current command is complete. Return False if the current word is incomplete."""
        cdef const char *word
        while self.missing:
            # A long word: copy its received part to its slot.
            if self.word.slot is not None:
                self.pos += self.word.fill(self.data + self.pos, self.end - self.pos)
                if self.word.missing():
                    return False
                self.end_long_word()
                continue
            # Complete short words: parse them in a fast loop. Then parse the line of the next word.
            if self.length < 0:
                self.take_short_words()
                if not self.missing:
                    break
                if not self.read_length():
                    return False
            if self.length >= KEEP_FROM:
                self.begin_long_word()
                continue
            # A short word that the fast loop did not parse.
            if self.end - self.pos < self.length + 2:
                return False
            word = self.data + self.pos
            if word[self.length] != b"\r" or word[self.length + 1] != b"\n":
                raise ProtocolError(protocol.NO_CRLF)
            if self.packed is None:
                self.args.append(PyBytes_FromStringAndSize(word, self.length))
            else:
                self.packed.add(word, self.length)
            self.pos += self.length + 2
            self.length = -1
            self.missing -= 1
        return True

    cdef int take_short_words(self) except -1:
        """Parse complete short words in a fast loop. It stops before a word that is long, incomplete or invalid."""
        cdef const char *at = self.data + self.pos
        cdef const char *end = self.data + self.end
        cdef const char *word
        cdef Py_ssize_t length, most = min(self.most_bytes, KEEP_FROM - 1), left = self.missing
        while left and end - at >= SHORTEST and at[0] == b"$" and b"0" <= at[1] <= b"9":
            length = at[1] - 48
            word = at + 2
            while length and word < at + 4 and b"0" <= word[0] <= b"9":
                length = 10 * length + word[0] - 48
                word += 1
            if word[0] != b"\r" or word[1] != b"\n" or length > most or self.size + length > self.max_command:
                break
            word += 2
            if end - word < length + 2 or word[length] != b"\r" or word[length + 1] != b"\n":
                break
            if self.packed is None:
                self.args.append(PyBytes_FromStringAndSize(word, length))
            else:
                self.packed.add(word, length)
            self.size += length
            left -= 1
            at = word + length + 2
        if left < self.missing:
            self.missing, self.pos, self.scanned = left, at - self.data, 0
        return 0

    cdef int read_length(self) except -1:
        """Parse the line before a word, and set `length`. Return False if the line is incomplete."""
        cdef Py_ssize_t end, length = announced(self, b"$", self.most_bytes)
        if length < 0:
            end = self.line(protocol.LONG_LENGTH)
            if end < 0:
                return False
            length = length_of(self.data[self.pos : end], self.limits, self.trusted)
            self.pos, self.scanned = end + 2, 0
        if self.size + length > self.max_command:
            raise ProtocolError(protocol.TOO_LONG)
        self.size += length
        self.length = length
        return True

    cdef int begin_long_word(self) except -1:
        """Allocate the slot of a long word. Raise MemoryError."""
        if not self.receiving:  # it is the first one of the command
            words = self.args if self.packed is None else all_of(self.packed)
            self.hashes = len(words) > 0 and isinstance(words[0], bytes) and words[0] in self.hashed
        slot = self.arena.take(self.length)
        self.receiving += slot.chunk.size_class.pitch
        self.word.begin(slot, self.hashes)
        if self.length >= IN_PLACE:
            self.were_long = True
        return 0

    cdef int end_long_word(self) except -1:
        """Append the slot of a complete long word to the command."""
        slot = self.word.end()
        if self.packed is None:
            self.args.append(slot)
        else:
            self.packed.add_slot(slot)
        self.length = -1
        self.missing -= 1
        return 0


cdef Packed packed_of(list words):
    """Return short words as `Packed`."""
    cdef Packed packed = Packed()
    for word in words:
        packed.add(word, len(word))
    return packed


cdef inline Py_ssize_t announced(Parser parser, char kind, Py_ssize_t most) noexcept:
    """Parse a complete line of `kind` and a number up to `most`, and return the number.

    For any other line, return -1 and parse nothing: the caller parses it with the functions of `core/protocol.py`,
    which raise the errors.
    """
    cdef const char *line = parser.data + parser.pos
    cdef Py_ssize_t size = min(parser.end - parser.pos, 12), number = 0, i = 1
    if size < 4 or line[0] != kind:
        return -1
    while i < size and b"0" <= line[i] <= b"9":
        number = number * 10 + (line[i] - 0x30)
        i += 1
    if i == 1 or i + 1 >= size or line[i] != b"\r" or line[i + 1] != b"\n" or number > most:
        return -1
    if line[1] == b"0" and i > 2:
        return -1
    parser.pos += i + 2
    parser.scanned = 0
    return number
