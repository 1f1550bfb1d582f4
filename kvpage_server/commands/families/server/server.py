"""The server family: how it is doing, and how it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial

from kvpage_server.commands.arguments import SYNTAX_ERROR, integer, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.server.info import info_text
from kvpage_server.commands.families.server.save import saved
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.steps import STEP, Steps, stepwise
from kvpage_server.commands.totals import counted
from kvpage_server.core import Argument
from kvpage_server.resp.reply import Reply, ReplyError, Stream, Verbatim

log = logging.getLogger("kvpage")


_server = partial(command, group="server")


@_server(
    "info [section [section ...]]",
    flags="loading stale dangerous filtered",
    complexity="O(N) with N connections",
    reply="text",
    summary="Describes the server's state.",
)
def info(client: Client, args: list[Argument]) -> Reply:
    """Text in sections of `name:value` lines; users who may not read every key are not shown what concerns all keys."""
    wanted = {word.decode("ascii", "replace").lower() for word in plain_all(args)}

    def steps() -> Steps[Reply]:
        yield from counted(client.server)
        return Verbatim(info_text(client, wanted).encode())

    return stepwise(steps(), small=len(client.server.clients) <= STEP)


@_server("time", flags="loading stale fast", since="2.6.0", reply="array of bulk", summary="Returns the server's time.")
def time_(client: Client, args: list[Argument]) -> Reply:
    """Unix seconds and the microseconds of this one."""
    now = time.time_ns() // 1000
    return [b"%d" % (now // 1_000_000), b"%d" % (now % 1_000_000)]


@_server(
    "role",
    flags="admin noscript loading stale fast filtered",
    since="2.8.12",
    reply="array",
    summary="Returns the server's role.",
)
def role(client: Client, args: list[Argument]) -> Reply:
    """Master, at offset 0, with no replicas."""
    return [b"master", 0, []]


@command(
    "wait numreplicas timeout",
    flags="noscript",
    since="3.0.0",
    reply="integer",
    summary="Returns 0: there are no replicas to wait for.",
    group="connection",
)
def wait(client: Client, args: list[Argument]) -> Reply:
    """0 at once."""
    integer(args[0])
    if integer(args[1]) < 0:
        raise ReplyError("ERR timeout is negative")
    return 0


container("module", group="server", since="4.0.0", summary="A container for module commands.")


@_server("module|list", flags="admin noscript filtered", since="4.0.0", reply="array", summary="Lists modules: none.")
def module_list(client: Client, args: list[Argument]) -> Reply:
    """Empty: the page commands are built in."""
    return []


@_server(
    "shutdown [NOSAVE | SAVE] [NOW] [FORCE] [ABORT]",
    flags="admin noscript loading stale no_multi allow_busy",
    complexity="O(N) with N changes that are not on disk",
    reply="nothing",
    summary="Ends the server.",
)
def shutdown(client: Client, args: list[Argument]) -> Reply:
    """No reply: the connection closes. An error, and the server goes on, when something cannot be written to disk.

    With FORCE or NOSAVE it ends nevertheless.
    """
    words = {word.upper() for word in plain_all(args)}
    if not words <= {b"NOSAVE", b"SAVE", b"NOW", b"FORCE", b"ABORT"} or {b"NOSAVE", b"SAVE"} <= words:
        raise ReplyError(SYNTAX_ERROR)
    if b"ABORT" in words:
        raise ReplyError("ERR No shutdown in progress.")
    tiered = client.server.tiered

    def steps() -> Iterator[Reply]:
        if tiered is not None and not words & {b"NOSAVE", b"FORCE"}:
            try:
                yield from saved(tiered)
            except ReplyError as error:
                log.error("SHUTDOWN is refused: %s", error)
                client.server.stats.note_error(str(error))
                yield ReplyError(f"ERR Errors trying to SHUTDOWN. {str(error).removeprefix('ERR ')}")
                return
        client.server.stop()
        client.close()

    return Stream(None, steps())
