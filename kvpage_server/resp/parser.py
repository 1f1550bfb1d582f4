"""Bytes in, commands out: the request half of RESP, without I/O.

The owner of a socket asks `buffers()` where the next bytes belong, reads into them, says `received(n)`, and takes
whole commands from `next()` until it answers None. A bulk string that has not arrived whole is received straight into
memory of its own, which `allocate` provides: for a page that is its final place, so its bytes are written once.

Every byte is looked at a bounded number of times, whatever the split of the input: what is kept between reads is at
most one line (bounded by `MAX_LINE`) or one bulk shorter than `DIRECT`. Any split gives the same commands.

Errors and limits are worded as Redis words them (`networking.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from kvpage_server.page import checksum
from kvpage_server.resp import groups
from kvpage_server.resp.groups import DECLARED
from kvpage_server.resp.inline import split_words

MAX_LINE = 64 * 1024  # PROTO_INLINE_MAX_SIZE
MAX_ARGUMENTS = 0x7FFF_FFFF
DIRECT = 1024  # an unfinished bulk of at least this size gets memory of its own
SCRATCH_SIZE = 64 * 1024


class Bulk(Protocol):
    """Memory that a long bulk string is received into. `digest` is the XXH3-64 of its bytes, 0 when it is not known."""

    digest: int

    @property
    def size(self) -> int:
        """Bytes of the string."""

    @property
    def room(self) -> memoryview:
        """Writable: the string's bytes and the two of its CRLF."""

    @property
    def body(self) -> memoryview:
        """The string's bytes."""


Argument = bytes | Bulk
Command = list[Argument]


class ProtocolError(Exception):
    """The stream is not RESP, or breaks a limit; nothing after this point can be understood."""


@dataclass(slots=True)
class Limits:
    """What a client may send. Unauthenticated clients are held to Redis's smaller ones."""

    max_bulk: int = 512 * 1024 * 1024
    max_arguments: int = MAX_ARGUMENTS
    max_command: int = 1024 * 1024 * 1024  # bytes of one command that wait in memory for its end
    unauthenticated: bool = False


UNAUTHENTICATED_ARGUMENTS = 10
UNAUTHENTICATED_BULK = 16384

_FEW = 4  # so many arguments are taken one by one
_FEW_WORDS = {b"*%d" % count: count for count in range(1, 10)}
_FEW_WORDS_LINES = frozenset(line + b"\r\n" for line in _FEW_WORDS)
_WINDOW = 16 * 1024  # bytes that are first looked at for a run of short ones; fewer when long ones are about

_TOO_LONG = "command exceeds the query buffer limit"
_NO_CRLF = "bulk string is not terminated by CRLF"
_LONG = 8192  # behind a bulk longer than this only its followers' arguments are read: what overshoots is copied

_scratch = memoryview(bytearray(SCRATCH_SIZE))
_after_long = _scratch[:256]


