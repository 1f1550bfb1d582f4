"""SAVE, BGSAVE, LASTSAVE: what was stored goes to disk by itself; these have it go now, and tell when it did."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial

from kvpage_server.commands.arguments import SYNTAX_ERROR, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command
from kvpage_server.core import Argument
from kvpage_server.resp.reply import OK, Reply, ReplyError, Stream, Wait, simple
from kvpage_server.store.disk.tier import DiskTier


def _tiered(client: Client) -> DiskTier:
    tiered = client.server.tiered
    if tiered is None:
        raise ReplyError("ERR there is no disk to save to: the parameter `store` is memory")
    return tiered


def saved(tiered: DiskTier) -> Generator[Reply, None, None]:
    """Steps of a reply until everything was written. Raises ReplyError saying what could not be, and why."""
    saving = tiered.begin_save()
    yield Wait(lambda then: saving.add_done_callback(lambda _: then()))
    if reason := saving.result():
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
    """OK, once it is there; an error that says what is not, and why. Others do not wait."""
    tiered = _tiered(client)

    def steps() -> Iterator[Reply]:
        try:
            yield from saved(tiered)
        except ReplyError as error:
            client.server.stats.note_error(str(error))
            yield error
        else:
            yield OK

    return Stream(None, steps())


@_save(
    "bgsave [SCHEDULE]",
    flags="admin noscript no_async_loading dangerous",
    reply="simple",
    summary="Starts writing everything to disk, and returns at once.",
)
def bgsave(client: Client, args: list[Argument]) -> Reply:
    """A simple string, as Redis words it."""
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
    """Unix seconds."""
    server = client.server
    return (server.started_ms if server.tiered is None else server.tiered.behind.last_commit) // 1000
