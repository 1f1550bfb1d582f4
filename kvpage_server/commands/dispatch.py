"""From a client's words to a reply: the command is found, what stands in its way is asked, it runs or is queued."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic_ns

from kvpage_server.commands.arguments import OUT_OF_MEMORY
from kvpage_server.commands.context import Client
from kvpage_server.commands.disk import Postponed, prepare, wait_for_room
from kvpage_server.commands.index_key import refuse_to_write
from kvpage_server.commands.measure import SLOW_WORD
from kvpage_server.commands.needs import nothing
from kvpage_server.commands.registry import AT_ONCE, Spec, find, too_many
from kvpage_server.resp.parser import Argument, Command
from kvpage_server.resp.reply import Piece, Raw, Reply, ReplyError, Stream, encode
from kvpage_server.store.memory import OutOfMemory
from kvpage_server.store.quota import OverLimit

log = logging.getLogger("kvpage")

_AT_ONCE = frozenset(("exec", "discard", "multi", "watch", "quit", "reset"))  # the others are queued after MULTI
_WHILE_SUBSCRIBED = frozenset(
    ("subscribe", "unsubscribe", "psubscribe", "punsubscribe", "ping", "quit", "reset")
)  # what RESP2 allows then: it cannot tell a reply from a message
_SECRET = frozenset(("auth", "hello", "acl|setuser", "config|set"))  # nobody else sees what they were given
_HTTP = (b"post", b"host:")  # what a browser that was tricked into talking to us says before a page's own words
_INTERNAL = "ERR internal error, the server's log says more"
_MOST_SHOWN = AT_ONCE  # words of a command that MONITOR shows
_LONGEST_SHOWN = 1024  # bytes of a word that MONITOR shows


class Paused(Exception):
    """The command has to wait for the end of a CLIENT PAUSE."""


def execute(client: Client, words: Command) -> Reply:
    """The reply to one command. Errors are replies too; Paused and Postponed are raised: it is to be tried again."""
    spec = None
    try:
        spec = find(words)
        client.last_command = spec.name
        if not client.free:
            check_rights(client, spec, words)
            admit(client, spec)
        have_room(client, spec)
    except ReplyError as error:
        return rejected(client, spec, words, error)
    if client.transaction is not None and spec.name not in _AT_ONCE:
        return client.transaction.queue(spec, words)
    if client.server.tiered is not None:
        try:
            prepare(client, client.server.tiered, spec, words)
        except ReplyError as error:
            return rejected(client, spec, words, error)
    return run_now(client, spec, words)


def is_at_once(words: Command) -> bool:
    """Whether a command is run even after MULTI."""
    return _name(words).decode("latin1") in _AT_ONCE


def admit(client: Client, spec: Spec) -> None:
    """Raises ReplyError when nobody in the client's state may call the command, Paused when it has to wait."""
    if (client.channels or client.patterns) and client.protocol == 2 and spec.name not in _WHILE_SUBSCRIBED:
        raise ReplyError(
            f"ERR Can't execute '{spec.name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET "
            "are allowed in this context"
        )
    if client.transaction is not None and "no_multi" in spec.flags:
        raise ReplyError("ERR Command not allowed inside a transaction")
    pause = client.server.pause
    if pause is not None and pause.ends > time.monotonic() and (not pause.only_writes or _writes(client, spec)):
        raise Paused


def have_room(client: Client, spec: Spec) -> None:
    """Have room for what a command is to store, now or in a transaction. Raises ReplyError, Postponed.

    It is made here, before a command runs: nothing leaves memory in the middle of one, or of a transaction.
    """
    if not client.server.keyspace.is_full or not _takes_memory(client, spec):
        return
    try:
        client.server.keyspace.make_room()
    except OutOfMemory:
        if client.server.tiered is not None:
            wait_for_room(client.server.tiered)
        raise ReplyError(OUT_OF_MEMORY) from None


