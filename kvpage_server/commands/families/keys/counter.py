"""Numbers in strings: the INCR commands. A page is no number."""

from __future__ import annotations

from functools import partial

from kvpage_server.commands.arguments import I64, NOT_AN_INTEGER, as_integer, integer, plain
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.keys.value import admit
from kvpage_server.commands.registry import command
from kvpage_server.commands.table.keys import READ, WRITE
from kvpage_server.commands.table.needs import extents
from kvpage_server.core import Argument
from kvpage_server.resp.reply import Reply, ReplyError
from kvpage_server.store.memory.entry import Text


def _add(client: Client, key: bytes, amount: int) -> Reply:
    """The INCR commands. They keep the time to live."""
    keyspace = client.server.keyspace
    entry = keyspace.find(key)
    old = 0 if entry is None else as_integer(entry.data) if isinstance(entry, Text) else None
    if old is None:
        raise ReplyError(NOT_AN_INTEGER)
    new = old + amount
    if not I64[0] <= new <= I64[1]:
        raise ReplyError("ERR increment or decrement would overflow")
    value = b"%d" % new
    admit(client, [(key, value, None)])
    keyspace.set_string(key, value, entry.expires if entry is not None else 0, "incrby")
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
    """The new number. A missing key counts as 0."""
    return _add(client, plain(args[0]), 1)


@_counter("decr key", summary="Subtracts one from a number.")
def decr(client: Client, args: list[Argument]) -> Reply:
    """The new number. A missing key counts as 0."""
    return _add(client, plain(args[0]), -1)


@_counter("incrby key increment", summary="Adds to a number.")
def incrby(client: Client, args: list[Argument]) -> Reply:
    """The new number. A missing key counts as 0."""
    return _add(client, plain(args[0]), integer(args[1]))


@_counter("decrby key decrement", summary="Subtracts from a number.")
def decrby(client: Client, args: list[Argument]) -> Reply:
    """The new number. A missing key counts as 0."""
    amount = integer(args[1])
    if amount == I64[0]:
        raise ReplyError("ERR decrement would overflow")
    return _add(client, plain(args[0]), -amount)
