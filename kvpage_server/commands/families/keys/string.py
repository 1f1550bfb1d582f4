"""The string family: strings, and pages as the strings of their blobs.

No command here changes a part of a value, so a page's bytes and its header always agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from kvpage_server.commands.arguments import I64, NOT_AN_INTEGER, SYNTAX_ERROR, as_integer, integer, plain, plain_all
from kvpage_server.commands.context import MANY_BYTES, Client
from kvpage_server.commands.dispatch.checks import fetched, hash_first, wait_for_checksums
from kvpage_server.commands.families.keys.value import (
    admit,
    admit_one,
    check_growth,
    copy_large,
    length_of,
    pages_of,
    part_of,
    put,
    split_before,
    store,
    string_of,
)
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import (
    READ,
    WRITE,
    Parts,
    as_used,
    extents,
    key_of_set,
    nothing,
    refuse_as_string,
    values,
)
from kvpage_server.core import Argument
from kvpage_server.core.pieces import Piece
from kvpage_server.page import unix_ms
from kvpage_server.resp import OK, Raw, Reply, ReplyError, Stream, encode
from kvpage_server.store.disk.prefetch import Needed, Prefetcher
from kvpage_server.store.memory.entry import Entry, Text, is_only_on_disk
from kvpage_server.store.memory.index import ExtentPage

_UNIT = {b"EX": 1000, b"PX": 1, b"EXAT": 1000, b"PXAT": 1}  # milliseconds


@dataclass(slots=True)
class Options:
    """Options after the key and value of SET, or the key of GETEX."""

    timing: bytes = b""  # one of `_UNIT`, KEEPTTL or PERSIST
    time: Argument = b""
    only_if: bytes = b""  # NX or XX
    get: bool = False

    def expires(self, name: str) -> int:
        """Return the expiry in unix milliseconds; 0 if no time was given. Raises ReplyError, which has the command's
        `name`, for an invalid time.
        """
        return expiry(name, self.timing, self.time) if self.timing in _UNIT else 0


def expiry(name: str, unit: bytes, raw: Argument) -> int:
    """Return the expiry in unix milliseconds for the word `raw` after `unit`, which is EX, PX, EXAT or PXAT. Raises
    ReplyError, which has the command's `name`, for an invalid time.
    """
    count = integer(raw)
    expires = count * _UNIT[unit] + (0 if unit.endswith(b"AT") else unix_ms())
    if count <= 0 or expires > I64[1]:
        raise ReplyError(f"ERR invalid expire time in '{name}' command")
    return expires


def _options(args: list[Argument], *, words: tuple[bytes, ...]) -> Options:
    """Return the parsed options in `args`, which may be those of `_UNIT` and `words`. An option may be repeated, but
    not contradict another. Raises ReplyError.
    """
    options, position = Options(), 0
    while position < len(args):
        word = plain(args[position]).upper()
        position += 1
        if word in _UNIT and position < len(args) and options.timing in (b"", word):
            options.timing, options.time = word, args[position]
            position += 1
        elif word not in words:
            raise ReplyError(SYNTAX_ERROR)
        elif word in (b"KEEPTTL", b"PERSIST") and options.timing in (b"", word):
            options.timing = word
        elif word in (b"NX", b"XX") and options.only_if in (b"", word):
            options.only_if = word
        elif word == b"GET":
            options.get = True
        else:
            raise ReplyError(SYNTAX_ERROR)
    return options


_string = partial(command, keys=(1, 1, 1), group="string")
_setting = partial(_string, flags="write denyoom", needs=extents, reply="OK")
_exchanging = partial(_string, access=READ | WRITE, reply="bulk | null")
_range = partial(
    command,
    flags="readonly",
    keys=(1, 1, 1),
    needs=values,
    group="string",
    complexity="O(N) with N bytes returned",
    reply="bulk",
)
_strings = partial(command, group="string", complexity="O(N) with N keys")
_setting_all = partial(_strings, flags="write denyoom", keys=(1, -1, 2), needs=extents, since="1.0.1")


@_string(
    "set key value [NX | XX] [GET] [EX seconds | PX milliseconds | EXAT unix-time-seconds | PXAT "
    "unix-time-milliseconds | KEEPTTL]",
    flags="write denyoom",
    uses=key_of_set,
    needs=as_used,
    reply="OK | bulk | null",
    summary="Sets the string value of a key; a page blob under its own key becomes that page.",
)
def set_(client: Client, args: list[Argument]) -> Reply:
    """Set a key's value. Return OK, or null if a condition does not hold; with GET the old value."""
    key = args[0] if type(args[0]) is bytes else plain(args[0])
    if len(args) == 2:
        store(client, key, args[1])
        return OK
    options = _options(args[2:], words=(b"NX", b"XX", b"GET", b"KEEPTTL"))
    expires = options.expires("set")
    keyspace = client.server.keyspace
    if options.get:
        copy_large(client, [(key, args[1])])
        if options.only_if != (b"XX" if keyspace.contents.find(key) is None else b"NX"):
            admit_one(client, key, args[1])
    old = keyspace.reader.read(key) if options.get else keyspace.contents.find(key)
    if options.get:
        hash_first(client, old)
    reply = string_of(old) if options.get else OK
    if options.only_if == (b"XX" if old is None else b"NX"):
        return reply if options.get else None
    if options.timing == b"KEEPTTL":
        expires = keyspace.contents.expires_of(key)
    store(client, key, args[1], expires)
    return reply


