"""One command for one key: what a cluster is asked, whichever node the key is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

from kvpage_server.client.cluster import block_value
from kvpage_server.client.cluster.block_value import block_key
from kvpage_server.client.cluster.lone_page import lone_key, lone_request
from kvpage_server.client.cluster.receiving import Answer, Answers, Place
from kvpage_server.client.errors import Refused
from kvpage_server.client.page import BlockName, Page, pages_of_block
from kvpage_server.client.questions import Question, encoded, key_of
from kvpage_server.client.wire.exchange import Piece, Request
from kvpage_server.client.wire.words import command, word
from kvpage_server.core import Chunk
from kvpage_server.page import HEADER_SIZE, BlockShape, checksum, pack_header

_ASKING = command(b"ASKING")
_KEYS = 4096  # of one command


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and the place for its answer if that is a long string. Can be sent again."""

    key: bytes
    pieces: Callable[[], Iterator[Piece | Chunk]]
    place: Place | None = None
    writes: bool = False
    once: bool = False  # not again when it may have been done
    apart: Callable[[], Iterator[Command]] | None = None  # the same, one key at a time, for a slot that is being moved
    read: Callable[[Any], Any] | None = None  # what the answer means; raises WrongReply


def ask(commands: Sequence[Command], *, asking: bool) -> Request[list[Answer]]:
    """Several commands at once. With `asking`, the node also answers for slots that are being moved to it."""

    def pieces() -> Iterator[Piece | Chunk]:
        for one in commands:
            if asking:
                yield _ASKING
            yield from one.pieces()

    def read(answers: list[Answer]) -> list[Answer]:
        if asking:
            answers = [first if isinstance(first, Refused) else second for first, second in _pairs(answers)]
        return [
            one.read(answer) if one.read and not isinstance(answer, Refused) else answer
            for one, answer in zip(commands, answers, strict=True)
        ]

    places = [place for one in commands for place in ([None, one.place] if asking else [one.place])]
    return Request(pieces, lambda: Answers(places), read)


def _pairs(answers: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(answers[::2], answers[1::2], strict=True)


def simple(*words: bytes | int, writes: bool = False) -> Command:
    """A command in a few words, of which the second is its key."""
    text = command(*words)
    return Command(bytes(words[1]) if isinstance(words[1], bytes) else b"", lambda: iter((text,)), None, writes)


def of_question(question: Question, *, once: bool) -> Command:
    """Any command whose second word is its key."""
    text = command(*map(encoded, question.words))
    return Command(key_of(question), lambda: iter((text,)), writes=once, once=once, read=question.read)


def get(key: bytes, place: Place) -> Command:
    return Command(key, simple(b"GET", key).pieces, place)


def get_opening(name: BlockName) -> Command:
    """Asks for the opening of a block, which has its shape."""
    return get_range(block_key(name), 0, block_value.OPENING_SIZE - 1)


def get_range(key: bytes, first: int, last: int) -> Command:
    return simple(b"GETRANGE", key, b"%d" % first, b"%d" % last)


def set_block(
    name: BlockName, shape: BlockShape, body: Sequence[memoryview], ttl: int, created_ms: int
) -> list[Command]:
    """Delete the pages of a block that were written alone, since without the block they would be found again. Then
    write the block. All of that is in one slot, so a node and its replicas do it in this order.

    Its digests are computed when it is sent."""
    key = block_key(name)
    opening, ending = _set(key, block_value.head_size(shape) + shape.nbytes, ttl)

    def pieces() -> Iterator[Piece]:
        yield opening + block_value.head(name[1], shape, body, ttl, created_ms)
        yield from body
        yield ending

    return [*_unlink_pages(name, shape), Command(key, pieces, writes=True)]


def _unlink_pages(name: BlockName, shape: BlockShape) -> list[Command]:
    def apart() -> Iterator[Command]:
        return (simple(b"UNLINK", lone_key(one), writes=True) for one, *_ in pages_of_block(name, shape))

    req_id, page = lone_request(name), b"%d" % name[1]
    texts = _unlinking(shape, len(req_id) + len(page))
    filled = [text.replace(b"\0", req_id).replace(b"\1", page) for text in texts]
    return [Command(block_key(name), partial(iter, (text,)), writes=True, apart=apart) for text in filled]


@lru_cache(16)
def _unlinking(shape: BlockShape, nbytes: int) -> list[bytes]:
    """UNLINK of a block's pages, with 0 and 1 for the request and the page id, which have so many bytes together."""
    pages = product(range(shape.layers), shape.planes, range(shape.heads))
    keys = [b"kv:\0:%d:%d:\1:%d" % (layer, head, plane.kv_type) for layer, plane, head in pages]
    words = [b"$%d\r\n%b\r\n" % (len(key) - 2 + nbytes, key) for key in keys]
    parts = [words[i : i + _KEYS] for i in range(0, len(words), _KEYS)]
    return [b"*%d\r\n%b%b" % (1 + len(part), word(b"UNLINK"), b"".join(part)) for part in parts]


def set_page(page: Page, body: memoryview, ttl: int, created_ms: int) -> Command:
    """Write a page. Its digest is computed when it is sent."""
    key = lone_key(page.key)
    opening, ending = _set(key, HEADER_SIZE + len(body), ttl)

    def pieces() -> Iterator[Piece]:
        about = page.dtype, page.key.kv_type, page.page_size, page.head_dim, page.key.layer, page.key.head
        yield opening + pack_header(*about, page.key.page, created_ms, ttl, len(body), checksum(body))
        yield body
        yield ending

    return Command(key, pieces, writes=True)


def _around(ttl: int) -> tuple[bytes, bytes]:
    """The bytes before the key and after the value of a SET."""
    if ttl:
        return b"*5\r\n" + word(b"SET"), b"\r\n" + word(b"EX") + word(ttl)
    return b"*3\r\n" + word(b"SET"), b"\r\n"


def _set(key: bytes, nbytes: int, ttl: int) -> tuple[bytes, bytes]:
    """The bytes before and after the value of a SET."""
    before, after = _around(ttl)
    return b"%b%b$%d\r\n" % (before, word(key), nbytes), after
