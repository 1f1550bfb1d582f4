"""Runs a command that was admitted, and counts what it costs. An exception becomes its reply."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic_ns

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.admission import check_rights, end_caching
from kvpage_server.commands.dispatch.disk import Postponed
from kvpage_server.commands.dispatch.shown import note_slow, show_monitors
from kvpage_server.commands.index_key import refuse_to_write
from kvpage_server.commands.table.spec import Spec, too_many
from kvpage_server.core import Command
from kvpage_server.core.piece import Piece
from kvpage_server.glob import PatternTooLong
from kvpage_server.resp.reply import Reply, ReplyError, Stream, Wait, bare, encode
from kvpage_server.store.eviction.quotas import OverLimit

log = logging.getLogger("kvpage")

_REFUSALS = (ReplyError, OverLimit, PatternTooLong)  # what a command may raise instead of a reply
_INTERNAL = "ERR internal error, the server's log says more"


def run(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command that was admitted, now or by EXEC. Errors are replies, too."""
    server = client.server
    if server.monitors:
        show_monitors(client, spec, words)
    calls = server.stats.calls[spec.name]
    started = monotonic_ns()
    try:
        if spec.writes_keys:
            refuse_to_write(spec, words)
        if spec.most and len(words) > spec.most:
            raise too_many(spec, words)
        reply = spec.handler(client, words[spec.words :])
        if client.tracking is not None:
            server.events.tracking.note(client, spec, words[spec.words :])
        return in_steps(client, spec, reply) if type(reply) is Stream else reply
    except Exception as error:  # noqa: BLE001 - it is told
        return told(client, spec, words, error)
    finally:
        client.finished = ended = monotonic_ns()
        took = ended - started
        calls.nanoseconds += took
        calls.histogram[took.bit_length()] += 1
        if took >= server.slow_from:
            note_slow(client, spec, words, took)


def told(client: Client, spec: Spec, words: Command, error: Exception) -> ReplyError:
    """What the client is told of what a command raised, without the frames that have its words. Raises Postponed."""
    if not isinstance(error, (*_REFUSALS, Postponed, MemoryError)):
        log.error("%r failed; the connection goes on", words[0], exc_info=error)
    error.__traceback__ = error.__context__ = None
    if isinstance(error, Postponed):
        raise error
    if isinstance(error, MemoryError):
        return _failed(client, spec, ReplyError("OOM the system has no memory left for this value"))
    return _failed(client, spec, _refusal(error) if isinstance(error, _REFUSALS) else ReplyError(_INTERNAL))


def run_as_asked(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command with the client's settings: CLIENT NO-TOUCH and CLIENT TRACKING."""
    reply = run_part(client, spec, words)
    end_caching(client, spec)
    return reply


def run_part(client: Client, spec: Spec, words: Command) -> Reply:
    """The same for a part of a command, which is not its last perhaps."""
    return run(client, spec, words) if client.touches else _run_untouched(client, spec, words)


def _run_untouched(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command, and the rest of its reply, so that reads do not count as uses."""
    keyspace = client.server.keyspace
    with keyspace.untouched():
        reply = run(client, spec, words)

    def items() -> Iterator[Reply]:
        while True:
            with keyspace.untouched():
                item = next(reply.items, Stream)
            if item is Stream:
                return
            yield item

    return replace(reply, items=items()) if type(reply) is Stream else reply


def run_queued(client: Client, spec: Spec, words: Command) -> list[Piece]:
    """The whole reply to a command of a transaction, encoded in the client's current protocol."""
    reply, pieces = _run_queued(client, spec, words), list[Piece]()
    try:
        if type(reply) is Stream:
            reply = replace(reply, items=_without_waiting(reply.items))
        encode(reply, client.protocol, pieces)
    except Exception:
        log.exception("%s failed between its steps; its transaction goes on", spec.name)
        return [_failed(client, spec, ReplyError(_INTERNAL)).line]
    return pieces


def _without_waiting(steps: Iterator[Reply]) -> Iterator[Reply]:
    """The steps of a reply, which do at once what they would wait for."""
    for step in steps:
        if type(step) is Wait and step.now is not None:
            step.now()
        else:
            yield step


def _run_queued(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command that was admitted when it was queued, if the client still has the right to it."""
    try:
        check_rights(client, spec, words)
    except ReplyError as error:
        client.server.stats.note_error(str(error))
        code, reason = str(error).split(" ", 1)
        return ReplyError(
            f"{code} ACLs rules changed between the moment the transaction was accumulated and the EXEC call. {reason}"
        )
    try:
        return run(client, spec, words)
    except ReplyError as error:
        return _failed(client, spec, error)
    except Postponed:
        return ReplyError(f"ERR '{spec.name}' would have to wait, and a command inside a transaction can't")


def in_steps(client: Client, spec: Spec, reply: Stream) -> Stream:
    """A streamed reply. Before its first part, it may still become an error."""
    assert not spec.waits, f"what {spec.name} needs may leave memory between its steps"
    if reply.length is not None:
        return reply

    def items() -> Iterator[Reply]:
        begun = False
        try:
            for item in reply.items:
                begun = begun or not (type(item) is Wait or item == ())
                yield item
        except _REFUSALS as error:
            yield _failed(client, spec, _refusal(error))
        except Exception:
            if begun:  # an error in the middle of a reply would be read as a part of it
                raise
            log.exception("%s failed between its steps; the connection goes on", spec.name)
            yield _failed(client, spec, ReplyError(_INTERNAL))

    return replace(reply, items=items())


def _refusal(error: Exception) -> ReplyError:
    if isinstance(error, ReplyError):
        return error
    return ReplyError(f"{'OOM' if isinstance(error, OverLimit) else 'ERR'} {error}")


def _failed(client: Client, spec: Spec, error: ReplyError) -> ReplyError:
    client.server.stats.calls[spec.name].failed += 1
    client.server.stats.note_error(str(error))
    return bare(error)