@_string("get key", flags="readonly fast", needs=values, reply="bulk | null", summary="Returns the value of a key.")
def get(client: Client, args: list[Argument]) -> Reply:
    """Return the value of a key, for a page its blob; null if there is no such key. Raises ReplyError for an index key,
    which is a set.
    """
    key = args[0] if type(args[0]) is bytes else plain(args[0])
    entry = client.keyspace.reader.read(key)
    if entry is None:
        refuse_as_string(client.keyspace, key)
    if type(entry) is Text:
        return entry.data
    if type(entry) is ExtentPage:
        hash_first(client, entry)
    return string_of(entry)


def _read(client: Client, raw: Argument) -> Entry | None:
    """Return a key's entry, and count a hit and a use; None, counted as a miss, if there is none. Raises ReplyError for
    an index key, which is a set.
    """
    key = plain(raw)
    entry = client.server.keyspace.reader.read(key)
    if entry is None:
        refuse_as_string(client.server.keyspace, key)
    return entry


def _set_expiring(client: Client, args: list[Argument], name: str, unit: bytes) -> Reply:
    """Set a value with an expiry, and return OK. `args` are key, time and value; `unit` is EX or PX, and `name` the
    command's.
    """
    key, time, value = plain(args[0]), args[1], args[2]
    store(client, key, value, expiry(name, unit, time))
    return OK


@_setting("setex key seconds value", since="2.0.0", summary="Sets a value with a time to live in seconds.")
def setex(client: Client, args: list[Argument]) -> Reply:
    """Set a key's value with a time to live in seconds, as SET with EX does. Return OK."""
    return _set_expiring(client, args, "setex", b"EX")


@_setting("psetex key milliseconds value", since="2.6.0", summary="Sets a value with a time to live in milliseconds.")
def psetex(client: Client, args: list[Argument]) -> Reply:
    """Set a key's value with a time to live in milliseconds, as SET with PX does. Return OK."""
    return _set_expiring(client, args, "psetex", b"PX")


@_setting(
    "setnx key value", flags="write denyoom fast", reply="integer", summary="Sets a value if its key does not exist."
)
def setnx(client: Client, args: list[Argument]) -> Reply:
    """Set a key's value if the key does not exist. Return 1 if it was set, else 0."""
    key = plain(args[0])
    if client.server.keyspace.contents.find(key) is not None:
        return 0
    store(client, key, args[1])
    return 1


@_exchanging("getset key value", flags="write denyoom fast", summary="Sets a value and returns the old one.")
def getset(client: Client, args: list[Argument]) -> Reply:
    """Set a key's value, without an expiry. Return the old value, or null."""
    key = plain(args[0])
    admit_one(client, key, args[1])
    entry = client.server.keyspace.reader.read(key)
    hash_first(client, entry)
    reply = string_of(entry)
    store(client, key, args[1])
    return reply


@_exchanging("getdel key", flags="write fast", since="6.2.0", summary="Returns a value and deletes it.")
def getdel(client: Client, args: list[Argument]) -> Reply:
    """Delete a key. Return its value, or null if there is no such key."""
    key = plain(args[0])
    entry = client.server.keyspace.reader.read(key)
    hash_first(client, entry)
    reply = string_of(entry)
    client.server.keyspace.contents.delete(key)
    return reply


