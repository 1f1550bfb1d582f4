"""The page family: KVPAGESET, KVPAGEGET, their batches, KVPAGEEXISTS.

The five arguments that name a page, joined, are its key. A batch is read by columns: the pages of a batch have most
words in common, so what a word means is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from kvpage_server.commands.arguments import check_batch, integer_in, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.disk import Ahead, fetched
from kvpage_server.commands.keys import pages
from kvpage_server.commands.misses import page_missed
from kvpage_server.commands.needs import extents_of_pages, nothing, values
from kvpage_server.commands.registry import Parts, command
from kvpage_server.commands.steps import freed
from kvpage_server.core import Argument, Slot
from kvpage_server.page import (
    ALLOWED_DTYPES,
    LAYOUT,
    MAGIC,
    MAX_HEAD,
    MAX_KV_TYPE,
    MAX_LAYER,
    MAX_PAGE,
    MAX_TTL,
    MAX_U32,
    VERSION,
    DType,
    PageError,
    check_req_id,
    checksum,
    unix_ms,
)
from kvpage_server.resp.reply import OK, Piece, Raw, Reply, ReplyError, Stream
from kvpage_server.store.entry import Entry, NewPage, Page, PageName, is_cold, is_page
from kvpage_server.store.index import Block
from kvpage_server.store.known import Needed
from kvpage_server.store.memory import Keyspace
from kvpage_server.store.tiered import Tiered

NAME_ARGUMENTS = 5
PAGE_ARGUMENTS = 10
AT_ONCE = 256  # pages that are read, checked or stored before other clients may have their turn
STEP = 16  # pages hashed, or sent from disk, before other clients may have their turn
_MOST_BYTES, _MOST_PAGES = 16 * 1024 * 1024, 256
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"

T = TypeVar("T")
_FEW, _MANY = 256, 4096  # how many words are remembered: those of a batch's pages are mostly the same


@lru_cache(_MANY)
def _req_id(word: Argument) -> bytes:
    try:
        return check_req_id(plain(word))
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


@lru_cache(_FEW)
def _layer(word: Argument) -> int:
    return integer_in("layer_idx", word, 0, MAX_LAYER)


@lru_cache(_FEW)
def _head(word: Argument) -> int:
    return integer_in("head_idx", word, 0, MAX_HEAD)


@lru_cache(_MANY)
def _page(word: Argument) -> int:
    return integer_in("page_id", word, 0, MAX_PAGE)


@lru_cache(_FEW)
def _kv_type(word: Argument) -> int:
    return integer_in("kv_type", word, 0, MAX_KV_TYPE)


_PARTS: tuple[Callable[[Any], object], ...] = (_req_id, _layer, _head, _page, _kv_type)
_new_name: Callable[[Iterable[object]], PageName] = partial(tuple.__new__, PageName)  # PageName._make, sooner


def page_name(args: Sequence[Argument]) -> PageName:
    """The page that five arguments name. Raises ReplyError saying which of them is wrong."""
    return _new_name((page_key(args), *(part(word) for part, word in zip(_PARTS, args, strict=False))))


def page_key(args: Sequence[Argument]) -> bytes:
    """The key that five arguments spell, without looking at them: good enough to ask whether it is there."""
    name: Sequence[Any] = args[:NAME_ARGUMENTS]
    try:
        return b":".join((b"kv", *name))
    except TypeError:  # one of them is so long that it lies in the arena
        return b":".join((b"kv", *plain_all(name)))


def page_keys(args: Sequence[Argument], width: int) -> list[bytes]:
    """The keys that a batch's arguments spell: five every `width`."""
    words = iter(args)
    columns: list[Iterable[Any]] = [words] * width  # it gives each of them the next one in turn
    if width != NAME_ARGUMENTS:
        columns = [args[first::width] for first in range(NAME_ARGUMENTS)]
    try:
        return list(map(b":".join, zip(repeat(b"kv"), *columns, strict=False)))
    except TypeError:  # one of them is so long that it lies in the arena
        return [page_key(args[start:]) for start in range(0, len(args), width)]


class Shape(NamedTuple):
    """What a page's arguments say of its tensor and its life."""

    dtype: DType
    page_size: int
    head_dim: int
    ttl: int  # seconds


_SIZE = attrgetter("size")


@lru_cache(_FEW)
def _shape(strict: bool, nbytes: int, dtype: Argument, page_size: Argument, head_dim: Argument, ttl: Argument) -> Shape:
    kind = integer_in("dtype", dtype, 0, 255)
    if kind not in DType.__members__.values():
        raise ReplyError(f"ERR dtype must be one of {ALLOWED_DTYPES}, got {kind}")
    rows = integer_in("page_size", page_size, 1, MAX_U32)
    columns = integer_in("head_dim", head_dim, 1, MAX_U32)
    seconds = integer_in("ttl", ttl, 0, MAX_TTL)
    if strict and nbytes != (full := rows * columns * DType(kind).itemsize):
        raise ReplyError(f"ERR body must be page_size x head_dim x itemsize = {full} bytes, got {nbytes}")
    return Shape(DType(kind), rows, columns, seconds)