class Parser:
    """One connection's parser. Not thread-safe: the scratch memory is shared by all parsers of a thread's loop."""

    def __init__(
        self,
        allocate: Callable[[int], Bulk],
        *,
        hashed: Callable[[Argument], bool] | None = None,
        limits: Limits | None = None,
        keep_from: int = 4096,
    ) -> None:
        """`allocate(n)` gives memory for a bulk of n bytes; bulks shorter than `keep_from` arrive as bytes instead.

        `hashed(name)` says whether the long bulks of a command are to have their digests; its first word is that.
        """
        self.limits = limits or Limits()
        self._allocate = allocate
        self._is_hashed = hashed
        self._keep_from = keep_from
        self._data = b""  # received, not yet parsed, from _pos on
        self._pos = 0
        self._args: Command = []  # of the command that is under way
        self._missing = 0  # its arguments still to come
        self._size = 0  # bytes of its arguments so far
        self._bulk: Bulk | None = None  # being received directly, `_filled` bytes so far
        self._room = memoryview(b"")
        self._filled = 0
        self._digest: xxhash.xxh3_64 | None = None  # of its first `_digested` bytes
        self._digested = 0
        self._any_long = False  # whether a bulk of the command under way was received directly
        self._ready: list[Command] = []  # whole commands taken from _data together, the next one last
        self._ready_size = 0  # bytes that all of them had; 0 when none is left
        self._looked = False  # for such commands, in what was received

    # -- receiving -------------------------------------------------------------------------------------------------

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong, in order. Valid until `received` is called."""
        if self._bulk is None:
            return [_scratch]
        return [self._room[self._filled :], _after_long if len(self._room) > _LONG else _scratch]

    def feed(self, data: bytes) -> None:
        """Receive `data` by way of `buffers`: what a socket would do."""
        view = memoryview(data)
        while view:
            total = 0
            for buffer in self.buffers():
                part = view[: len(buffer)]
                buffer[: len(part)] = part
                total += len(part)
                view = view[len(part) :]
            self.received(total)

    def arriving(self, count: int) -> None:
        """`count` bytes of `buffers()` are written, and more will be: hash them as long as they are in the cache."""
        if self._bulk is not None and self._hashes:
            self._hash_up_to(min(self._filled + count, len(self._room) - 2))

    def received(self, count: int) -> None:
        """`count` bytes have been written into `buffers()`. Raises ProtocolError for a bulk without its CRLF."""
        if self._bulk is not None:
            taken = min(count, len(self._room) - self._filled)
            self._filled += taken
            count -= taken
            if self._filled == len(self._room):
                self._finish_bulk()
        if count:
            fresh = bytes(_scratch[:count])
            self._data = self._data[self._pos :] + fresh if self._pos < len(self._data) else fresh
            self._pos = 0
            self._looked = False

    def _finish_bulk(self) -> None:
        bulk, room = self._bulk, self._room
        assert bulk is not None
        if bytes(room[-2:]) != b"\r\n":
            raise ProtocolError(_NO_CRLF)
        kept = len(room) - 2 >= self._keep_from
        if kept and self._hashes:
            bulk.digest = self._digest_of(bulk)
        self._digest = None
        self._args.append(bulk if kept else bytes(bulk.body))
        self._missing -= 1
        self._bulk = None
        self._room = memoryview(b"")

    @property
    def _hashes(self) -> bool:
        """Whether the long bulks of the command under way are to have their digests."""
        return self._is_hashed is not None and bool(self._args) and self._is_hashed(self._args[0])

    def _hash_up_to(self, end: int) -> None:
        """Hash what has come of a bulk and was not hashed yet."""
        if self._digest is None:
            self._digest, self._digested = xxhash.xxh3_64(), 0
        self._digest.update(self._room[self._digested : end])
        self._digested = end

    def _digest_of(self, bulk: Bulk) -> int:
        """The digest of a bulk that has arrived whole."""
        if self._digest is None:
            return checksum(bulk.body)
        self._hash_up_to(len(self._room) - 2)
        return self._digest.intdigest()

    # -- commands --------------------------------------------------------------------------------------------------

    @property
    def in_a_bulk(self) -> bool:
        """Whether a long bulk has begun and not ended."""
        return self._bulk is not None

    @property
    def expected(self) -> int:
        """So many bytes are to come yet of a long bulk."""
        if self._bulk is not None:
            return len(self._room) - self._filled
        return 0

    @property
    def is_idle(self) -> bool:
        """Whether everything that was received has been taken."""
        return self._pos == len(self._data) and not (self._missing or self._ready or self._args)

    @property
    def pending(self) -> int:
        """Bytes held of commands that were not taken yet, most of which have not arrived whole."""
        return self._size + len(self._data) - self._pos + self._ready_size

    @property
    def arguments(self) -> int:
        """How many arguments of the command under way are held."""
        return len(self._args)

    def give_up(self) -> Command:
        """The arguments of the command under way, which will not come to its end."""
        args, self._args = self._args, []
        return args

    def next(self) -> Command | None:
        """The next whole command, or None when more bytes are needed. Raises ProtocolError."""
        if self._ready:
            return self._ready.pop()
        self._ready_size = 0
        while True:
            if self._missing:
                self._take_bulks()
                if self._size > self.limits.max_command:
                    raise ProtocolError(_TOO_LONG)
                if self._missing:
                    return None
            if self._args:
                command, self._args, self._size = self._args, [], 0
                self._any_long = False
                return command
            if self._pos == len(self._data):
                return None
            if not self._looked and self._take_short_commands():
                return self._ready.pop()
            if not self._start_command():
                return None

    def _take_short_commands(self) -> bool:
        """Take a pipeline of short commands at once, by splitting it at its line ends; False when there is none.

        As in `_take_short_ones`, the split is believed only as far as every declared length is the true one.
        """
        self._looked = True
        limits = self.limits
        data = self._data[self._pos :]
        if data[:4] not in _FEW_WORDS_LINES:
            return False
        if limits.max_arguments < len(_FEW_WORDS) or limits.max_bulk < len(DECLARED):
            return False
        lines: list[Any] = data.split(b"\r\n")
        taken, whole, declared = 0, len(lines) - 1, DECLARED.get
        ready = self._ready
        while taken < whole:
            stop = taken + 1 + 2 * _FEW_WORDS.get(lines[taken], whole)
            if stop > whole:
                break
            words = lines[taken + 2 : stop : 2]
            if list(map(declared, lines[taken + 1 : stop : 2])) != list(map(len, words)):
                break
            ready.append(words)
            taken = stop
        ready.reverse()  # `next` takes them from the end
        self._ready_size = len(data) - sum(map(len, lines[taken:])) - 2 * (whole - taken)
        self._pos += self._ready_size
        return taken > 0

    def _start_command(self) -> bool:
        """Read the line that opens a command; False when it has not arrived."""
        data, pos = self._data, self._pos
        if pos == len(data):
            return False
        if data[pos] != 0x2A:  # '*'
            return self._inline()
        line = self._line("too big mbulk count string")
        if line is None:
            return False
        count = _length(line[1:])
        if count is None or count > self.limits.max_arguments:
            raise ProtocolError("invalid multibulk length")
        if self.limits.unauthenticated and count > UNAUTHENTICATED_ARGUMENTS:
            raise ProtocolError("unauthenticated multibulk length")
        self._missing = max(count, 0)
        return True

    def _line(self, too_long: str) -> bytes | None:
        """The line at the cursor without its CRLF, or None when it has not arrived."""
        end = self._data.find(b"\r\n", self._pos)
        if end < 0:
            if len(self._data) - self._pos > MAX_LINE:
                raise ProtocolError(too_long)
            return None
        line = self._data[self._pos : end]
        self._pos = end + 2
        return line

    def _inline(self) -> bool:
        end = self._data.find(b"\n", self._pos)
        if end < 0 or end - self._pos > MAX_LINE:
            if len(self._data) - self._pos > MAX_LINE:
                raise ProtocolError("too big inline request")
            return False
        line = self._data[self._pos : end].removesuffix(b"\r")
        self._pos = end + 1
        words = split_words(line)
        if words is None:
            raise ProtocolError("unbalanced quotes in request")
        self._args = [*words]
        return True

    def _take_bulks(self) -> None:
        """Take the arguments that have arrived; an unfinished long one goes on into memory of its own."""
        data, pos, args = self._data, self._pos, self._args
        size, missing = len(data), self._missing
        find, limits, keep_from = data.find, self.limits, self._keep_from
        if missing > _FEW:
            pos = self._take_short_ones()
            missing = self._missing
        try:
            while missing and self._bulk is None:
                end = find(b"\r\n", pos)
                if end < 0:
                    if size - pos > MAX_LINE:
                        raise ProtocolError("too big bulk count string")
                    return
                if data[pos] != 0x24:  # '$'
                    shown = data[pos : pos + 1].decode("utf-8", "surrogateescape")
                    raise ProtocolError(f"expected '$', got '{shown}'")
                length = _length(data[pos + 1 : end])
                if length is None or length < 0 or length > limits.max_bulk:
                    raise ProtocolError("invalid bulk length")
                if limits.unauthenticated and length > UNAUTHENTICATED_BULK:
                    raise ProtocolError("unauthenticated bulk length")
                start = end + 2
                stop = start + length
                if stop + 2 <= size and length < keep_from:
                    if data[stop : stop + 2] != b"\r\n":
                        raise ProtocolError(_NO_CRLF)
                    args.append(data[start:stop])
                    self._size += length
                    missing -= 1
                    pos = stop + 2
                    continue
                if length < DIRECT:
                    return
                self._size += length
                if self._size > limits.max_command:
                    raise ProtocolError(_TOO_LONG)
                self._missing = missing
                pos = self._receive_directly(length, data, start)
                missing = self._missing
        finally:
            self._pos, self._missing = pos, missing

    def _take_short_ones(self) -> int:
        """Take a run of short arguments at once, by splitting it at its line ends; the cursor after it.

        What has arrived is split piece by piece, as long as it is nothing else: so all of it once, and little in vain.
        """
        pos, window = self._take_groups(self._pos), _WINDOW // 8 if self._any_long else _WINDOW
        while self._missing:
            taken = self._take_some(pos, self._missing, window)
            pos += taken
            if 2 * taken < window:
                break
            window *= 4
        return pos

    def _take_groups(self, pos: int) -> int:
        """Take groups of arguments, of which the second says how many there are, as batches do; the cursor after them.

        What only looks like a batch is taken, too, as far as it is framed alike.
        """
        args, count = self._args, len(self._args) + self._missing - 2
        if len(args) < 2:
            pos += self._take_some(pos, 2 - len(args), _WINDOW // 8)
            if len(args) < 2:
                return pos
        number = (_length(said) if isinstance(said := args[1], bytes) else None) or 0
        if not _FEW < number <= count or count % number:
            return pos
        width = count // number
        if begun := (len(args) - 2) % width:
            pos += self._take_some(pos, width - begun, _WINDOW // 8)
        if (len(args) - 2) % width:
            return pos
        words, end = groups.take(self._data, pos, width, self._missing // width)
        args += words
        self._missing -= len(words)
        self._size += end - pos
        return end

    def _take_some(self, pos: int, most: int, window: int) -> int:
        """Take up to so many short arguments from what has arrived from `pos` on; the bytes they had."""
        return self._take_lines(self._data[pos : pos + window].split(b"\r\n", 2 * most))

    def _take_lines(self, lines: list[bytes]) -> int:
        """Take the arguments that lines are, length and value in turn; the bytes they had.

        They are believed only as far as every declared length is the true one. The last line has no end.
        """
        whole = (len(lines) - 1) // 2
        lengths, values = lines[0 : 2 * whole : 2], lines[1 : 2 * whole : 2]
        declared, sizes = list(map(DECLARED.get, lengths)), list(map(len, values))
        if declared != sizes:
            whole = next(i for i, (said, size) in enumerate(zip(declared, sizes, strict=True)) if said != size)
            del lengths[whole:], values[whole:], sizes[whole:]
        total = sum(sizes)
        self._args += values
        self._missing -= whole
        self._size += total
        return total + sum(map(len, lengths)) + 4 * whole

    def _receive_directly(self, length: int, data: bytes, start: int) -> int:
        """Move what has arrived of a long bulk into its own memory; the cursor after it."""
        self._any_long = True
        self._bulk = bulk = self._allocate(length) if length >= self._keep_from else Buffer(length)
        self._room = bulk.room
        arrived = min(len(data) - start, length + 2)
        self._room[:arrived] = data[start : start + arrived]
        self._filled = arrived
        if arrived == length + 2:
            self._finish_bulk()
        return start + arrived


class Buffer:
    """A bulk in memory of its own."""

    __slots__ = ("body", "digest", "room", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.digest = 0
        self.room = memoryview(bytearray(size + 2))
        self.body = self.room[:size]


def _length(digits: bytes) -> int | None:
    """The number as Redis's string2ll reads it: no plus sign, spaces or leading zeros; None when it is none."""
    if digits.isdigit() and len(digits) <= 19:
        if digits[0] == 0x30 and len(digits) > 1:
            return None
        return int(digits)
    if digits[:1] == b"-" and digits[1:].isdigit() and digits[1] != 0x30 and len(digits) <= 20:
        return -int(digits[1:])
    return None
