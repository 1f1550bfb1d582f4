"""Our programs in terminals of ASCII and Latin-1: unsupported characters are replaced, and nothing fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pexpect
import pytest
import redis
from servers import RunningServer

POSIX = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
TERMINALS = {
    "ASCII": POSIX,
    "strict ASCII": {"PYTHONIOENCODING": "ascii:strict"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
}
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
NAME = "zoë-ключ-…-" + "x" * 60


def environment(terminal: str) -> dict[str, str]:
    return {**os.environ, **TERMINALS[terminal]}


def run(terminal: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment(terminal), capture_output=True, timeout=60)


def set_pages(client: redis.Redis) -> None:
    for page in range(2):
        client.execute_command("KVBLOCKSET", NAME, page, 2, 3, 4, 0, 2, 0, 1, 8, 1, 1, 8, bytes(2 * 2 * 3 * 64))
    client.set(NAME, "value")


@pytest.mark.parametrize("terminal", TERMINALS)
def test_looking_at_a_store_works_in_each_terminal(server: RunningServer, client: redis.Redis, terminal: str) -> None:
    set_pages(client)
    for words in (
        ["status"],
        ["ls"],
        ["ls", NAME],
        ["stat", f"kv:{NAME}:0:0:0:0"],
        ["verify", NAME],
        ["why", NAME],
    ):
        done = run(terminal, "kvpage_server.cli", *words, "--url", server.url)
        assert (done.returncode, done.stderr) == (0, b""), words
        if terminal != "Latin-1":
            assert done.stdout.isascii(), words


@pytest.mark.parametrize("terminal", TERMINALS)
def test_json_has_the_same_names_in_each_terminal(server: RunningServer, client: redis.Redis, terminal: str) -> None:
    set_pages(client)
    done = run(terminal, "kvpage_server.cli", "ls", "--json", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert [each["request"] for each in json.loads(done.stdout.decode("latin-1"))["requests"]] == [NAME]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("terminal", TERMINALS)
def test_tables_fit_with_the_escapes_of_their_names(
    server: RunningServer, client: redis.Redis, terminal: str, width: int
) -> None:
    for name in ("ключ-" * 8, "plain"):
        client.execute_command("KVPAGESET", name, 0, 0, 0, 0, 1, 64, 64, 0, bytes(8192))
    command = ["-m", "kvpage_server.cli", "ls", "--url", server.url]
    env = environment(terminal) | {"NO_COLOR": "1", "TERM": "xterm"}
    env.pop("COLUMNS", None)  # it would count instead of the terminal's width
    with pexpect.spawn(sys.executable, command, env=env, timeout=60, dimensions=(40, width)) as shown:
        shown.expect(pexpect.EOF)
        head, *rows = [line.rstrip() for line in ESCAPES.sub(b"", shown.before).splitlines()]
    assert len(rows) == 2
    assert any(row.startswith(rb"\u043a\u043b\u") for row in rows)
    assert {len(row) for row in (head, *rows)} == {len(head)}, "the columns are aligned"
    assert len(head) <= width


@pytest.mark.parametrize("terminal", TERMINALS)
def test_top_draws_its_lines_in_each_terminal(server: RunningServer, client: redis.Redis, terminal: str) -> None:
    set_pages(client)
    command = ["-m", "kvpage_server.cli", "top", "--watch", "0.1", "--url", server.url]
    with pexpect.spawn(sys.executable, command, env=environment(terminal), timeout=60, dimensions=(40, 100)) as shown:
        shown.expect(rb"memory .*[.#]")
        shown.sendintr()
        shown.expect(pexpect.EOF)
        assert b"Error" not in shown.before
    assert shown.exitstatus == 130


@pytest.mark.parametrize("terminal", TERMINALS)
def test_a_server_refuses_odd_options_in_each_terminal(terminal: str) -> None:
    done = run(terminal, "kvpage_server.app", "--größe…", "1")
    assert done.returncode == 1
    assert b"unknown parameter" in done.stderr
    assert b"Traceback" not in done.stderr
