"""Commands for authentication, protocol, and state of a connection."""

from __future__ import annotations

import asyncio
import re
from functools import partial

from kvpage_server import __version__
from kvpage_server.commands.access.users import DEFAULT, TooMany
from kvpage_server.commands.arguments import SYNTAX_ERROR, as_integer, escaped, integer, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import Postponed
from kvpage_server.commands.families.server.info import REDIS_VERSION
from kvpage_server.commands.registry import command
from kvpage_server.core import Argument
from kvpage_server.resp import OK, PONG, Push, Reply, ReplyError, Wait, simple

MOST_OF_A_NAME = 1024  # bytes; CLIENT LIST, SLOWLOG and ACL LOG copy the name
_PRINTABLE = re.compile(rb"[!-~]*\Z")
_AT_HAND = "noscript loading stale fast no_auth allow_busy"  # flags of commands that are always allowed


def checked_name(name: bytes) -> bytes:
    """Return a client name unchanged. Raises ReplyError for spaces, control characters or more than MOST_OF_A_NAME
    bytes.
    """
    return printable("Client names", name)


def printable(what: str, value: bytes) -> bytes:
    """Return a value unchanged. Raises ReplyError, which begins with `what`, if the value cannot be a field of CLIENT
    LIST.
    """
    if not _PRINTABLE.match(value):
        raise ReplyError(f"ERR {what} cannot contain spaces, newlines or special characters.")
    if len(value) > MOST_OF_A_NAME:
        raise ReplyError(f"ERR {what} can have at most {MOST_OF_A_NAME} bytes, got {len(value)}")
    return value


_command = partial(command, group="connection")


@_command(
    "ping [message]",
    flags="fast while_subscribed",
    reply="simple | bulk | array of bulk",
    summary="Returns PONG, or the message.",
)
def ping(client: Client, args: list[Argument]) -> Reply:
    """Return PONG, or the message. A RESP2 client that is subscribed gets it in the form of a published message."""
    if len(args) > 1:
        raise ReplyError("ERR wrong number of arguments for 'ping' command")
    if client.protocol == 2 and (client.channels or client.patterns):
        return Push([b"pong", plain(args[0]) if args else b""])
    return plain(args[0]) if args else PONG


@_command("echo message", flags="loading stale fast", reply="bulk", summary="Returns the message.")
def echo(client: Client, args: list[Argument]) -> Reply:
    """Return the message."""
    return plain(args[0])


@_command("select index", flags="loading stale fast", reply="OK", summary="Chooses the database; the only one is 0.")
def select(client: Client, args: list[Argument]) -> Reply:
    """Return OK for database 0, the only one. Raises ReplyError for others."""
    index = integer(args[0])
    if not -(2**31) <= index < 2**31:
        raise ReplyError("ERR value is out of range, value must between -2147483648 and 2147483647")
    if index != 0:
        raise ReplyError("ERR DB index is out of range")
    return OK


@_command(
    "quit",
    arity=-1,
    flags=_AT_HAND + " unqueued while_subscribed",
    reply="OK",
    summary="Ends the connection once the reply is sent.",
)
def quit_(client: Client, args: list[Argument]) -> Reply:
    """Return OK, after which the connection is closed."""
    client.close()
    return OK


@_command(
    "reset",
    flags=_AT_HAND + " unqueued while_subscribed",
    since="6.2.0",
    complexity="O(N) with N channels and watched keys",
    reply="simple",
    summary="Resets the connection to its initial state.",
)
def reset(client: Client, args: list[Argument]) -> Reply:
    """Reset the connection: no transaction, subscription, MONITOR, tracking, ticket or name, RESP2, and the default
    user if that needs no password. Return RESET.
    """
    client.end_transaction()
    client.server.channels.forget(client)
    client.server.monitors.pop(client, None)
    client.server.events.untrack(client)
    client.protocol, client.name = 2, b""
    client.silence = max(client.silence, 0)  # SKIP still holds for this reply
    client.spared, client.touches = False, True
    client.take_back_all()
    client.drop_area()
    default = client.server.users.default
    is_open = default.no_password and default.enabled and not client.needs_password
    client.become(default if is_open else None)
    return simple("RESET")


