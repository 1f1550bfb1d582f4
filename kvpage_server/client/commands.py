"""What is asked in which words: GET, SET and the like of any Redis, or the page family of kvpage-server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from kvpage_server.client.errors import Unsupported, WrongReply
from kvpage_server.client.exchange import Piece, Request
from kvpage_server.client.page import BlockName, Page, Sized, page_nbytes, pages_of_block
from kvpage_server.client.reply import Values
from kvpage_server.client.scatter import CRLF, Bodies
from kvpage_server.page import (
    HEADER_SIZE,
    MAGIC,
    VERSION,
    BlockShape,
    DType,
    PageError,
    PageKey,
    checksum,
    header_fields,
    pack_header,
    unix_ms,
)

Missed = dict[int, str]  # which of a batch, and why

_NAMED = "magic", "version", "kv_type", "flags", "layer", "head", "page", "body_size", "reserved", "checksum"
_HEADER = header_fields(*_NAMED)
_SHAPE = header_fields("dtype", "page_size", "head_dim")


# -- words -------------------------------------------------------------------------------------------------------------


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


@lru_cache(maxsize=4096)
def _number(value: int) -> bytes:
    return _bulk(b"%d" % value)


def _words(*words: bytes | int) -> bytes:
    return b"".join([_number(word) if isinstance(word, int) else _bulk(word) for word in words])


def _command(*words: bytes | int) -> bytes:
    return b"*%d\r\n%b" % (len(words), _words(*words))


def _get(keys: Sequence[PageKey]) -> bytes:
    name = _bulk(b"GET" if len(keys) == 1 else b"MGET")
    return b"*%d\r\n%b%b" % (1 + len(keys), name, b"".join(map(_bulk, map(bytes, keys))))


def _page_command(name: bytes, count: int, width: int) -> bytes:
    """What precedes the arguments, `width` a page, of a page command; of its batch when there is more than one page."""
    if count == 1:
        return b"*%d\r\n%b" % (1 + width, _bulk(b"KVPAGE" + name))
    return b"*%d\r\n%b" % (2 + count * width, _words(b"KVPAGEM" + name, count))


_few_words = lru_cache(maxsize=4096)(_words)  # what the pages of a batch have in common


def _page_name(key: PageKey) -> bytes:
    return _few_words(key.req_id) + _few_words(key.layer, key.head) + _few_words(key.page, key.kv_type)


@lru_cache(maxsize=256)
def _page_shape(dtype: int, page_size: int, head_dim: int, ttl: int, nbytes: int) -> bytes:
    """The arguments of a page that is written from its dtype on, up to its body."""
    return b"%b$%d\r\n" % (_words(dtype, page_size, head_dim, ttl), nbytes)


def _flat(names: Sequence[BlockName]) -> Iterator[bytes | int]:
    for name in names:
        yield from name


def _one_piece(text: bytes) -> Callable[[], Iterator[Piece]]:
    return lambda: iter((text,))


# -- answers -----------------------------------------------------------------------------------------------------------


def _all_ok(values: list[Any]) -> None:
    for value in values:
        if value != b"OK":
            raise WrongReply(f"instead of OK came {value!r:.80}")


def _integer(values: list[Any]) -> int:
    if not isinstance(values[0], int):
        raise WrongReply(f"instead of a number came {values[0]!r:.80}")
    return values[0]


def _yes_no(values: list[Any]) -> list[bool]:
    for value in values:
        if value not in (0, 1):
            raise WrongReply(f"instead of 0 or 1 came {value!r:.80}")
    return [value == 1 for value in values]


def _array(values: list[Any], length: int) -> list[Any]:
    if not isinstance(values[0], list) or len(values[0]) != length:
        raise WrongReply(f"instead of an array of {length} came {values[0]!r:.80}")
    return values[0]


def _amiss(key: PageKey, header: memoryview, body: memoryview, verify: bool) -> str | None:
    """What is wrong with a blob that was found under a page's key."""
    found = _HEADER.unpack(header)
    digest = found[-1]
    if found != (MAGIC, VERSION, key.kv_type, 0, key.layer, key.head, key.page, len(body), 0, digest):
        return "header"
    return "checksum" if verify and digest and checksum(body) != digest else None


# -- dialects ----------------------------------------------------------------------------------------------------------