def _read_pages(client: Client, args: Sequence[Argument]) -> Iterator[tuple[PageName, Shape, Slot]]:
    """The pages that arguments describe, ten each. Raises ReplyError for the first that is wrong."""
    columns: list[Sequence[Any]] = [args[i::PAGE_ARGUMENTS] for i in range(PAGE_ARGUMENTS)]
    slots, slot_of = columns.pop(), client.keyspace.slot_of
    if set(map(type, slots)) != {Slot}:
        slots = [body if type(body) is Slot else slot_of(plain(body)) for body in slots]
    parts = (_each(part, words) for part, words in zip(_PARTS, columns, strict=False))
    names = map(_new_name, zip(page_keys(args, PAGE_ARGUMENTS), *parts, strict=True))
    shape = partial(_shape, client.server.config.strict_page_shape)
    return zip(names, _each(shape, [*map(_SIZE, slots)], *columns[NAME_ARGUMENTS:]), slots, strict=True)


def _each(meaning: Callable[..., T], *columns: Sequence[Any]) -> Iterable[T]:
    """What each row means; looked up once where all are the same."""
    if all(words.count(words[0]) == len(words) for words in columns):
        return repeat(meaning(*(words[0] for words in columns)), len(columns[0]))
    return map(meaning, *columns)


def _describe(read: Iterable[tuple[PageName, Shape, Slot]], now: int, with_checksum: bool) -> Iterator[NewPage]:
    """Pages with their headers, their bodies hashed; `now` in unix milliseconds."""
    write = LAYOUT.pack_into  # as pack_header does, without another call
    for name, (dtype, rows, dim, ttl), slot in read:
        _, _, layer, head, page, kv_type = name
        digest = (slot.digest or checksum(slot.body)) if with_checksum else 0
        slot.digest = 0
        to, size = slot.header, slot.size
        write(to, 0, MAGIC, VERSION, dtype, kv_type, 0, rows, dim, layer, head, page, now, ttl, size, 0, digest)
        yield name, slot, now + ttl * 1000 if ttl else 0


def _page_or_none(client: Client, args: list[Argument], entry: Entry | None) -> Reply:
    """A page's reply: its body; null when it is not there. Raises ReplyError for a bad name or a plain string."""
    if entry is None:
        page_missed(client, page_name(args))
        return None
    if not is_page(entry):
        raise ReplyError(WRONG_TYPE)
    return spell_page(entry)


def spell_page(page: Page) -> tuple[Piece, ...]:
    """A page's body as a bulk string: one borrowed piece when it lies in a slot of its own."""
    if isinstance(page, Slot):
        return (page,)
    return b"$%d\r\n" % page.size, page.part(0, page.size), b"\r\n"


@command(
    "kvpageset",
    11,
    "write denyoom page",
    uses=pages(0),
    needs=extents_of_pages(0),
    group="page",
    usage="req layer head page type dtype page_size head_dim ttl body",
    summary="Stores a page; ttl is in seconds, 0 for none.",
)
def kvpageset(client: Client, args: list[Argument]) -> Reply:
    """OK."""
    read = list(_read_pages(client, args))
    client.keyspace.set_pages(_describe(read, unix_ms(), client.server.config.page_checksums))
    return OK


@command(
    "kvpageget",
    6,
    "readonly fast page",
    uses=pages(0),
    needs=values,
    group="page",
    usage="req layer head page type",
    summary="Returns a page's body, null when it is not there.",
)
def kvpageget(client: Client, args: list[Argument]) -> Reply:
    """The body."""
    return _page_or_none(client, args, client.keyspace.read(page_key(args)))


