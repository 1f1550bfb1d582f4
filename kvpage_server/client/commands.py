"""Requests to one server: string commands for any Redis, or the page commands of kvpage-server; and the choice between
raw blocks and blocks in the lossless code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from kvpage_server.client.errors import Refused, Unsupported, WrongReply
from kvpage_server.client.page import BlockName, Page, StateName, header_of, layout_of, mismatch
from kvpage_server.client.raw_commands import Kept, array, ascending, integer, kept, ok, up_to
from kvpage_server.client.wire.exchange import Piece, Request, around_set, command, word
from kvpage_server.client.wire.reply import Values
from kvpage_server.core import Bodies, Chunk, Memory, PageKeys, SentPages
from kvpage_server.lossless import decode_body, encode_block_body
from kvpage_server.page import HEADER_SIZE, BlockShape, DType, PageError, PageKey, Plane, checksum, unix_ms

Missed = dict[int, str]  # position in the batch -> reason of the miss
_NAMES_PER_STEP = 4096  # names that are encoded before other tasks have their turn


# -- Raw blocks or blocks in the lossless code (docs/page-code.md): the faster way, by measured rates ------------------

Coding = Literal["auto", "always", "never"]
DECAY = 0.5  # weight of earlier measurements at each new one
_MEASURED = 1 << 20  # bytes; smaller transfers are not measured, because latency dominates them
_CODED = 1 << 16  # bytes; smaller transfers are not coded
_TRIED = 4  # coded transfers until their rate is compared with that of raw ones
_PROBE = 32  # one of so many transfers takes the other way, which measures it
_MOST_SHAPES = 256  # whose ratios are known
_SAMPLE = 1 << 20  # bytes by which encoder and decoder are measured first
_ROUNDS = 3  # of a measurement of the codec, of which the fastest counts
_USUAL_RATIOS = {DType.BFLOAT16: 1.4, DType.FLOAT16: 1.12, DType.FLOAT32: 1.17}
_LEAST_RATIO = 1.1


class Rate:
    """A rate (amount per second), averaged over measurements: weighted by duration, and less with each later one."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Note that `amount` took `seconds`."""
        self._amount = self._amount * DECAY + amount
        self._seconds = self._seconds * DECAY + seconds

    @property
    def value(self) -> float | None:
        """The rate; None before the first observation."""
        return self._amount / self._seconds if self._seconds else None


def block_code(coding: Coding, *, is_local: bool) -> BlockCode | None:
    """Return the choice between raw and coded blocks for a client; None if it sends raw blocks only.

    With ``auto``, it sends raw blocks to a server on this machine. Raises ValueError for another `coding`.
    """
    if coding not in (allowed := get_args(Coding)):
        raise ValueError(f"code must be one of {', '.join(allowed)}, got {coding!r}")
    return None if coding == "never" or (coding == "auto" and is_local) else BlockCode(always=coding == "always")


def after_refusal(what: str, error: Refused, code: BlockCode | None) -> tuple[bool, BlockCode | None]:
    """Return whether a client asks the server for its dialect again, and then repeats the method `what`; and the `code`
    for blocks from then on.

    It does if the server may be an older one since a restart, which does not know the commands for coded blocks or does
    not compare the shapes of blocks, or if the user may not call these commands.
    """
    of_blocks = what in ("mset_blocks", "fetch_blocks_into")
    if code is not None and of_blocks and (error.code == "NOPERM" or "unknown command" in str(error).lower()):
        return True, None
    return what == "fetch_blocks_into" and error.code == "ERR", code


class Link:
    """One direction of a connection. The rates are raw bytes per second from the first byte to the last one, or, of
    coded transfers, from the start of the encoder or to the end of the decoder.
    """

    def __init__(self) -> None:
        self.raw = Rate()
        self.coded = Rate()
        self.coded_transfers = 0  # measured ones
        self.choices = 0  # of transfers for which the code is the faster way by the rates of link and codec
        self.raw_bytes = 0  # of coded blocks, before they were coded
        self.coded_bytes = 0  # of their codes


