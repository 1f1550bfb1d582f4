"""Requests of dumps and restores to a running server: many commands in a round trip, and values without copies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, groupby, islice
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import redis

from kvpage_server.client.errors import Refused
from kvpage_server.client.raw_commands import RawCommand, commit, reader_of
from kvpage_server.client.wire.connection import Deadline, PageConnection, page_pool
from kvpage_server.client.wire.exchange import Piece, Request, command, word
from kvpage_server.client.wire.reply import Values
from kvpage_server.page import HEADER_SIZE, BlockShape, PageError, PageKey, index_key
from kvpage_server.snapshot.format import FOREVER

# -- Read-ahead --------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Command: TypeAlias = Sequence[bytes | int]  # its words


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator. A thread computes the next item while the caller uses the current one.

    So two items are in memory. No item may be None.
    """
    with ThreadPoolExecutor(1, "kvpage-read_ahead") as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


# -- Amounts of dumped or restored values ------------------------------------------------------------------------------


@dataclass(slots=True)
class Amount:
    """Numbers of dumped or restored pages and strings, and their bytes."""

    pages: int = 0
    strings: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, count: int, *, are_pages: bool) -> None:
        """Add `count` pages or strings with `nbytes` in total."""
        self.nbytes += nbytes
        if are_pages:
            self.pages += count
        else:
            self.strings += count


_WITHIN = 60.0  # seconds until a batch of commands fails
_KEYS_PER_QUERY = 1000  # keys that are queried in one round trip
_KEYS_PER_MGET = 50  # keys of one MGET, during which the server may run no other command
_FEW_KEYS = 16  # keys of a request whose sizes are queried one by one
_REQUESTS = 100  # requests that are queried in one round trip

KEY_COSTS = 8 << 10  # bytes whose transfer takes as long as a key
BATCH_BYTES = 16 << 20  # bytes of values that are read or written in one round trip

_USUAL_LARGEST = 64 << 20  # bytes of the largest command of a server that does not report its limit


class Value(NamedTuple):
    """A key's value, or the first bytes of it, and its expiry in unix milliseconds of the server, -1 for none."""

    key: bytes
    data: memoryview
    expires_ms: int


class Listed(NamedTuple):
    """Some page keys of a block, in the order layer, plane, head, and the bytes of all its pages."""

    keys: list[PageKey]
    nbytes: int


class Written(Enum):
    """The outcome of a write that was not refused."""

    DONE = auto()
    THERE = auto()  # the key exists, and was not replaced because of `only_new`


class Writes:
    """Queue of write commands that are sent together. Values are not copied."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.count = 0
        self.nbytes = 0

    def set(self, key: bytes, value: Sequence[Piece], ttl_left_ms: int, *, only_new: bool) -> None:
        """Queue a SET of a value in pieces, with a TTL in milliseconds or FOREVER.

        With `only_new`, the SET does not replace a value.
        """
        options: list[bytes | int] = [b"PX", ttl_left_ms] if ttl_left_ms != FOREVER else []
        options += [b"NX"] if only_new else []
        size = sum(map(len, value))
        self.pieces += [b"*%d\r\n%b$%d\r\n" % (3 + len(options), word(b"SET") + word(key), size), *value]
        self.pieces.append(b"\r\n" + b"".join(map(word, options)))
        self._added(size)

    def set_block(self, req_id: bytes, page: int, shape: BlockShape, ttl: int, body: Sequence[Piece]) -> None:
        """Queue a KVBLOCKSET of a block's body in pieces. `ttl` is in seconds, 0 for none."""
        planes = [number for plane in shape.planes for number in (plane.kv_type, int(plane.dtype), plane.head_dim)]
        numbers = (shape.layers, shape.heads, shape.page_size, ttl, len(shape.planes), *planes)
        given: list[bytes | int] = [b"KVBLOCKSET", req_id, page, *numbers]
        self.pieces.append(b"*%d\r\n%b$%d\r\n" % (len(given) + 1, b"".join(map(word, given)), shape.nbytes))
        self.pieces += [*body, b"\r\n"]
        self._added(shape.nbytes)

    def _added(self, nbytes: int) -> None:
        self.count += 1
        self.nbytes += nbytes


