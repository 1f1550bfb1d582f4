"""Commands of very many words, done in parts between which others have their turn.

Up to `AT_ONCE` words, a command runs at once, as in Redis: nobody sees it half done. Of a command of more words the
table says how it is divided, see `Parts`; what is not divided is refused, since nothing may hold up all clients. Rights
are asked for all parts before the first is done. A part that fails ends the command, and those before it are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvpage_server.commands import dispatch
from kvpage_server.commands.context import Client
from kvpage_server.commands.disk import Postponed, prepare
from kvpage_server.commands.registry import AT_ONCE, Parts, Spec, find
from kvpage_server.commands.steps import Steps, freed
from kvpage_server.commands.transaction import MOST_QUEUED, too_much_queued
from kvpage_server.resp.parser import Command
from kvpage_server.resp.reply import Piece, Raw, Reply, ReplyError, Stream, encode
from kvpage_server.store.hold import Hold

_PART = 128  # items


def execute(client: Client, words: Command) -> Reply:
    """The reply to one command. Errors are replies too; Paused and Postponed are raised: it is to be tried again."""
    queues = client.transaction is not None and not dispatch.is_at_once(words)
    if len(words) <= AT_ONCE or (queues and len(words) <= MOST_QUEUED):
        return dispatch.execute(client, words)
    spec = None
    try:
        spec = find(words)
        if queues:
            raise too_much_queued()
        if not client.free:
            dispatch.admit(client, spec)
        if spec.parts is None:
            raise ReplyError(f"ERR '{spec.name}' takes at most {AT_ONCE} words at once, got {len(words)}")
    except ReplyError as error:
        return Stream(None, _refused(dispatch.rejected(client, spec, words, error), words))
    client.last_command = spec.name
    return Stream(None, _steps(client, spec, spec.parts, words), whole="write" in spec.flags)


def _refused(error: ReplyError, words: Command) -> Iterator[Reply]:
    yield error
    yield from freed(words)


def _steps(client: Client, spec: Spec, parts: Parts, words: Command) -> Iterator[Reply]:
    try:
        if not client.free:
            for part in _divided(spec, parts, words):
                dispatch.check_rights(client, spec, part)
                yield ()
        if parts.joined:
            yield from _joined(client, spec, parts, words)
        else:
            hold = yield from _ready(client, spec, words)
            reply = dispatch.run_now(client, spec, words)
            del hold
            yield from _flat(reply)
    except ReplyError as error:
        yield dispatch.rejected(client, spec, words, error)
    yield from freed(words)


def _divided(spec: Spec, parts: Parts, words: Command) -> Iterable[Command]:
    """The words of each part."""
    first = spec.words + parts.first
    size = _PART * parts.width
    return (words[:first] + words[start : start + size] for start in range(first, len(words), size))


def _ready(client: Client, spec: Spec, words: Command) -> Steps[Hold | None]:
    """Steps until there is room for what a command stores, and what it needs is in memory: to be held until it has run.

    Raises ReplyError when either cannot be, or the disk cannot keep what is promised.
    """
    hold: Hold | None = None
    while True:
        try:
            dispatch.have_room(client, spec)
            if client.server.tiered is not None:
                prepare(client, client.server.tiered, spec, words)
            return hold
        except Postponed as postponed:
            hold = postponed.hold or hold
            yield postponed.wait


def _flat(reply: Reply) -> Iterator[Reply]:
    """The items of a reply that is made while it is sent."""
    if not isinstance(reply, Stream):
        yield reply
        return
    if reply.length is not None:
        yield Raw(b"*%d\r\n" % reply.length)
    yield from reply.items


def _joined(client: Client, spec: Spec, parts: Parts, words: Command) -> Iterator[Reply]:
    """The parts one after the other, and what their replies make together."""
    total: Reply = 0
    if parts.joined == "array":
        yield Raw(b"*%d\r\n" % (parts.items * (len(words) - spec.words - parts.first)))
    for part in _divided(spec, parts, words):
        hold = yield from _ready(client, spec, part)
        reply = dispatch.run_now(client, spec, part)
        del hold
        if parts.joined == "array":
            yield _items(client, reply, parts.items * (len(part) - spec.words - parts.first))
        elif isinstance(reply, ReplyError):
            yield reply
            return
        elif parts.joined == "apart":
            yield reply
        else:
            total = total + reply if parts.joined == "sum" else reply
            yield ()
    if parts.joined in ("sum", "last"):
        yield total


def _items(client: Client, reply: Reply, count: int) -> tuple[Piece, ...]:
    """The items of an array, without what says how many there are; an error in place of each if it is one."""
    pieces: list[Piece] = []
    encode(reply, client.protocol, pieces)
    return tuple(pieces * count) if isinstance(reply, ReplyError) else tuple(pieces[1:])