@_exchanging(
    "getex key [EX seconds | PX milliseconds | EXAT unix-time-seconds | PXAT unix-time-milliseconds | PERSIST]",
    flags="write fast",
    since="6.2.0",
    summary="Returns a value and changes its time to live.",
)
def getex(client: Client, args: list[Argument]) -> Reply:
    """Return a key's value, for a page its blob, and set or remove the key's expiry if an option says so. Return null,
    and change nothing, if there is no such key.

    Without an option, the expiry stays. A time in the past deletes the key, after its value was read. Raises ReplyError
    for invalid options or, if the key exists, an invalid time.
    """
    key, options, keyspace = plain(args[0]), _options(args[1:], words=(b"PERSIST",)), client.server.keyspace
    entry = keyspace.reader.read(key)
    if entry is None:
        return None
    hash_first(client, entry)
    expires = options.expires("getex")
    if expires or (options.timing == b"PERSIST" and entry.expires):
        keyspace.contents.set_expiry(key, expires)
    return string_of(entry)


@_strings(
    "mget key [key ...]",
    flags="readonly fast",
    keys=(1, -1, 1),
    needs=values,
    fetches=True,
    parts=Parts(joined="array"),
    reply="array of bulk or null",
    summary="Returns the values of keys.",
)
def mget(client: Client, args: list[Argument]) -> Reply:
    """Return an array of the values of keys, null for keys that do not exist. Long values are looked up while the reply
    is sent.
    """
    keys, contents = plain_all(args), client.keyspace.contents
    found = client.server.keyspace.reader.read_all(keys)
    # not `values_to_load(keys)`: the reads may have evicted one of the values, to make room on disk for another
    cold = contents.any_on_disk and any(map(_is_only_on_disk, found))
    much = sum([entry.size for entry in found if entry is not None]) > MANY_BYTES
    if cold or much or wait_for_checksums(found):
        return Stream(None, _in_parts(client, keys, whole=not much))
    return [*map(string_of, found)]


def _is_only_on_disk(entry: Entry | None) -> bool:
    """Return whether an entry is a value that is only on disk."""
    return not (entry is None or isinstance(entry, Text)) and is_only_on_disk(entry)


def _in_parts(client: Client, keys: list[bytes], *, whole: bool) -> Iterator[Reply]:
    """Yield MGET's array of values in steps. With `whole`, all values are looked up in one step.

    Raises ReplyError if values of the first step cannot be read from disk. In later steps, error replies replace the
    values of that step.
    """
    at, find = 0, client.server.keyspace.contents.find
    while at < len(keys):
        start, size, most = at, 0, client.server.lookup_bytes
        while at < len(keys) and (whole or at == start or size < most):
            entry = find(keys[at])
            size += entry.size if entry is not None else 0
            at += 1
        some, failed = keys[start:at], None
        try:
            yield from fetched(client, partial(_values_of, some), touches=client.touches)
            while wait := wait_for_checksums(map(find, some)):
                yield wait
                yield from fetched(client, partial(_values_of, some), touches=client.touches)
        except ReplyError as error:
            if not start:
                raise
            failed = error
        pieces: list[Piece] = []
        for key in some:
            encode(failed or string_of(find(key)), client.protocol, pieces)
        if not start:
            yield Raw(b"*%d\r\n" % len(keys))
        yield (*pieces,)


def _values_of(keys: list[bytes], lookup: Prefetcher) -> Iterable[Needed]:
    """Return the values to load before these keys can be read."""
    return lookup.values_of(keys)


def _mset(client: Client, args: list[Argument]) -> None:
    """Set all values of `args` (keys and values in turn), or none if one is a damaged page or there is no space for
    all. Raises ReplyError, OverLimit.
    """
    keys, values = plain_all(args[::2]), args[1::2]
    split_before(client, keys, stores=True)
    pages = pages_of(client, [*zip(keys, values, strict=True)])
    check_growth(client, pages)
    admit(client, zip(keys, values, pages, strict=True))
    for page in pages:
        if page is not None:
            client.keyspace.split_block(page[0].req_id, page[0].page)  # it may be refused, so nothing is stored before
    for key, value, page in zip(keys, values, pages, strict=True):
        put(client, key, value, page)