class RunningStore:
    """A connection to a running server. Its reads do not count as uses for the eviction policy.

    Methods raise the errors of `kvpage_server.client.errors`, the constructor also ValueError for an invalid URL.
    """

    def __init__(self, url: str) -> None:
        self._pool = page_pool(url, {"redis_connect_func": _connected})
        self._connection = self._pool.lend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._connection)
        self._pool.close()

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, and return their decoded replies. Raises Refused if one of the replies is an
        error.
        """
        replies = self._answers(commands)
        if refused := next((reply for reply in replies if isinstance(reply, Refused)), None):
            raise refused
        return replies

    def _answers(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, and return their decoded replies, with errors among them."""
        replies = self._ask([b"".join(command(*words) for words in commands)], len(commands))
        return [
            reply if isinstance(reply, Refused) else reader_of(words)(reply)
            for words, reply in zip(commands, replies, strict=True)
        ]

    def _ask(self, pieces: list[Piece], replies: int) -> list[Any]:
        if not replies:
            return []
        request: Request[list[Any]] = Request(lambda: iter(pieces), lambda: Values(replies, with_errors=True), list)
        return self._connection.ask(request, Deadline(_WITHIN))

    def largest_command(self) -> int:
        """Return the bytes of the largest command that the server accepts."""
        return self._of_memory(b"largest_command_bytes") or _USUAL_LARGEST

    def maxmemory(self) -> int:
        """Return the server's maxmemory; 0 for no limit."""
        return self._of_memory(b"maxmemory")

    def _of_memory(self, field: bytes) -> int:
        (text,) = self.ask([(b"INFO", b"memory")])
        found = re.search(rb"^%b:(\d+)" % field, bytes(text), re.MULTILINE)
        return int(found[1]) if found else 0

    def run_id(self) -> str:
        """Return the id of the server's process, another one after each start; empty if the user may not read it."""
        (text,) = self._query([(b"INFO", b"server")])
        found = None if isinstance(text, Refused) else re.search(rb"^run_id:(\w+)", bytes(text), re.MULTILINE)
        return found[1].decode() if found else ""

    def now_ms(self) -> int:
        """Return the server's time in unix milliseconds."""
        ((seconds, microseconds),) = self.ask([(b"TIME",)])
        return int(seconds) * 1000 + int(microseconds) // 1000

    # -- listing -------------------------------------------------------------------------------------------------------

    def requests(self) -> Iterator[list[bytes]]:
        """Yield lists of requests that have pages."""
        for keys in self._scan(b"TYPE", b"set"):
            yield [key.removeprefix(b"kv:").removesuffix(b":index") for key in keys]

    def blocks(self, requests: Iterable[bytes], match: bytes) -> Iterator[Listed]:
        """Yield the blocks of requests, each with the keys of its pages that match a glob pattern."""
        left = iter(requests)
        while some := list(islice(left, _REQUESTS)):
            yield from self._blocks(some, match)

    def _blocks(self, requests: list[bytes], match: bytes) -> Iterator[Listed]:
        pages = self.ask([_sscan(req_id, 0, match) for req_id in requests])
        # STRLEN takes the server a twentieth of the time of KVPAGEINDEX, so it has the sizes of few pages.
        few = [cursor == b"0" and len(keys) <= _FEW_KEYS for cursor, keys in pages]
        asked = [
            [(b"STRLEN", key) for key in keys] if is_few else [(b"KVPAGEINDEX", req_id, b"WITHSIZES")]
            for req_id, (_, keys), is_few in zip(requests, pages, few, strict=True)
        ]
        replies = iter(self.ask([*chain.from_iterable(asked)]))
        for req_id, (cursor, keys), is_few in zip(requests, pages, few, strict=True):
            nbytes: dict[int, int] = defaultdict(int)
            if is_few:
                for key, size in zip(keys, islice(replies, len(keys)), strict=True):
                    nbytes[PageKey.parse(key).page] += size
            else:
                nbytes |= {block.get("page"): block.get("bytes", 0) for block in next(replies)}
            while True:
                named = [PageKey.parse(key) for key in keys]
                for page, of_block in groupby(named, lambda key: key.page):
                    yield Listed(list(of_block), nbytes.get(page, 0))
                if cursor == b"0":
                    break
                ((cursor, keys),) = self.ask([_sscan(req_id, int(cursor), match)])

    def keys_of_blocks(self, blocks: Sequence[tuple[bytes, int]]) -> list[set[bytes] | Refused]:
        """Return for each block ``(req_id, page_id)`` its page keys, or Refused if the user may not list them."""
        # SSCAN of an index key returns whole blocks; the cursor is the page id of the first one plus 1.
        replies = self._query([(b"SSCAN", index_key(req_id), page + 1, b"COUNT", 1) for req_id, page in blocks])
        suffixes = [b":%d" % page for _, page in blocks]
        return [
            reply
            if isinstance(reply, Refused)
            else {key for key in reply[1] if key.rpartition(b":")[0].endswith(suffix)}
            for reply, suffix in zip(replies, suffixes, strict=True)
        ]

    def strings(self, match: bytes) -> Iterator[list[tuple[bytes, int]]]:
        """Yield lists of (key, length of its value) for matching keys that are not pages."""
        for keys in self._scan(b"MATCH", match):
            plain = self._without_pages(keys)
            yield list(zip(plain, self.ask([(b"STRLEN", key) for key in plain]), strict=True))

    def _without_pages(self, keys: list[bytes]) -> list[bytes]:
        named = [(key, index) for key in keys if (index := _index_of(key))]
        are_pages = self.ask([(b"SISMEMBER", index, key) for key, index in named])
        pages = {key for (key, _), is_page in zip(named, are_pages, strict=True) if is_page}
        return [key for key in keys if key not in pages]

    def _scan(self, *options: bytes) -> Iterator[list[bytes]]:
        cursor = b"0"
        while True:
            ((cursor, keys),) = self.ask([(b"SCAN", cursor, b"COUNT", _KEYS_PER_QUERY, *options)])
            if keys:
                yield keys
            if cursor == b"0":
                return

    # -- reading and writing -------------------------------------------------------------------------------------------

    def values(self, keys: Sequence[bytes]) -> list[Value]:
        """Return the values of the keys that exist. A value and its expiry are read atomically."""
        # In parts, because a block may have more pages than a client can watch.
        return list(chain.from_iterable(map(self._values, _parts_of(keys, _KEYS_PER_QUERY))))

    def _values(self, keys: Sequence[bytes]) -> list[Value]:
        some = _parts_of(keys, _KEYS_PER_MGET)
        asked = [*((b"MGET", *part) for part in some), *((b"PEXPIRETIME", key) for key in keys)]
        _, *replies, _, unchanged = self.ask([(b"WATCH", *keys), *asked, (b"MULTI",), (b"EXEC",)])
        if unchanged is not None:
            return _existing(keys, list(chain.from_iterable(replies[: len(some)])), replies[len(some) :])
        if len(keys) > 1:  # a value or expiry has changed meanwhile
            middle = len(keys) // 2
            return self._values(keys[:middle]) + self._values(keys[middle:])
        data, expires = self._read_atomically(keys[0])
        return _existing(keys, [data], [expires])

    def look(self, key: PageKey) -> tuple[bool, Value | None]:
        """Return whether the value of a page's key is a page, and the value, or None if there is none.

        Both are read atomically.
        """
        name = bytes(key)
        data, expires, is_page = self._read_atomically(name, [b"SISMEMBER", index_key(key.req_id), name])
        found = _existing([name], [data], [expires])
        return bool(is_page), found[0] if found else None

    def _read_atomically(self, key: bytes, *others: Command) -> list[Any]:
        """Return a key's value, its expiry, and the replies to other commands, read atomically in one transaction."""
        asked: list[Command] = [[b"GET", key], [b"PEXPIRETIME", key], *others]
        request = commit([RawCommand(words, reader_of(words)) for words in asked])
        return self._connection.ask(request, Deadline(_WITHIN)) or []

    def headers(self, keys: Sequence[bytes]) -> list[Value]:
        """Return the headers of the pages that exist, as values of 64 bytes."""
        asked = [((b"GETRANGE", key, 0, HEADER_SIZE - 1), (b"PEXPIRETIME", key)) for key in keys]
        replies = self.ask([*chain.from_iterable(asked)])
        return _existing(keys, replies[::2], replies[1::2])

    def lost_by_damage(self, keys: Sequence[PageKey | bytes]) -> list[bytes]:
        """Return those of these keys, pages and strings, that the server removed because their values were damaged."""
        lost: list[bytes] = []
        for some in _parts_of(keys, _KEYS_PER_QUERY):
            replies = self._answers([_why_lost(key) for key in some])
            lost += [bytes(key) for key, reply in zip(some, replies, strict=True) if _reason(reply) == b"corrupt"]
        return lost

    def exist(self, keys: Sequence[bytes]) -> list[bool | Refused]:
        """Return for each key whether it exists, or Refused if the user may not read it, or the server refuses it."""
        replies = self._query([(b"TYPE", key) for key in keys])
        return [reply if isinstance(reply, Refused) else reply != b"none" for reply in replies]

    def any_exist(self, groups: Sequence[Sequence[bytes]]) -> list[bool | Refused]:
        """Return for each group of keys whether one of them exists, or Refused if the user may not read them."""
        parts = [(i, part) for i, keys in enumerate(groups) for part in _parts_of(keys, _KEYS_PER_QUERY)]
        found: list[bool | Refused] = [False] * len(groups)
        for (i, _), reply in zip(parts, self._query([(b"EXISTS", *keys) for _, keys in parts]), strict=True):
            if not isinstance(found[i], Refused):
                found[i] = reply if isinstance(reply, Refused) else found[i] or reply > 0
        return found

    def _query(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, and return their replies. A reply may be a Refused with NOPERM, or with ERR for a key
        that is too long.

        Raises other errors.
        """
        replies = self._answers(commands)
        for reply in replies:
            if isinstance(reply, Refused) and reply.code not in ("NOPERM", "ERR"):
                raise reply
        return replies

    def write(self, writes: Writes) -> list[Written | Refused]:
        """Send queued writes, and return the outcome of each.

        It is Refused if the server refuses this value or has no space for it. Raises Refused if the server refuses all
        writes now, for example with MISCONF.
        """
        replies = self._ask(writes.pieces, writes.count)
        return [_written(reply) for reply in replies]


def _written(reply: Any) -> Written | Refused:
    if isinstance(reply, Refused):
        if reply.code in ("ERR", "NOPERM", "OOM"):
            return reply
        raise reply
    return Written.DONE if reply == b"OK" else Written.THERE


def _connected(connection: PageConnection) -> None:
    connection.on_connect()  # type: ignore[no-untyped-call]
    with suppress(redis.ResponseError):  # without the right to it, reads count as uses
        connection.send_packed_command(command(b"CLIENT", b"NO-TOUCH", b"ON"))
        connection.read_response()


def _parts_of(keys: Sequence[T], most: int) -> list[Sequence[T]]:
    """Cut a list of keys into parts of at most `most` keys."""
    return [keys[start : start + most] for start in range(0, len(keys), most)]


def _existing(keys: Sequence[bytes], values: Sequence[Any], expires_ms: Sequence[int]) -> list[Value]:
    """Return the values of existing keys. `expires_ms` are the replies to PEXPIRETIME."""
    return [
        Value(key, memoryview(value), expires)
        for key, value, expires in zip(keys, values, expires_ms, strict=True)
        if value is not None and expires >= FOREVER
    ]


def _sscan(req_id: bytes, cursor: int, match: bytes) -> Command:
    return b"SSCAN", index_key(req_id), cursor, b"MATCH", match, b"COUNT", _KEYS_PER_QUERY


def _why_lost(key: PageKey | bytes) -> Command:
    """Return the command that queries why a page or a string was removed."""
    if isinstance(key, PageKey):
        return b"KVPAGEWHY", key.req_id, key.layer, key.head, key.page, key.kv_type
    return b"KVLOST", re.sub(rb"[*?[\\]", rb"\\\g<0>", key)  # the pattern that matches only the key


def _reason(reply: Any) -> bytes:
    """Return the reason in a reply to `_why_lost`; the empty one if the key exists, or the user may not ask."""
    if isinstance(reply, Refused):
        return b""
    records = reply.get("strings", [reply])
    return bytes(records[0].get("reason", b"")) if records else b""


def _index_of(key: bytes) -> bytes | None:
    """Return the index key that lists the pages of a page key's request; None if `key` is not a page key."""
    try:
        return index_key(PageKey.parse(key).req_id)
    except PageError:
        return None
