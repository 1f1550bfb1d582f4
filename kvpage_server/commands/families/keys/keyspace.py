"""Commands for keys of any kind, pages and strings; and KVLOST."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, zip_longest

from kvpage_server.commands.arguments import SYNTAX_ERROR, integer, integer_in, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.keys.value import split_before
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import Parts, extents, lists_pages, nothing
from kvpage_server.core import Argument, literal
from kvpage_server.glob import COMPARED, Matches, glob, portions
from kvpage_server.page import index_key
from kvpage_server.resp import OK, Raw, Reply, ReplyError, Stream, simple
from kvpage_server.store.contents import OVER_QUOTA, Loss

_CURSOR = re.compile(rb"(?:[+-]?\d{1,20})?\Z")  # the 64-bit numbers that C's strtoul accepts
_U64_MAX = 2**64 - 1
MOST_SCANNED = 1000  # upper limit of COUNT; the keys of one block are returned together, even if there are more
_STEP = 1000  # keys that a step lists, compares or encodes


_for_each = partial(
    command, keys=(1, -1, 1), group="generic", parts=Parts(joined="sum"), complexity="O(N) with N keys", reply="integer"
)
_flush = partial(
    command, flags="write keyspace dangerous allkeys", group="server", complexity="O(N) with N keys", reply="OK"
)
_generic = partial(command, group="generic")


@_for_each("del key [key ...]", flags="write", needs=extents, summary="Deletes keys.")
def del_(client: Client, args: list[Argument]) -> Reply:
    """Delete keys, and return the number of keys that existed."""
    keys = plain_all(args)
    split_before(client, keys)
    return client.server.keyspace.contents.delete_all(keys)


@_for_each(
    "unlink key [key ...]", flags="write fast", needs=extents, since="4.0.0", summary="Deletes keys, as DEL does."
)
def unlink(client: Client, args: list[Argument]) -> Reply:
    """Delete keys, exactly as DEL does, and return the number of keys that existed."""
    return del_(client, args)


@_for_each("exists key [key ...]", flags="readonly fast", needs=nothing, summary="Counts the keys that exist.")
def exists(client: Client, args: list[Argument]) -> Reply:
    """Return the number of arguments that are existing keys. A key that is named twice counts twice."""
    return sum(_is_there(client, key) for key in plain_all(args))


def _is_there(client: Client, key: bytes) -> bool:
    """Return whether a key exists. A string that exists is leased for a short time, unless the client has CLIENT
    NO-TOUCH, because the client will probably read it next.
    """
    keyspace = client.server.keyspace
    entry = keyspace.reader.look(key)
    if entry is None:
        return lists_pages(keyspace, key)
    if client.touches:
        keyspace.protection.lease_after_exists(key, entry)
    return True


@_for_each(
    "touch key [key ...]",
    flags="readonly fast",
    needs=nothing,
    since="3.2.1",
    summary="Marks keys as used, and counts those that exist.",
)
def touch(client: Client, args: list[Argument]) -> Reply:
    """Count each existing key as used, and return the number of arguments that are existing keys."""
    keyspace = client.server.keyspace
    return sum(keyspace.reader.read(key) is not None or lists_pages(keyspace, key) for key in plain_all(args))


@_generic(
    "type key", flags="readonly fast", keys=(1, 1, 1), needs=nothing, reply="simple", summary="Names a value's type."
)
def type_(client: Client, args: list[Argument]) -> Reply:
    """Return "string" for pages and strings, "set" for an index key, "none" for no value."""
    key, keyspace = plain(args[0]), client.server.keyspace
    if keyspace.reader.look(key) is not None:
        return simple("string")
    return simple("set" if lists_pages(keyspace, key) else "none")


def matcher(pattern: bytes) -> Matches | None:
    """Return a function whose result is true for keys that match a pattern; None for ``*``. Raises PatternTooLong."""
    return None if pattern == b"*" else glob(pattern)


@_generic(
    "keys pattern",
    flags="readonly dangerous filtered",
    complexity="O(N) with N keys in the store",
    reply="array of bulk",
    summary="Returns the keys that match a pattern, all at once.",
)
def keys(client: Client, args: list[Argument]) -> Reply:
    """Return the keys that match the pattern and that the user may read, in no particular order. They are collected in
    steps, because there may be millions.
    """
    matches = matcher(plain(args[0]))

    def steps() -> Iterator[Reply]:
        found: list[bytes] = []
        for some in _visible_keys(client):
            yield from _matching(some, matches, found)
        yield from _encode_keys(found)

    return Stream(None, steps())


def _matching(keys: list[bytes], matches: Matches | None, found: list[bytes]) -> Iterator[Reply]:
    """Add the keys that match to `found`, in steps."""
    for some in portions(keys) if matches else [keys]:
        found += some if matches is None else filter(matches, some)
        yield ()


def _visible_keys(client: Client) -> Iterator[list[bytes]]:
    """Yield the existing keys that the client may read, in a group for each step. A group may be empty."""
    listing = client.server.keyspace.listing
    return map(client.visible, listing.groups(listing.places(), _keys_of_a_step(client)))


def _keys_of_a_step(client: Client) -> int:
    """Return the number of keys that one step may examine: fewer for a user with many key patterns."""
    return max(_STEP // client.cost_of_a_key, 1)


@_generic(
    "scan cursor [MATCH pattern] [COUNT count] [TYPE type] [MAXLEN bytes]",
    flags="readonly filtered",
    since="2.8.0",
    complexity="O(1) a call with a COUNT of 1, O(N) for all N keys",
    reply="array",
    summary="Returns some keys, and the cursor to go on with.",
)
def scan(client: Client, args: list[Argument]) -> Reply:
    """Return the next cursor, 0 at the end, and keys. A key that exists from the first call to the last is returned.

    MAXLEN, which Redis does not have, leaves out keys of more bytes.

    Index keys are sets, and the only ones: they are listed by TYPE set alone. A user without access to every key gets
    only keys that it may read. The cursor and the number of calls reveal how many keys the store has, because a call
    that examined all keys would delay other clients.
    """
    keyspace = client.server.keyspace
    cursor = scan_cursor(plain(args[0]))
    matches, count, type_name = scan_options(plain_all(args[1:]), has_maxlen=True)
    count, step = min(count, MOST_SCANNED), _keys_of_a_step(client)
    groups: Iterator[list[bytes]]
    if type_name == b"set":
        cursor, requests = keyspace.listing.scan_requests(cursor, count)
        keys = len(requests)
        groups = ([*map(index_key, requests[start : start + step])] for start in range(0, keys, step))
    else:
        cursor, places, keys = keyspace.listing.scan(cursor, count)
        groups = keyspace.listing.groups(places if type_name == b"string" else (), step)
    if keys > _STEP or not client.sees_all:
        return Stream(None, _scanned(client, cursor, groups, matches))
    found = [*chain.from_iterable(groups)]
    if matches and sum(map(len, found)) > COMPARED:
        return Stream(None, _scanned(client, cursor, iter([found]), matches))
    return [b"%d" % cursor, found if matches is None else list(filter(matches, found))]


def _scanned(client: Client, cursor: int, groups: Iterator[list[bytes]], matches: Matches | None) -> Iterator[Reply]:
    """Yield the reply of SCAN in steps: the cursor, and those keys of the groups that match and that the client may
    read.
    """
    found = list[bytes]()
    for some in map(client.visible, groups):
        yield from _matching(some, matches, found)
    yield Raw(b"*2\r\n$%d\r\n%d\r\n" % (len(b"%d" % cursor), cursor))
    yield from _encode_keys(found)


def _encode_keys(keys: list[bytes]) -> Iterator[Reply]:
    """Yield an array of keys, encoded in steps of 1000 keys."""
    yield Raw(b"*%d\r\n" % len(keys))
    for start in range(0, len(keys), _STEP):
        yield (b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys[start : start + _STEP]),)


def scan_cursor(word: bytes) -> int:
    """Return a cursor of SCAN or SSCAN, an unsigned 64-bit number parsed as in Redis. Raises ReplyError."""
    word = word.partition(b"\0")[0]  # a string of C ends there
    value = int(word or b"0") if _CURSOR.match(word) else _U64_MAX + 1
    if abs(value) > _U64_MAX:
        raise ReplyError("ERR invalid cursor")
    return value & _U64_MAX


def scan_options(words: list[bytes], *, has_maxlen: bool = False) -> tuple[Matches | None, int, bytes]:
    """Return the options of SCAN or SSCAN: a filter for MATCH and MAXLEN, None for every key; COUNT, by default 10;
    TYPE in lower case, by default b"string".

    MAXLEN is allowed if `has_maxlen`. Raises ReplyError, PatternTooLong.
    """
    matches, count, type_name, longest = None, 10, b"string", None
    for option, value in zip_longest(words[::2], words[1::2]):
        if value is None:
            raise ReplyError(SYNTAX_ERROR)
        if option.upper() == b"COUNT":
            count = _scan_count(value)
        elif option.upper() == b"MATCH":
            matches = matcher(value)
        elif option.upper() == b"TYPE":
            type_name = value.lower()
        elif option.upper() == b"MAXLEN" and has_maxlen:
            longest = _scan_count(value)
        else:
            raise ReplyError(SYNTAX_ERROR)
    return matches if longest is None else _limit_key_length(longest, matches), count, type_name


def _limit_key_length(longest: int, matches: Matches | None) -> Matches:
    """Return a filter for keys of at most `longest` bytes that also pass the filter `matches`, if there is one."""
    return lambda key: len(key) <= longest and (matches is None or matches(key))


def _scan_count(word: bytes) -> int:
    """Return the number after COUNT or MAXLEN. Raises ReplyError unless it is an integer from 1 on."""
    count = integer(word)
    if count < 1:
        raise ReplyError(SYNTAX_ERROR)
    return count


@_generic(
    "randomkey",
    flags="readonly filtered",
    complexity="O(1), or O(N) with N keys for a user who may not read all of them",
    reply="bulk | null",
    summary="Returns a random key.",
)
def randomkey(client: Client, args: list[Argument]) -> Reply:
    """Return a random key that the user may read; null if there is none."""
    if client.sees_all:
        return client.server.keyspace.listing.random_key()

    def steps() -> Iterator[Reply]:
        keys: list[bytes] = []
        for some in _visible_keys(client):
            keys += some
            yield ()
        yield random.choice(keys) if keys else None

    return Stream(None, steps())


@command(
    "dbsize",
    flags="readonly fast keyspace filtered",
    complexity="O(1), or O(N) with N keys for a user who may not read all of them",
    reply="integer",
    summary="Returns the number of keys.",
    group="server",
)
def dbsize(client: Client, args: list[Argument]) -> Reply:
    """Return the number of keys that the user may read. For a user with access to every key, it includes expired keys
    that were not removed yet.
    """
    if client.sees_all:
        return len(client.server.keyspace)

    def steps() -> Iterator[Reply]:
        count = 0
        for some in _visible_keys(client):
            count += len(some)
            yield ()
        yield count

    return Stream(None, steps())


@_flush("flushdb [ASYNC | SYNC]", summary="Removes every key; there is one database.")
@_flush("flushall [ASYNC | SYNC]", summary="Removes every key.")
def flushall(client: Client, args: list[Argument]) -> Reply:
    """Remove every key. All keys disappear for all clients at the same time.

    Return OK when the memory is free, or before that with ASYNC. In a transaction, EXEC frees it before its reply.
    """
    options = [word.upper() for word in plain_all(args)]
    if options not in ([], [b"ASYNC"], [b"SYNC"]):
        raise ReplyError(SYNTAX_ERROR)
    contents = client.server.keyspace.contents
    contents.flush()

    def steps() -> Iterator[Reply]:
        if options == [b"ASYNC"]:
            yield OK
        while not client.in_exec and contents.free_flushed():
            yield ()
        if options != [b"ASYNC"]:
            yield OK

    return Stream(None, steps())


# -- KVLOST ------------------------------------------------------------------------------------------------------------

MOST_LOST = 1000  # strings in a reply
_LOST_STEP = 1000  # keys that a step compares with patterns


@command(
    "kvlost pattern [COUNT count]",
    flags="readonly filtered",
    complexity="O(1) for a key without wildcards, O(N) with N removals that are remembered",
    reply="map",
    summary="Lists removed strings, with the reasons.",
    group="string",
)
def kvlost(client: Client, args: list[Argument]) -> Reply:
    """Return a map. `strings` has a map for each removed string whose key matches, the latest first, at most COUNT (1
    to 1000, by default 100): its `key`, the `reason` (expired, evicted, over quota, deleted, overwritten or corrupt),
    `at`, when it was removed (unix milliseconds), and the `policy` or the pattern of the `quota` that evicted it, with
    the `limit` that was reached: maxmemory, maxdisk, or filesystem if that was full. A pattern does not find keys of
    more than 512 bytes; such a key is found by its whole name.

    `since` says from when on the server remembers all removals (unix milliseconds): a restart forgets them, and the
    oldest are dropped when all take more than 16 MB. It depends on removals of others, and is 0 for users
    without the right to read every key.
    """
    pattern, count = plain(args[0]), _count(plain_all(args[1:]))
    keyspace, key = client.keyspace, literal(pattern)
    matches = matcher(pattern) if key is None else None

    def removed(some: Iterable[bytes]) -> Iterator[dict[str, Reply]]:
        """Yield the description of each removed string of these keys that matches, that the client may read, and that
        was not stored again.
        """
        for name in client.visible(some if matches is None else filter(matches, some)):
            loss = keyspace.lost.of(name)
            if loss is not None and keyspace.contents.find(name) is None:
                yield _described(name, loss)

    def steps() -> Iterator[Reply]:
        names = [key] if key is not None else [*keyspace.lost.latest()]
        step, found = max(_LOST_STEP // client.cost_of_a_key, 1), list[dict[str, Reply]]()
        for start in range(0, len(names), step):
            for some in portions(names[start : start + step]):
                found += removed(some)
                yield ()
            if len(found) >= count:
                break
        yield {"since": keyspace.lost.since if client.sees_all else 0, "strings": found[:count]}

    return Stream(None, steps())


def _count(words: list[bytes]) -> int:
    """Return the number after COUNT; 100 without words. Raises ReplyError."""
    if not words:
        return 100
    if len(words) != 2 or words[0].upper() != b"COUNT":
        raise ReplyError(SYNTAX_ERROR)
    return integer_in("count", words[1], 1, MOST_LOST)


def _described(key: bytes, loss: Loss) -> dict[str, Reply]:
    """Return KVLOST's map of a removed string."""
    by: dict[str, Reply] = {"quota" if loss.reason == OVER_QUOTA else "policy": loss.by} if loss.by else {}
    if loss.limit:
        by["limit"] = loss.limit
    return {"key": key, "reason": loss.reason, "at": loss.at, **by}
