"""Commands as MONITOR and SLOWLOG show them."""

from __future__ import annotations

import time

from kvpage_server.commands.context import Client
from kvpage_server.commands.measure import SLOW_WORD
from kvpage_server.commands.table.spec import AT_ONCE, Spec
from kvpage_server.core import Argument, Command
from kvpage_server.resp.reply import Raw

_MOST_SHOWN = AT_ONCE  # words of a command that MONITOR shows
_LONGEST_SHOWN = 1024  # bytes of a word that MONITOR shows
_ALL_SHOWN = 32 * 1024  # bytes of all words together, because every byte is escaped


def shown(spec: Spec, words: Command, most: int) -> list[bytes]:
    """A command's first words as other users may see them. Long words are cut, so that no page is copied."""
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
    body = word if isinstance(word, bytes) else word.body
    if len(body) <= most:
        return bytes(body)
    return b"%b... (%d more bytes)" % (bytes(body[:most]), len(body) - most)


def note_slow(client: Client, spec: Spec, words: Command, took: int) -> None:
    server = client.server
    threshold = server.config.slowlog_log_slower_than
    if 0 <= threshold <= took // 1000 and "skip_slowlog" not in spec.flags:
        server.slow_log.note(shown(spec, words, SLOW_WORD), took, client.address, client.name)
    milliseconds = took // 1_000_000
    if 0 < server.config.latency_monitor_threshold <= milliseconds:
        server.latency.note("fast-command" if "fast" in spec.flags else "command", milliseconds)


def show_monitors(client: Client, spec: Spec, words: Command) -> None:
    """Show a command to the clients that MONITOR, in Redis's format. Administration is not shown."""
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
