"""Calls of commands that may run. The cost of a call is counted, and an exception becomes an error reply."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from time import monotonic_ns

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import Postponed, check_rights, end_caching, require_durable_state
from kvpage_server.commands.measure import SLOW_WORD
from kvpage_server.commands.specs import (
    BY_WORD,
    INDEX_SUFFIX,
    SUBCOMMANDS,
    WORDS_PER_STEP,
    Spec,
    names_index,
    refuse_to_write,
    too_many,
)
from kvpage_server.commands.steps import another_step
from kvpage_server.core import Argument, CallAgain, Callee, Caller, Command, Parser
from kvpage_server.core.pieces import Piece
from kvpage_server.glob import PatternTooLong
from kvpage_server.resp import Raw, Reply, ReplyError, Stream, Wait, bare, encode
from kvpage_server.store.contents import TooManyPages
from kvpage_server.store.evict import Claim, MoreRoom, OverLimit

# -- MONITOR and SLOWLOG -----------------------------------------------------------------------------------------------

_MOST_SHOWN = WORDS_PER_STEP  # words of a command that MONITOR shows
_LONGEST_SHOWN = 1024  # bytes of a word that MONITOR shows
_ALL_SHOWN = 32 * 1024  # bytes of all words together, because every byte is escaped


def shown(spec: Spec, words: Command, most: int) -> list[bytes]:
    """Return a command's first words for MONITOR or the slow log, at most 1024 words and 32 KiB.

    Words longer than `most` bytes are cut, so that no page is copied. The arguments of a `secret` command are redacted.
    If words are left out, the last item says how many.
    """
    cut: list[bytes] = []
    left = _ALL_SHOWN
    for at, word in enumerate(words[:_MOST_SHOWN]):
        cut.append(b"(redacted)" if spec.secret and at >= spec.words else _cut(word, most))
        left -= len(cut[-1])
        if left <= 0:
            break
    more = len(words) - len(cut)
    return [*cut, *([b"... (%d more words)" % more] if more else [])]


def _cut(word: Argument, most: int) -> bytes:
    """Return a word; of a word longer than `most` bytes the beginning, and the number of the other bytes."""
    body = word if isinstance(word, bytes) else word.body
    if len(body) <= most:
        return bytes(body)
    return b"%b... (%d more bytes)" % (bytes(body[:most]), len(body) - most)


def note_slow(client: Client, spec: Spec, words: Command, took: int) -> None:
    """Add a call that took `took` nanoseconds to the slow log and the latency events, if it exceeds their
    thresholds.
    """
    server = client.server
    threshold = server.config.slowlog_log_slower_than
    if 0 <= threshold <= took // 1000 and "skip_slowlog" not in spec.flags:
        server.slow_log.note(shown(spec, words, SLOW_WORD), took, client.address, client.name)
    milliseconds = took // 1_000_000
    if 0 < server.config.latency_monitor_threshold <= milliseconds:
        server.latency.note("fast-command" if "fast" in spec.flags else "command", milliseconds)


def show_monitors(client: Client, spec: Spec, words: Command) -> None:
    """Send a command that has run to every client that has called MONITOR, in Redis's format.

    Commands with the flags `admin` or `skip_monitor` are left out.
    """
    if spec.flags & {"admin", "skip_monitor"}:
        return
    quoted = b" ".join(_quote(word) for word in shown(spec, words, _LONGEST_SHOWN))
    now = time.time_ns() // 1000
    line = Raw(b"+%d.%06d [0 %b] %b\r\n" % (now // 1_000_000, now % 1_000_000, client.address.encode(), quoted))
    for monitor in client.server.monitors:
        if monitor.silence >= 0 and not monitor.closing:  # as in Redis, CLIENT REPLY OFF applies to these lines, too
            monitor.push(line)


_ESCAPED = {byte: b"\\x%02x" % byte for byte in range(256)} | {byte: b"%c" % byte for byte in range(0x20, 0x7F)}
_ESCAPED |= {0x22: b'\\"', 0x5C: b"\\\\", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t", 0x07: b"\\a", 0x08: b"\\b"}


def _quote(word: bytes) -> bytes:
    """Return the word in quotes, with escapes for bytes that are not printable."""
    return b'"%b"' % b"".join(map(_ESCAPED.__getitem__, word))


log = logging.getLogger("kvpage")

_REFUSALS = (ReplyError, OverLimit, TooManyPages, PatternTooLong)  # exceptions that become error replies
_INTERNAL = "ERR internal error, the server's log says more"


def run(client: Client, spec: Spec, words: Command) -> Reply:
    """Call the function of a command that passed all checks, and return its reply; errors are replies, too.

    The call is counted. `words` are all words of the command. Raises Postponed if the function itself has to wait; the
    call is counted when it is repeated.
    """
    server = client.server
    calls, counts = server.stats.calls[spec.name], True
    started = monotonic_ns()
    try:
        if spec.writes_keys:
            refuse_to_write(spec, words)
        if spec.most and len(words) > spec.most:
            raise too_many(spec, words)
        reply = spec.handler(client, words[spec.words :])
        if client.tracking is not None and server.events.tracking.notes(client, spec):
            reply = _noted(client, spec, words, reply)
        return in_steps(client, spec, reply) if type(reply) is Stream else reply
    except Exception as error:  # noqa: BLE001 - it becomes an error reply
        counts = not isinstance(error, CallAgain)
        return error_reply(client, spec, words, error)
    finally:
        client.finished = ended = monotonic_ns()
        took = ended - started
        calls.nanoseconds += took
        calls.histogram[took.bit_length()] += counts
        if took >= server.slow_from:
            note_slow(client, spec, words, took)
        if counts and server.monitors:  # as in Redis: EXEC follows the commands of its transaction
            show_monitors(client, spec, words)


def _noted(client: Client, spec: Spec, words: Command, reply: Reply) -> Reply:
    """Note the keys that a command of a tracking client reads, and return its reply. If it names many keys, they are
    noted in steps, before those of the reply.
    """
    tracking, parts = client.server.events.tracking, spec.parts
    if type(reply) is not Stream or parts is None or len(words) <= WORDS_PER_STEP:
        tracking.note(client, spec, words[spec.words :])
        return reply

    def items() -> Iterator[Reply]:
        """Note the keys of each part, then yield the items of the reply."""
        for part in parts.divided(words, spec.words):
            tracking.note(client, spec, part[spec.words :])
            yield ()
        yield from reply.items

    return replace(reply, items=items())


def error_reply(client: Client, spec: Spec, words: Command, error: Exception) -> ReplyError:
    """Return the error reply for an exception of a command, count it, and log unexpected exceptions. If `error` is a
    Postponed, it is raised. After MoreRoom, Postponed is raised: the space is reserved until the command is called
    again.

    The exception's traceback is removed, because its frames keep the command's words in memory.
    """
    if not isinstance(error, (*_REFUSALS, CallAgain, MemoryError)):
        log.error("%r failed; the connection goes on", words[0], exc_info=error)
    error.__traceback__ = error.__context__ = None
    if isinstance(error, MoreRoom):
        raise Postponed(another_step(), room=Claim(error))
    if isinstance(error, Postponed):
        raise error
    if isinstance(error, MemoryError):
        return _failed(client, spec, ReplyError("OOM the system has no memory left for this value"))
    return _failed(client, spec, _refusal(error) if isinstance(error, _REFUSALS) else ReplyError(_INTERNAL))


def run_with_client_flags(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command for a client that is not on the fast path, with CLIENT NO-TOUCH, and end the effect of CLIENT
    CACHING.
    """
    reply = run_part(client, spec, words)
    end_caching(client, spec)
    return reply