class BlockCode:
    """The choice between raw and coded blocks for a client of one server. Threads may share it.

    Raw transfers measure the link. If it is slow enough, blocks are coded. Then the rates of coded and raw transfers
    decide, because the server may be busy, and some transfers still take the other way.

    The server's encoder and decoder are taken to be as fast as this machine's, in raw bytes per second.
    """

    def __init__(self, *, always: bool) -> None:
        """Choose by rates or, if `always`, the code for all blocks that have one."""
        self.received, self.sent = Link(), Link()
        self.encoder, self.decoder = Rate(), Rate()
        self._always = always
        self._ratios: dict[BlockShape, Rate] = {}  # raw bytes per coded byte

    def chooses(self, link: Link, shape: BlockShape, count: int) -> bool:
        """Return whether `count` blocks of a shape should travel on a link in the code."""
        ratio, nbytes = self.ratio(shape), count * shape.nbytes
        if ratio < _LEAST_RATIO or (nbytes < _CODED and not self._always):
            return False
        if self._always:
            return True
        rate = link.raw.value
        if rate is None or rate >= self.break_even(ratio, receives=link is self.received):
            return False
        chosen = link.coded_transfers < _TRIED or (link.coded.value or 0.0) > rate
        if nbytes >= _MEASURED:
            link.choices += 1
            chosen = chosen is (link.choices % _PROBE != 0)
        return chosen

    def break_even(self, ratio: float, *, receives: bool) -> float:
        """Return the rate of a link in bytes per second below which codes of a `ratio` arrive sooner than raw bytes.

        The sender's and the link's work overlap, or the link's and the receiver's. This side's work is added.
        """
        if self.encoder.value is None or self.decoder.value is None:
            self._measure_codec()
        own, other = self.encoder.value or 1.0, self.decoder.value or 1.0
        own, other = (other, own) if receives else (own, other)
        # 1 / rate > max(1 / (ratio * rate), 1 / other) + 1 / own
        return min(own * (1 - 1 / ratio), 1 / (1 / own + 1 / other))

    def ratio(self, shape: BlockShape) -> float:
        """Return the ratio of raw blocks of a shape to their codes, measured or estimated."""
        found = self._ratios.get(shape)
        return (found.value if found else None) or _usual_ratio(shape)

    def moved(self, link: Link, nbytes: int, seconds: float, *, coded: bool = False) -> None:
        """Note that blocks of `nbytes` raw bytes took `seconds` on a link."""
        if nbytes < _MEASURED:
            return
        (link.coded if coded else link.raw).observe(nbytes, seconds)
        link.coded_transfers += coded

    def coded(self, link: Link, shape: BlockShape, raw: int, coded: int | None) -> None:
        """Note that `raw` bytes of blocks of a shape were `coded` bytes on a link, or that they have no code."""
        if coded is not None:
            link.raw_bytes += raw
            link.coded_bytes += coded
        if shape not in self._ratios and len(self._ratios) == _MOST_SHAPES:
            self._ratios.clear()
        self._ratios.setdefault(shape, Rate()).observe(raw, raw if coded is None else coded)

    def _measure_codec(self) -> None:
        self.measure(*_sample())

    def measure(self, body: bytes, shape: BlockShape) -> int:
        """Note the rates of encoder and decoder for a block. Return the bytes of its code, or of itself without one."""
        into = memoryview(bytearray(body))  # a copy, because the first write to new memory takes longer
        encoding, decoding, size = list[float](), list[float](), 0
        for _ in range(_ROUNDS):
            begun = time.perf_counter()
            code = encode_block_body(body, shape)
            if code is None:
                return len(body)
            encoded = time.perf_counter()
            decode_body(code, into)
            encoding.append(encoded - begun)
            decoding.append(time.perf_counter() - encoded)
            size = len(code)
        self.encoder.observe(len(body), min(encoding))
        self.decoder.observe(len(body), min(decoding))
        return size


