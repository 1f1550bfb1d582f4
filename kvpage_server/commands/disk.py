"""What commands wait for where there is a disk: values that are fetched, and room for what is written.

A command that reads values runs once they are in memory. A long reply that is made while it is sent fetches what its
next steps need, and so does a batch of writes. All else knows what it needs from the index alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Concatenate, ParamSpec

from kvpage_server.commands.arguments import plain
from kvpage_server.commands.context import Client
from kvpage_server.commands.keys import Prefix
from kvpage_server.commands.registry import Spec
from kvpage_server.resp.parser import Argument, Command
from kvpage_server.resp.reply import Reply, ReplyError, Wait
from kvpage_server.store.cold import Cold
from kvpage_server.store.tiered import Tiered

P = ParamSpec("P")

_READ_VALUES = frozenset(("get", "mget", "getrange", "substr", "getset", "getdel", "getex", "set", "kvpageget"))
_FETCH_THEMSELVES = frozenset(("kvpagemget", "kvpagemset", "kvblockmget", "kvpageverify"))  # but not within EXEC


class Postponed(Exception):
    """The command is to be tried again after the wait."""

    def __init__(self, wait: Wait) -> None:
        super().__init__("the command has to wait")
        self.wait = wait


def prepare(client: Client, tiered: Tiered, spec: Spec, words: Command) -> None:
    """Raises Postponed when a command has to wait for the disk, ReplyError when it cannot keep what it promises."""
    queued = client.transaction.commands if client.transaction is not None and spec.name == "exec" else None
    commands = [(spec, words)] if queued is None else queued
    behind = tiered.behind
    if (behind.full or behind.failing) and any("denyoom" in spec.flags for spec, _ in commands):
        if behind.failing and behind.mode == "always":
            raise ReplyError(f"MISCONF Errors writing to disk, and appendfsync is always: {behind.failing}")
        if behind.full and behind.mode != "no":
            raise Postponed(Wait(behind.when_there_is_room))
    if tiered.any_cold:
        values: dict[Cold, None] = {}
        for spec, words in commands:
            if queued is not None or spec.name not in _FETCH_THEMSELVES:
                values.update(dict.fromkeys(_wanted(tiered, spec, words[spec.words :])))
        if values:
            raise Postponed(Wait(partial(tiered.fetch, list(values))))


def _wanted(tiered: Tiered, spec: Spec, args: Sequence[Argument]) -> Iterable[Cold]:
    """What has to be in memory for a command to run."""
    if spec.name in ("kvblockget", "kvblockmget"):
        first = 1 if spec.name == "kvblockmget" else 0
        return [cold for i in range(first, len(args) - 1, 2) for cold in _of_block(tiered, args[i], args[i + 1])]
    if spec.name == "kvpageverify":
        blocks = tiered.index.of(plain(args[0]))
        return [cold for block in blocks for cold in tiered.cold_of_block(block.req_id, block.page)]
    if spec.name in _READ_VALUES or spec.name == "kvpagemget":
        return tiered.cold_of(_keys(spec, args))
    if "write" in spec.flags or spec.name == "kvpagestat":
        return tiered.cold_blocks_of(_keys(spec, args))
    return ()


def _of_block(tiered: Tiered, req_id: Argument, page: Argument) -> Iterable[Cold]:
    number = plain(page)
    return tiered.cold_of_block(plain(req_id), int(number)) if number.isdigit() and len(number) < 12 else ()


def _keys(spec: Spec, args: Sequence[Argument]) -> list[bytes]:
    return [key for key, _ in spec.uses_of(args) if not isinstance(key, Prefix)]


def fetch_ahead(
    client: Client, find: Callable[Concatenate[Tiered, P], Sequence[Cold]], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Have what `find`, asked with those arguments, finds missing fetched; nobody waits for it yet."""
    tiered = client.server.tiered
    if tiered is not None and tiered.any_cold and (values := find(tiered, *args, **kwargs)):
        tiered.fetch_some(values)


def fetched(
    client: Client, find: Callable[Concatenate[Tiered, P], Sequence[Cold]], *args: P.args, **kwargs: P.kwargs
) -> Iterator[Reply]:
    """Steps of a reply until what `find`, asked with those arguments, finds missing is in memory."""
    tiered = client.server.tiered
    while tiered is not None and tiered.any_cold and (values := find(tiered, *args, **kwargs)):
        yield Wait(partial(tiered.fetch, values))