@_setting_all(
    "mset key value [key value ...]",
    parts=Parts(width=2, joined="last"),
    reply="OK",
    summary="Sets the values of keys.",
)
def mset(client: Client, args: list[Argument]) -> Reply:
    """Set the values of keys, and return OK."""
    if len(args) % 2:
        raise ReplyError("ERR wrong number of arguments for 'mset' command")
    _mset(client, args)
    return OK


@_setting_all(
    "msetnx key value [key value ...]", reply="integer", summary="Sets the values of keys if none of them exists."
)
def msetnx(client: Client, args: list[Argument]) -> Reply:
    """Set the values of keys if none of the keys exists. Return 1 if they were set, else 0."""
    if len(args) % 2:
        raise ReplyError("ERR wrong number of arguments for 'msetnx' command")
    if any(client.server.keyspace.contents.find(key) is not None for key in plain_all(args[::2])):
        return 0
    _mset(client, args)
    return 1


@_string(
    "strlen key",
    flags="readonly fast",
    needs=nothing,
    since="2.2.0",
    reply="integer",
    summary="Returns the length of a value.",
)
def strlen(client: Client, args: list[Argument]) -> Reply:
    """Return the length of a key's value in bytes, including a page's header; 0 if there is no such key."""
    entry = _read(client, args[0])
    return 0 if entry is None else length_of(entry)


@_range("substr key start end", since="1.0.0", summary="Returns a part of a value; the old name of GETRANGE.")
@_range("getrange key start end", since="2.4.0", summary="Returns a part of a value.")
def getrange(client: Client, args: list[Argument]) -> Reply:
    """Return the bytes of a value from start to end, both included; an empty string if there are none. Negative numbers
    count from the end.
    """
    start, end = integer(args[1]), integer(args[2])
    entry = _read(client, args[0])
    if entry is None:
        return b""
    size = length_of(entry)
    first = max(start + size, 0) if start < 0 else start
    last = max(end + size, 0) if end < 0 else min(end, size - 1)
    if first > last or (start < 0 and end < 0 and start > end) or not size:
        return b""
    hash_first(client, entry)
    return part_of(entry, first, last + 1)


# -- Numbers in strings: the INCR commands -----------------------------------------------------------------------------


def _add(client: Client, key: bytes, amount: int) -> Reply:
    """Add `amount` to the number that a key has, 0 without a key, and return the sum. The expiry stays.

    Raises ReplyError if the value is no 64-bit integer, or the sum is none; OverLimit.
    """
    keyspace = client.server.keyspace
    entry = keyspace.contents.find(key)
    old = 0 if entry is None else as_integer(entry.data) if isinstance(entry, Text) else None
    if old is None:
        raise ReplyError(NOT_AN_INTEGER)
    new = old + amount
    if not I64[0] <= new <= I64[1]:
        raise ReplyError("ERR increment or decrement would overflow")
    value = b"%d" % new
    admit(client, [(key, value, None)])
    keyspace.contents.set_string(key, value, entry.expires if entry is not None else 0, "incrby")
    return new


_counter = partial(
    command,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    needs=extents,
    access=READ | WRITE,
    group="string",
    reply="integer",
)


@_counter("incr key", summary="Adds one to a number.")
def incr(client: Client, args: list[Argument]) -> Reply:
    """Add 1 to the number that a key has, and return the sum. A missing key counts as 0."""
    return _add(client, plain(args[0]), 1)


@_counter("decr key", summary="Subtracts one from a number.")
def decr(client: Client, args: list[Argument]) -> Reply:
    """Subtract 1 from the number that a key has, and return the difference. A missing key counts as 0."""
    return _add(client, plain(args[0]), -1)


@_counter("incrby key increment", summary="Adds to a number.")
def incrby(client: Client, args: list[Argument]) -> Reply:
    """Add a number to the one that a key has, and return the sum. A missing key counts as 0."""
    return _add(client, plain(args[0]), integer(args[1]))


@_counter("decrby key decrement", summary="Subtracts from a number.")
def decrby(client: Client, args: list[Argument]) -> Reply:
    """Subtract a number from the one that a key has, and return the difference. A missing key counts as 0."""
    amount = integer(args[1])
    if amount == I64[0]:
        raise ReplyError("ERR decrement would overflow")
    return _add(client, plain(args[0]), -amount)
