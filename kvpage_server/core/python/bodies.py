"""Bodies of pages: digests, keys of sent pages, the output queue, and the receiver of bodies into their places.

Replies are received into scratch memory that stays in the processor's cache, parsed there, and bodies are copied to
their places. Of a long body the rest is received where it belongs, and no more behind it than the line before the next
long one, so that such a body is copied by the kernel alone. Absent bodies and those of another length are missed and
the others still arrive. A place is written to by its own page alone.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import xxhash
from typing_extensions import Buffer

from kvpage_server.core.pieces import MAX_BULK, MAX_FRAME, MAX_LINE, ErrorAnswer, WrongAnswer, as_bytes, wrong_answer
from kvpage_server.core.python.slots import Slot
from kvpage_server.page import (
    FIELD_AT,
    HEADER_SIZE,
    LAYOUT,
    MAGIC,
    MAX_U32,
    VERSION,
    DType,
    PageKey,
    checksum,
    pack_header,
)

# -- The caller's memory, buffer after buffer --------------------------------------------------------------------------


class Memory:
    """Held as long as this is."""

    def __init__(self, buffers: Sequence[Buffer], *, writable: bool = False) -> None:
        """Raises Unusable for one that can't be sent from or, with `writable`, received into."""
        self._views = [as_bytes(buffer, i, writable=writable) for i, buffer in enumerate(buffers)]

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, part: slice) -> Memory:
        """Neighbours, still held together with all the others."""
        some = Memory(())
        some._views = self._views[part]
        return some

    def sizes(self) -> list[int]:
        """Return the bytes of each."""
        return list(map(len, self._views))

    def views(self) -> list[memoryview]:
        """Return each as bytes."""
        return self._views


# -- Digests of data in several pieces: of all of it, and of its pages -------------------------------------------------

BODY_SIZE = slice(FIELD_AT["body_size"], FIELD_AT["body_size"] + 4)
CHECKSUM = slice(FIELD_AT["checksum"], FIELD_AT["checksum"] + 8)


def digest(pieces: Sequence[Buffer]) -> int:
    """XXH3-64 of the pieces as one."""
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.intdigest()


def fill_digests(headers: Buffer, pieces: Sequence[Buffer]) -> None:
    """Write each page's digest into its header. The pages are in the pieces in the order of their headers, each in one.

    Raises ValueError if they are not."""
    (table,) = Memory([headers], writable=True).views()
    left = Memory(pieces).views()
    for start in range(0, len(table), HEADER_SIZE):
        header = table[start : start + HEADER_SIZE]
        size = int.from_bytes(header[BODY_SIZE], "little")
        while left and not left[0]:
            left = left[1:]
        if not left or len(left[0]) < size or len(header) < HEADER_SIZE:
            raise ValueError(MISFIT)
        header[CHECKSUM] = checksum(left[0][:size]).to_bytes(8, "little")
        left[0] = left[0][size:]
    if any(map(len, left)):
        raise ValueError(MISFIT)


MISFIT = "the pieces are not the pages of the headers"


# -- The output queue: borrowed memory, piece by piece, each kept until the kernel has taken all of it -----------------

# Bytes in one call, which frees no memory of the socket, however much the peer reads meanwhile. Found by trying: less
# costs more calls, and a megabyte a tenth to a third more time (docs/performance.md).
SEND_BYTES = 768 << 10
SEND_TURN = 4 << 20  # bytes sent in one call: others wait meanwhile
MOST_PIECES = 1024  # in one call: IOV_MAX


class BorrowedPiece(Protocol):
    """Memory that is not reused while the object lives."""

    @property
    def view(self) -> memoryview:
        """Where it is now."""


