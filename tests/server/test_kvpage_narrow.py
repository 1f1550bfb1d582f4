"""`kvpage` in narrow terminals, and with more rows than it prints."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import redis
from rich.cells import cell_len
from servers import RunningServer
from test_kvpage_cli import flip_a_bit, kvpage, set_block
from waiting import PATIENCE, until

from kvpage_server.look.top import _View
from kvpage_server.system.terminal import Terminal, out, readable, table_of

AGENT, MODEL = "traveller-with-a-long-name", "HuggingFaceTB/SmolLM2-135M-Instruct"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def manifest(*blocks: str) -> bytes:
    received = {"model": MODEL, "saved": 1, "chain": blocks, "block_tokens": 4, "count": 4 * len(blocks)}
    return b"0123456789abcdef" + json.dumps(received).encode()


def printed(width: int, drop: Sequence[str] = ()) -> list[str]:
    """The lines of a table in a terminal of that width."""
    terminal = Terminal(force_terminal=True, width=width, file=StringIO(), color_system=None, highlight=False)
    table = table_of("agent", "model", "tokens", "size", "used", numbers_from=2, drop=drop)
    table.add_row(readable(AGENT), readable(MODEL), "12,345", "7.4 MiB", "34 s")
    terminal.print(table, soft_wrap=False)
    return str(terminal.file.getvalue()).splitlines()


@pytest.mark.parametrize("width", [20, 30, 40, 48, 60, 72, 80, 100])
def test_a_table_fits_and_its_numbers_are_whole(width: int) -> None:
    header, row = printed(width, drop=("model", "tokens"))
    assert max(map(cell_len, (header, row))) <= width
    assert header.split()[0] == "agent"
    assert row.startswith(AGENT[:8])
    for name, number in (("tokens", "12,345"), ("size", "7.4 MiB"), ("used", "34 s")):
        assert (name in header) == (number in row)


def test_columns_are_dropped_in_their_order() -> None:
    headers = [printed(width, drop=("model", "tokens"))[0].split() for width in (100, 48, 34, 23)]
    assert headers == [
        ["agent", "model", "tokens", "size", "used"],
        ["agent", "tokens", "size", "used"],
        ["agent", "size", "used"],
        ["agent", "size"],
    ]
    assert AGENT in printed(100)[1]
    assert "…" in printed(60)[1]


@pytest.fixture(params=[48, 60, 80])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The width of the terminal in which `kvpage` prints."""
    monkeypatch.setattr(out, "_force_terminal", True)
    monkeypatch.setattr(out, "_width", request.param)
    monkeypatch.setattr(out, "_height", 50)
    return int(request.param)


WORDS = {
    *[
        "agent",
        "model",
        "tokens",
        "blocks",
        "size",
        "unshared",
        "saved",
        "used",
        "request",
        "pages",
        "in",
        "memory",
        "shared",
        "by",
        "agents",
        "saves",
    ],
    *["block", "tier", "protected", "engine", "prompts", "reused", "store"],
}
HEADS = "agent ", "request ", "shared by ", "block ", "engine "


def check_lines(shown: str, width: int, tables: int) -> None:
    """Every line fits, and the headers of so many tables have whole words."""
    lines = [line.rstrip() for line in ESCAPES.sub("", shown).splitlines()]
    assert [line for line in lines if cell_len(line) > width] == []
    heads = [line for line in lines if line.startswith(HEADS) and AGENT[:8] not in line]
    assert len(heads) == tables, lines
    assert {word for line in heads for word in line.split()} <= {*WORDS}


def fill(client: redis.Redis) -> None:
    client.set(f"manifest:{AGENT}:f1", manifest("b1", "b2"))
    client.set(f"manifest:{AGENT}-two:f1", manifest("b1", "b3"))
    for name in ("b1", "b2", "a-request-with-quite-a-long-name-of-its-own"):
        set_block(client, name)
    client.get("nothing")


def test_ls_stat_and_status_fit_a_narrow_terminal(server: RunningServer, client: redis.Redis, width: int) -> None:
    fill(client)
    for words, tables in ((["ls"], 3), (["stat", AGENT], 1), (["status"], 0)):
        code, shown, _ = kvpage(*words, url=server.url)
        assert code == 0
        check_lines(shown, width, tables)


def test_top_fits_a_narrow_terminal(server: RunningServer, client: redis.Redis, width: int) -> None:
    fill(client)
    tier = {"hits": 2, "tokens": 3_000_000, "bytes": 1 << 20}
    received = {"name": "machine.example:12345", "model": MODEL, "answers": 4, "computed": 100, "used": 1 << 40}
    received |= {"room": 1 << 41, "tiers": dict.fromkeys(("hot", "prefix", "page", "cold"), tier)}
    with server.client(protocol=3, decode_responses=False) as store:
        view = _View(store, server.url)
        until(lambda: client.publish("kvpage:engines", json.dumps(received)), "a listener")

        def frame() -> str:
            with redirect_stdout(StringIO()) as shown:
                out.print(view.frame(), soft_wrap=False)
            return shown.getvalue()

        until(lambda: "machine" in frame(), "the engine")
        check_lines(frame(), width, 4)


