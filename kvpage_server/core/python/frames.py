"""The parser of requests in RESP: bytes in, commands out.

A command is a list of words, or a `Words` if it has more than MOST_LISTED. A word is `bytes`, or a `Slot` if it has
KEEP_FROM bytes or more. The parser receives a long word into its slot, so that the body of a page is not copied when it
is stored.

**Cost.** Every byte is parsed a bounded number of times, however the input is cut into packets: between two calls, the
parser keeps at most an incomplete line or an incomplete short word unparsed. The cuts change neither the commands nor
an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast, overload

import xxhash

from kvpage_server.core.protocol import (
    AHEAD,
    DIRECT,
    KEEP_FROM,
    LONG_COUNT,
    LONG_INLINE,
    LONG_LENGTH,
    MAX_LINE,
    MOST_LISTED,
    NO_CRLF,
    RECEIVE_AGAIN_FROM,
    RECEIVE_TURN,
    SCRATCH_SIZE,
    TOO_LONG,
    WORD,
    Limits,
    ProtocolError,
    count_of,
    inline_words,
    length_of,
)
from kvpage_server.core.python.slots import Arena, Slot
from kvpage_server.core.regions import IN_PLACE

# -- The words of a long command ---------------------------------------------------------------------------------------

Argument = bytes | Slot
Command = list[Argument]


class Words:
    """The words of a long command, or a slice of them, which copies no words.

    Words cannot be replaced. Only the last words of a command can be deleted.
    """

    __slots__ = ("_all", "_range")

    def __init__(self, words: list[Argument], places: range | None = None) -> None:
        self._all = words
        self._range = range(len(words)) if places is None else places

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[Argument]:
        return map(self._all.__getitem__, self._range)

    @overload
    def __getitem__(self, where: int) -> Argument: ...

    @overload
    def __getitem__(self, where: slice) -> Words | list[Argument]: ...

    def __getitem__(self, where: int | slice) -> Argument | Words | list[Argument]:
        if isinstance(where, int):
            return self._all[self._range[where]]
        places = self._range[where]
        return Words(self._all, places) if places.step == 1 else [self._all[place] for place in places]

    def __add__(self, others: Iterable[Argument]) -> list[Argument]:
        return [*self, *others]

    def __radd__(self, others: Iterable[Argument]) -> list[Argument]:
        return [*others, *self]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Words | list):
            return NotImplemented
        return [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Words({[*self]})"

    def __delitem__(self, where: slice) -> None:
        """Drop the last words of the command, so that the memory of many words can be freed in steps.

        Raise TypeError if the slice has gaps, or does not end with the last word of the whole command.
        """
        places = self._range[where]
        if places.step != 1 or places.stop != len(self._all):
            raise TypeError("only the last words of a command can be dropped")
        del self._all[places.start :]
        self._range = range(self._range.start, min(self._range.stop, places.start))


_CRLF = b"\r\n"
_NOWHERE = memoryview(b"")
_LENGTHS = {b"$%d" % length: length for length in range(KEEP_FROM)}  # the lines before short words, and their lengths
_LONGEST_LINE = len(b"$%d\r\n" % KEEP_FROM)  # bytes of such a line
_BLANK = re.compile(rb"(?:[ \t\r\0\v\f]{0,%d}\n)+" % MAX_LINE)  # consecutive lines without a word


class Scratch:
    """Receive buffer of SCRATCH_SIZE bytes that all parsers of a thread share. Parsers copy unparsed bytes from it."""

    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(SCRATCH_SIZE))


class Parser:
    """The parser of one connection's requests.

    `arena` allocates the slots of long words. `hashed` are the names of commands whose long words are hashed while they
    are received. The *current* command is the incomplete one, and the *current* word its first incomplete word.
    """

    def __init__(
        self,
        arena: Arena,
        scratch: Scratch | None = None,
        limits: Limits | None = None,
        hashed: Collection[bytes] = frozenset(),
    ) -> None:
        self.limits = limits or Limits()
        self.trusted = True  # whether the client has authenticated
        self.receiving = 0  # bytes of slots of the current command
        self.received = 0  # bytes of slots of the command that `next` returned last
        self.taken_bytes = 0  # bytes of memory of the command that `next` returned last
        self._hashed = hashed
        self._arena = arena
        self._scratch = scratch or Scratch()

        # Received bytes: `_data` from `_pos` on is not parsed yet.
        self._data = b""
        self._pos = 0
        self._scanned = 0  # bytes after `_pos` that have no end of a line

        # The current command.
        self._words: list[Argument] = []  # its complete words
        self._missing = 0  # number of its words that are not complete
        self._size = 0  # bytes of its words, including the one whose line was parsed last

        # The current word.
        self._length = -1  # its bytes; -1 until its line was parsed
        self._slot: Slot | None = None  # its slot, if it is long
        self._place = _NOWHERE  # the memory of that slot for the word and its CRLF
        self._filled = 0  # bytes of `_place` that were received
        self._digest: Any = None  # the hash of these bytes, if the command is in `hashed`

        self._were_long = False  # whether the last long word had IN_PLACE bytes or more
        self._fault: ProtocolError | MemoryError | None = None  # the error that `next` has to raise

    def trust(self, trusted: bool) -> None:
        """Set whether the client has authenticated."""
        self.trusted = trusted

    @property
    def held(self) -> int:
        """Bytes of memory of received data that `next` did not return yet."""
        return len(self._data) - self._pos + self._size + WORD * len(self._words)

    @property
    def is_idle(self) -> bool:
        """Whether `next` has returned all received bytes as commands."""
        return self._pos == len(self._data) and not self._missing and self._fault is None

    @property
    def is_partial(self) -> bool:
        """Whether `next` needs more bytes, as far as `receive` has parsed them."""
        return self._fault is None and (self._missing > 0 or not self._words)

    def give_up(self) -> Command:
        """Drop all received bytes, because the connection closes. Return the complete words of the current command.

        The caller frees them in steps.
        """
        self._slot = self._fault = None
        self._place = _NOWHERE
        self._data, self._pos = b"", 0
        return self._taken()

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, descriptor: int) -> int:
        """Receive until a command is complete, no bytes are available, or RECEIVE_TURN bytes were received.

        Return the number of bytes; 0 at the end of the stream, -1 if no bytes are available. It may only be called
        after `next` has returned None. Raise OSError if nothing was received; after some bytes, the next call raises
        it.
        """
        received = 0
        while received < RECEIVE_TURN:
            room = self._room()
            try:
                count = os.readv(descriptor, room)
            except (BlockingIOError, InterruptedError):
                return received or -1
            except OSError:
                if received:
                    break  # the next call raises it
                raise
            self._put(room, count)
            received += count
            if not count or self._completes() or (count < sum(map(len, room)) and count < RECEIVE_AGAIN_FROM):
                break
        return received

    def _room(self) -> list[memoryview]:
        """Return the buffers for the next bytes.

        If DIRECT bytes or more of a long word are missing, these are the rest of its slot and a part of the scratch
        memory; otherwise only the scratch memory. Bytes in the scratch memory have to be copied. So after a long word,
        only AHEAD bytes are received there, because the next word is probably long, too.
        """
        scratch, rest = self._scratch.memory, self._place[self._filled :]
        if len(rest) < DIRECT:
            return [scratch[: len(rest) + (AHEAD if self._were_long else SCRATCH_SIZE)]]
        return [rest[:RECEIVE_TURN], scratch[: AHEAD if len(rest) <= RECEIVE_TURN else 0]]

    def _put(self, room: list[memoryview], count: int) -> None:
        """Count and keep `count` bytes that were received into the buffers of `_room`."""
        *slot, scratch = room
        for rest in slot:
            self._arrived(rest[:count])
            count = max(count - len(rest), 0)
        if count:
            self._keep(scratch[:count])
            if self._slot is None:
                self._were_long = False

    def _completes(self) -> bool:
        """Return whether `next` has a result: a complete command or an error, which is kept for it."""
        try:
            return self._is_whole()
        except (ProtocolError, MemoryError) as fault:
            self._fault = fault
            return True

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes that another function has received."""
        self._keep(memoryview(data))

    def _keep(self, data: memoryview) -> None:
        """Append bytes to the unparsed data, and drop the parsed data."""
        self._data = self._data[self._pos :] + bytes(data)
        self._pos = 0

    # -- commands --------------------------------------------------------------------------------------------------

    def next(self) -> Command | None:
        """Return the next complete command, or None if more bytes are needed. Raise ProtocolError or MemoryError."""
        if self._fault is not None:
            try:
                raise self._fault
            finally:
                self._fault = None  # breaks a reference cycle: the traceback refers to this frame, and it to the parser
        return self._taken() if self._is_whole() else None

    def _is_whole(self) -> bool:
        """Parse the available bytes. Return whether a command is complete."""
        while self._take_words():
            if self._words:
                return True
            if self._pos == len(self._data) or not self._begin_command():
                break
        return False

    def _taken(self) -> Command:
        """Return the words of the current command, and begin with the next one."""
        words, self._words = self._words, []
        self.received, self.receiving = self.receiving, 0
        self.taken_bytes = self._size + WORD * len(words)
        self._missing = self._size = 0
        return cast("Command", Words(words)) if len(words) > MOST_LISTED else words  # both are read in the same way

    def _begin_command(self) -> bool:
        """Parse the first line of a command, or an inline command. Return False if it is incomplete.

        After an empty line or a count of 0, there is no command yet.
        """
        if self._data[self._pos] != ord("*"):
            if not self._scanned and (blank := _BLANK.match(self._data, self._pos)):
                self._pos = blank.end()  # in one step, because a client may send a megabyte of such lines
                return True
            line = self._line(b"\n", LONG_INLINE)
            if line is not None:
                self._words = [*inline_words(line)]
        else:
            line = self._line(_CRLF, LONG_COUNT)
            if line is not None:
                self._missing = count_of(line, self.limits, self.trusted)
        return line is not None

    def _line(self, end: bytes, too_long: str) -> bytes | None:
        """Return the line at `_pos` without its `end`, and move `_pos` behind it; None if it is incomplete.

        Raise ProtocolError with the message `too_long` for more than MAX_LINE bytes.
        """
        start = self._pos
        stop = self._data.find(end, start + self._scanned)
        if (len(self._data) - len(end) + 1 if stop < 0 else stop) - start > MAX_LINE:
            raise ProtocolError(too_long)
        if stop < 0:
            self._scanned = max(len(self._data) - start - len(end) + 1, 0)
            return None
        self._scanned = 0
        self._pos = stop + len(end)
        return self._data[start:stop]

    # -- words -----------------------------------------------------------------------------------------------------

    def _take_words(self) -> bool:
        """Parse words until the current command is complete. Return False if the current word is incomplete."""
        while self._missing:
            if self._length < 0:
                self._take_short_words()
                if not self._missing:
                    break
                line = self._line(_CRLF, LONG_LENGTH)
                if line is None:
                    return False
                length = length_of(line, self.limits, self.trusted)
                if self._size + length > self.limits.max_command:
                    raise ProtocolError(TOO_LONG)
                self._size += length
                self._length = length
            word = self._long_word() if self._length >= KEEP_FROM else self._short_word()
            if word is None:
                return False
            self._words.append(word)
            self._missing -= 1
            self._length = -1
        return True

    def _take_short_words(self) -> None:
        """Parse complete short words in a fast loop. It stops before a word that is long, incomplete or invalid."""
        data, pos, size, most = self._data, self._pos, self._size, self.limits
        for left in range(self._missing, 0, -1):
            line_end = data.find(_CRLF, pos, pos + _LONGEST_LINE)
            length = _LENGTHS.get(data[pos:line_end]) if line_end > pos else None
            if length is None or length > most.max_bulk or size + length > most.max_command:
                break
            stop = line_end + 2 + length
            if data[stop : stop + 2] != _CRLF:
                break
            self._words.append(data[line_end + 2 : stop])
            self._missing = left - 1
            size += length
            pos = stop + 2
        if pos > self._pos:
            self._pos, self._size, self._scanned = pos, size, 0

    def _short_word(self) -> bytes | None:
        """Return the current word, which is short; None if it is incomplete."""
        stop = self._pos + self._length
        if stop + len(_CRLF) > len(self._data):
            return None
        word = self._data[self._pos : stop]
        self._pos = stop + len(_CRLF)
        _check_end(self._data[stop : self._pos])
        return word

    def _long_word(self) -> Slot | None:
        """Copy received bytes of the current word, which is long, to its slot. Return the slot if it is complete.

        Otherwise return None. Allocate the slot first if there is none. Raise ProtocolError if no CRLF follows the
        word, MemoryError if there is no memory for the slot.
        """
        if self._slot is None:
            self._slot = self._arena.allocate(self._length)
            self.receiving += self._slot.footprint
            self._place, self._filled = self._slot.room, 0
            if self._length >= IN_PLACE:
                self._were_long = True
            self._digest = xxhash.xxh3_64() if self._words and self._words[0] in self._hashed else None
        slot, room = self._slot, self._place
        part = memoryview(self._data)[self._pos : self._pos + len(room) - self._filled]
        room[self._filled : self._filled + len(part)] = part
        self._pos += len(part)
        self._arrived(part)
        if self._filled < len(room):
            return None
        _check_end(room[-len(_CRLF) :])
        if self._digest is not None:
            slot.digest = self._digest.intdigest()
        self._slot, self._place = None, _NOWHERE
        return slot

    def _arrived(self, part: memoryview) -> None:
        """Count bytes of the current word that were written to its slot. Hash them if the command is in `hashed`."""
        if self._digest is not None:
            self._digest.update(part[: max(self._length - self._filled, 0)])
        self._filled += len(part)


def _check_end(end: bytes | memoryview) -> None:
    """Raise ProtocolError if a word does not end with CRLF."""
    if end != _CRLF:
        raise ProtocolError(NO_CRLF)