class Outbox:
    """Pieces in their order. Costs: O(1) per piece, without copying borrowed memory."""

    def __init__(self) -> None:
        self._pieces: list[bytes | BorrowedPiece] = []  # the owners of the memory, which is not reused before
        self._buffers: list[bytes | memoryview] = []
        self._ends: list[int] = []  # of each, in bytes from where the first that ever waited began
        self._sent = 0  # likewise
        self._gone = 0  # so many of the first are sent, and nothing but their places is left

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        return self._ends[-1] - self._sent if self._ends else 0

    def add(self, pieces: Sequence[bytes | BorrowedPiece]) -> None:
        """Append pieces to the queue: bytes, and objects with a `view`."""
        buffers = _views(pieces)
        if not all(buffers):
            pieces = [piece for piece, buffer in zip(pieces, buffers, strict=True) if buffer]
            buffers = list(filter(None, buffers))
        ends = accumulate(map(len, buffers), initial=self._ends[-1] if self._ends else self._sent)
        next(ends)
        self._ends += ends
        self._buffers += buffers
        self._pieces += pieces

    def send(self, descriptor: int) -> int:
        """Send queued output until the kernel is full or a turn is over; return the bytes sent. Raises OSError."""
        sent = 0
        while self.nbytes and sent < SEND_TURN:
            buffers = self.next()
            try:
                count = os.writev(descriptor, buffers)
            except BlockingIOError:
                break
            except OSError:
                if sent:
                    break  # it will be met again
                raise
            self.sent(count)
            sent += count
            if count < sum(map(len, buffers)):
                break  # it has no room for more
        return sent

    def next(self) -> list[bytes | memoryview]:
        """Return the next buffers to send."""
        if not self._ends:
            return []
        first, ends = self._gone, self._ends
        buffers = self._buffers[first : first + MOST_PIECES]
        if begun := self._sent - (ends[first] - len(buffers[0])):
            buffers[0] = memoryview(buffers[0])[begun:]
        if self.nbytes <= SEND_BYTES:
            return buffers
        last = bisect_left(ends, self._sent + SEND_BYTES, first, first + len(buffers)) - first
        if last < len(buffers):
            beyond = ends[first + last] - self._sent - SEND_BYTES
            buffers[last:] = [memoryview(buffers[last])[: len(buffers[last]) - beyond]]
        return buffers

    def sent(self, count: int) -> None:
        """Remove the bytes that the kernel has taken."""
        if not 0 <= count <= self.nbytes:
            raise ValueError(f"{self.nbytes} bytes wait to be sent, got {count}")
        self._sent += count
        before, gone = self._gone, bisect_right(self._ends, self._sent, self._gone)
        if 2 * gone >= len(self._ends):  # not earlier, because the rest moves
            del self._pieces[:gone], self._buffers[:gone], self._ends[:gone]
            self._gone = 0
        else:
            self._pieces[before:gone] = [b""] * (gone - before)
            self._buffers[before:gone] = [b""] * (gone - before)
            self._gone = gone

    def renew(self) -> None:
        """Read each piece's address again, because memory has moved."""
        self._buffers = _views(self._pieces)

    def clear(self) -> None:
        """Drop the queued output."""
        self.sent(self.nbytes)


def _views(pieces: Sequence[bytes | BorrowedPiece]) -> list[bytes | memoryview]:
    return [
        piece if isinstance(piece, bytes) else piece.borrowed if type(piece) is Slot else piece.view for piece in pieces
    ]


# -- Pages on their way out: words and bodies in turn, made for some pages at a time -----------------------------------


def spelt(*words: bytes | int) -> bytes:
    """Words of a command as they go over the wire."""
    texts = [word if isinstance(word, bytes) else b"%d" % word for word in words]
    return b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts])


class PageKeys:
    """Keys of pages, in the caller's order."""

    def __init__(self, keys: Sequence[PageKey]) -> None:
        self.names = [*keys]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, part: slice) -> PageKeys:
        """Neighbours."""
        return PageKeys(self.names[part])

    def words(self) -> bytes:
        """Return the five words of each, as page commands take them: req_id, layer, head, page, kv_type."""
        return b"".join(map(words_of, self.names))

    def keys(self) -> bytes:
        """Return the key of each, one word."""
        return spelt(*map(bytes, self.names))


def words_of(name: PageKey) -> bytes:
    """Return the five words of one."""
    return spelt(name.req_id, name.layer, name.head, name.page, name.kv_type)


