"""Bytes in, commands out: the request half of RESP.

A command is a list of words, and `Words` where there are many. A word is `bytes`; one of `KEEP_FROM` bytes or more has
a `Slot` of its own from its first byte on, so that a page is where it will stay. `hashed` are the names of commands
whose long words are to have their digests.

Every byte is looked at a bounded number of times, however the input is cut: what is kept between two calls is at most a
line, or a short word. Any cut gives the same commands, and the same error in the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Any, cast

import xxhash

from kvpage_server.core.protocol import (
    DIRECT,
    KEEP_FROM,
    LONG_COUNT,
    LONG_INLINE,
    LONG_LENGTH,
    MAX_LINE,
    MOST_LISTED,
    NO_CRLF,
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
from kvpage_server.core.python.words import Argument, Command, Words

_CRLF = b"\r\n"
_BLANK = re.compile(rb"(?:[ \t\r\0\v\f]{0,%d}\n)+" % MAX_LINE)  # lines without a word


class Scratch:
    """Memory to receive into, for all parsers of a thread: what they do not parse at once they copy."""

    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(SCRATCH_SIZE))


class Parser:
    """One connection's parser.

    `receiving` are the bytes of the arena's memory that the command under way has, `received` those of the command that
    was taken last.
    """

    def __init__(
        self,
        arena: Arena,
        scratch: Scratch | None = None,
        limits: Limits | None = None,
        hashed: Collection[bytes] = frozenset(),
    ) -> None:
        self.limits = limits or Limits()
        self.trusted = True
        self.receiving = 0
        self.received = 0
        self._hashed = hashed
        self._arena = arena
        self._scratch = scratch or Scratch()
        self._data = b""  # received, and not parsed from `_pos` on
        self._pos = 0
        self._scanned = 0  # bytes of that which hold no end of a line
        self._words: list[Argument] = []  # of the command under way
        self._missing = 0  # its words still to come
        self._size = 0  # bytes of its words so far
        self._length = -1  # of the next word, once its line was read
        self._slot: Slot | None = None  # of the next word, if it is long
        self._filled = 0  # bytes of it that are there, those of its CRLF included
        self._digest: Any = None  # of them, if that is wanted

    def trust(self, trusted: bool) -> None:
        """Whether the client has authenticated."""
        self.trusted = trusted

    @property
    def held(self) -> int:
        """Bytes of memory held for commands that were not taken."""
        return len(self._data) - self._pos + self._size + WORD * len(self._words)

    @property
    def is_idle(self) -> bool:
        """Whether everything that was received has been taken."""
        return self._pos == len(self._data) and not self._missing

    def give_up(self) -> Command:
        """The words of the command under way, which will not come to its end; nothing is held any more."""
        self._slot = None
        self._data, self._pos = b"", 0
        return self._taken()

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, descriptor: int) -> int:
        """Receive from a socket, once; how many bytes. 0 at the stream's end, -1 when there is nothing yet.

        To be called when `next` has answered None. Raises OSError.
        """
        room = [self._scratch.memory]
        rest = 0
        if self._slot is not None and self._slot.size + len(_CRLF) - self._filled >= DIRECT:
            room.insert(0, self._slot.room[self._filled :])
            rest = len(room[0])
        try:
            count = os.readv(descriptor, room)
        except (BlockingIOError, InterruptedError):
            return -1
        straight = min(rest, count)
        if straight:
            self._arrived(room[0][:straight])
        if count > straight:
            self._keep(self._scratch.memory[: count - straight])
        return count

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes that somebody else received."""
        self._keep(memoryview(data))

    def _keep(self, data: memoryview) -> None:
        self._data = self._data[self._pos :] + bytes(data)
        self._pos = 0

    # -- commands --------------------------------------------------------------------------------------------------

    def next(self) -> Command | None:
        """The next whole command, or None when more bytes are needed. Raises ProtocolError."""
        while self._take_words():
            if self._words:
                return self._taken()
            if self._pos == len(self._data) or not self._begin_command():
                break
        return None

    def _taken(self) -> Command:
        """The words of the command that was under way."""
        words, self._words = self._words, []
        self.received, self.receiving = self.receiving, 0
        self._missing = self._size = 0
        return cast("Command", Words(words)) if len(words) > MOST_LISTED else words  # it is read as a list is

    def _begin_command(self) -> bool:
        """Read the line that opens a command; false when it has not arrived."""
        if self._data[self._pos] != ord("*"):
            if not self._scanned and (blank := _BLANK.match(self._data, self._pos)):
                self._pos = blank.end()  # a megabyte of such lines may come at once
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
        """The line at the cursor, or None when it has not arrived."""
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
        """Take the words that have arrived; false when one is missing."""
        while self._missing:
            if self._length < 0:
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

    def _short_word(self) -> bytes | None:
        stop = self._pos + self._length
        if stop + len(_CRLF) > len(self._data):
            return None
        word = self._data[self._pos : stop]
        self._pos = stop + len(_CRLF)
        _check_end(self._data[stop : self._pos])
        return word

    def _long_word(self) -> Slot | None:
        if self._slot is None:
            self._slot = self._arena.allocate(self._length)
            self.receiving += self._slot.footprint
            self._filled = 0
            self._digest = xxhash.xxh3_64() if self._words and self._words[0] in self._hashed else None
        slot, room = self._slot, self._slot.room
        part = memoryview(self._data)[self._pos : self._pos + len(room) - self._filled]
        room[self._filled : self._filled + len(part)] = part
        self._pos += len(part)
        self._arrived(part)
        if self._filled < len(room):
            return None
        _check_end(room[-len(_CRLF) :])
        if self._digest is not None:
            slot.digest = self._digest.intdigest()
        self._slot = None
        return slot

    def _arrived(self, part: memoryview) -> None:
        """Bytes of the long word are in its slot."""
        if self._digest is not None:
            self._digest.update(part[: max(self._length - self._filled, 0)])
        self._filled += len(part)


def _check_end(end: bytes | memoryview) -> None:
    if end != _CRLF:
        raise ProtocolError(NO_CRLF)
