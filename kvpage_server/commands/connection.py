"""The connection family: who is talking, and how."""

from __future__ import annotations

import re
import time

from kvpage_server import __version__
from kvpage_server.commands.arguments import as_integer, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.info import REDIS_VERSION
from kvpage_server.commands.registry import command, container
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import OK, PONG, Reply, ReplyError

_PRINTABLE = re.compile(rb"[!-~]*\Z")


@command("ping", -1, "fast", group="connection", usage="[message]", summary="Says that the server lives.")
def ping(client: Client, args: list[Argument]) -> Reply:
    """PONG, or the message."""
    if len(args) > 1:
        raise ReplyError("ERR wrong number of arguments for 'ping' command")
    return plain(args[0]) if args else PONG


@command("echo", 2, "fast", group="connection", usage="message", summary="Returns the message.")
def echo(client: Client, args: list[Argument]) -> Reply:
    """The message."""
    return plain(args[0])


@command("select", 2, "fast", group="connection", usage="index", summary="Chooses the database; there is one, 0.")
def select(client: Client, args: list[Argument]) -> Reply:
    """OK for 0."""
    index = as_integer(args[0])
    if index is None:
        raise ReplyError("ERR invalid DB index")
    if index != 0:
        raise ReplyError("ERR DB index is out of range")
    return OK


@command("quit", -1, "fast", group="connection", summary="Ends the connection once the reply is sent.")
def quit_(client: Client, args: list[Argument]) -> Reply:
    """OK, the last word."""
    client.close()
    return OK


@command(
    "hello",
    -1,
    "fast",
    group="connection",
    usage="[protover [AUTH username password] [SETNAME clientname]]",
    summary="Greets the server and chooses RESP2 or RESP3.",
)
def hello(client: Client, args: list[Argument]) -> Reply:
    """A map of who the server is."""
    words = plain_all(args)
    protocol = client.protocol
    if words:
        chosen = as_integer(words[0])
        if chosen is None:
            raise ReplyError("ERR Protocol version is not an integer or out of range")
        if chosen not in (2, 3):
            raise ReplyError("NOPROTO unsupported protocol version")
        protocol = chosen
    name = client.name
    rest = words[1:]
    while rest:
        option = rest[0].upper()
        if option == b"AUTH" and len(rest) >= 3:
            rest = rest[3:]
        elif option == b"SETNAME" and len(rest) >= 2:
            name = _checked_name(rest[1])
            rest = rest[2:]
        else:
            shown = rest[0].decode("ascii", "backslashreplace")
            raise ReplyError(f"ERR Syntax error in HELLO option '{shown}'")
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


def _checked_name(name: bytes) -> bytes:
    if not _PRINTABLE.match(name):
        raise ReplyError("ERR Client names cannot contain spaces, newlines or special characters.")
    return name


container("client", group="connection", summary="A container for commands about connections.")


@command("client|id", 2, "fast", group="connection", summary="Returns the connection's id.")
def client_id(client: Client, args: list[Argument]) -> Reply:
    """Unique, growing."""
    return client.id


@command("client|getname", 2, "fast", group="connection", summary="Returns the connection's name.")
def client_getname(client: Client, args: list[Argument]) -> Reply:
    """Null when none was set."""
    return client.name or None


@command("client|setname", 3, "fast", group="connection", usage="name", summary="Names the connection.")
def client_setname(client: Client, args: list[Argument]) -> Reply:
    """An empty name takes it away."""
    client.name = _checked_name(plain(args[0]))
    return OK


@command(
    "client|setinfo",
    4,
    "fast",
    group="connection",
    usage="<LIB-NAME libname | LIB-VER libver>",
    summary="Tells which client library is talking.",
)
def client_setinfo(client: Client, args: list[Argument]) -> Reply:
    """Shown by CLIENT LIST and INFO."""
    option, value = plain_all(args)
    if option.upper() not in (b"LIB-NAME", b"LIB-VER"):
        raise ReplyError(f"ERR Unrecognized option '{option.decode('ascii', 'backslashreplace')}'")
    what = option.lower().decode()
    if not _PRINTABLE.match(value):
        raise ReplyError(f"ERR {what} cannot contain spaces, newlines or special characters.")
    if what == "lib-name":
        client.lib_name = value
    else:
        client.lib_version = value
    return OK


def describe(client: Client) -> str:
    """A client as a line of CLIENT LIST."""
    now = time.monotonic()
    return (
        f"id={client.id} addr={client.address} laddr={client.local_address} name={client.name.decode('ascii')} "
        f"age={int(now - client.connected)} idle={int(now - client.active)} flags=N db=0 resp={client.protocol} "
        f"cmd={client.last_command} user=default lib-name={client.lib_name.decode('ascii')} "
        f"lib-ver={client.lib_version.decode('ascii')}"
    )