def run_part(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command, or a part of it, with the client's CLIENT NO-TOUCH. The effect of CLIENT CACHING goes on
    afterwards.
    """
    return run(client, spec, words) if client.touches else _run_untouched(client, spec, words)


def _run_untouched(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command and the steps of its reply, without counting its reads as uses for the eviction policy."""
    keyspace = client.server.keyspace
    with keyspace.reader.untouched():
        reply = run(client, spec, words)

    def items() -> Iterator[Reply]:
        """Yield the items of the streamed reply. The reads of each step do not count as uses."""
        while True:
            with keyspace.reader.untouched():
                item = next(reply.items, Stream)
            if item is Stream:
                return
            yield item

    return replace(reply, items=items()) if type(reply) is Stream else reply


def run_queued(client: Client, spec: Spec, words: Command, rights: object) -> list[Piece]:
    """Run a queued command in EXEC, and return its whole reply, encoded in the client's current protocol. `rights` is
    the `edition` of the client's user when the rights for the command were checked.

    A streamed reply is run to its end, without other clients in between. Errors are replies, too.
    """
    reply, pieces = _run_queued(client, spec, words, rights), list[Piece]()
    client.in_exec = True
    try:
        if type(reply) is Stream:
            reply = replace(reply, items=_run_waits_inline(reply.items))
        encode(reply, client.protocol, pieces)
    except Exception:
        log.exception("%s failed between its steps; its transaction goes on", spec.name)
        return [_failed(client, spec, ReplyError(_INTERNAL)).line]
    finally:
        client.in_exec = False
    return pieces


def _run_waits_inline(steps: Iterator[Reply]) -> Iterator[Reply]:
    """Yield the steps of a reply. A Wait with `now` is replaced by a call of that function, which does the work at
    once.
    """
    for step in steps:
        if type(step) is Wait and step.now is not None:
            step.now()
        else:
            yield step


def _run_queued(client: Client, spec: Spec, words: Command, rights: object) -> Reply:
    """Run a queued command if the user still has the rights for it, and return its reply; errors are replies, too. The
    rights are checked again unless they are those of the edition `rights`.

    A command that would have to wait is refused, because EXEC does not wait, unless the work can be done at once.
    """
    try:
        if client.user is None or client.user.edition is not rights:
            check_rights(client, spec, words)
    except ReplyError as error:
        client.server.stats.note_error(str(error))
        code, reason = str(error).split(" ", 1)
        return ReplyError(
            f"{code} ACLs rules changed between the moment the transaction was accumulated and the EXEC call. {reason}"
        )
    try:
        while True:
            try:
                return run(client, spec, words)
            except Postponed as postponed:
                postponed.__traceback__ = None  # its frames refer to it, and to the words
                if postponed.wait.now is None:
                    raise
                postponed.wait.now()
    except ReplyError as error:
        return _failed(client, spec, error)
    except Postponed:
        return ReplyError(f"ERR '{spec.name}' would have to wait, and a command inside a transaction can't")


def in_steps(client: Client, spec: Spec, reply: Stream) -> Stream:
    """Return a Stream that turns an exception into an error reply. If an item was sent before, an unexpected exception
    is raised instead, and closes the connection. All steps of a write run, also if its client disconnects, unless the
    Stream says otherwise. A Stream with a `length` is returned unchanged.
    """
    assert not spec.preloads, f"what {spec.name} needs may leave memory between its steps"
    if reply.length is not None:
        return reply

    def items() -> Iterator[Reply]:
        """Yield the items of the reply, or an error."""
        begun = False
        try:
            for item in reply.items:
                begun = begun or not (type(item) is Wait or item == ())
                yield item
        except _REFUSALS as error:
            yield _failed(client, spec, _refusal(error))
        except Exception:
            if begun:  # the client would read an error in the middle of a reply as a part of it
                raise
            log.exception("%s failed between its steps; the connection goes on", spec.name)
            yield _failed(client, spec, ReplyError(_INTERNAL))

    return replace(reply, items=items(), whole=spec.writes if reply.whole is None else reply.whole)


def _refusal(error: Exception) -> ReplyError:
    """Return the error reply for one of `_REFUSALS`."""
    if isinstance(error, ReplyError):
        return error
    return ReplyError(f"{'OOM' if isinstance(error, OverLimit) else 'ERR'} {error}")


def _failed(client: Client, spec: Spec, error: ReplyError) -> ReplyError:
    """Count a failed call and its error code. Return the error without its traceback."""
    client.server.stats.calls[spec.name].failed += 1
    client.server.stats.note_error(str(error))
    return bare(error)


# -- The fast path: commands that the core calls without Python code in between ----------------------------------------


def caller_of(client: Client, parser: Parser) -> Caller:
    """Return the core's `Caller`, which calls commands of a client on the fast path. It must not be used while any
    client has called MONITOR.
    """
    return Caller(client, parser, _rows(), _may_run, note_slow)


def finish_call(client: Client, spec: Spec, words: Command, reply: Reply, error: Exception | None) -> Reply:
    """Return the reply to a command that the core has called, but whose result it cannot encode: a Stream, another type
    of reply, or the exception `error`. Raises Postponed.
    """
    if error is None:
        return in_steps(client, spec, reply) if type(reply) is Stream else reply
    return error_reply(client, spec, words, error)


@cache
def _rows() -> dict[Argument, Callee]:
    """Return the commands that the core may call, by the word that clients send, in lower and upper case."""
    return {word: _row(spec) for word, spec in BY_WORD.items() if spec.name not in SUBCOMMANDS and not spec.runs_queued}


def _row(spec: Spec) -> Callee:
    """Return a command's row for the core."""
    most = spec.arity if spec.arity > 0 else WORDS_PER_STEP
    written = spec.keys[0] if spec.writes_keys and not spec.writes_several else 0
    asks = spec.stores or spec.writes_keys
    return Callee(spec, spec.name, spec.handler, abs(spec.arity), most, asks, written, INDEX_SUFFIX)


def _may_run(client: Client, spec: Spec, words: Command) -> bool:
    """Return whether the core may call a command now. Otherwise the command takes the other path, `execute`.

    It may if memory is not full, few messages wait to be sent, the command does not wait for the disk, and it writes no
    index key. Under `appendfsync always`, this function also lets the reply of a write wait until the changes before it
    are on disk. The core calls it for rows with `Callee.asks`, and on a tiered server for all rows.
    """
    tiered = client.server.tiered
    if (spec.stores and client.keyspace.memory.is_full()) or client.server.channels.is_full:
        return False
    if tiered is not None:
        behind = tiered.stored.behind
        if (spec.stores or spec.writes_keys) and (behind.failing or behind.full):
            return False
        if client.keyspace.contents.any_on_disk and spec.preloads:
            return False
        if spec.writes and behind.mode == "always":
            require_durable_state(client, tiered)
    return not (spec.writes_several and names_index(spec, words))
