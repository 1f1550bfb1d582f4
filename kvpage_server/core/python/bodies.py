"""Bodies of pages: their digests, pages to send, the server's output queue, and the client's receiver of bodies.

The receiver, `Bodies`, receives replies into scratch memory that stays in the processor's cache, parses them there, and
copies each body to the buffer that the caller has provided for it. The rest of a long body is received directly into
its buffer; the same call receives at most the line before the next long body into the scratch memory. So the kernel
writes long bodies to their buffers, and they are not copied again. A body that is absent, has another length or belongs
to another page is reported as missing, and the receiver continues with the next one.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import xxhash
from typing_extensions import Buffer

from kvpage_server.core.pieces import (
    MAX_BULK,
    MAX_FRAME,
    MAX_LINE,
    ErrorAnswer,
    WrongAnswer,
    as_bytes,
    copied_parts,
    wrong_answer,
)
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

# -- Buffers of the caller ---------------------------------------------------------------------------------------------


class Memory:
    """The caller's buffers as bytes, without copies. Their memory stays valid while this object exists."""

    def __init__(self, buffers: Sequence[Buffer], *, writable: bool = False) -> None:
        """Raise Unusable for a buffer that cannot be sent from or, with `writable`, not be received into."""
        self._views = [as_bytes(buffer, i, writable=writable) for i, buffer in enumerate(buffers)]

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, part: slice) -> Memory:
        """Return consecutive buffers. In the compiled core, they keep all buffers of the original object valid."""
        some = Memory(())
        some._views = self._views[part]
        return some

    def sizes(self) -> list[int]:
        """Return the number of bytes of each buffer."""
        return list(map(len, self._views))

    def views(self) -> list[memoryview]:
        """Return each buffer as a memoryview of bytes."""
        return self._views


# -- Digests of data in several pieces, and of the pages in it ---------------------------------------------------------

BODY_SIZE = slice(FIELD_AT["body_size"], FIELD_AT["body_size"] + 4)
CHECKSUM = slice(FIELD_AT["checksum"], FIELD_AT["checksum"] + 8)
COPIED = 64 * 1024  # bytes that are hashed while they are in the processor's cache


def digest(pieces: Sequence[Buffer]) -> int:
    """Return the XXH3-64 of the pieces as if they were one piece."""
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.intdigest()


def copy_hashed(source: Buffer, target: Buffer) -> int:
    """Copy `source` to `target`, which has as many bytes, and return the XXH3-64 of the copied bytes in `target`.

    Raise ValueError if their sizes differ. `source` may change meanwhile: only the copy is hashed.
    """
    found, into = xxhash.xxh3_64(), as_bytes(target, writable=True)
    view = as_bytes(source)
    if len(view) != len(into):
        raise ValueError(f"{len(view)} bytes do not fit into {len(into)}")
    for at in range(0, len(view), COPIED):
        into[at : at + COPIED] = view[at : at + COPIED]
        found.update(into[at : at + COPIED])
    return found.intdigest()


def fill_digests(headers: Buffer, pieces: Sequence[Buffer]) -> None:
    """Write the XXH3-64 of each page's body into its header.

    `headers` are the 64-byte headers of all pages in one writable buffer. `pieces` contain the bodies in the same
    order, each body within one piece. Raise ValueError if the bytes of `pieces` are not exactly the body lengths of the
    headers.
    """
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


# -- The output queue of a session: bytes and borrowed memory, kept until the kernel has accepted it -------------------

# Bytes in one system call. During a call the socket gets no new buffer space, however much the peer reads. The value
# was measured: with fewer bytes there are more calls, and with a megabyte, sending takes a tenth to a third more time
# (docs/performance.md).
SEND_BYTES = 768 << 10
SEND_TURN = 4 << 20  # bytes sent in one turn, because other clients wait meanwhile
MOST_PIECES = 1024  # pieces in one system call: IOV_MAX


class BorrowedPiece(Protocol):
    """Memory that is not reused while the object exists."""

    @property
    def view(self) -> memoryview:
        """The memory at its current address."""


