"""The commands for times to live of keys. The store has expiries in unix milliseconds; commands have other
units, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvpage_server.commands.arguments import I64, integer, plain, plain_all, shorten
from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import extents, lists_pages, nothing
from kvpage_server.core import Argument
from kvpage_server.page import unix_ms
from kvpage_server.resp import Reply, ReplyError

_CONDITIONS = (b"NX", b"XX", b"GT", b"LT")


def _conditions(words: list[bytes]) -> set[bytes]:
    """Return the conditions NX, XX, GT, LT of an EXPIRE command, in upper case. Raises ReplyError for other words and
    contradictory ones.
    """
    found = set()
    for word in words:
        if word.upper() not in _CONDITIONS:
            raise ReplyError(f"ERR Unsupported option {shorten(word, 1024)}")
        found.add(word.upper())
    if b"NX" in found and len(found) > 1:
        raise ReplyError("ERR NX and XX, GT or LT options at the same time are not compatible")
    if {b"GT", b"LT"} <= found:
        raise ReplyError("ERR GT and LT options at the same time are not compatible")
    return found


_changing = partial(command, flags="write fast", keys=(1, 1, 1), needs=extents, group="generic", reply="integer")


def _may_change(conditions: set[bytes], old: int, new: int) -> bool:
    """Return whether the conditions allow a change of the expiry from `old` to `new`, in unix milliseconds. `old` is 0
    for a key without expiry, which counts as infinite.
    """
    refused = (
        (b"NX" in conditions and old)
        or (b"XX" in conditions and not old)
        or (b"GT" in conditions and (not old or new <= old))
        or (b"LT" in conditions and old and new >= old)
    )
    return not refused


def _declare(name: str, unit: int, base: Callable[[], int], *, since: str, time: str, summary: str) -> None:
    """Declare the EXPIRE command `name`. `unit` is the number of milliseconds that its argument counts, and `base()`
    returns the time from which it counts, in unix milliseconds.
    """

    @_changing(f"{name} key {time} [NX | XX | GT | LT]", since=since, summary=summary)
    def expire(client: Client, args: list[Argument]) -> Reply:
        """Return 1 if the expiry was set, 0 if the key does not exist or a condition does not hold. An expiry in the
        past deletes the key.
        """
        conditions = _conditions(plain_all(args[2:]))
        start = base()
        expires = integer(args[1]) * unit + start
        if not I64[0] <= expires - start <= expires <= I64[1]:
            raise ReplyError(f"ERR invalid expire time in '{name}' command")
        key, keyspace = plain(args[0]), client.server.keyspace
        entry = keyspace.contents.find(key)
        if entry is None or not _may_change(conditions, entry.expires, expires):
            return 0
        keyspace.contents.set_expiry(key, max(expires, 1))
        return 1


def _epoch() -> int:
    """Return 0, the unix epoch: the base of commands with an absolute time."""
    return 0


_declare("expire", 1000, unix_ms, since="1.0.0", time="seconds", summary="Sets a key's time to live in seconds.")
_declare("pexpire", 1, unix_ms, since="2.6.0", time="milliseconds", summary="Sets a key's time to live in ms.")
_declare(
    "expireat", 1000, _epoch, since="1.2.0", time="unix-time-seconds", summary="Sets the second at which a key expires."
)
_declare(
    "pexpireat",
    1,
    _epoch,
    since="2.6.0",
    time="unix-time-milliseconds",
    summary="Sets the millisecond at which a key expires.",
)


def _expiry(client: Client, raw: Argument) -> int:
    """Return the expiry of a key in unix milliseconds; -1 if it has none, -2 if the key does not exist."""
    key, keyspace = plain(raw), client.server.keyspace
    entry = keyspace.reader.look(key)
    if entry is None:
        return -1 if lists_pages(keyspace, key) else -2
    return entry.expires or -1


def _seconds(milliseconds: int) -> int:
    """Return milliseconds as seconds, rounded. A negative number, which is a code, is returned unchanged."""
    return milliseconds if milliseconds < 0 else (milliseconds + 500) // 1000


def _left(client: Client, raw: Argument) -> int:
    """Return the milliseconds until a key expires; -1 if it has no expiry, -2 if the key does not exist."""
    expires = _expiry(client, raw)
    return expires if expires < 0 else max(expires - unix_ms(), 0)


_expiry_of = partial(command, flags="readonly fast", keys=(1, 1, 1), needs=nothing, group="generic", reply="integer")


@_expiry_of("ttl key", summary="Returns a key's time to live in seconds.")
def ttl(client: Client, args: list[Argument]) -> Reply:
    """Return the seconds until the key expires, rounded; -1 for ever, -2 for no such key."""
    return _seconds(_left(client, args[0]))


@_expiry_of("pttl key", since="2.6.0", summary="Returns a key's time to live in milliseconds.")
def pttl(client: Client, args: list[Argument]) -> Reply:
    """Return the milliseconds until the key expires; -1 for ever, -2 for no such key."""
    return _left(client, args[0])


@_expiry_of("expiretime key", since="7.0.0", summary="Returns the unix second at which a key expires.")
def expiretime(client: Client, args: list[Argument]) -> Reply:
    """Return the unix second at which the key expires, rounded; -1 for never, -2 for no such key."""
    return _seconds(_expiry(client, args[0]))


@_expiry_of("pexpiretime key", since="7.0.0", summary="Returns the unix millisecond at which a key expires.")
def pexpiretime(client: Client, args: list[Argument]) -> Reply:
    """Return the unix millisecond at which the key expires; -1 for never, -2 for no such key."""
    return _expiry(client, args[0])


@_changing("persist key", since="2.2.0", summary="Removes a key's time to live.")
def persist(client: Client, args: list[Argument]) -> Reply:
    """Remove the key's expiry. Return 1 if it had one, else 0."""
    key, keyspace = plain(args[0]), client.server.keyspace
    entry = keyspace.contents.find(key)
    if entry is None or not entry.expires:
        return 0
    keyspace.contents.set_expiry(key, 0)
    return 1
