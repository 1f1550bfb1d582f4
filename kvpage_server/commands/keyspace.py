"""The keyspace family: what holds for every key, page or string."""

from __future__ import annotations

from kvpage_server.commands.arguments import SYNTAX_ERROR, integer, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command
from kvpage_server.page import unix_ms
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import OK, Reply, ReplyError, simple


@command("del", -2, "write", keys=(1, -1, 1), group="keyspace", usage="key [key ...]", summary="Deletes keys.")
def del_(client: Client, args: list[Argument]) -> Reply:
    """How many were there."""
    return sum(client.keyspace.delete(key) for key in plain_all(args))


@command(
    "exists",
    -2,
    "readonly fast",
    keys=(1, -1, 1),
    group="keyspace",
    usage="key [key ...]",
    summary="Counts the keys that exist.",
)
def exists(client: Client, args: list[Argument]) -> Reply:
    """How many are there, a key named twice counted twice."""
    return sum(client.keyspace.find(key) is not None for key in plain_all(args))


@command("type", 2, "readonly fast", keys=(1, 1, 1), group="keyspace", usage="key", summary="Names a value's type.")
def type_(client: Client, args: list[Argument]) -> Reply:
    """string or none."""
    return simple("none" if client.keyspace.find(plain(args[0])) is None else "string")


def _remaining(client: Client, key: bytes) -> int:
    """Milliseconds a key has to live; -1 for ever, -2 when it does not exist."""
    entry = client.keyspace.find(key)
    if entry is None:
        return -2
    return entry.expires - unix_ms() if entry.expires else -1


@command("ttl", 2, "readonly fast", keys=(1, 1, 1), group="keyspace", usage="key", summary="Returns seconds to live.")
def ttl(client: Client, args: list[Argument]) -> Reply:
    """Seconds, rounded; -1 for ever, -2 for no such key."""
    left = _remaining(client, plain(args[0]))
    return left if left < 0 else (left + 500) // 1000


@command("pttl", 2, "readonly fast", keys=(1, 1, 1), group="keyspace", usage="key", summary="Returns ms to live.")
def pttl(client: Client, args: list[Argument]) -> Reply:
    """Milliseconds; -1 for ever, -2 for no such key."""
    return _remaining(client, plain(args[0]))


_CONDITIONS = (b"NX", b"XX", b"GT", b"LT")


def _check_conditions(words: list[bytes]) -> set[bytes]:
    found = set(words)
    for word in words:
        if word not in _CONDITIONS:
            raise ReplyError(f"ERR Unsupported option {word.decode('ascii', 'backslashreplace')}")
    if b"NX" in found and len(found) > 1:
        raise ReplyError("ERR NX and XX, GT or LT options at the same time are not compatible")
    if {b"GT", b"LT"} <= found:
        raise ReplyError("ERR GT and LT options at the same time are not compatible")
    return found


def _may_change(conditions: set[bytes], old: int, new: int) -> bool:
    """Whether EXPIRE's conditions allow it; a key without expiry counts as living for ever."""
    refused = (
        (b"NX" in conditions and old)
        or (b"XX" in conditions and not old)
        or (b"GT" in conditions and (not old or new <= old))
        or (b"LT" in conditions and old and new >= old)
    )
    return not refused


def expire_at(client: Client, args: list[Argument], unit: int, base: int, name: str) -> int:
    """The EXPIRE commands: `unit` milliseconds a count, counted from `base`."""
    key, count = plain(args[0]), integer(args[1])
    conditions = _check_conditions([word.upper() for word in plain_all(args[2:])])
    expires = count * unit + base
    if not -(2**63) <= count * unit < 2**63 or not -(2**63) <= expires < 2**63:
        raise ReplyError(f"ERR invalid expire time in '{name}' command")
    entry = client.keyspace.find(key)
    if entry is None or not _may_change(conditions, entry.expires, expires):
        return 0
    client.keyspace.set_expiry(key, max(expires, 1))
    return 1


@command(
    "expire",
    -3,
    "write fast",
    keys=(1, 1, 1),
    group="keyspace",
    usage="key seconds [NX | XX | GT | LT]",
    summary="Sets a key's time to live in seconds.",
)
def expire(client: Client, args: list[Argument]) -> Reply:
    """1 when it was set."""
    return expire_at(client, args, 1000, unix_ms(), "expire")


@command("dbsize", 1, "readonly fast", group="server", summary="Returns the number of keys.")
def dbsize(client: Client, args: list[Argument]) -> Reply:
    """Keys, those overdue but not yet swept too."""
    return len(client.keyspace)


@command("flushall", -1, "write", group="server", usage="[ASYNC | SYNC]", summary="Removes every key.")
def flushall(client: Client, args: list[Argument]) -> Reply:
    """Everything goes at once."""
    if [word.upper() for word in plain_all(args)] not in ([], [b"ASYNC"], [b"SYNC"]):
        raise ReplyError(SYNTAX_ERROR)
    client.keyspace.flush()
    return OK
