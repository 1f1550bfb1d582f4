"""The subcommands of CLIENT, for the client's own connection and other connections that the user may see."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvpage_server.commands.arguments import SYNTAX_ERROR, as_integer, escaped, integer, plain, plain_all
from kvpage_server.commands.context import Client, Pause
from kvpage_server.commands.families.connections.connection import checked_name, printable
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.steps import STEP, Steps, each, stepwise
from kvpage_server.core import Argument
from kvpage_server.resp import OK, Reply, ReplyError, Verbatim

_OWN = "noscript loading stale keeps_caching"
_OTHERS = "admin noscript loading stale keeps_caching"
_TYPES = (b"normal", b"master", b"replica", b"slave", b"pubsub")

Chosen = Callable[[Client], bool]

_own = partial(command, flags=_OWN, group="connection")
_others = partial(command, flags=_OTHERS, group="connection")


container("client", group="connection", since="2.4.0", summary="A container for commands about connections.")


@_own("client|id", since="5.0.0", reply="integer", summary="Returns the connection's id.")
def client_id(client: Client, args: list[Argument]) -> Reply:
    """Return the id of the client's connection. Ids are unique, and grow with time."""
    return client.id


@_own("client|getname", since="2.6.9", reply="bulk | null", summary="Returns the connection's name.")
def client_getname(client: Client, args: list[Argument]) -> Reply:
    """Return the name of the client's connection; null if it has none."""
    return client.name or None


@_own("client|setname connection-name", since="2.6.9", reply="OK", summary="Names the connection.")
def client_setname(client: Client, args: list[Argument]) -> Reply:
    """Set the name of the client's connection, and return OK. An empty name removes it."""
    client.name = checked_name(plain(args[0]))
    return OK


@_own(
    "client|setinfo <LIB-NAME libname | LIB-VER libver>",
    since="7.2.0",
    reply="OK",
    summary="Sets the name or version of the client library.",
)
def client_setinfo(client: Client, args: list[Argument]) -> Reply:
    """Set the name or version of the client's library, which CLIENT LIST shows, and return OK."""
    option, value = plain_all(args)
    what = option.lower()
    if what not in (b"lib-name", b"lib-ver"):
        raise ReplyError(f"ERR Unrecognized option '{escaped(option)}'")
    checked = printable(what.decode(), value)
    if what == b"lib-name":
        client.lib_name = checked
    else:
        client.lib_version = checked
    return OK


@_own("client|info", since="6.2.0", reply="text", summary="Describes the connection.")
def client_info(client: Client, args: list[Argument]) -> Reply:
    """Return the line of CLIENT LIST for the client's connection."""
    return Verbatim(_line(client))


@_others(
    "client|list [TYPE <NORMAL | MASTER | REPLICA | PUBSUB>] [ID client-id [client-id ...]]",
    flags=_OTHERS + " filtered",
    since="2.4.0",
    complexity="O(N) with N connections",
    reply="text",
    summary="Lists connections.",
)
def client_list(client: Client, args: list[Argument]) -> Reply:
    """Return a line for each connection that the user may see, and that the options select: all connections if it may
    read every key, otherwise those of its own user.
    """
    words = plain_all(args)
    option = words[0].upper() if words else b""
    chosen: Chosen
    if not words:
        chosen = _everyone
    elif option == b"TYPE" and len(words) == 2:
        chosen = _of_type(words[1])
    elif option == b"ID" and len(words) > 1:
        ids = set(map(as_integer, words[1:]))
        if not all(ids):
            raise ReplyError("ERR Invalid client ID")
        chosen = lambda other: other.id in ids  # noqa: E731
    else:
        raise ReplyError(SYNTAX_ERROR)
    peers = list(client.peers())

    def steps() -> Steps[Reply]:
        lines = yield from each(
            peers, lambda some: [_line(other) for other in some if not other.gone and chosen(other)]
        )
        return Verbatim(b"".join(lines))

    return stepwise(steps(), small=len(peers) <= STEP)


def _line(other: Client) -> bytes:
    """Return the line of CLIENT LIST for a client, with its line break."""
    return str(other).encode("utf-8", "surrogateescape") + b"\n"


def _everyone(other: Client) -> bool:
    """Return True: the condition that selects every client."""
    return True


