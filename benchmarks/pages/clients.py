"""The clients that write and read the work: an ordinary one, the same for all servers, and PageClient."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.pages.work import Batch, BlockWork, Work
from kvpage_server.client import Page, PageClient
from kvpage_server.page import DType, PageKey

# -- An ordinary client ------------------------------------------------------------------------------------------------
#
# It sends with `sendmsg`, and receives with `recv_into`. It knows no low-water marks, and joins nothing that is long.
#
# kvpage-server is asked for pages and blocks. Redis and Valkey are asked for values of the same bytes under the keys of
# the same pages, with MSET and MGET: no header, no checksum. Requests are made ready before anything is measured.

Step = Callable[[], None]

OK = b"+OK\r\n"
ABSENT = b"$-1\r\n"
_PIECES = 512  # pieces of a `sendmsg`, at most
_JOINED = 512  # pieces with fewer bytes are joined


class Wrong(AssertionError):
    """Error: a reply differs from the written bytes, or is invalid."""


@dataclass(frozen=True)
class Way:
    """The functions with which a client writes and reads each generation of a work."""

    writes: list[Step]
    reads: list[Step]
    check: Callable[[int], None]  # checks a generation's read, right after it; raises Wrong


def must_be(read: bytes | memoryview, written: bytes | memoryview) -> None:
    """Raise Wrong if the bytes differ."""
    if bytes(read) != bytes(written):  # bytes are compared much faster than views
        raise Wrong("the bytes that were read are not those that were written")


def bulk(text: bytes) -> bytes:
    """Return a text as a bulk string of RESP."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def spell(*words: bytes) -> bytes:
    """Return a command in RESP."""
    return b"*%d\r\n%b" % (len(words), b"".join(map(bulk, words)))