def test_ls_prints_some_rows_and_the_number_of_others(server: RunningServer, client: redis.Redis) -> None:
    for number in range(60):
        set_block(client, f"r{number:02}")
    lines = kvpage("ls", url=server.url)[1].splitlines()
    assert (len(lines), lines[-1]) == (52, "and 10 more requests; --limit 0 shows all")
    lines = kvpage("ls", "--limit", "2", url=server.url)[1].splitlines()
    assert (len(lines), lines[-1]) == (4, "and 58 more requests; --limit 0 shows all")
    assert len(kvpage("ls", "--limit", "0", url=server.url)[1].splitlines()) == 61
    assert len(json.loads(kvpage("ls", "--json", url=server.url)[1])["requests"]) == 60
    for page in range(3):
        set_block(client, "many", page)
    lines = kvpage("ls", "many", "--limit", "2", url=server.url)[1].splitlines()
    assert (len(lines), lines[-1]) == (4, "and 1 more block; --limit 0 shows all")
    assert kvpage("ls", "--limit", "-1", url=server.url)[0] == 2


def test_ls_of_an_agent_names_the_command_that_shows_it(server: RunningServer, client: redis.Redis) -> None:
    client.set("manifest:alice:f1", manifest("b1"))
    code, shown, errors = kvpage("ls", "alice", url=server.url)
    assert (code, shown) == (1, "")
    shows = "kvpage stat alice shows its blocks, kvpage verify alice checks them"
    assert errors == f"kvpage: alice is an agent, and no request: {shows}\n"


def test_an_agent_can_be_verified(server: RunningServer, client: redis.Redis) -> None:
    client.set("manifest:alice:f1", manifest("b1", "b2"))
    for name in ("b1", "b2"):
        set_block(client, name)
    assert kvpage("verify", "alice", url=server.url)[:2] == (0, "24 pages in 2 blocks checked, all intact\n")
    client.execute_command("KVPAGEDEL", "b2")
    code, shown, _ = kvpage("verify", "alice", url=server.url)
    assert code == 1
    assert shown == "1 block missing: kvpage why alice says why\n12 pages in 1 block checked, none corrupt\n"
    code, shown, _ = kvpage("stat", "alice", url=server.url)
    assert (code, shown.splitlines()[-1]) == (1, "1 block missing: kvpage why alice says why")
    assert kvpage("stat", "alice", "--json", url=server.url)[0] == 1
    received = json.loads(kvpage("verify", "alice", "--json", url=server.url)[1])
    assert {key: received[key] for key in ("agent", "checked", "unchecked", "corrupt", "missing_blocks")} == {
        "agent": "alice", "checked": 12, "unchecked": 0, "corrupt": [], "missing_blocks": 1,
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux lets one process reach another's memory so")
def test_a_corrupt_block_of_an_agent_is_found(server: RunningServer, client: redis.Redis) -> None:
    body = bytes(range(251)) * 4
    client.execute_command("KVPAGESET", "b1", 0, 0, 0, 0, 3, 1, len(body), 0, body)
    client.set("manifest:alice:f1", manifest("b1"))
    flip_a_bit(server.pid, body)
    code, shown, _ = kvpage("verify", "alice", url=server.url)
    assert (code, shown.splitlines()) == (1, ["corrupt, and removed: 1 of 1 page", "  kv:b1:0:0:0:0"])


def test_a_terminal_without_a_cursor_shows_every_frame_of_top(server: RunningServer) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "kvpage_server.cli", "top", "--url", server.url]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=os.environ | {"TERM": "dumb"}) as process:
        received = b""
        while received.count(b"memory") < 2:
            assert select.select([master], [], [], PATIENCE)[0], received
            received += os.read(master, 10_000)
        process.kill()
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("words", [["top"], ["status", "--watch"]], ids=" ".join)
def test_a_terminated_watch_shows_the_cursor_again(server: RunningServer, words: list[str]) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "kvpage_server.cli", *words, "--url", server.url]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"}) as process:
        received = b""

        def receive_until(wanted: bytes) -> None:
            nonlocal received
            while wanted not in received:
                assert select.select([master], [], [], PATIENCE)[0], received
                received += os.read(master, 10_000)

        receive_until(b"memory")
        process.send_signal(signal.SIGTERM)
        receive_until(b"\x1b[?25h")
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert received.count(b"\x1b[?1049h") == received.count(b"\x1b[?1049l")
    os.close(master)
    os.close(slave)