def _of_type(word: bytes) -> Chosen:
    """Return a condition that selects clients of a type of Redis; no client has the types of replication. Raises
    ReplyError for an unknown type.
    """
    kind = word.lower()
    if kind not in _TYPES:
        raise ReplyError(f"ERR Unknown client type '{escaped(word)}'")
    if kind in (b"normal", b"pubsub"):
        return lambda other: bool(other.channels or other.patterns) == (kind == b"pubsub")
    return lambda other: False


@_others(
    "client|kill <ip:port | [ID client-id] [TYPE <NORMAL | MASTER | REPLICA | PUBSUB>] [USER username] "
    "[ADDR ip:port] [LADDR ip:port] [SKIPME <YES | NO>] [MAXAGE seconds]>",
    arity=-3,
    flags=_OTHERS + " filtered",
    since="2.4.0",
    complexity="O(N) with N connections",
    reply="OK | integer",
    summary="Ends connections.",
)
def client_kill(client: Client, args: list[Argument]) -> Reply:
    """Close connections of CLIENT LIST that the options select. Return their number; OK for the old form with an
    address, and then an error if there is no such connection.
    """
    words = plain_all(args)
    if len(words) == 1:
        chosen, skip_me = [_of_address(words[0])], False
    else:
        chosen, skip_me = _filters(client, words)
    peers = [other for other in client.peers() if not (skip_me and other is client)]
    at_once = max(STEP // len(chosen), 1) if chosen else STEP

    def steps() -> Steps[Reply]:
        killed = yield from each(
            peers, lambda some: [_end(client, other) for other in some if _is(other, chosen)], at_once=at_once
        )
        if client in killed:
            client.close()  # in the last step, after which no command runs
        if len(words) == 1 and not killed:
            raise ReplyError("ERR No such client")
        return OK if len(words) == 1 else len(killed)

    return stepwise(steps(), small=len(peers) <= at_once)


def _is(other: Client, chosen: list[Chosen]) -> bool:
    """Return whether a client is connected, and fulfils all conditions."""
    return not other.gone and all(is_chosen(other) for is_chosen in chosen)


def _end(client: Client, other: Client) -> Client:
    """Close the connection of the client `other`, and return `other`. If it is the calling client, its connection is
    left for the caller to close.
    """
    if other is not client:
        other.connection.abort()
    return other


def _of_address(word: bytes) -> Chosen:
    """Return a condition that selects the client with an address ("host:port", or the path of a unix socket and a
    number).
    """
    address = word[:1024].decode("utf-8", "surrogateescape")
    return lambda other: other.address == address


def _filters(client: Client, words: list[bytes]) -> tuple[list[Chosen], bool]:
    """Return the conditions in CLIENT KILL's options, and whether the calling client is left out (SKIPME). Raises
    ReplyError.
    """
    if len(words) % 2:
        raise ReplyError(SYNTAX_ERROR)
    chosen: list[Chosen] = []
    skip_me = True
    for option, value in zip(words[::2], words[1::2], strict=True):
        what = option.upper()
        if what == b"SKIPME" and value.upper() in (b"YES", b"NO"):
            skip_me = value.upper() == b"YES"
        elif what in (b"ID", b"MAXAGE"):
            chosen.append(_of_number(what, value))
        elif what == b"TYPE":
            chosen.append(_of_type(value))
        elif what == b"USER":
            chosen.append(_of_user(client, value))
        elif what == b"ADDR":
            chosen.append(_of_address(value))
        elif what == b"LADDR":
            local = value[:1024].decode("utf-8", "surrogateescape")
            chosen.append(lambda other, local=local: other.local_address == local)  # type: ignore[misc]
        else:
            raise ReplyError(SYNTAX_ERROR)
    return chosen, skip_me


def _of_number(what: bytes, value: bytes) -> Chosen:
    """Return the condition for the option `what`, ID or MAXAGE (seconds), with a number from 1 on. Raises
    ReplyError.
    """
    number = as_integer(value)
    if number is None or number <= 0:
        name = "client-id" if what == b"ID" else "maxage"
        raise ReplyError(f"ERR {name} should be greater than 0")
    if what == b"ID":
        return lambda other: other.id == number
    return lambda other: time.monotonic() - other.connected >= number


def _of_user(client: Client, name: bytes) -> Chosen:
    """Return a condition that selects the clients of a user. Raises ReplyError if there is no such user, or the client
    may not see it.
    """
    user = client.server.users.by_name.get(name)
    if user is None or not (client.sees_all or user is client.user):
        raise ReplyError(f"ERR No such user '{escaped(name)}'")
    return lambda other: other.user is user


@_others(
    "client|pause timeout [WRITE | ALL]",
    since="3.0.0",
    complexity="O(N) with N connections",
    reply="OK",
    summary="Makes every client's commands, or writes, wait for some milliseconds.",
)
def client_pause(client: Client, args: list[Argument]) -> Reply:
    """Let the commands of all clients, or only the commands that write, wait for some milliseconds, and return OK. A
    pause never shortens or weakens another.
    """
    timeout, *mode = plain_all(args)
    if len(mode) > 1 or (mode and mode[0].upper() not in (b"WRITE", b"ALL")):
        raise ReplyError(SYNTAX_ERROR)
    milliseconds = as_integer(timeout)
    if milliseconds is None:
        raise ReplyError("ERR timeout is not an integer or out of range")
    if milliseconds < 0:
        raise ReplyError("ERR timeout is negative")
    new = Pause(time.monotonic() + milliseconds / 1000, bool(mode) and mode[0].upper() == b"WRITE")
    old = client.server.pause if client.server.is_paused else None
    if old is not None:
        new = Pause(max(old.ends, new.ends), old.only_writes and new.only_writes)
    client.server.begin_pause(new)
    return OK


@_others("client|unpause", since="6.2.0", complexity="O(N) with N connections", reply="OK", summary="Ends a pause.")
def client_unpause(client: Client, args: list[Argument]) -> Reply:
    """End a CLIENT PAUSE, and return OK. Commands that wait run then."""
    client.server.end_pause()
    return OK


@_others(
    "client|unblock client-id [TIMEOUT | ERROR]",
    since="5.0.0",
    most=4,
    reply="integer",
    summary="Unblocks a connection that waits in a blocking command; there are no such commands.",
)
def client_unblock(client: Client, args: list[Argument]) -> Reply:
    """Return 0: no client waits in a blocking command, because there are none."""
    number, *reason = plain_all(args)
    if reason and reason[0].upper() not in (b"TIMEOUT", b"ERROR"):
        raise ReplyError("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR")
    integer(number)
    return 0


def _on_or_off(args: list[Argument]) -> bool:
    """Return whether the first argument is ON. Raises ReplyError if it is neither ON nor OFF."""
    word = plain(args[0]).upper()
    if word not in (b"ON", b"OFF"):
        raise ReplyError(SYNTAX_ERROR)
    return word == b"ON"


@_others(
    "client|no-evict <ON | OFF>",
    since="7.0.0",
    reply="OK",
    summary="Sets whether the connection may be closed when all connections hold too much memory.",
)
def client_no_evict(client: Client, args: list[Argument]) -> Reply:
    """Set whether the connection is spared when connections are closed because all hold more memory than
    maxmemory-clients. Return OK.
    """
    client.spared = _on_or_off(args)
    return OK


@_own(
    "client|no-touch <ON | OFF>",
    since="7.2.0",
    reply="OK",
    summary="Sets whether the connection's reads count as a use of keys.",
)
def client_no_touch(client: Client, args: list[Argument]) -> Reply:
    """Set whether the client's reads do not count as uses of values for eviction, for example those of a backup. Return
    OK.
    """
    client.touches = not _on_or_off(args)
    client.update_fast_path()
    return OK


@_own(
    "client|reply <ON | OFF | SKIP>",
    flags=_OWN + " no_multi",
    since="3.2.0",
    reply="OK | nothing",
    summary="Turns replies on or off, or leaves out the next one.",
)
def client_reply(client: Client, args: list[Argument]) -> Reply:
    """Turn the replies to the client on or off, or only for the next command. Return OK for ON; OFF and SKIP have no
    reply.
    """
    word = plain(args[0]).upper()
    if word not in (b"ON", b"OFF", b"SKIP"):
        raise ReplyError(SYNTAX_ERROR)
    if word == b"ON":
        client.silence = 0
    elif word == b"OFF":
        client.silence = -1
    elif client.silence >= 0:
        client.silence = 2  # this one and the next
    client.update_fast_path()
    return OK