def send(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Send all pieces, _PIECES with each system call."""
    left = list(pieces)
    first = 0
    while first < len(left):
        sent = sock.sendmsg(left[first : first + _PIECES])
        while first < len(left) and sent >= len(left[first]):
            sent -= len(left[first])
            first += 1
        if sent:
            left[first] = left[first][sent:]


def receive(sock: socket.socket, into: memoryview) -> None:
    """Receive until the memory is full. Raises EOFError at the end of the stream."""
    while into:
        count = sock.recv_into(into)
        if not count:
            raise EOFError("the server has closed the connection")
        into = into[count:]


def pieces_of(parts: Iterable[bytes | memoryview]) -> list[memoryview]:
    """Return parts as they are sent: short ones joined, long ones without a copy."""
    found: list[memoryview] = []
    short: list[bytes | memoryview] = []
    for part in parts:
        if len(part) < _JOINED:
            short.append(part)
            continue
        if short:
            found.append(memoryview(b"".join(short)))
            short = []
        found.append(memoryview(part))
    if short:
        found.append(memoryview(b"".join(short)))
    return found


class Answers:
    """Memory for replies that are arrays of bulk strings with known lengths. None is an absent item."""

    def __init__(self, expected: Sequence[Sequence[memoryview | None]]) -> None:
        self._expected = expected
        self._memory = memoryview(bytearray(max(map(_length, expected))))
        self._views = [self._memory[: _length(items)] for items in expected]

    def receive(self, sock: socket.socket, number: int) -> None:
        """Receive reply number `number` into the memory."""
        receive(sock, self._views[number])

    def check(self, number: int) -> None:
        """Raise Wrong unless the last reply is the expected one with this number."""
        at = 0
        for part in _answer(self._expected[number]):
            must_be(self._memory[at : at + len(part)], part)
            at += len(part)


def _answer(items: Sequence[memoryview | None]) -> Iterator[bytes | memoryview]:
    yield b"*%d\r\n" % len(items)
    for item in items:
        if item is None:
            yield ABSENT
        else:
            yield b"$%d\r\n" % len(item)
            yield item
            yield b"\r\n"


def _length(items: Sequence[memoryview | None]) -> int:
    return sum(map(len, _answer(items)))


def way(
    sock: socket.socket,
    writes: Iterable[Iterable[bytes | memoryview]],
    reads: Iterable[bytes],
    expected: Sequence[Sequence[memoryview | None]],
    *,
    oks: int = 1,
) -> Way:
    """Return a `Way` that sends encoded requests. The replies are `oks` OKs to a write, and an array of bulk strings
    to a read.
    """
    answers = Answers(expected)
    right, answer = oks * OK, memoryview(bytearray(oks * len(OK)))

    def writing(pieces: list[memoryview]) -> Step:
        def step() -> None:
            send(sock, pieces)
            receive(sock, answer)
            if answer != right:
                raise Wrong(f"a write was answered with {bytes(answer)!r}")

        return step

    def reading(number: int, request: bytes) -> Step:
        pieces = [memoryview(request)]

        def step() -> None:
            send(sock, pieces)
            answers.receive(sock, number)

        return step

    return Way(
        [writing(pieces_of(parts)) for parts in writes],
        [reading(number, request) for number, request in enumerate(reads)],
        answers.check,
    )


def kvpage_way(sock: socket.socket, work: Work | BlockWork) -> Way:
    """Return a `Way` with the page commands, for pages or blocks."""
    return kvpage_pages(sock, work) if isinstance(work, Work) else kvpage_blocks(sock, work)


def value_way(sock: socket.socket, work: Work | BlockWork) -> Way:
    """Return a `Way` with MSET and MGET, for pages or blocks."""
    return values(sock, work) if isinstance(work, Work) else block_values(sock, work)


def kvpage_pages(sock: socket.socket, work: Work) -> Way:
    """Return a `Way` with KVPAGEMSET and KVPAGEMGET."""
    reads = [kvpagemget(batch.keys) for batch in work.batches]
    return way(sock, map(_kvpagemset, work.batches), reads, [batch.bodies for batch in work.batches])


def values(sock: socket.socket, work: Work) -> Way:
    """Return a `Way` with MSET and MGET of the pages' keys."""
    keys = [[bytes(key) for key in batch.keys] for batch in work.batches]
    return _values(sock, keys, [batch.bodies for batch in work.batches])


def kvpage_blocks(sock: socket.socket, work: BlockWork) -> Way:
    """Return a `Way` with a pipeline of KVBLOCKSET, one for each block, and KVBLOCKMGET."""
    writes = [_kvblocksets(work, generation) for generation in range(len(work.names))]
    reads = [
        spell(b"KVBLOCKMGET", b"%d" % len(names), *(word for req_id, page in names for word in (req_id, b"%d" % page)))
        for names in work.names
    ]
    return way(sock, writes, reads, work.bodies, oks=len(work.names[0]))


def block_values(sock: socket.socket, work: BlockWork) -> Way:
    """Return a `Way` with MSET and MGET of a value for each block."""
    keys = [[b"block:%b:%d" % name for name in names] for names in work.names]
    return _values(sock, keys, work.bodies)


def block_page_values(sock: socket.socket, work: BlockWork) -> Way:
    """Return a `Way` with MSET and MGET of a value for each page of the blocks."""
    spans = list(work.shape.page_spans())
    keys = [
        [b"kv:%b:%d:%d" % (*name, number) for name in names for number in range(work.shape.pages)]
        for names in work.names
    ]
    bodies = [[body[span] for body in batch for span in spans] for batch in work.bodies]
    return _values(sock, keys, bodies)


def _values(sock: socket.socket, keys: list[list[bytes]], bodies: list[list[memoryview]]) -> Way:
    writes = map(_mset, keys, bodies)
    return way(sock, writes, [spell(b"MGET", *batch) for batch in keys], bodies)


def name_words(key: PageKey) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Return the five words that name a page."""
    return key.req_id, b"%d" % key.layer, b"%d" % key.head, b"%d" % key.page, b"%d" % key.kv_type


def shape_words(nbytes: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the four words between name and body of KVPAGESET: ttl 0, uint8, one row, `nbytes` columns."""
    return b"%d" % DType.UINT8, b"1", b"%d" % nbytes, b"0"


def kvpagemget(keys: Sequence[PageKey]) -> bytes:
    """Return the KVPAGEMGET request for pages."""
    return spell(b"KVPAGEMGET", b"%d" % len(keys), *(word for key in keys for word in name_words(key)))


def kvpageset(key: PageKey, body: memoryview) -> list[memoryview]:
    """Return the pieces of a KVPAGESET request."""
    words = (b"KVPAGESET", *name_words(key), *shape_words(len(body)))
    return pieces_of((b"*11\r\n%b$%d\r\n" % (b"".join(map(bulk, words)), len(body)), body, b"\r\n"))


def set_value(key: bytes, body: memoryview) -> list[memoryview]:
    """Return the pieces of a SET request."""
    return pieces_of((b"*3\r\n%b%b$%d\r\n" % (bulk(b"SET"), bulk(key), len(body)), body, b"\r\n"))


def _kvpagemset(batch: Batch) -> Iterator[bytes | memoryview]:
    count = len(batch.keys)
    yield b"*%d\r\n" % (2 + 10 * count) + bulk(b"KVPAGEMSET") + bulk(b"%d" % count)
    for key, body in zip(batch.keys, batch.bodies, strict=True):
        yield b"".join(map(bulk, (*name_words(key), *shape_words(len(body))))) + b"$%d\r\n" % len(body)
        yield body
        yield b"\r\n"


def _kvblocksets(work: BlockWork, generation: int) -> Iterator[bytes | memoryview]:
    shape = work.shape
    numbers = (shape.layers, shape.heads, shape.page_size, 0, len(shape.planes))
    planes = (word for plane in shape.planes for word in (plane.kv_type, plane.dtype, plane.head_dim))
    words = b"".join(bulk(b"%d" % number) for number in (*numbers, *planes))
    count = 1 + 2 + len(numbers) + 3 * len(shape.planes) + 1
    for (req_id, page), body in zip(work.names[generation], work.bodies[generation], strict=True):
        yield b"*%d\r\n" % count + bulk(b"KVBLOCKSET") + bulk(req_id) + bulk(b"%d" % page) + words
        yield b"$%d\r\n" % len(body)
        yield body
        yield b"\r\n"


def _mset(keys: list[bytes], bodies: list[memoryview]) -> Iterator[bytes | memoryview]:
    yield b"*%d\r\n" % (1 + 2 * len(keys)) + bulk(b"MSET")
    for key, body in zip(keys, bodies, strict=True):
        yield bulk(key) + b"$%d\r\n" % len(body)
        yield body
        yield b"\r\n"


# -- The same work through the public methods of PageClient ------------------------------------------------------------
#
# It speaks to Redis and Valkey as well: there pages go as values with MSET and MGET, each with its 64 bytes of header.

DEADLINE = 60.0  # seconds, of a call


def connect_page_client(url: str) -> PageClient:
    """Return a PageClient that does not verify checksums, like the ordinary client."""
    return PageClient(url, verify=False, deadline=DEADLINE)


def page_client_pages(client: PageClient, work: Work) -> Way:
    """Return a `Way` with `mset` and `mget_into`."""
    stored = [
        [Page(key, body, DType.UINT8, 1, len(body)) for key, body in zip(batch.keys, batch.bodies, strict=True)]
        for batch in work.batches
    ]
    places = _places([len(body) for body in work.batches[0].bodies])

    def writing(number: int) -> Step:
        return lambda: client.mset(stored[number])

    def reading(number: int) -> Step:
        keys = work.batches[number].keys
        return _finding_all(lambda: client.mget_into(keys, places))

    numbers = range(len(work.batches))
    check = _checking(places, [batch.bodies for batch in work.batches])
    return Way([*map(writing, numbers)], [*map(reading, numbers)], check)


def page_client_blocks(client: PageClient, work: BlockWork) -> Way:
    """Return a `Way` with `mset_blocks` and `mget_blocks_into`."""
    places = _places([len(body) for body in work.bodies[0]])

    def writing(number: int) -> Step:
        return lambda: client.mset_blocks(work.names[number], work.shape, work.bodies[number])

    def reading(number: int) -> Step:
        return _finding_all(lambda: client.mget_blocks_into(work.names[number], work.shape, places))

    numbers = range(len(work.names))
    return Way([*map(writing, numbers)], [*map(reading, numbers)], _checking(places, work.bodies))


def _places(lengths: Sequence[int]) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for nbytes in lengths]


def _finding_all(read: Callable[[], list[bool]]) -> Step:
    def step() -> None:
        found = read()
        if not all(found):
            raise Wrong(f"{found.count(False)} of {len(found)} are not there")

    return step


def _checking(places: Sequence[memoryview], expected: Sequence[Sequence[memoryview]]) -> Callable[[int], None]:
    def check(number: int) -> None:
        for place, body in zip(places, expected[number], strict=True):
            must_be(place, body)

    return check