@command(
    "kvpagemset",
    -12,
    "write denyoom page",
    uses=pages(1, PAGE_ARGUMENTS),
    needs=extents_of_pages(1, PAGE_ARGUMENTS),
    fetches=True,
    group="page",
    usage="N req layer head page type dtype page_size head_dim ttl body "
    "[req layer head page type dtype page_size head_dim ttl body ...]",
    parts=Parts(1, PAGE_ARGUMENTS),
    summary="Stores N pages, all or none.",
)
def kvpagemset(client: Client, args: list[Argument]) -> Reply:
    """OK; an error when one page is refused, and then none is stored."""
    count = check_batch("KVPAGEMSET", args, PAGE_ARGUMENTS, "page")

    def store() -> Iterator[Reply]:
        """Read all, then hash some pages a step; then they become visible, `AT_ONCE` of them at once."""
        read: list[tuple[PageName, Shape, Slot]] = []
        for start in range(1, len(args), AT_ONCE * PAGE_ARGUMENTS):
            try:
                read.extend(_read_pages(client, args[start : start + AT_ONCE * PAGE_ARGUMENTS]))
            except ReplyError as error:
                code, message = str(error).split(" ", 1)
                raise ReplyError(f"{code} page {len(read) + 1} of {count}: {message}") from None
            yield ()
        now, with_checksum = unix_ms(), client.server.config.page_checksums
        pages: list[NewPage] = []
        for start in range(0, count, STEP):
            pages += _describe(read[start : start + STEP], now, with_checksum)
            yield ()
        at_once = count if client.keyspace.rationed else AT_ONCE  # what limits them may refuse them, and then all
        for start in range(0, count, at_once):
            some = pages[start : start + at_once]
            blocks = dict.fromkeys((name.req_id, name.page) for name, _, _ in some)
            yield from fetched(client, partial(_extents_at, blocks))
            client.keyspace.set_pages(some)
            yield ()
        yield from freed(read)
        yield from freed(pages)
        yield OK

    return Stream(None, store())


def _extents_at(blocks: Iterable[tuple[bytes, int]], tiered: Tiered) -> Iterable[Needed]:
    return tiered.extents_at(blocks)


@command(
    "kvpagemget",
    -7,
    "readonly page",
    uses=pages(1, NAME_ARGUMENTS),
    needs=values,
    fetches=True,
    group="page",
    usage="N req layer head page type [req layer head page type ...]",
    parts=Parts(1, NAME_ARGUMENTS),
    summary="Returns N pages' bodies, null for those that are not there.",
)
def kvpagemget(client: Client, args: list[Argument]) -> Reply:
    """An array of bodies, each looked up as the reply comes to it."""
    count = check_batch("KVPAGEMGET", args, NAME_ARGUMENTS, "page")
    keyspace, tiered = client.keyspace, client.server.tiered
    most = _most_at_once(keyspace.find(page_key(args[1:])))
    if count <= most and (slots := keyspace.read_apart(page_keys(args[1:], NAME_ARGUMENTS))):
        return b"*%d\r\n" % count, *slots

    def bodies() -> Iterator[Reply]:
        keys: list[bytes] = []
        for start in range(1, len(args), AT_ONCE * NAME_ARGUMENTS):
            keys += _checked_keys(keyspace, args[start : start + AT_ONCE * NAME_ARGUMENTS])
            yield ()
        yield Raw(b"*%d\r\n" % count)
        absent = b"_\r\n" if client.protocol == 3 else b"$-1\r\n"
        step = STEP if tiered is not None and tiered.any_cold else most
        steps = [keys[start : start + step] for start in range(0, count, step)]
        ahead = Ahead(client, Tiered.cold_of, steps, of_pages=True)
        for some in steps:
            yield from ahead.next()
            if slots := keyspace.read_apart(some):
                yield slots
                continue
            entries = keyspace.read_all(some)
            if loan := ahead.loan_of(entries):
                yield loan
                continue
            pieces: list[Piece] = []
            for key, entry in zip(some, entries, strict=True):
                if type(entry) is Slot and type(entry.unit) is Block:
                    pieces.append(entry)
                elif is_page(entry) and is_cold(entry):
                    pieces += ahead.loan_of([entry]) or (absent,)
                elif is_page(entry):
                    pieces += spell_page(entry)
                else:
                    pieces.append(absent)
                    if entry is None:
                        page_missed(client, page_name(key.split(b":")[1:]))
            yield (*pieces,)

    return Stream(None, bodies())


def _checked_keys(keyspace: Keyspace, args: Sequence[Argument]) -> list[bytes]:
    """The keys of pages, five arguments each. Raises ReplyError for the first that can be no page's."""
    keys = page_keys(args, NAME_ARGUMENTS)
    for i in keyspace.without_entry(keys):
        page_name(args[i * NAME_ARGUMENTS : (i + 1) * NAME_ARGUMENTS])
    return keys


def _most_at_once(first: Entry | None) -> int:
    """How many pages, the first of which that is, are sent from memory before other clients may have their turn."""
    return max(STEP, min(_MOST_BYTES // max(first.size, 1), _MOST_PAGES)) if first is not None else STEP


@command(
    "kvpageexists",
    6,
    "readonly fast page",
    uses=pages(0),
    needs=nothing,
    group="page",
    usage="req layer head page type",
    summary="Says whether a page is there, from the index alone.",
)
def kvpageexists(client: Client, args: list[Argument]) -> Reply:
    """1 or 0."""
    entry = client.keyspace.find(page_key(args))
    if entry is None:
        page_name(args)
    return int(is_page(entry))
