"""Page bodies received into the memory where they belong.

What comes is received into scratch memory that stays in the processor's cache, taken apart there, and bodies are copied
to their places. Of a long body the rest is received where it belongs, and no more behind it than the line before the
next long one, so that such a body is copied by the kernel alone. Absent bodies and those of another length are missed
and the others still arrive. A place is written to by its own page alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from kvpage_server.core.answers import MAX_BULK, MAX_FRAME, MAX_LINE, ErrorAnswer, WrongAnswer, wrong_answer
from kvpage_server.core.python.memory import Memory
from kvpage_server.core.python.sent_pages import PageKeys
from kvpage_server.page import HEADER_SIZE, LAYOUT, MAGIC, VERSION, PageKey, checksum

SCRATCH_BYTES = 256 * 1024
LONG_BYTES = 16 * 1024  # of a body that is worth a call. A server, which can't know what follows, takes longer ones
ITEMS_AHEAD = 64  # items that are looked at for a long one: of 4 KiB each they fill the scratch memory
LARGEST_STEP_BYTES = 1024 * 1024  # bytes in one call


class Bodies:
    """The answer to a read of pages: an array of bulk strings or, unless `array`, for one place a bulk string alone.

    With `names` they are blobs, whose headers must name these pages; with `verify` bodies must have their checksums.
    """

    def __init__(self, places: Memory, *, array: bool, names: PageKeys | None = None, verify: bool = False) -> None:
        self._places = places.views()
        self._array = array
        self._names = None if names is None else names.names
        self._verify = verify
        self._missed: dict[int, str] = {}
        self._error: bytes | None = None
        self._is_wrong = False
        self._opening = b"*%d\r\n" % len(places) if array else b""
        self._next: Callable[[Bodies, memoryview], int] = Bodies._take_opening if array else Bodies._take_line
        self._item = 0
        self._left = 0  # bytes of what comes next
        self._header = bytearray(HEADER_SIZE)
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8).data
        self._start = self._end = 0  # of what is in there and not taken yet

    @property
    def done(self) -> bool:
        """Whether the answer is whole."""
        return self._next is Bodies._take_nothing and not self._is_wrong

    def result(self) -> dict[int, str]:
        """What was missed and why: absent, size, header, checksum. Raises ErrorAnswer."""
        if self._error is not None:
            raise ErrorAnswer(self._error)
        return self._missed

    def receive(self, fd: int) -> int:
        """Receive what is there, in one call; how many bytes, 0 at the end of the stream, -1 if nothing is there now.
        Raises WrongAnswer."""
        direct = self._rest_of_long_body()
        self._make_room()
        ahead = self._scratch[self._end : min(SCRATCH_BYTES, self._end + self._wanted(direct))]
        try:
            count = os.readv(fd, [direct, ahead] if direct else [ahead])
        except BlockingIOError:
            return -1
        there = min(count, len(direct))
        if there:
            self._left -= there
            if not self._left:
                self._arrived()
        self._end += count - there
        self._take()
        return count

    def feed(self, data: bytes) -> None:
        """Take what was received by other means. Raises WrongAnswer."""
        rest = memoryview(data)
        while rest:
            self._make_room()
            some = rest[: SCRATCH_BYTES - self._end]
            self._scratch[self._end : self._end + len(some)] = some
            self._end += len(some)
            rest = rest[len(some) :]
            self._take()

    # -- where the next bytes belong ---------------------------------------------------------------------------------

    def _rest_of_long_body(self) -> memoryview:
        if self._next is not Bodies._take_body or self._left < LONG_BYTES:
            return memoryview(b"")
        place = self._places[self._item]
        return place[len(place) - self._left :][:LARGEST_STEP_BYTES]

    def _make_room(self) -> None:
        """What is not taken yet, a line at most, goes to the beginning."""
        left = bytes(self._scratch[self._start : self._end])
        self._scratch[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _wanted(self, direct: memoryview) -> int:
        """Bytes up to the next long body."""
        wanted = MAX_FRAME
        item = self._item
        if self._next in (Bodies._take_body, Bodies._take_dropped, Bodies._take_crlf):
            wanted += self._left - len(direct) + 2
            item += 1
        for place in self._places[item : item + ITEMS_AHEAD]:
            wanted += MAX_FRAME + (0 if self._names is None else HEADER_SIZE)
            if len(place) >= LONG_BYTES:
                return wanted
            wanted += len(place)
        return SCRATCH_BYTES

    # -- taking what came: each takes the beginning of it and says how many bytes, -1 if it needs more of them ---------

    def _take(self) -> None:
        """Take all that is there but a line that is not whole."""
        data, at = self._scratch, self._start
        while True:
            some = data[at : self._end]
            taken = self._next(self, some)
            if taken < 0:
                self._start = at
                return
            at += taken

    def _take_opening(self, some: memoryview) -> int:
        if bytes(some[:1]) == b"-":
            self._next = Bodies._take_error
            return 0
        if some[: len(self._opening)] != self._opening[: len(some)]:
            raise self._wrong(some, item=-1)
        if len(some) < len(self._opening):
            return -1
        self._next = Bodies._take_line
        self._skip_to_the_end()
        return len(self._opening)

    def _take_error(self, some: memoryview) -> int:
        line = bytes(some[: MAX_LINE + 2])
        end = line.find(b"\r\n")
        if end < 0:
            if len(line) > MAX_LINE:
                self._is_wrong = True
                raise WrongAnswer(f"an error is longer than {MAX_LINE} bytes")
            return -1
        self._error = line[1:end]
        self._next = Bodies._take_nothing
        return end + 2

    def _take_line(self, some: memoryview) -> int:
        line = bytes(some[:MAX_FRAME])
        if line[:1] == b"-" and not self._item and not self._array:
            self._next = Bodies._take_error
            return 0
        end = line.find(b"\r\n")
        if line[:1] not in (b"", b"$", b"_") or (end < 0 and len(line) == MAX_FRAME):
            raise self._wrong(some, self._item)
        if end < 0:
            return -1
        word = line[:end]
        if word in (b"_", b"$-1"):
            self._missed[self._item] = "absent"
            self._go_on()
            return end + 2
        if word[:1] == b"_" or not word[1:].isdigit() or len(word) > 11 or int(word[1:]) > MAX_BULK:
            raise self._wrong(some, self._item)
        size, header = int(word[1:]), 0 if self._names is None else HEADER_SIZE
        if size != header + len(self._places[self._item]):
            self._missed[self._item] = "size"
            self._next, self._left = Bodies._take_dropped, size
        elif header:
            self._next, self._left = Bodies._take_header, header
        else:
            self._next, self._left = Bodies._take_body, size
        return end + 2

    def _take_header(self, some: memoryview) -> int:
        if not some:
            return -1
        some = some[: self._left]
        start = HEADER_SIZE - self._left
        self._header[start : start + len(some)] = some
        self._left -= len(some)
        if not self._left:
            self._next, self._left = Bodies._take_body, len(self._places[self._item])
        return len(some)

    def _take_body(self, some: memoryview) -> int:
        if self._left and not some:
            return -1
        place, some = self._places[self._item], some[: self._left]
        start = len(place) - self._left
        place[start : start + len(some)] = some
        self._left -= len(some)
        if not self._left:
            self._arrived()
        return len(some)

    def _take_dropped(self, some: memoryview) -> int:
        if self._left and not some:
            return -1
        taken = min(len(some), self._left)
        self._left -= taken
        if not self._left:
            self._next, self._left = Bodies._take_crlf, 2
        return taken

    def _take_crlf(self, some: memoryview) -> int:
        if not some:
            return -1
        if some[:1] != b"\r\n"[2 - self._left : 3 - self._left]:
            raise self._wrong(some, self._item)
        self._left -= 1
        if not self._left:
            self._go_on()
        return 1

    def _take_nothing(self, some: memoryview) -> int:
        if some:
            raise self._wrong(some, len(self._places))
        return -1

    def _wrong(self, some: memoryview, item: int) -> WrongAnswer:
        self._is_wrong = True
        return wrong_answer(item, len(self._places), bytes(some[:40]))

    def _arrived(self) -> None:
        """A body is there; its CRLF comes next."""
        self._next, self._left = Bodies._take_crlf, 2
        if self._names is not None:
            reason = _amiss(self._names[self._item], self._header, self._places[self._item], self._verify)
            if reason:
                self._missed[self._item] = reason

    def _go_on(self) -> None:
        self._item += 1
        self._next = Bodies._take_line
        self._skip_to_the_end()

    def _skip_to_the_end(self) -> None:
        if self._item == len(self._places):
            self._next = Bodies._take_nothing


def _amiss(name: PageKey, header: bytearray, body: memoryview, verify: bool) -> str | None:
    """What is wrong with a blob that was found under a page's key."""
    magic, version, _, kv_type, flags, _, _, *place, _, _, size, reserved, digest = LAYOUT.unpack(header)
    if (magic, version, flags, reserved, size) != (MAGIC, VERSION, 0, 0, len(body)):
        return "header"
    if (*place, kv_type) != (name.layer, name.head, name.page, name.kv_type):
        return "header"
    return "checksum" if verify and digest and checksum(body) != digest else None