@lru_cache(64)
def _usual_ratio(shape: BlockShape) -> float:
    coded = sum(shape.page_nbytes(plane) / _USUAL_RATIOS.get(plane.dtype, 1.0) for plane in shape.planes)
    return sum(map(shape.page_nbytes, shape.planes)) / coded


@cache
def _sample() -> tuple[bytes, BlockShape]:
    """Return a block of normally distributed bfloat16, and its shape."""
    shape = BlockShape(1, _SAMPLE // (1 << 14), 128, (Plane(0, DType.BFLOAT16, 64),))
    values = np.random.default_rng(0).standard_normal(_SAMPLE // 2, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(), shape


# -- words -------------------------------------------------------------------------------------------------------------


def _encode_names(opening: bytes, names: PageKeys, encode: Callable[[PageKeys], bytes]) -> Iterator[Piece]:
    """Yield the bytes of a command that names pages: `opening`, then the names, encoded by `encode` in chunks of
    _NAMES_PER_STEP.
    """
    yield opening
    for start in range(0, len(names), _NAMES_PER_STEP):
        yield encode(names[start : start + _NAMES_PER_STEP])


def _chunks(count: int, encode: Callable[[int], Chunk]) -> Iterator[Chunk]:
    at = 0
    while at < count:
        run = encode(at)
        yield run
        at = run.stop


def _opening(one: bytes, several: bytes, count: int) -> bytes:
    """Return the encoded first words of a command with `count` keys: the name `one` for a single key, otherwise
    `several`.
    """
    return b"*%d\r\n%b" % (1 + count, word(one if count == 1 else several))


def _page_opening(name: bytes, count: int, width: int) -> bytes:
    """Return the encoded first words of KVPAGE`name`, or of KVPAGEM`name` if `count` is more than one page.

    `width` is the number of arguments of each page.
    """
    if count == 1:
        return b"*%d\r\n%b" % (1 + width, word(b"KVPAGE" + name))
    return b"*%d\r\n%b%b" % (2 + count * width, word(b"KVPAGEM" + name), word(count))


def _flat(names: Sequence[BlockName | StateName]) -> Iterator[bytes | int]:
    for name in names:
        yield from name


def _one_piece(text: bytes) -> Callable[[], Iterator[Piece]]:
    return lambda: iter((text,))


# -- answers -----------------------------------------------------------------------------------------------------------


def _all_ok(values: list[Any]) -> None:
    for value in values:
        ok(value)


def _integer(values: list[Any]) -> int:
    return integer(values[0])


def _yes_no(values: list[Any]) -> list[bool]:
    return [up_to(1)(value) == 1 for value in values]


def _not_refused(value: Any) -> Any:
    """Return a reply; None if its key has a value of another type than a string. Raises Refused for another error."""
    if not isinstance(value, Refused):
        return value
    if value.code == "WRONGTYPE":
        return None
    raise value.again()


# -- dialects ----------------------------------------------------------------------------------------------------------


class _Existence(NamedTuple):
    """Commands that say which pages exist, with the number of their replies and the decoder of these."""

    pieces: Callable[[], Iterator[Piece]]
    replies: int
    read: Callable[[list[Any]], list[bool]]


class BlobCommands:
    """Requests to any Redis or Valkey, which stores a page as a string with the page's blob."""

    def set_pages(self, pages: SentPages, ttl: int) -> Request[None]:
        """Write pages: all with one MSET, or, if there is a `ttl` in seconds, each with its own SET."""
        created, count = unix_ms(), len(pages)
        before, after = around_set(ttl) if ttl else (b"", b"\r\n")

        def pieces() -> Iterator[Piece | Chunk]:
            if not ttl:
                yield b"*%d\r\n%b" % (1 + 2 * count, word(b"MSET"))
            yield from _chunks(count, lambda start: pages.as_blobs(start, before, after, ttl, created))

        return Request(pieces, lambda: Values(count if ttl else 1), _all_ok)

    def read_pages(self, names: PageKeys, places: Memory, verify: bool) -> Request[Missed]:
        array = len(names) > 1
        return Request(
            lambda: _encode_names(_opening(b"GET", b"MGET", len(names)), names, PageKeys.keys),
            lambda: Bodies(places, array=array, names=names, verify=verify),
            dict,
        )

    def fetch_pages(self, keys: Sequence[PageKey], verify: bool) -> Request[tuple[list[Page | None], Missed]]:
        names = PageKeys(keys)

        def read(values: list[Any]) -> tuple[list[Page | None], Missed]:
            blobs = values if len(keys) == 1 else array(len(keys))(values[0])
            missed: Missed = {}
            return [_decode(i, keys[i], blob, verify, missed) for i, blob in enumerate(blobs)], missed

        return Request(lambda: _encode_names(_opening(b"GET", b"MGET", len(names)), names, PageKeys.keys), Values, read)

    def exists(self, keys: Sequence[PageKey]) -> Request[list[bool]]:
        asked = self.existence(keys)
        return Request(asked.pieces, lambda: Values(asked.replies, with_errors=True), asked.read)

    def delete(self, keys: Sequence[PageKey]) -> Request[int]:
        """Delete the values of keys. The result is the number of pages among them."""
        keys = [*dict.fromkeys(keys)]
        asked, names = self.existence(keys), PageKeys(keys)

        def pieces() -> Iterator[Piece]:
            yield from asked.pieces()
            yield from _encode_names(_opening(b"DEL", b"DEL", len(names)), names, PageKeys.keys)

        def read(values: list[Any]) -> int:
            *there, deleted = values
            # Another client may have deleted some pages in between.
            return min(sum(asked.read(there)), integer(_not_refused(deleted)))

        return Request(pieces, lambda: Values(asked.replies + 1, with_errors=True), read)

    def existence(self, keys: Sequence[PageKey]) -> _Existence:
        """Return the commands that read the headers of pages."""
        text = b"".join(command(b"GETRANGE", bytes(key), 0, HEADER_SIZE - 1) for key in keys)

        def read(values: list[Any]) -> list[bool]:
            return [header_of(key, _not_refused(value)) is not None for key, value in zip(keys, values, strict=True)]

        return _Existence(_one_piece(text), len(keys), read)

    def set_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[Sequence[memoryview]], ttl: int
    ) -> Request[None]:
        """Return the request that writes blocks of one shape. A body is one memoryview, or several in the order of its
        bytes. `ttl` is in seconds, 0 for none.
        """
        whole = [pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)) for pieces in bodies]
        spans = [*shape.page_spans()]
        pages = SentPages.of_blocks(names, layout_of(shape).packed, [body[span] for body in whole for span in spans])
        return self.set_pages(pages, ttl)

    def read_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, places: Memory, verify: bool
    ) -> Request[Missed]:
        spans = [*shape.page_spans()]
        pages = Memory([place[span] for place in places.views() for span in spans])
        request = self.read_pages(PageKeys.of_blocks(names, layout_of(shape).packed), pages, verify)

        def blocks(pages: Missed) -> Missed:
            return {page // shape.pages: reason for page, reason in pages.items()}

        return Request(request.pieces, request.receiver, blocks)

    def delete_request(self, req_id: bytes, pages: Sequence[int]) -> Request[int]:
        """Raise Unsupported: a plain Redis cannot list the pages of a request."""
        raise self._unsupported("delete a request")

    def prefix(self, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Request[int]:
        """Raise Unsupported: a plain Redis cannot count the complete blocks of a prefix."""
        raise self._unsupported("count the complete blocks of a prefix")

    def lengths(
        self, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, lease_ms: int
    ) -> Request[list[int]]:
        """Raise Unsupported."""
        raise self._unsupported("count the complete blocks of a prefix")

    def examine(
        self, names: Sequence[BlockName], states: Sequence[BlockName], pages_per_block: int, lease_ms: int
    ) -> Request[tuple[int, list[bool]]]:
        """Raise Unsupported."""
        raise self._unsupported("count the complete blocks of a prefix")

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Request[int]:
        """Raise Unsupported: a plain Redis has no leases."""
        raise self._unsupported("lease blocks")

    def keep(self, keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> Request[Kept]:
        """Raise Unsupported: a plain Redis cannot protect a value from eviction for a time."""
        raise self._unsupported("keep values")

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"a plain Redis or Valkey can't {what}, only kvpage-server can")


def _decode(item: int, key: PageKey, blob: Any, verify: bool, missed: Missed) -> Page | None:
    """Return the page in a blob, or None if the blob is absent or invalid. Then `missed[item]` is set to the reason."""
    if blob is None:
        missed[item] = "absent"
        return None
    header, body = header_of(key, blob), memoryview(blob)[HEADER_SIZE:]
    if reason := mismatch(header, body, verify=verify):
        missed[item] = reason
        return None
    assert header
    return Page(key, body, header.dtype, header.page_size, header.head_dim)


class PageCommands(BlobCommands):
    """Requests to kvpage-server. Reads that verify checksums, and deletions, use the string commands as for Redis.

    `code` chooses between raw and coded blocks; None for raw blocks only. With `shapes`, reads of blocks name the
    expected shape, and the server compares it.
    """

    def __init__(self, code: BlockCode | None = None, *, shapes: bool = False) -> None:
        self.code = code
        self._shapes = shapes
        self._last: tuple[BlockShape, ShapeWords] | None = None  # of the last read: usually, they are the same again

    def shape_words(self, shape: BlockShape) -> ShapeWords:
        """Return the last words of a command that reads blocks of a shape."""
        if not self._shapes:
            return ()
        last = self._last
        if last is None or last[0] is not shape:
            planes = [(int(plane.kv_type), int(plane.dtype), plane.head_dim) for plane in shape.planes]
            numbers = shape.layers, shape.heads, shape.page_size, *chain.from_iterable(planes)
            self._last = last = shape, (b"SHAPE", b":".join(b"%d" % number for number in numbers))
        return last[1]

    def set_pages(self, pages: SentPages, ttl: int) -> Request[None]:
        """Write pages, all or none."""
        count = len(pages)

        def pieces() -> Iterator[Piece | Chunk]:
            yield _page_opening(b"SET", count, 10)
            yield from _chunks(count, lambda start: pages.as_words(start, ttl))

        return Request(pieces, Values, _all_ok)

    def read_pages(self, names: PageKeys, places: Memory, verify: bool) -> Request[Missed]:
        """Receive pages into the buffers `places`. The result has the reason for each miss, by index.

        With `verify`, the pages are received as blobs, because their headers have the checksums.
        """
        if verify:
            return super().read_pages(names, places, verify)
        return Request(
            lambda: _encode_names(_page_opening(b"GET", len(names), 5), names, PageKeys.words),
            lambda: Bodies(places, array=len(names) > 1),
            dict,
        )

    def existence(self, keys: Sequence[PageKey]) -> _Existence:
        """Return the command that says which pages exist."""
        names = PageKeys(keys)

        def read(values: list[Any]) -> list[bool]:
            value = _not_refused(values[0])
            return _yes_no([value] if len(names) == 1 else array(len(names))(value))

        return _Existence(
            lambda: _encode_names(_page_opening(b"EXISTS", len(names), 5), names, PageKeys.words), 1, read
        )

    def set_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[Sequence[memoryview]], ttl: int
    ) -> Request[None]:
        """Write whole blocks, each with its own command."""
        numbers = _numbers(shape, ttl)
        opening = b"*%d\r\n%b" % (4 + len(numbers), word(b"KVBLOCKSET"))
        words = b"".join(map(word, numbers))
        after = words + b"$%d\r\n" % shape.nbytes

        def pieces() -> Iterator[Piece]:
            for (req_id, page), body in zip(names, bodies, strict=True):
                yield b"%b%b%b%b" % (opening, word(req_id), word(page), after)
                yield from body
                yield b"\r\n"

        code = self.code
        if code is None:
            return Request(pieces, lambda: Values(len(names)), _all_ok)
        transfer = _Transfer(code, code.sent, shape)
        if not code.chooses(code.sent, shape, len(names)):
            read = transfer.timed(_all_ok, lambda _: len(names))
            return Request(lambda: transfer.begin(pieces()), lambda: Values(len(names)), read)
        opening_coded = b"*%d\r\n%b" % (5 + len(numbers), word(b"KVBLOCKSETCODED"))
        encoded: list[tuple[bytes, memoryview | None]] = []  # digest and code of each body, if they are prepared

        def prepare() -> None:
            transfer.prepare()
            encoded[:] = map(transfer.encode, bodies)

        def coded_pieces() -> Iterator[Piece]:
            for i, ((req_id, page), body) in enumerate(zip(names, bodies, strict=True)):
                digest, block = encoded[i] if encoded else transfer.encode(body)
                if block is None:
                    yield b"%b%b%b%b" % (opening, word(req_id), word(page), after)
                    yield from body
                else:
                    numbers_and_digest = words + word(digest)
                    yield b"%b%b%b%b" % (opening_coded, word(req_id), word(page), numbers_and_digest)
                    yield b"$%d\r\n" % len(block)
                    yield block
                yield b"\r\n"

        read = transfer.timed(_all_ok, lambda _: len(names), coded=True)
        return Request(lambda: transfer.begin(coded_pieces()), lambda: Values(len(names)), read, prepare)

    def read_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, places: Memory, verify: bool
    ) -> Request[Missed]:
        """Receive whole blocks into the buffers `places`. The result has the reason for each miss, by index.

        `verify` has no effect: a raw block is sent without a checksum, and that of a coded block is always compared.
        """
        expected = self.shape_words(shape)
        if len(names) == 1:
            text = command(b"KVBLOCKGET", *names[0], *expected)
        else:
            text = command(b"KVBLOCKMGET", len(names), *_flat(names), *expected)
        code, why = self.code, _of_shapes if expected else dict[int, str]
        if code is None:
            return Request(_one_piece(text), lambda: Bodies(places, array=len(names) > 1), why)
        transfer = _Transfer(code, code.received, shape)
        if not code.chooses(code.received, shape, len(names)):
            read = transfer.timed(why, lambda missed: len(names) - len(missed))
            pieces = _one_piece(text)
            return Request(lambda: transfer.begin(pieces()), lambda: Bodies(places, array=len(names) > 1), read)
        text = command(b"KVBLOCKMGETCODED", len(names), *_flat(names), *expected)
        found: list[Any] = []  # for each name None, its body, or digest and code

        def read_coded(values: list[Any]) -> Missed:
            found[:] = map(_raw_or_coded, array(len(names))(values[0]))
            return {}

        def decode(_: Missed) -> Missed:
            reasons = map(transfer.decode, found, places.views())
            missed = why({i: reason for i, reason in enumerate(reasons) if reason is not None})
            found.clear()
            return missed

        finish = transfer.timed(decode, lambda missed: len(names) - len(missed), coded=True)
        return Request(lambda: transfer.begin(iter((text,))), Values, read_coded, finish=finish)

    def delete_request(self, req_id: bytes, pages: Sequence[int]) -> Request[int]:
        """Delete all pages of a request, or those with these page ids. The result is the number of deleted pages."""
        return Request(_one_piece(command(b"KVPAGEDEL", req_id, *pages)), Values, _integer)

    def prefix(self, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Request[int]:
        """Count the complete blocks from the first name on, and lease them for `lease_ms` milliseconds, 0 for no
        lease.
        """
        text = command(b"KVPAGEPREFIX", pages_per_block, lease_ms, len(names), *_flat(names))
        return Request(_one_piece(text), Values, lambda values: up_to(len(names))(values[0]))

    def lengths(
        self, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, lease_ms: int
    ) -> Request[list[int]]:
        """Find the lengths in blocks at which a prefix can be restored: all its blocks and the states that need as many
        are complete. Lease the longest for `lease_ms` milliseconds.
        """
        words = pages_per_block, lease_ms, len(names), *_flat(names), b"LENGTHS", len(states), *_flat(states)
        return Request(
            _one_piece(command(b"KVPAGEPREFIX", *words)), Values, lambda values: ascending(len(names))(values[0])
        )

    def examine(
        self, names: Sequence[BlockName], states: Sequence[BlockName], pages_per_block: int, lease_ms: int
    ) -> Request[tuple[int, list[bool]]]:
        """Count the complete blocks of `names` as `prefix` does, and find out for each state whether it is complete.
        With `lease_ms`, a state counts only if it is leased, too.
        """
        words = [(b"KVPAGEPREFIX", pages_per_block, lease_ms, len(names), *_flat(names))] if names else []
        for req_id, page in states:
            if lease_ms:
                words.append((b"KVPAGELEASE", req_id, lease_ms, page))
            words.append((b"KVBLOCKEXISTS", req_id, page))

        def read(values: list[Any]) -> tuple[int, list[bool]]:
            count = up_to(len(names))(values[0]) if names else 0
            answers = _yes_no(values[1:] if names else values)
            width = 2 if lease_ms else 1
            return count, [all(answers[i : i + width]) for i in range(0, len(answers), width)]

        text = b"".join(command(*some) for some in words)
        return Request(_one_piece(text), lambda: Values(len(words)), read)

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Request[int]:
        """Lease all blocks of a request, or those with these page ids, for `lease_ms` milliseconds. The result is their
        number.
        """
        return Request(_one_piece(command(b"KVPAGELEASE", req_id, lease_ms, *pages)), Values, _integer)

    def keep(self, keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> Request[Kept]:
        """Give the values of some keys a lifetime; with 0 seconds, begin their own ones anew."""
        words = command(b"KVPAGEKEEP", tenant.encode(), tenants, seconds, *keys)
        return Request(_one_piece(words), Values, lambda values: kept(len(keys))(values[0]))


# -- Blocks in the lossless code ---------------------------------------------------------------------------------------


class _Transfer:
    """One request with blocks of a shape: its time, and their codes."""

    def __init__(self, code: BlockCode, link: Link, shape: BlockShape) -> None:
        self._code = code
        self._link = link
        self._shape = shape
        self._begun: float | None = None
        self._is_prepared = False

    def prepare(self) -> None:
        """Begin the time before the encoder."""
        self._begun, self._is_prepared = time.perf_counter(), True

    def begin(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the pieces of the request. The time begins with the first one, unless `prepare` was called."""
        if not self._is_prepared:
            self._begun = time.perf_counter()
        yield from pieces

    def timed(
        self, last: Callable[[Any], Any], blocks: Callable[[Any], int], *, coded: bool = False
    ) -> Callable[[Any], Any]:
        """Return `last`, which is the last work of the transfer, with a note of the rate after it.

        `blocks` gets the result of `last`, and returns the number of blocks that were sent or received.
        """

        def do_and_note(answer: Any) -> Any:
            result = last(answer)
            if self._begun is not None:
                seconds = time.perf_counter() - self._begun
                self._code.moved(self._link, blocks(result) * self._shape.nbytes, seconds, coded=coded)
            return result

        return do_and_note

    def encode(self, body: Sequence[memoryview]) -> tuple[bytes, memoryview | None]:
        """Return the digest of a block and its code, or None if that would save less than a tenth."""
        begun = time.perf_counter()
        whole = body[0] if len(body) == 1 else np.concatenate([np.frombuffer(piece, np.uint8) for piece in body]).data
        digest, code = b"%016x" % checksum(whole), encode_block_body(whole, self._shape)
        if code is not None:
            self._code.encoder.observe(len(whole), time.perf_counter() - begun)
        self._code.coded(self._link, self._shape, len(whole), None if code is None else len(code))
        return digest, code

    def decode(self, found: Any, place: memoryview) -> str | None:
        """Copy or decode a block into its memory. Return the reason of a miss, or None."""
        if found is None:
            return "absent"
        if not isinstance(found, list):
            if len(found) != len(place):
                return "size"
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(found, np.uint8))
            self._code.coded(self._link, self._shape, len(place), None)
            return None
        digest, code = found
        begun = time.perf_counter()
        if int.from_bytes(code[4:8], "little") != len(place):
            return "size"
        try:
            decode_body(code, place, self._shape)
        except PageError:
            return "code"
        if checksum(place) != digest:
            return "checksum"
        self._code.decoder.observe(len(place), time.perf_counter() - begun)
        self._code.coded(self._link, self._shape, len(place), len(code))
        return None


def _raw_or_coded(value: Any) -> Any:
    """Return an item of the reply to KVBLOCKMGETCODED: None, a raw body, or a list of digest and code.

    Raises WrongReply for another one.
    """
    if value is None or isinstance(value, bytes | memoryview):
        return value
    digest, code = array(2)(value)
    if not isinstance(code, bytes | memoryview):
        raise WrongReply.instead_of("a coded block", code)
    try:
        return [int(bytes(digest), 16), code]
    except (TypeError, ValueError):
        raise WrongReply.instead_of("a digest", digest) from None


# -- The commands that a server supports -------------------------------------------------------------------------------

ShapeWords = tuple[bytes, ...]  # the option SHAPE and the expected shape, or nothing


def _of_shapes(missed: Missed) -> Missed:
    """Return the misses of a read that named the expected shape: the server sends no byte of a block in another one."""
    return {i: "shape" if why == "size" else why for i, why in missed.items()}


def _numbers(shape: BlockShape, ttl: int) -> tuple[int, ...]:
    """Return the arguments of KVBLOCKSET between the name and the body."""
    planes = [(int(plane.kv_type), int(plane.dtype), plane.head_dim) for plane in shape.planes]
    return shape.layers, shape.heads, shape.page_size, ttl, len(planes), *chain.from_iterable(planes)


def _takes_shape(description: Any) -> bool:
    """Return whether KVBLOCKGET takes more than its name and that of the block, by the item of COMMAND INFO's reply."""
    try:
        return int(description[1]) < 0
    except (LookupError, TypeError, ValueError):
        return False


def ask_dialect(code: BlockCode | None = None) -> Request[BlobCommands]:
    """Return the request for the commands that the server supports. Its result is the `BlobCommands` object to use.

    With `code`, blocks may travel in the lossless code if the server supports it.
    """

    asked = _FAMILY if code is None else (*_FAMILY, *_CODES)

    def read(values: list[Any]) -> BlobCommands:
        described = array(len(asked))(values[0])
        known = [bool(description) for description in described]
        if not all(known[: len(_FAMILY)]):
            return BlobCommands()
        return PageCommands(code if all(known) else None, shapes=_takes_shape(described[0]))

    return Request(_one_piece(command(b"COMMAND", b"INFO", *asked)), Values, read)


_FAMILY = (b"kvblockget", b"kvpagemget", b"kvblockmget")
_CODES = (b"kvblockmgetcoded", b"kvblocksetcoded")