PAGES_PER_CHUNK = 1024  # pages in a chunk
_ITEMSIZES = {int(dtype): dtype.itemsize for dtype in DType}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text and bodies in turn, ending with text; `stop` is where the pages end that it was made from."""

    pieces: list[bytes | memoryview]
    stop: int


class SentPages:
    """Pages to be written, each a key, a body, dtype, page_size and head_dim."""

    def __init__(self, pages: Sequence[tuple[PageKey, Buffer, int, int, int]]) -> None:
        """Raises Unusable for a body that can't be sent."""
        self.names = PageKeys([page[0] for page in pages])
        self.bodies = Memory([page[1] for page in pages])
        self.shapes = [page[2:] for page in pages]

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, part: slice) -> SentPages:
        """Neighbours, still held together with all the others."""
        some = SentPages(())
        some.names, some.bodies, some.shapes = self.names[part], self.bodies[part], self.shapes[part]
        return some

    def misfit(self) -> int:
        """Return the first whose body is not as long as its shape says, or whose shape is none; -1 if there is none."""
        for i, ((dtype, page_size, head_dim), nbytes) in enumerate(zip(self.shapes, self.bodies.sizes(), strict=True)):
            if not (0 < page_size <= MAX_U32 and 0 < head_dim <= MAX_U32 and nbytes <= MAX_U32):
                return i
            if dtype not in _ITEMSIZES or page_size * head_dim * _ITEMSIZES[dtype] != nbytes:
                return i
        return -1

    def as_words(self, start: int, ttl: int) -> Chunk:
        """Return the arguments of a page command that writes, of some pages from `start` on."""
        pieces: list[bytes | memoryview] = []
        stop = self._stop(start)
        before = b""
        for name, shape, body in self._some(start, stop):
            pieces += [b"%b%b%b$%d\r\n" % (before, words_of(name), spelt(*shape, ttl), len(body)), body]
            before = b"\r\n"
        pieces.append(before)
        return Chunk(pieces, stop)

    def as_blobs(self, start: int, before: bytes, after: bytes, ttl: int, created: int) -> Chunk:
        """Keys and blobs of some pages from `start` on, with the same text before and after each."""
        pieces: list[bytes | memoryview] = []
        stop = self._stop(start)
        between = before
        for name, (dtype, page_size, head_dim), body in self._some(start, stop):
            about = dtype, name.kv_type, page_size, head_dim, name.layer, name.head, name.page
            header = pack_header(*about, created, ttl, len(body), checksum(body))
            key = spelt(bytes(name))
            pieces += [b"%b%b$%d\r\n%b" % (between, key, len(header) + len(body), header), body]
            between = after + before
        pieces.append(after)
        return Chunk(pieces, stop)

    def _some(self, start: int, stop: int) -> zip[tuple[PageKey, tuple[int, int, int], memoryview]]:
        part = slice(start, stop)
        return zip(self.names.names[part], self.shapes[part], self.bodies.views()[part], strict=True)

    def _stop(self, start: int) -> int:
        """Return where a chunk from `start` on ends."""
        nbytes = 0
        for stop in range(start, min(start + PAGES_PER_CHUNK, len(self))):
            if nbytes >= SEND_BYTES:
                return stop
            nbytes += len(self.bodies.views()[stop])
        return min(start + PAGES_PER_CHUNK, len(self))


SCRATCH_BYTES = 256 * 1024
# bytes of a body that justify a call; a server takes longer ones, because it does not know the next word
LONG_BYTES = 16 * 1024
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
        self._left = 0  # bytes of the next item
        self._header = bytearray(HEADER_SIZE)
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8).data
        self._start = self._end = 0  # the bytes in the scratch memory that are not parsed yet

    @property
    def done(self) -> bool:
        """Whether the answer is whole."""
        return self._next is Bodies._take_nothing and not self._is_wrong

    def result(self) -> dict[int, str]:
        """Return the missing items with their reasons: absent, size, header, checksum. Raises ErrorAnswer."""
        if self._error is not None:
            raise ErrorAnswer(self._error)
        return self._missed

    def receive(self, fd: int) -> int:
        """Receive available bytes in one call; return their number, 0 at the end of the stream, -1 if none are
        available. Raises WrongAnswer.
        """
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
        """Parse bytes that another function has received. Raises WrongAnswer."""
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
        """Move the unparsed bytes, a line at most, to the beginning."""
        left = bytes(self._scratch[self._start : self._end])
        self._scratch[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _wanted(self, direct: memoryview) -> int:
        """Return bytes up to the next long body."""
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

    # -- Parsers: each takes bytes from the start and returns their number, or -1 if it needs more ---------------------

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
        """Note a complete body; its CRLF follows."""
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
    """Return the reason why a blob does not match its page's key, or None."""
    magic, version, _, kv_type, flags, _, _, *place, _, _, size, reserved, digest = LAYOUT.unpack(header)
    if (magic, version, flags, reserved, size) != (MAGIC, VERSION, 0, 0, len(body)):
        return "header"
    if (*place, kv_type) != (name.layer, name.head, name.page, name.kv_type):
        return "header"
    return "checksum" if verify and digest and checksum(body) != digest else None