def check_rights(client: Client, spec: Spec, words: Command) -> None:
    """Raises ReplyError when the client has not authenticated or its user has no right to this; the ACL log tells."""
    user = client.user
    if "no_auth" in spec.flags:
        return
    if user is None:
        raise ReplyError("NOAUTH Authentication required.")
    if user.unrestricted:
        return
    denial = user.denial(spec, words[spec.words :])
    if denial is not None:
        client.server.refuse(client, denial.kind, denial.what)
        raise ReplyError(denial.message)


def _writes(client: Client, spec: Spec) -> bool:
    """Whether the command changes the store, EXEC by what was queued."""
    if spec.name == "exec" and client.transaction is not None:
        return any(spec.flags & {"write", "may_replicate"} for spec, _ in client.transaction.commands)
    return bool(spec.flags & {"write", "may_replicate"})


def _takes_memory(client: Client, spec: Spec) -> bool:
    """Whether a command needs room: one that stores something, any that is queued, and EXEC of one that stores."""
    if client.transaction is None:
        return "denyoom" in spec.flags
    if spec.name == "exec":
        return any("denyoom" in queued.flags for queued, _ in client.transaction.commands)
    return spec.name not in ("discard", "quit", "reset")


def rejected(client: Client, spec: Spec | None, words: Command, error: ReplyError) -> ReplyError:
    """The error as the reply to a command that was not run."""
    stats = client.server.stats
    stats.note_error(str(error))
    if spec is not None:
        stats.calls[spec.name].rejected += 1
    elif _name(words) in _HTTP:
        log.warning("%s speaks HTTP: its connection ends, the rest of it may be commands", client.address)
        client.connection.abort()
    if _name(words) == b"exec":
        client.end_transaction()
        return ReplyError(f"EXECABORT Transaction discarded because of: {str(error).removeprefix('ERR ')}")
    if client.transaction is not None:
        client.transaction.refused = True
    return _bare(error)


def _name(words: Command) -> bytes:
    """The first word, if it is as short as names are."""
    return words[0].lower() if isinstance(words[0], bytes) else b""