class Outbox:
    """Output queue of a session: bytes and borrowed memory, which is not copied. Amortised O(1) for each piece."""

    def __init__(self) -> None:
        # The queue, in three lists of the same length. The first `_gone` items are empty, because these pieces were
        # sent; they are deleted when they are half of the lists.
        self._pieces: list[bytes | BorrowedPiece] = []  # the pieces, which keep their memory from being reused
        self._buffers: list[bytes | memoryview] = []  # the memory
        self._ends: list[int] = []  # end of each piece, in bytes since the outbox was created
        self._sent = 0  # bytes that were sent since the outbox was created
        self._gone = 0
        self._fresh = 0  # pieces added since the last `copy_parts`; some of them may have been sent

    @property
    def nbytes(self) -> int:
        """Bytes in the queue."""
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
        self._fresh += len(pieces)

    def copy_parts(self) -> None:
        """Copy small parts of large values that wait, so that a part that is not read keeps no whole value in memory
        that the store has dropped. It is called after `send`, because parts that are sent at once need no copy.
        """
        start = max(len(self._pieces) - self._fresh, self._gone)
        self._pieces[start:] = copied_parts(self._pieces[start:])
        self._buffers[start:] = _views(self._pieces[start:])
        self._fresh = 0

    def send(self, descriptor: int) -> int:
        """Send queued output until the socket's buffer is full or SEND_TURN bytes were sent. Return their number.

        Raise OSError if nothing was sent; after some bytes, the next call raises it.
        """
        sent = 0
        while self.nbytes and sent < SEND_TURN:
            buffers = self.next()
            try:
                count = os.writev(descriptor, buffers)
            except BlockingIOError:
                break
            except OSError:
                if sent:
                    break  # the next call raises it
                raise
            self.sent(count)
            sent += count
            if count < sum(map(len, buffers)):
                break  # the socket's buffer is full
        return sent

    def next(self) -> list[bytes | memoryview]:
        """Return the next buffers to send: up to MOST_PIECES, with up to SEND_BYTES bytes together."""
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
        """Remove `count` bytes that the kernel has accepted. Raise ValueError if the queue has fewer."""
        if not 0 <= count <= self.nbytes:
            raise ValueError(f"{self.nbytes} bytes wait to be sent, got {count}")
        self._sent += count
        before, gone = self._gone, bisect_right(self._ends, self._sent, self._gone)
        if 2 * gone >= len(self._ends):  # not earlier, because the deletion moves all later items
            del self._pieces[:gone], self._buffers[:gone], self._ends[:gone]
            self._gone = 0
        else:
            self._pieces[before:gone] = [b""] * (gone - before)
            self._buffers[before:gone] = [b""] * (gone - before)
            self._gone = gone

    def renew(self) -> None:
        """Read the address of each piece's memory again. The session calls this after borrowed memory has moved."""
        self._buffers = _views(self._pieces)

    def clear(self) -> None:
        """Drop all queued output."""
        self.sent(self.nbytes)


def _views(pieces: Sequence[bytes | BorrowedPiece]) -> list[bytes | memoryview]:
    return [
        piece if isinstance(piece, bytes) else piece.borrowed if type(piece) is Slot else piece.view for piece in pieces
    ]


# -- Pages to send: words and bodies alternate, encoded in chunks of some pages ----------------------------------------


def encode_words(*words: bytes | int) -> bytes:
    """Return words of a command as bulk strings."""
    texts = [word if isinstance(word, bytes) else b"%d" % word for word in words]
    return b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts])


PART = struct.Struct("=6I")  # a page of each block in a layout: layer, head, kv_type, dtype, page_size, head_dim


