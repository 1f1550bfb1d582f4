"""Raw commands: the words of any command, with the decoder of its reply.

Every reply is checked. If it is not a possible reply to its command, WrongReply is raised and the connection is
closed, because the next reply may belong to another command as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import redis

from kvpage_server.client.errors import Refused, Unsupported, WrongReply
from kvpage_server.client.page import BlockName
from kvpage_server.client.wire.connection import QUIETLY, check_url, greet
from kvpage_server.client.wire.exchange import Request, command
from kvpage_server.client.wire.reply import Values
from kvpage_server.page import check_integer

Word = str | bytes | int  # of a command; a str is sent in UTF-8, an int in decimal


class RawCommand(NamedTuple):
    """A command of `PageClient.ask` and `PageClient.transaction`: its `words`, such as ``["GET", b"key"]``, and `read`,
    the decoder of its reply.

    `read` gets bytes or a memoryview of a string, an int, None, a list or a dict; its result is the decoded reply. It
    raises WrongReply for a reply that does not fit. Without `read`, the reply is returned unchanged. With several
    servers, `key` selects the server: a key, or the position of the word that is one.
    """

    words: Sequence[Word]
    read: Callable[[Any], Any] = lambda reply: reply
    key: int | bytes = 1


class Kept(NamedTuple):
    """The result of `PageClient.keep`."""

    keys: int  # number of keys, from the first one, whose values are kept
    until: int  # the end of their lifetime in unix milliseconds; 0 if it is unknown
    why: str  # the reason why the next key is not kept; empty if all are


def key_of(raw_command: RawCommand) -> bytes:
    """Return the key of a command, which selects the server. Raises Unsupported if there is none."""
    if isinstance(raw_command.key, bytes):
        return raw_command.key
    if len(raw_command.words) <= raw_command.key:
        raise Unsupported(f"several servers can't be asked for anything without a key, got {raw_command.words[0]!r}")
    return encoded(raw_command.words[raw_command.key])


class BlockCommands:
    """Commands about blocks for kvpage-server."""

    @staticmethod
    def exists(name: BlockName) -> RawCommand:
        return RawCommand(["KVBLOCKEXISTS", *name], up_to(1))

    @staticmethod
    def delete(req_id: bytes, pages: Sequence[int]) -> RawCommand:
        return RawCommand(["KVPAGEDEL", req_id, *pages], integer)


def ask(raw_commands: Sequence[RawCommand]) -> Request[list[Any]]:
    """Return the request that sends several commands in a pipeline. Its result is the list of their decoded replies.

    The result raises Refused for the first error reply.
    """
    return _request([raw_command.words for raw_command in raw_commands], lambda values: _read(raw_commands, values))


def watch(keys: Sequence[Word], raw_command: RawCommand) -> Request[Any]:
    """Return the request that watches keys, and sends a command about them. Its result is the decoded reply to the
    command. Without keys, nothing is watched.
    """
    raw_commands = [*([RawCommand(["WATCH", *keys], ok)] if keys else []), raw_command]
    return _request([one.words for one in raw_commands], lambda values: _read(raw_commands, values)[-1])


def commit(raw_commands: Sequence[RawCommand]) -> Request[list[Any] | None]:
    """Return the request that runs all commands in MULTI and EXEC.

    Its result is the list of their decoded replies, or None if a watched key was changed.
    """
    check_raw_commands(raw_commands)

    def read(values: list[Any]) -> list[Any] | None:
        opened, *queued, answers = values
        ok(opened)
        for value in queued:
            _expect(value == b"QUEUED", "QUEUED", value)
        return None if answers is None else _read(raw_commands, array(len(raw_commands))(answers))

    return _request([["MULTI"], *(raw_command.words for raw_command in raw_commands), ["EXEC"]], read)


def check_raw_commands(raw_commands: Sequence[RawCommand]) -> None:
    """Raise TypeError for another type than RawCommand, and ValueError for a command without words."""
    for raw_command in raw_commands:
        if not isinstance(raw_command, RawCommand):
            raise TypeError(f"a command must be a RawCommand, got {raw_command!r:.60}")
        if isinstance(raw_command.words, str | bytes):
            raise TypeError(f"the words of a command must be a list, got {raw_command.words!r:.60}")
        if not raw_command.words:
            raise ValueError("a command must have at least one word")


def encoded(word: Word) -> bytes:
    """Return the bytes that are sent for a word. Raises TypeError for another type than Word."""
    if isinstance(word, bytes):
        return word
    if isinstance(word, str):
        return word.encode()
    try:
        return b"%d" % check_integer("a word", word)
    except TypeError:
        raise TypeError(f"a word of a command must be str, bytes or int, got {type(word).__name__}") from None


def _request(commands: Sequence[Sequence[Word]], read: Callable[[list[Any]], Any]) -> Request[Any]:
    text = b"".join([command(*map(encoded, words)) for words in commands])
    return Request(lambda: iter((text,)), lambda: Values(len(commands)), read)


def _read(raw_commands: Sequence[RawCommand], values: Sequence[Any]) -> list[Any]:
    if refused := next((value for value in values if isinstance(value, Refused)), None):
        raise refused.again()
    return [raw_command.read(value) for raw_command, value in zip(raw_commands, values, strict=True)]


# -- readers -----------------------------------------------------------------------------------------------------------


def _expect(so: bool, expected: str, value: Any) -> None:
    if not so:
        raise WrongReply.instead_of(expected, value)


def ok(value: Any) -> None:
    """Raise WrongReply for another reply than OK."""
    _expect(value == b"OK", "OK", value)


def ok_or_not(value: Any) -> bool:
    """Return True for the reply OK, False for null. Raises WrongReply for another reply."""
    _expect(value in (b"OK", None), "OK or nothing", value)
    return value is not None


def integer(value: Any) -> int:
    _expect(isinstance(value, int), "a number", value)
    return int(value)


def up_to(most: int) -> Callable[[Any], int]:
    """Return a decoder of numbers from 0 to `most`."""

    def read(value: Any) -> int:
        _expect(isinstance(value, int) and 0 <= value <= most, f"a number from 0 to {most}", value)
        return int(value)

    return read


def kept(keys: int) -> Callable[[Any], Kept]:
    """Return a decoder of the reply to KVPAGEKEEP with this number of keys."""

    def read(value: Any) -> Kept:
        count, until, why = array(3)(value)
        return Kept(up_to(keys)(count), integer(until), (text(why) or b"").decode(errors="replace"))

    return read


def ascending(most: int) -> Callable[[Any], list[int]]:
    """Return a decoder of numbers from 1 to `most` in ascending order."""

    def read(value: Any) -> list[int]:
        _expect(isinstance(value, list), f"numbers from 1 to {most}", value)
        found = [integer(one) for one in value]
        in_order = all(one < other for one, other in pairwise([0, *found, most + 1]))
        _expect(in_order, f"numbers from 1 to {most} in ascending order", value)
        return found

    return read


def text(value: Any) -> bytes | None:
    """Decode a string or null. Raises WrongReply."""
    _expect(value is None or isinstance(value, bytes | memoryview), "a string", value)
    return None if value is None else bytes(value)


def array(length: int) -> Callable[[Any], list[Any]]:
    """Return a decoder of arrays of `length` replies of any kind."""

    def read(value: Any) -> list[Any]:
        _expect(isinstance(value, list) and len(value) == length, f"an array of {length}", value)
        return list(value)

    return read


def fields(value: Any) -> dict[bytes, Any]:
    """Decode a map, or in RESP2 an array of its names and values."""
    pairs = list(value.items()) if isinstance(value, dict) else None
    if isinstance(value, list):
        pairs = list(zip(value[::2], value[1::2], strict=False))
    _expect(pairs is not None and all(isinstance(name, bytes) for name, _ in pairs), "a map", value)
    return dict(pairs or ())


def texts(length: int) -> Callable[[Any], list[bytes | None]]:
    """Return a decoder of arrays of `length` strings, with None for null."""
    several = array(length)
    return lambda value: [text(one) for one in several(value)]


def scanned(value: Any) -> tuple[bytes, list[bytes]]:
    """Decode the reply to SCAN or SSCAN: the next cursor, and keys. Raises WrongReply."""
    cursor, keys = array(2)(value)
    _expect(isinstance(cursor, bytes) and cursor.isdigit(), "a cursor", cursor)
    return cursor, [bytes(key) for key in several(string)(keys)]


def string(value: Any) -> bytes | memoryview:
    _expect(isinstance(value, bytes | memoryview), "a string", value)
    return value  # type: ignore[no-any-return]  # checked


def or_null(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decoder of what `read` decodes, and of null, as None."""
    return lambda value: None if value is None else read(value)


