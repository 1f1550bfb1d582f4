"""One command for one key: what a cluster is asked, whichever node the key is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

from kvpage_server.client.cluster import block_value
from kvpage_server.client.cluster.block_value import block_key
from kvpage_server.client.cluster.receiving import Answer, Answers, Place
from kvpage_server.client.cluster.topology import has_tag
from kvpage_server.client.errors import Refused
from kvpage_server.client.page import BlockName, Page, pages_of_block
from kvpage_server.client.questions import Question, encoded, key_of
from kvpage_server.client.wire.exchange import Piece, Request
from kvpage_server.client.wire.words import command, word
from kvpage_server.core import Chunk, SentPages
from kvpage_server.page import BlockShape

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
    together: bool = True  # whether it can be sent; if not, it is done apart
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


def get_block(name: BlockName, place: Place) -> Command:
    text = command(b"GET", block_key(name))
    return Command(block_key(name), lambda: iter((text,)), place)


def get_opening(name: BlockName) -> Command:
    """Asks for the opening of a block, which has its shape."""
    return get_range(block_key(name), 0, block_value.OPENING_SIZE - 1)


def get_range(key: bytes, first: int, last: int) -> Command:
    return simple(b"GETRANGE", key, b"%d" % first, b"%d" % last)


def set_block(
    name: BlockName, shape: BlockShape, body: Sequence[memoryview], ttl: int, created_ms: int
) -> list[Command]:
    """Write a block, and delete the pages of it that were written alone: without the block they would be found again.

    Its digests are computed when it is sent."""
    key = block_key(name)
    opening, ending = _set(key, block_value.head_size(shape) + shape.nbytes, ttl)

    def pieces() -> Iterator[Piece]:
        yield opening + block_value.head(name[1], shape, body, ttl, created_ms)
        yield from body
        yield ending

    return [Command(key, pieces, writes=True), *_unlink_pages(name, shape)]


def _unlink_pages(name: BlockName, shape: BlockShape) -> list[Command]:
    """Delete the pages of a block that were written alone. Those of a request with braces are in the block's slot."""
    key, req_id, page = block_key(name), name[0], b"%d" % name[1]

    def apart() -> Iterator[Command]:
        return (simple(b"UNLINK", bytes(one), writes=True) for one, *_ in pages_of_block(name, shape))

    if not has_tag(req_id):
        return [Command(key, lambda: iter(()), writes=True, apart=apart, together=False)]
    texts = _unlinking(shape, len(req_id) + len(page))
    filled = [text.replace(b"\0", req_id).replace(b"\1", page) for text in texts]
    return [Command(key, partial(iter, (text,)), writes=True, apart=apart) for text in filled]


@lru_cache(16)
def _unlinking(shape: BlockShape, nbytes: int) -> list[bytes]:
    """UNLINK of a block's pages, with 0 and 1 for the request and the page id, which have so many bytes together."""
    pages = product(range(shape.layers), shape.planes, range(shape.heads))
    keys = [b"kv:\0:%d:%d:\1:%d" % (layer, head, plane.kv_type) for layer, plane, head in pages]
    words = [b"$%d\r\n%b\r\n" % (len(key) - 2 + nbytes, key) for key in keys]
    parts = [words[i : i + _KEYS] for i in range(0, len(words), _KEYS)]
    return [b"*%d\r\n%b%b" % (1 + len(part), word(b"UNLINK"), b"".join(part)) for part in parts]


def set_page(page: Page, ttl: int, created_ms: int) -> Command:
    sent = SentPages([page])
    before, after = _around(ttl)
    return Command(bytes(page.key), lambda: iter((sent.as_blobs(0, before, after, ttl, created_ms),)), writes=True)


def _around(ttl: int) -> tuple[bytes, bytes]:
    """The bytes before the key and after the value of a SET."""
    if ttl:
        return b"*5\r\n" + word(b"SET"), b"\r\n" + word(b"EX") + word(ttl)
    return b"*3\r\n" + word(b"SET"), b"\r\n"


def _set(key: bytes, nbytes: int, ttl: int) -> tuple[bytes, bytes]:
    """The bytes before and after the value of a SET."""
    before, after = _around(ttl)
    return b"%b%b$%d\r\n" % (before, word(key), nbytes), after
