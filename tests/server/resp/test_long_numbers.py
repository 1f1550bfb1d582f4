"""Digits without end, wherever a number may stand: Python's `int` refuses them, and no command may fail of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from servers import RunningServer, start_server

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.specs import TABLE

LONG = b"9" * 5000
TOO_LONG = [LONG, b"-" + LONG, b"0" * 5000, b"+" + LONG, b"1." + LONG, b"9" * 100_000]
COMMANDS = sorted(name for name in TABLE if name not in ("shutdown", "monitor"))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One of its own: CLIENT PAUSE and its like are called, too."""
    with start_server() as server:
        yield server


def frame(words: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def calls(name: str) -> list[list[bytes]]:
    """The command with numbers for its arguments, one of which has no end."""
    named = [word.encode() for word in name.split("|")]
    given = re.findall(r"[A-Za-z_-]+", TABLE[name].usage.replace("...", ""))
    words = [*named, *(word.encode() if word.isupper() else b"1" for word in given)]
    first = len(named)
    return [[*words[:i], long, *words[i + 1 :]] for i in range(first, len(words)) for long in TOO_LONG]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_word_of_5000_digits_is_a_normal_error(server: RunningServer, name: str) -> None:
    for words in calls(name):
        with server.connect() as sock:
            sock.sendall(frame(words) + b"PING over\r\n")
            received = b""
            while b"over\r\n" not in received and (some := sock.recv(1 << 20)):
                received += some
        assert b"internal error" not in received, words[:4]
        assert received, words[:4]


@pytest.mark.parametrize("cursor", ["9" * 5000, "18446744073709551616", "-" + "9" * 21, "-", "+", "1 "])
@pytest.mark.parametrize("command", [["SCAN"], ["SSCAN", "kv:r:index"]], ids=lambda words: words[0])
def test_a_cursor_that_is_none_is_named_as_redis_names_it(
    server: RunningServer, command: list[str], cursor: str
) -> None:
    with server.connect() as sock:
        sock.sendall(frame([word.encode() for word in (*command, cursor)]))
        assert sock.recv(1000) == b"-ERR invalid cursor\r\n"