def several(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Return a decoder of arrays of any length, whose values `read` decodes."""

    def read_all(value: Any) -> list[Any]:
        _expect(isinstance(value, list), "an array", value)
        return [*map(read, value)]

    return read_all


def record(value: Any) -> dict[str, Any]:
    """Decode a map of a command about pages, with names as text. Fields that are not known stay as they are."""
    return {name: _FIELDS.get(name, _any)(one) for name, one in ((n.decode(), v) for n, v in fields(value).items())}


def _any(value: Any) -> Any:
    return value


_COUNTS = "page pages blocks block layers heads layer head bytes memory complete checked unchecked at since dtype type"
_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(f"{_COUNTS} page_size head_dim created_ms ttl ttl_left_ms".split(), integer),
    **dict.fromkeys(("pinned", "lease_left_ms", "kept_until_ms"), or_null(integer)),
    **dict.fromkeys(("reason", "cause", "policy", "quota", "limit", "key", "tier"), string),
    **dict.fromkeys(("checksum", "kept_by"), or_null(string)),
    "planes": several(integer),
    "corrupt": several(string),
    "strings": several(record),
}

# Decoders of replies by command, for code that sends commands without a decoder. Replies to others stay as they are.
READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("DBSIZE", "EXISTS", "PEXPIRETIME", "PTTL", "SCARD", "SISMEMBER", "STRLEN"), integer),
    **dict.fromkeys(("GETRANGE", "INFO", "TYPE"), string),
    **dict.fromkeys(("SCAN", "SSCAN"), scanned),
    **dict.fromkeys(("KVPAGEWHY", "KVPAGEVERIFY", "KVLOST"), record),
    "CONFIG GET": lambda value: {name: string(one) for name, one in fields(value).items()},
    "GET": or_null(string),
    "KVPAGEINDEX": several(record),
    "KVPAGESTAT": or_null(record),
    "MGET": several(or_null(string)),
    "OBJECT": or_null(integer),
    "TIME": several(string),
}


def reader_of(words: Sequence[Word]) -> Callable[[Any], Any]:
    """Return the decoder of the reply to a command."""
    return READERS.get(encoded(words[0]).decode(), _any)


def plain_client(url: str, **options: Any) -> redis.Redis:
    """Return a redis-py client that sends no commands by itself except its handshake, and raises WrongReply for a reply
    that `READERS` cannot decode.

    With a name in bytes, redis-py does not convert the reply any further. Raises ValueError for a URL that is not
    redis://, rediss:// or unix://, or has an unknown option.
    """
    check_url(url)
    client = redis.Redis.from_url(url, **QUIETLY | {"redis_connect_func": greet} | options)
    for name, read in READERS.items():
        client.set_response_callback(name, _then(read, client.response_callbacks.get(name)))  # type: ignore[no-untyped-call]
        client.set_response_callback(name.encode(), _then(read, None))  # type: ignore[arg-type]
    return client


def _then(read: Callable[[Any], Any], convert: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a callback of redis-py that decodes a reply, and then converts it as redis-py does."""
    return lambda reply, **options: convert(read(reply), **options) if convert else read(reply)
