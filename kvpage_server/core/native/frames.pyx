"""Bytes in, commands out: the request half of RESP. The twin in `core/python` says what it does.

Every byte is looked at a bounded number of times, however the input is cut. What was received lies in a scratch memory
that all connections of a loop share, so that it stays in the processor's cache, and is parsed there. What cannot be
parsed yet is kept by the connection when somebody else receives: mostly a few bytes, for a word that is long goes to
its slot as far as it is there.
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
cdef Py_ssize_t MUCH = protocol.MUCH
cdef Py_ssize_t PIECE = 256 * 1024  # bytes received into a slot at once: few enough to be hashed in the cache
cdef Py_ssize_t SHORTEST = 6  # bytes of an empty word with its line
cdef Py_ssize_t LITTLE = 4096  # bytes left over that are moved when more is received


@cython.no_gc
cdef class Scratch:
    def __cinit__(self):
        self.memory = <char *>malloc(SCRATCH_SIZE)
        if self.memory == NULL:
            raise MemoryError("the system has no memory to receive into")

    def __dealloc__(self):
        free(self.memory)


@cython.no_gc
cdef class Parser:
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
        """Whether the client has authenticated."""
        self.trusted = trusted
        self.most_words, self.most_bytes = self.limits.max_arguments, self.limits.max_bulk
        if not trusted:
            self.most_words = min(self.most_words, protocol.UNAUTHENTICATED_ARGUMENTS)
            self.most_bytes = min(self.most_bytes, protocol.UNAUTHENTICATED_BULK)

    @property
    def held(self):
        """Bytes of memory held for commands that were not taken."""
        cdef Py_ssize_t words = len(self.args) if self.args is not None else 0
        if self.packed is not None:
            words = self.packed.count
        return self.end - self.pos + self.size + WORD * words

    @property
    def is_idle(self):
        """Whether everything that was received has been taken."""
        return self.pos == self.end and self.missing == 0 and self.fault is None

    def give_up(self):
        """The words of the command under way, which will not come to its end; nothing is held any more."""
        self.word.slot = self.fault = None
        self.pos = self.end
        words = self.taken()
        return [] if words is None else words

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, int descriptor):
        cdef Py_ssize_t received = 0, count, room
        while received < RECEIVE_TURN:
            count = self.receive_once(descriptor, &room, received > 0)
            if count <= 0:
                return received or count
            received += count
            if self.completes() or (count < room and count < MUCH):
                break
        return received

    cdef Py_ssize_t receive_once(self, int descriptor, Py_ssize_t *most, bint again) except -2:
        """Receive from a socket once. `most` becomes how many bytes there was room for.

        What goes wrong after something was received (`again`) will be met again.
        """
        cdef iovec room[2]
        cdef int rooms = 1
        cdef Py_ssize_t count, straight = 0
        self.make_room(room)
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
        straight = min(straight, count)
        if straight:
            self.word.arrived(straight)
        if count > straight:
            self.end += count - straight
            if self.word.slot is None:
                self.were_long = False
        return count

    cdef bint completes(self) except -1:
        """Whether a command is whole, or something is wrong with it: `next` tells of either."""
        try:
            return self.is_whole()
        except (ProtocolError, MemoryError) as fault:
            self.fault = fault
            return True

    def feed(self, const unsigned char[::1] data not None):
        """Take bytes that somebody else received."""
        cdef Py_ssize_t count = data.shape[0], taken = 0
        if not count:
            return
        if self.word.slot is not None and self.pos == self.end:
            taken = self.word.fill(<const char *>&data[0], count)
        if taken < count:
            self.keep(count - taken)
            memcpy(self.data + self.end, &data[0] + taken, count - taken)
            self.end += count - taken

    cdef int make_room(self, iovec *room) except -1:
        """Where the next bytes belong: behind those that are left over."""
        cdef Py_ssize_t rest = self.end - self.pos
        if rest > LITTLE:
            self.keep(rest)
            room.iov_base, room.iov_len = self.own + self.end, self.own_room - self.end
            return 0
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
        """Have what is left over in memory of its own, with room for so many bytes more. Raises MemoryError."""
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
        """The next whole command, or None when more bytes are needed. Raises ProtocolError."""
        return self.take()

    cdef object take(self):
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
        """Take what has arrived of the next command: whether that is all of it."""
        while not self.missing or self.take_words():
            if self.args is not None or self.packed is not None:
                return True
            if self.pos == self.end or not self.begin_command():
                break
        return False

    cdef object taken(self):
        """The words of the command that was under way."""
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
        """Read the line that opens a command; false when it has not arrived."""
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
        """Read a command that is a line of words; false when it has not arrived."""
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
        """Skip lines without a word, of which a megabyte may come at once; whether there was one."""
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
        """Where the line ends that begins at `pos`, at its CRLF; -1 when that has not arrived."""
        if self.pos == self.end:
            return -1
        cdef char *start = self.data + self.pos
        cdef char *stop = self.data + self.end - 1  # where no CRLF begins
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
        """Take the words that have arrived; false when one is missing."""
        cdef const char *word
        while self.missing:
            if self.word.slot is not None:
                self.pos += self.word.fill(self.data + self.pos, self.end - self.pos)
                if self.word.missing():
                    return False
                self.end_long_word()
                continue
            if self.length < 0:
                self.take_short_words()
                if not self.missing:
                    break
                if not self.read_length():
                    return False
            if self.length >= KEEP_FROM:
                self.begin_long_word()
                continue
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
        """Take those that have arrived with their lines, up to one that is long, or not as it should be."""
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
        """Read the line that announces a word; false when it has not arrived."""
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
        """Have memory for a long word. Raises MemoryError."""
        name = None
        if self.packed is not None and self.packed.count:
            name = all_of(self.packed)[0]
        elif self.args:
            name = self.args[0]
        slot = self.arena.take(self.length)
        self.receiving += slot.chunk.size_class.pitch
        self.word.begin(slot, isinstance(name, bytes) and name in self.hashed)
        if self.length >= IN_PLACE:
            self.were_long = True
        return 0

    cdef int end_long_word(self) except -1:
        """Take a long word that is whole."""
        slot = self.word.end()
        if self.packed is None:
            self.args.append(slot)
        else:
            self.packed.add_slot(slot)
        self.length = -1
        self.missing -= 1
        return 0


cdef Packed packed_of(list words):
    cdef Packed packed = Packed()
    for word in words:
        packed.add(word, len(word))
    return packed


cdef inline Py_ssize_t announced(Parser parser, char kind, Py_ssize_t most) noexcept:
    """The number in the line that is next, which is taken; -1 for anything but an ordinary line that has arrived."""
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