class BlobCommands:
    """What any Redis or Valkey can do: a page is a string whose value is its blob."""

    def set_pages(self, pages: Sequence[Sized], ttl: int) -> Request[None]:
        """Write pages: together, or with a `ttl`, in seconds, each for itself."""
        created = unix_ms()

        def key_and_header(page: Page, body: memoryview) -> bytes:
            key, shape = page.key, (page.page_size, page.head_dim)
            place = key.layer, key.head, key.page
            header = pack_header(page.dtype, key.kv_type, *shape, *place, created, ttl, len(body), checksum(body))
            return b"%b$%d\r\n%b" % (_bulk(bytes(key)), HEADER_SIZE + len(body), header)

        def together() -> Iterator[Piece]:
            before = b"*%d\r\n%b" % (1 + 2 * len(pages), _bulk(b"MSET"))
            for page, body in pages:
                yield before + key_and_header(page, body)
                yield body
                before = CRLF
            yield CRLF

        def each() -> Iterator[Piece]:
            before, after = b"*5\r\n" + _bulk(b"SET"), CRLF + _words(b"EX", ttl)
            for page, body in pages:
                yield before + key_and_header(page, body)
                yield body
                yield after

        if ttl:
            return Request(each, lambda: Values(len(pages)), _all_ok)
        return Request(together, Values, _all_ok)

    def read_pages(self, keys: Sequence[PageKey], places: Sequence[memoryview], verify: bool) -> Request[Missed]:
        """Receive pages into their places."""

        def check(item: int, header: memoryview, body: memoryview) -> str | None:
            return _amiss(keys[item], header, body, verify)

        def receiver() -> Bodies:
            return Bodies(places, array=len(keys) > 1, header=HEADER_SIZE, check=check)

        return Request(_one_piece(_get(keys)), receiver, dict)

    def fetch_pages(self, keys: Sequence[PageKey], verify: bool) -> Request[tuple[list[Page | None], Missed]]:
        """Receive pages into memory of their own."""

        def read(values: list[Any]) -> tuple[list[Page | None], Missed]:
            blobs = values if len(keys) == 1 else _array(values, len(keys))
            missed: Missed = {}
            return [_decode(i, keys[i], blob, verify, missed) for i, blob in enumerate(blobs)], missed

        return Request(_one_piece(_get(keys)), Values, read)

    def exists(self, keys: Sequence[PageKey]) -> Request[list[bool]]:
        """Which pages are there."""
        text = b"".join(_command(b"EXISTS", bytes(key)) for key in keys)
        return Request(_one_piece(text), lambda: Values(len(keys)), _yes_no)

    def delete(self, keys: Sequence[PageKey]) -> Request[int]:
        """Delete pages; how many there were."""
        return Request(_one_piece(_command(b"DEL", *map(bytes, keys))), Values, _integer)

    def set_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[Sequence[memoryview]], ttl: int
    ) -> Request[None]:
        """Write whole blocks, whose bodies may be in several pieces."""
        whole = [pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)) for pieces in bodies]
        pages = [
            (Page(key, body[span], plane.dtype, shape.page_size, plane.head_dim), body[span])
            for name, body in zip(names, whole, strict=True)
            for key, plane, span in pages_of_block(name, shape)
        ]
        return self.set_pages(pages, ttl)

    def read_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, places: Sequence[memoryview], verify: bool
    ) -> Request[Missed]:
        """Receive whole blocks into their places."""
        found = [
            (key, place[span])
            for name, place in zip(names, places, strict=True)
            for key, _, span in pages_of_block(name, shape)
        ]
        request = self.read_pages([key for key, _ in found], [place for _, place in found], verify)

        def blocks(pages: Missed) -> Missed:
            return {page // shape.pages: reason for page, reason in pages.items()}

        return Request(request.pieces, request.receiver, blocks)

    def delete_request(self, req_id: bytes, pages: Sequence[int]) -> Request[int]:
        """Delete a request, or some of its blocks; how many pages there were."""
        raise self._unsupported("delete a request")

    def prefix(self, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Request[int]:
        """How many blocks from the first on are complete; those are leased."""
        raise self._unsupported("count the complete blocks of a prefix")

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Request[int]:
        """Protect a request, or some of its blocks, from eviction for a while; how many blocks."""
        raise self._unsupported("lease blocks")

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"a plain Redis or Valkey can't {what}, only kvpage-server can")


def _decode(item: int, key: PageKey, blob: Any, verify: bool, missed: Missed) -> Page | None:
    """The page that a blob holds; None, and the reason in `missed`, when it holds none."""
    if blob is None:
        missed[item] = "absent"
        return None
    view = memoryview(blob)
    header, body = view[:HEADER_SIZE], view[HEADER_SIZE:]
    described = _described(*_SHAPE.unpack(header)) if len(header) == HEADER_SIZE else None
    reason = _amiss(key, header, body, verify) if described else "header"
    if described is None or reason:
        missed[item] = reason or "header"
        return None
    return Page(key, body, *described)


@lru_cache(maxsize=256)
def _described(dtype: int, page_size: int, head_dim: int) -> tuple[DType, int, int] | None:
    """What a header says that a page is; None for what no page is."""
    try:
        page_nbytes(dtype, page_size, head_dim)
    except PageError:
        return None
    return DType(dtype), page_size, head_dim


class PageCommands(BlobCommands):
    """What kvpage-server does better. It knows blobs as well: they are how a reader gets at the checksums."""

    def set_pages(self, pages: Sequence[Sized], ttl: int) -> Request[None]:
        """Write pages, all or none."""

        def pieces() -> Iterator[Piece]:
            before = _page_command(b"SET", len(pages), 10)
            for page, body in pages:
                key, _, dtype, page_size, head_dim = page
                yield before + _page_name(key) + _page_shape(dtype, page_size, head_dim, ttl, len(body))
                yield body
                before = CRLF
            yield CRLF

        return Request(pieces, Values, _all_ok)

    def read_pages(self, keys: Sequence[PageKey], places: Sequence[memoryview], verify: bool) -> Request[Missed]:
        """Receive pages into their places: with `verify` as blobs."""
        if verify:
            return super().read_pages(keys, places, verify)
        text = _page_command(b"GET", len(keys), 5) + b"".join(map(_page_name, keys))
        return Request(_one_piece(text), lambda: Bodies(places, array=len(keys) > 1), dict)

    def exists(self, keys: Sequence[PageKey]) -> Request[list[bool]]:
        """Which pages are there."""
        text = _page_command(b"EXISTS", len(keys), 5) + b"".join(map(_page_name, keys))

        def read(values: list[Any]) -> list[bool]:
            return _yes_no(values if len(keys) == 1 else _array(values, len(keys)))

        return Request(_one_piece(text), Values, read)

    def set_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[Sequence[memoryview]], ttl: int
    ) -> Request[None]:
        """Write whole blocks, each for itself."""
        planes = [(int(plane.kv_type), int(plane.dtype), plane.head_dim) for plane in shape.planes]
        numbers = _words(shape.layers, shape.heads, shape.page_size, ttl, len(planes), *chain.from_iterable(planes))
        opening = b"*%d\r\n%b" % (9 + 3 * len(planes), _bulk(b"KVBLOCKSET"))

        def pieces() -> Iterator[Piece]:
            for name, body in zip(names, bodies, strict=True):
                yield b"%b%b%b$%d\r\n" % (opening, _words(*name), numbers, shape.nbytes)
                yield from body
                yield CRLF

        return Request(pieces, lambda: Values(len(names)), _all_ok)

    def read_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, places: Sequence[memoryview], verify: bool
    ) -> Request[Missed]:
        """Receive whole blocks into their places. A block has no checksum of its own to verify."""
        if len(names) == 1:
            text = _command(b"KVBLOCKGET", *names[0])
        else:
            text = _command(b"KVBLOCKMGET", len(names), *_flat(names))
        return Request(_one_piece(text), lambda: Bodies(places, array=len(names) > 1), dict)

    def delete_request(self, req_id: bytes, pages: Sequence[int]) -> Request[int]:
        """Delete a request, or some of its blocks; how many pages there were."""
        return Request(_one_piece(_command(b"KVPAGEDEL", req_id, *pages)), Values, _integer)

    def prefix(self, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Request[int]:
        """How many blocks from the first on are complete; those are leased."""
        words = _command(b"KVPAGEPREFIX", pages_per_block, lease_ms, len(names), *_flat(names))
        return Request(_one_piece(words), Values, _integer)

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Request[int]:
        """Protect a request, or some of its blocks, from eviction for a while; how many blocks."""
        return Request(_one_piece(_command(b"KVPAGELEASE", req_id, lease_ms, *pages)), Values, _integer)


def ask_dialect() -> Request[BlobCommands]:
    """Which of the two the server understands."""

    def read(values: list[Any]) -> BlobCommands:
        wanted = len(_FAMILY)
        known = [description for description in _array(values, wanted) if description]
        return PageCommands() if len(known) == wanted else BlobCommands()

    return Request(_one_piece(_command(b"COMMAND", b"INFO", *_FAMILY)), Values, read)


_FAMILY = (b"kvpagemget", b"kvblockmget")