@_command(
    "auth [username] password",
    flags=_AT_HAND + " secret",
    complexity="O(N) with N passwords of the user",
    reply="OK",
    summary="Authenticates the connection.",
)
def auth(client: Client, args: list[Argument]) -> Reply:
    """Log the client in as a user, `default` without a name, and return OK. Raises ReplyError for a wrong password,
    and Postponed, which delays the reply, after many wrong passwords from the client's address.
    """
    if len(args) > 2:
        raise ReplyError(SYNTAX_ERROR)
    words = plain_all(args)
    if len(words) == 1 and client.server.users.default.no_password:
        raise ReplyError(
            "ERR AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    _authenticate(client, words[0] if len(words) == 2 else DEFAULT, words[-1])
    return OK


def _authenticate(client: Client, name: bytes, password: bytes) -> None:
    """Log the client in as the user `name`. Raises ReplyError for a wrong password, which is counted and noted in the
    ACL log, and Postponed as `_wait_for_its_turn`.
    """
    _wait_for_its_turn(client)
    user = client.server.users.authenticate(name, password)
    if user is None or (client.needs_password and user.no_password):
        client.server.login_limit.note(client.address, over_http=client.over_http)
        client.server.refuse(client, "auth", b"AUTH", name)
        raise ReplyError("WRONGPASS invalid username-password pair or user is disabled.")
    client.become(user)


def _wait_for_its_turn(client: Client) -> None:
    """Raise Postponed if too many wrong passwords were sent from the client's address, so that its logins are slowed
    down; ReplyError if the wait would be too long. Return when the command runs once more after the wait.
    """
    if client.waited_to_authenticate:
        client.waited_to_authenticate = False
        return
    try:
        seconds = client.server.login_limit.take_turn(client.address, over_http=client.over_http)
    except TooMany as error:
        raise ReplyError(f"ERR {error}") from None
    if seconds:
        client.waited_to_authenticate = True
        raise Postponed(Wait(partial(asyncio.get_running_loop().call_later, seconds)))


@_command(
    "hello [protover [AUTH username password] [SETNAME clientname]]",
    flags=_AT_HAND + " secret",
    since="6.0.0",
    reply="map",
    summary="Greets the server and chooses RESP2 or RESP3.",
)
def hello(client: Client, args: list[Argument]) -> Reply:
    """Set the protocol and, as the options say, the user and the name of the connection. Return a map that describes
    server and connection.
    """
    words = plain_all(args)
    protocol = _protocol(words[0]) if words else client.protocol
    name, credentials = client.name, None
    rest = words[1:]
    while rest:
        option = rest[0].upper()
        if option == b"AUTH" and len(rest) >= 3:
            credentials, rest = rest[1:3], rest[3:]
        elif option == b"SETNAME" and len(rest) >= 2:
            name, rest = checked_name(rest[1]), rest[2:]
        else:
            raise ReplyError(f"ERR Syntax error in HELLO option '{escaped(rest[0])}'")
    if credentials is not None:
        _authenticate(client, *credentials)
    if client.user is None:
        raise ReplyError(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH "
            "<user> <pass> option can be used to authenticate the client and select the RESP protocol version at the "
            "same time"
        )
    client.protocol, client.name = protocol, name
    return {
        "server": "redis",
        "version": REDIS_VERSION,
        "proto": protocol,
        "id": client.id,
        "mode": "standalone",
        "role": "master",
        "modules": [],
        "kvpage": __version__,
    }


def _protocol(word: bytes) -> int:
    """Return the RESP version in an argument, 2 or 3. Raises ReplyError for others."""
    chosen = as_integer(word)
    if chosen is None:
        raise ReplyError("ERR Protocol version is not an integer or out of range")
    if chosen not in (2, 3):
        raise ReplyError("NOPROTO unsupported protocol version")
    return chosen


@_command("readonly", flags="loading stale fast", since="3.0.0", reply="OK", summary="Has no effect here.")
def readonly(client: Client, args: list[Argument]) -> Reply:
    """Return OK. The command is meant for replicas, which do not exist here."""
    return OK


@_command("readwrite", flags="loading stale fast", since="3.0.0", reply="OK", summary="Has no effect here.")
def readwrite(client: Client, args: list[Argument]) -> Reply:
    """Return OK, as READONLY does."""
    return OK
