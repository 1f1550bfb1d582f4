"""INFO, TIME, ROLE, SHUTDOWN, the commands that save to disk, and the refusal of CLUSTER."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from functools import partial

from kvpage_server.commands.arguments import SYNTAX_ERROR, integer, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.server.info import info_text
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.specs import lower_name
from kvpage_server.commands.steps import STEP, Steps, counted, stepwise
from kvpage_server.core import Argument
from kvpage_server.resp import OK, Reply, ReplyError, Stream, Verbatim, Wait, simple
from kvpage_server.store.disk.tier import DiskTier

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
    """Return the text of the named sections, or of the default ones: lines `name:value`. Users without access to every
    key do not see values about all keys.
    """
    names = {lower_name(word).decode("ascii", "replace") for word in plain_all(args)}

    def steps() -> Steps[Reply]:
        yield from counted(client.server)
        return Verbatim(info_text(client, names).encode())

    return stepwise(steps(), small=len(client.server.clients) <= STEP)


@_server("time", flags="loading stale fast", since="2.6.0", reply="array of bulk", summary="Returns the server's time.")
def time_(client: Client, args: list[Argument]) -> Reply:
    """Return the unix seconds, and the microseconds since that second."""
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
    """Return master, the offset 0 and no replicas."""
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
    """Return 0 immediately: there are no replicas."""
    integer(args[0])
    if integer(args[1]) < 0:
        raise ReplyError("ERR timeout is negative")
    return 0


container("module", group="server", since="4.0.0", summary="A container for module commands.")


@_server("module|list", flags="admin noscript filtered", since="4.0.0", reply="array", summary="Lists modules: none.")
def module_list(client: Client, args: list[Argument]) -> Reply:
    """Return an empty array: the page commands are no module."""
    return []


@_server(
    "shutdown [NOSAVE | SAVE] [NOW] [FORCE] [ABORT]",
    flags="admin noscript loading stale no_multi allow_busy",
    complexity="O(N) with N changes that are not on disk",
    reply="nothing",
    summary="Ends the server.",
)
def shutdown(client: Client, args: list[Argument]) -> Reply:
    """Write dirty values to disk, and stop the server. There is no reply: the connection is closed. If values cannot be
    written, the reply is an error, and the server goes on.

    FORCE or NOSAVE stop the server in any case.
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
                yield from _done(tiered.begin_save())
            except ReplyError as error:
                log.error("SHUTDOWN is refused: %s", error)
                raise ReplyError(f"ERR Errors trying to SHUTDOWN. {str(error).removeprefix('ERR ')}") from None
        client.server.stop()
        client.close()

    return Stream(None, steps())


# -- CLUSTER: refused, so that clients of Redis Cluster recognise a server that is not a node of one -------------------

_cluster = partial(
    command,
    flags="stale",
    group="cluster",
    since="3.0.0",
    summary="Refused, as by a Redis without cluster support.",
)

container("cluster", group="cluster", since="3.0.0", summary="A container for Redis Cluster's commands.")


@_cluster("cluster|info", reply="bulk")
@_cluster("cluster|keyslot key", reply="integer")
@_cluster("cluster|myid", reply="bulk")
@_cluster("cluster|nodes", reply="bulk")
@_cluster("cluster|shards", since="7.0.0", reply="array of map")
@_cluster("cluster|slots", reply="array of array")
def cluster_disabled(client: Client, args: list[Argument]) -> Reply:
    """Raise ReplyError with Redis's text, by which clients recognise a server without cluster support."""
    raise ReplyError("ERR This instance has cluster support disabled")


# -- SAVE, BGSAVE, LASTSAVE --------------------------------------------------------------------------------------------


def _tiered(client: Client) -> DiskTier:
    """Return the disk tier. Raises ReplyError if the store has none."""
    tiered = client.server.tiered
    if tiered is None:
        raise ReplyError("ERR there is no disk to save to: the parameter `store` is memory")
    return tiered


def _done(writing: asyncio.Future[str]) -> Iterator[Reply]:
    """Yield a Wait until `writing` is done. Raises ReplyError if its result, the reason of a failure, is not empty."""
    yield Wait(lambda then: writing.add_done_callback(lambda _: then()))
    if reason := writing.result():
        raise ReplyError(f"ERR Errors writing to disk: {reason}")


_save = partial(command, group="server")


@_save(
    "save",
    flags="admin noscript no_async_loading no_multi dangerous",
    complexity="O(N) with N changes that are not on disk",
    reply="OK",
    summary="Writes everything to disk before it answers.",
)
def save(client: Client, args: list[Argument]) -> Reply:
    """Return OK when all dirty values are on disk, or an error with the number of unwritten values and the reason.
    Other clients are served meanwhile.
    """
    tiered = _tiered(client)

    def steps() -> Iterator[Reply]:
        yield from _done(tiered.begin_save())
        yield OK

    return Stream(None, steps())


@_save(
    "kvdecode",
    flags="admin noscript no_async_loading no_multi dangerous",
    complexity="O(N) with N bytes on disk",
    reply="OK",
    summary="Stores all values on disk without the lossless code.",
)
def kvdecode(client: Client, args: list[Argument]) -> Reply:
    """Return OK when no value on disk has the code, and the file has the format that older versions read. Other clients
    are served meanwhile. It needs `page-code off`. If the disk is full, the reply is an error, and the values so far
    are decoded.
    """
    tiered = _tiered(client)
    if (mode := client.server.config.page_code) != "off":
        raise ReplyError(f"ERR KVDECODE needs `page-code off`, and page-code is {mode}")

    def steps() -> Iterator[Reply]:
        yield from _done(tiered.begin_decoding())
        yield OK

    return Stream(None, steps())


@_save(
    "bgsave [SCHEDULE]",
    flags="admin noscript no_async_loading dangerous",
    reply="simple",
    summary="Starts writing everything to disk, and returns at once.",
)
def bgsave(client: Client, args: list[Argument]) -> Reply:
    """Start to write all dirty values to disk, and return Redis's confirmation."""
    if [word.upper() for word in plain_all(args)] not in ([], [b"SCHEDULE"]):
        raise ReplyError(SYNTAX_ERROR)
    _tiered(client).begin_save()
    return simple("Background saving started")


@_save(
    "lastsave",
    flags="loading stale fast admin dangerous",
    tips="nondeterministic_output",
    reply="integer",
    summary="Returns the unix second of the last commit to disk, or of the start if there was none.",
)
def lastsave(client: Client, args: list[Argument]) -> Reply:
    """Return the unix second of the last commit to disk, or of the server's start if there was none."""
    server = client.server
    return (server.started_ms if server.tiered is None else server.tiered.behind.last_commit) // 1000
