"""docs/commands.md describes the server: it matches the command table, its examples run, its arguments are hinted."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from servers import RunningServer
from waiting import PATIENCE

import kvpage_server.commands.families  # noqa: F401  # fills the table
from conf.commands import EXAMPLES, reference
from kvpage_server.commands.families.pages.request import REASONS
from kvpage_server.commands.specs import TABLE

DOCUMENT = Path(__file__).parents[2] / "docs" / "commands.md"
REDIS_CLI = shutil.which("redis-cli")
needs_redis_cli = pytest.mark.skipif(not REDIS_CLI, reason="redis-cli is not installed (Debian: redis-tools)")


def test_the_reference_is_up_to_date() -> None:
    how = "run: python -m conf.commands > docs/commands.md"
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), how


def test_every_page_block_and_index_command_has_an_example() -> None:
    groups = ("page", "map", "set")
    described = {name for name, spec in TABLE.items() if spec.group in groups and not name.endswith("|help")}
    assert described - {"kvmap"} == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        assert f"> {name.upper().replace('|', ' ')}" in example


def test_every_reply_of_kvpagewhy_is_described() -> None:
    described = DOCUMENT.read_text(encoding="utf-8").partition("### KVPAGEWHY\n")[2].partition("```")[0]
    assert [reason for reason in REASONS if not re.search(rf"\b{reason}\b", described)] == []
    fields = {"reason", "at", "policy", "quota", "block", "blocks", "cause", "since"}
    assert fields <= {*re.findall(r"`(\w+)`", described)}


def sessions(example: str) -> Iterator[tuple[str, str]]:
    for part in example.removeprefix("> ").split("\n> "):
        typed, _, answered = part.partition("\n")
        yield typed, answered.rstrip("\n")


@pytest.mark.parametrize(
    "document", ["README.md", "docs/api.md", "docs/install.md", "docs/watch.md", "docs/eviction.md"]
)
def test_no_line_of_a_paragraph_is_indented(document: str) -> None:
    prose = re.sub(r"(?ms)^ *```.*?^ *```", "", (DOCUMENT.parents[1] / document).read_text(encoding="utf-8"))
    assert re.findall(r"(?m)^(?! |[-*+] |\d\. |\|).+\n( +\S.*)", prose) == []


@needs_redis_cli
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_match_redis_cli(server: RunningServer, client: redis.Redis, name: str) -> None:
    for typed, expected in sessions(EXAMPLES[name]):
        command = [REDIS_CLI, "--no-raw", "-p", str(server.port), *shlex.split(typed)]
        answered = subprocess.run(
            command, check=True, capture_output=True, encoding="utf-8", timeout=100
        ).stdout.rstrip("\n")
        pattern = re.escape(expected).replace(re.escape("..."), ".+")
        assert re.fullmatch(pattern, answered), f"{typed} answered\n{answered}\nnot\n{expected}"


@contextmanager
def interactive(port: int) -> Iterator[int]:
    """redis-cli in a wide terminal; the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm", "HOME": "/nonexistent"}
        os.execvp("redis-cli", ["redis-cli", "-p", str(port)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 1000, 0, 0))
    try:
        yield terminal
    finally:
        os.write(terminal, b"\x15\x04")
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Return the terminal's output up to and including `wanted`."""
    shown, deadline = b"", time.monotonic() + PATIENCE
    while wanted not in shown:
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], f"{wanted!r} not in {shown!r}"
        shown += os.read(terminal, 65536)
    return shown


@needs_redis_cli
def test_redis_cli_hints_at_the_arguments_of_every_page_command(server: RunningServer) -> None:
    with interactive(server.port) as terminal:
        read_until(terminal, b"> ")
        for name in EXAMPLES:
            usage = re.sub(
                r"\b(?!(\w+) \[\1 )(\w+) \[(\w+) \.\.\.\]", r"\2 [\3 [\3 ...]]", TABLE[name].usage
            )  # how redis-cli spells it
            usage = usage.replace(" | ", "|")
            os.write(terminal, name.upper().replace("|", " ").encode() + b" ")
            read_until(terminal, usage.encode() + b"\x1b[0m")
            os.write(terminal, b"\x15")