class PageKeys:
    """The keys of some pages, in the caller's order."""

    def __init__(self, keys: Sequence[PageKey]) -> None:
        self.names = [*keys]

    @classmethod
    def of_blocks(cls, names: Sequence[tuple[bytes, int]], layout: bytes) -> PageKeys:
        """Return the keys of all pages of blocks, named (req_id, page_id). `layout` is a PART for each page of a block.

        Raise as PageKey for an invalid name.
        """
        parts = [*PART.iter_unpack(layout)]
        return cls([PageKey(req_id, part[0], part[1], page, part[2]) for req_id, page in names for part in parts])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, part: slice) -> PageKeys:
        """Return the keys of a slice without gaps."""
        return PageKeys(self.names[part])

    def words(self) -> bytes:
        """Return the five words of all keys as bulk strings, see `words_of`."""
        return b"".join(map(words_of, self.names))

    def keys(self) -> bytes:
        """Return each key as one bulk string, `kv:...`."""
        return encode_words(*map(bytes, self.names))


def words_of(name: PageKey) -> bytes:
    """Return the five words of a page's key as bulk strings: req_id, layer, head, page, kv_type."""
    return encode_words(name.req_id, name.layer, name.head, name.page, name.kv_type)


PAGES_PER_CHUNK = 1024  # pages in a chunk
_ITEMSIZES = {int(dtype): dtype.itemsize for dtype in DType}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Encoded pages, ready to send."""

    pieces: list[bytes | memoryview]  # texts and bodies alternate; a text is first and last
    stop: int  # index after the last of its pages


class SentPages:
    """Pages to write to a server, each as (key, body, dtype, page_size, head_dim)."""

    def __init__(self, pages: Sequence[tuple[PageKey, Buffer, int, int, int]]) -> None:
        """Raise Unusable for a body that cannot be sent from."""
        self.names = PageKeys([page[0] for page in pages])
        self.bodies = Memory([page[1] for page in pages])
        self.shapes = [page[2:] for page in pages]

    @classmethod
    def of_blocks(cls, names: Sequence[tuple[bytes, int]], layout: bytes, bodies: Sequence[Buffer]) -> SentPages:
        """Return all pages of blocks, as `PageKeys.of_blocks`, without an object for each page. Raise ValueError for
        another number of bodies, Unusable for a body that cannot be sent from.
        """
        some = cls(())
        some.names, some.bodies = PageKeys.of_blocks(names, layout), Memory(bodies)
        some.shapes = [part[3:] for part in PART.iter_unpack(layout)] * len(names)
        if len(some.bodies) != len(some.names):
            raise ValueError(f"{len(some.names)} pages need as many bodies, got {len(some.bodies)}")
        return some

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, part: slice) -> SentPages:
        """Return the pages of a slice without gaps."""
        some = SentPages(())
        some.names, some.bodies, some.shapes = self.names[part], self.bodies[part], self.shapes[part]
        return some

    def misfit(self) -> int:
        """Return the index of the first page with an invalid dtype or shape, or whose body does not have its size.

        Return -1 if all pages are valid.
        """
        for i, ((dtype, page_size, head_dim), nbytes) in enumerate(zip(self.shapes, self.bodies.sizes(), strict=True)):
            if not (0 < page_size <= MAX_U32 and 0 < head_dim <= MAX_U32 and nbytes <= MAX_U32):
                return i
            if dtype not in _ITEMSIZES or page_size * head_dim * _ITEMSIZES[dtype] != nbytes:
                return i
        return -1

    def as_words(self, start: int, ttl: int) -> Chunk:
        """Return a chunk of pages from index `start` on, each as the ten words of KVPAGEMSET. `ttl` is in seconds.

        `Chunk.stop` is the index of the first page after the chunk.
        """
        pieces: list[bytes | memoryview] = []
        stop = self._stop(start)
        before = b""
        for name, shape, body in self._some(start, stop):
            pieces += [b"%b%b%b$%d\r\n" % (before, words_of(name), encode_words(*shape, ttl), len(body)), body]
            before = b"\r\n"
        pieces.append(before)
        return Chunk(pieces, stop)

    def as_blobs(self, start: int, before: bytes, after: bytes, ttl: int, created: int) -> Chunk:
        """Return a chunk of pages from index `start` on, each as two words: its key and its blob.

        `before` and `after` are sent before and after each page, for example the other words of a SET. `ttl` is in
        seconds, `created` in unix milliseconds; both are written into the headers.
        """
        pieces: list[bytes | memoryview] = []
        stop = self._stop(start)
        between = before
        for name, (dtype, page_size, head_dim), body in self._some(start, stop):
            about = dtype, name.kv_type, page_size, head_dim, name.layer, name.head, name.page
            header = pack_header(*about, created, ttl, len(body), checksum(body))
            key = encode_words(bytes(name))
            pieces += [b"%b%b$%d\r\n%b" % (between, key, len(header) + len(body), header), body]
            between = after + before
        pieces.append(after)
        return Chunk(pieces, stop)

    def _some(self, start: int, stop: int) -> zip[tuple[PageKey, tuple[int, int, int], memoryview]]:
        """Return key, shape and body of the pages from index `start` to before `stop`."""
        part = slice(start, stop)
        return zip(self.names.names[part], self.shapes[part], self.bodies.views()[part], strict=True)

    def _stop(self, start: int) -> int:
        """Return the index after the last page of a chunk that begins at `start`.

        A chunk has up to PAGES_PER_CHUNK pages, and ends early after the page with which its bodies reach SEND_BYTES.
        """
        nbytes = 0
        for stop in range(start, min(start + PAGES_PER_CHUNK, len(self))):
            if nbytes >= SEND_BYTES:
                return stop
            nbytes += len(self.bodies.views()[stop])
        return min(start + PAGES_PER_CHUNK, len(self))


# -- The receiver of bodies --------------------------------------------------------------------------------------------

SCRATCH_BYTES = 256 * 1024  # bytes of the scratch memory
# If at least as many bytes of a body are missing, they are received in its buffer, because that is worth a system call.
# The server's parser has a larger limit, because it cannot predict the next word.
LONG_BYTES = 16 * 1024
ITEMS_AHEAD = 64  # items that are searched for the next long body: 64 bodies of 4 KiB fill the scratch memory
LARGEST_STEP_BYTES = 1024 * 1024  # bytes after which `receive` returns


class Bodies:
    """Receiver of the reply to a read of pages: an array of bulk strings, or without `array` one bulk string.

    The body of item `i` is written to buffer `i` of `places`. With `names`, the bulk strings are blobs, whose headers
    must belong to these keys. With `verify`, the bodies must match the checksums of their headers.
    """

    def __init__(self, places: Memory, *, array: bool, names: PageKeys | None = None, verify: bool = False) -> None:
        self._places = places.views()
        self._array = array
        self._names = None if names is None else names.names
        self._verify = verify
        self._missed: dict[int, str] = {}  # reasons of missing items, by index
        self._error: bytes | None = None  # the text of an error reply
        self._is_wrong = False  # whether WrongAnswer was raised
        self._opening = b"*%d\r\n" % len(places) if array else b""
        # State of the parser: the function that parses the next bytes, the index of the current item, and the number of
        # missing bytes of its current part, which is a header, a body or a CRLF.
        self._next: Callable[[Bodies, memoryview], int] = Bodies._take_opening if array else Bodies._take_line
        self._item = 0
        self._left = 0
        self._header = bytearray(HEADER_SIZE)  # the header of the current blob
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8).data
        self._start = self._end = 0  # the received bytes in the scratch memory that were not parsed yet

    @property
    def done(self) -> bool:
        """Whether the reply is complete."""
        return self._next is Bodies._take_nothing and not self._is_wrong

    def result(self) -> dict[int, str]:
        """Return the missing items: by index, the reason "absent", "size", "header" or "checksum".

        It may only be called after `done`. Raise ErrorAnswer if the reply is an error.
        """
        if self._error is not None:
            raise ErrorAnswer(self._error)
        return self._missed

    def receive(self, fd: int) -> int:
        """Receive available bytes, about LARGEST_STEP_BYTES at most, and parse them.

        Return their number; 0 at the end of the stream, -1 if no bytes are available. Raise WrongAnswer for bytes that
        are not the expected reply, or OSError.
        """
        direct = self._rest_of_long_body()
        self._move_to_start()
        ahead = self._scratch[self._end : min(SCRATCH_BYTES, self._end + self._ahead(direct))]
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
        """Parse bytes that another function has received. Raise WrongAnswer if they are not the expected reply."""
        rest = memoryview(data)
        while rest:
            self._move_to_start()
            some = rest[: SCRATCH_BYTES - self._end]
            self._scratch[self._end : self._end + len(some)] = some
            self._end += len(some)
            rest = rest[len(some) :]
            self._take()

    # -- buffers for the next bytes ----------------------------------------------------------------------------------

    def _rest_of_long_body(self) -> memoryview:
        """Return the memory for the missing bytes of the current body, up to LARGEST_STEP_BYTES.

        Return empty memory if fewer than LONG_BYTES are missing, because these are received into the scratch memory.
        """
        if self._next is not Bodies._take_body or self._left < LONG_BYTES:
            return memoryview(b"")
        place = self._places[self._item]
        return place[len(place) - self._left :][:LARGEST_STEP_BYTES]

    def _move_to_start(self) -> None:
        """Move the unparsed bytes, at most a line, to the beginning of the scratch memory."""
        left = bytes(self._scratch[self._start : self._end])
        self._scratch[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _ahead(self, direct: memoryview) -> int:
        """Return the number of bytes to receive into the scratch memory: up to the line before the next long body.

        `direct` is the memory of the current body that the same call receives into.
        """
        size = MAX_FRAME
        item = self._item
        if self._next in (Bodies._take_body, Bodies._take_dropped, Bodies._take_crlf):
            size += self._left - len(direct) + 2
            item += 1
        for place in self._places[item : item + ITEMS_AHEAD]:
            size += MAX_FRAME + (0 if self._names is None else HEADER_SIZE)
            if len(place) >= LONG_BYTES:
                return size
            size += len(place)
        return SCRATCH_BYTES

    # -- parsers: each parses bytes from the start, and returns their number, or -1 if it needs more -------------------

    def _take(self) -> None:
        """Parse the bytes in the scratch memory. An incomplete line at the end stays there."""
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
        self._end_if_complete()
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
            self._advance()
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
            self._advance()
        return 1

    def _take_nothing(self, some: memoryview) -> int:
        if some:
            raise self._wrong(some, len(self._places))
        return -1

    def _wrong(self, some: memoryview, item: int) -> WrongAnswer:
        """Return the error for unexpected bytes `some` in place of `item`. The reply cannot be completed after it."""
        self._is_wrong = True
        return wrong_answer(item, len(self._places), bytes(some[:40]))

    def _arrived(self) -> None:
        """Check a complete blob, and expect its CRLF."""
        self._next, self._left = Bodies._take_crlf, 2
        if self._names is not None:
            reason = _mismatch(self._names[self._item], self._header, self._places[self._item], self._verify)
            if reason:
                self._missed[self._item] = reason

    def _advance(self) -> None:
        """Expect the line of the next item, or no more bytes after the last one."""
        self._item += 1
        self._next = Bodies._take_line
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        """Expect no more bytes if all items were received."""
        if self._item == len(self._places):
            self._next = Bodies._take_nothing


def _mismatch(name: PageKey, header: bytearray, body: memoryview, verify: bool) -> str | None:
    """Return the reason why a blob does not belong to a page's key, "header" or "checksum"; None if it does."""
    magic, version, _, kv_type, flags, _, _, *place, _, _, size, reserved, digest = LAYOUT.unpack(header)
    if (magic, version, flags, reserved, size) != (MAGIC, VERSION, 0, 0, len(body)):
        return "header"
    if (*place, kv_type) != (name.layer, name.head, name.page, name.kv_type):
        return "header"
    return "checksum" if verify and digest and checksum(body) != digest else None