def run_now(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command that was admitted, as its client's reading of keys counts."""
    if client.free:
        return run(client, spec, words)
    reply = run(client, spec, words) if client.touches else _run_untouched(client, spec, words)
    if client.tracking is not None and client.transaction is None and spec.parent != "client":
        client.tracking.asked = False  # CLIENT CACHING is for one command, or transaction
    return reply


def _run_untouched(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command whose reading is no use of the keys, nor is that of the rest of its reply."""
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


def _bare(error: ReplyError) -> ReplyError:
    """The error without the frames that it came through: they hold its command, and it itself in a circle."""
    error.__traceback__ = error.__context__ = None
    return error


def run_queued(client: Client, spec: Spec, words: Command) -> list[Piece]:
    """The whole reply of a command of a transaction, with all its steps, as the client's protocol spells it now."""
    reply, pieces = _run_queued(client, spec, words), list[Piece]()
    try:
        encode(reply, client.protocol, pieces)
    except Exception:
        log.exception("%s failed between its steps; its transaction goes on", spec.name)
        return [_failed(client, spec, ReplyError(_INTERNAL)).line]
    return pieces


def _run_queued(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command that was admitted when it was queued, if the client has not lost the right to it since."""
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
    except Postponed:
        return ReplyError(f"ERR '{spec.name}' would have to wait, which nothing may inside a transaction")


def run(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command that was admitted, now or by EXEC. Errors are replies too."""
    server = client.server
    if server.monitors:
        _show_monitors(client, spec, words)
    calls = server.stats.calls[spec.name]
    started = monotonic_ns()
    try:
        if spec.keys[0] and "write" in spec.flags:
            refuse_to_write(spec, words)
        if spec.most and len(words) > spec.most:
            raise too_many(spec, words)
        reply = spec.handler(client, words[spec.words :])
        if client.tracking is not None:
            server.events.tracking.note(client, spec, words[spec.words :])
        return _in_steps(client, spec, reply) if type(reply) is Stream else reply
    except OverLimit as error:
        return _over_limit(client, spec, error)
    except ReplyError as error:
        return _failed(client, spec, error)
    except Postponed:
        raise
    except MemoryError:
        calls.failed += 1
        server.stats.note_error("OOM")
        return ReplyError("OOM the system has no memory left for this value")
    except Exception:
        log.exception("%r failed; the connection goes on", words[0])
        return _failed(client, spec, ReplyError(_INTERNAL))
    finally:
        client.finished = ended = monotonic_ns()
        took = ended - started
        calls.nanoseconds += took
        calls.histogram[took.bit_length()] += 1
        if took >= server.slow_from:
            _note_slow(client, spec, words, took)


def _in_steps(client: Client, spec: Spec, reply: Stream) -> Stream:
    """A reply in steps. A single one may end with the error that it cannot be done."""
    assert spec.fetches or spec.needs is nothing, f"what {spec.name} needs may leave memory between its steps"
    if reply.length is not None:
        return reply

    def items() -> Iterator[Reply]:
        try:
            yield from reply.items
        except OverLimit as error:
            yield _over_limit(client, spec, error)
        except ReplyError as error:
            yield _failed(client, spec, error)

    return replace(reply, items=items())


def _over_limit(client: Client, spec: Spec, error: OverLimit) -> ReplyError:
    return _failed(client, spec, ReplyError(f"OOM {error}"))


def _failed(client: Client, spec: Spec, error: ReplyError) -> ReplyError:
    client.server.stats.calls[spec.name].failed += 1
    client.server.stats.note_error(str(error))
    return _bare(error)


def shown(spec: Spec, words: Command, most: int) -> list[bytes]:
    """A command's first words as others may see them, cut to so many bytes each: a page is not copied to be shown."""
    more, words = len(words) - _MOST_SHOWN, words[:_MOST_SHOWN]
    if spec.name in _SECRET:
        words = [*words[: spec.words], *[b"(redacted)"] * (len(words) - spec.words)]
    return [*(_cut(word, most) for word in words), *([b"... (%d more words)" % more] if more > 0 else [])]


def _cut(word: Argument, most: int) -> bytes:
    body = word if isinstance(word, bytes) else word.body
    if len(body) <= most:
        return bytes(body)
    return b"%b... (%d more bytes)" % (bytes(body[:most]), len(body) - most)


def _note_slow(client: Client, spec: Spec, words: Command, took: int) -> None:
    server = client.server
    threshold = server.config.slowlog_log_slower_than
    if 0 <= threshold <= took // 1000 and "skip_slowlog" not in spec.flags:
        server.slow_log.note(shown(spec, words, SLOW_WORD), took, client.address, client.name)
    milliseconds = took // 1_000_000
    if 0 < server.config.latency_monitor_threshold <= milliseconds:
        server.latency.note("fast-command" if "fast" in spec.flags else "command", milliseconds)


def _show_monitors(client: Client, spec: Spec, words: Command) -> None:
    """Tell those who MONITOR, as Redis spells it; administration is not shown."""
    if spec.flags & {"admin", "skip_monitor"}:
        return
    quoted = b" ".join(_quote(word) for word in shown(spec, words, _LONGEST_SHOWN))
    now = time.time_ns() // 1000
    line = Raw(b"+%d.%06d [0 %b] %b\r\n" % (now // 1_000_000, now % 1_000_000, client.address.encode(), quoted))
    for monitor in client.server.monitors:
        monitor.push(line)


_SPELT = {byte: b"\\x%02x" % byte for byte in range(256)} | {byte: b"%c" % byte for byte in range(0x20, 0x7F)}
_SPELT |= {0x22: b'\\"', 0x5C: b"\\\\", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t", 0x07: b"\\a", 0x08: b"\\b"}


def _quote(word: bytes) -> bytes:
    """In quotes, with escapes for what is not printable."""
    return b'"%b"' % b"".join(map(_SPELT.__getitem__, word))
