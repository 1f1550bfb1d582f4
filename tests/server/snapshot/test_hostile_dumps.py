"""Hostile dumps: each bad file and entry costs one line and itself, the rest is restored, and memory is bounded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from hostile_dumps import BAD, ENTRIES, FILES, SUMMARIES, VALUE, Hostile, forge, page, page_note, plane, raw, tensor
from keyspaces import HALVES, set_block
from servers import RunningServer
from test_kvpage_cli import kvpage

PROGRAM = Path(sys.executable).with_name("kvpage")
MOST_MEMORY = 700 << 20  # bytes of a restore
named = pytest.mark.parametrize


@pytest.fixture(scope="module")
def good(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of a block and two strings."""
    path = tmp_path_factory.mktemp("good") / "dump"
    with server.client() as client:
        client.flushall()
        set_block(client, "chat", 0, HALVES, ttl=3600)
        client.set("manifest:alice", "text")
        client.set("string", "value", px=500_000)
        assert kvpage("dump", str(path), "--url", server.url)[0] == 0
    return path


@pytest.fixture
def copied(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "dump")


COUNT = HALVES.pages + 2


def name_in_summary(path: Path) -> None:
    """Make BAD a file of the dump, with its digest if it has one."""
    file, summary = path / BAD, path / "dump.json"
    received, digest = json.loads(summary.read_bytes()), None
    if file.is_file():
        with open(file, "rb") as opened:
            digest = re.search(rb'"digest":"([0-9a-f]{16})"', opened.read(1 << 20))
    received["files"][BAD] = digest[1].decode() if digest else "0" * 16
    summary.write_text(json.dumps(received), encoding="utf-8")


def restored(path: Path, server: RunningServer) -> str:
    """The output of a restore into the empty server, which has exit status 1 and is no traceback."""
    with server.client() as client:
        client.flushall()
        code, shown, errors = kvpage("restore", str(path), "--url", server.url)
        assert (code, errors) == (1, ""), shown
        return shown


def ids(hostile: Hostile) -> str:
    return hostile.name


@named("hostile", SUMMARIES, ids=ids)
def test_a_bad_summary_costs_itself(server: RunningServer, client: redis.Redis, copied: Path, hostile: Hostile) -> None:
    hostile.make(copied)
    shown = restored(copied, server)
    assert shown.startswith(f"{HALVES.pages} pages and 2 strings"), shown
    assert [line for line in shown.splitlines() if hostile.line in line], shown
    assert "1 is corrupt" in shown
    assert client.dbsize() == COUNT
    code, shown, errors = kvpage("inspect", "--verify", str(copied))
    assert (code, errors) == (1, "")
    assert hostile.line in shown
    code, _, errors = kvpage("dump", "--update", str(copied), "--url", server.url)
    assert (code, errors.count("\n")) == (1, 1)
    assert hostile.line in errors


@named("hostile", FILES, ids=ids)
def test_a_bad_file_costs_itself(server: RunningServer, client: redis.Redis, copied: Path, hostile: Hostile) -> None:
    check(server, client, copied, hostile)
    code, shown, errors = kvpage("inspect", "--verify", str(copied))
    assert (code, errors) == (1, "")
    assert hostile.line in shown
    check_update(server, client, copied)


@named("hostile", ENTRIES, ids=ids)
def test_a_bad_entry_costs_itself(server: RunningServer, client: redis.Redis, copied: Path, hostile: Hostile) -> None:
    check(server, client, copied, hostile)
    code, _, errors = kvpage("inspect", str(copied))
    assert (code in (0, 1), errors) == (True, "")
    check_update(server, client, copied)


def check(server: RunningServer, client: redis.Redis, path: Path, hostile: Hostile) -> None:
    hostile.make(path)
    name_in_summary(path)
    shown = restored(path, server)
    assert shown.startswith(f"{HALVES.pages} pages and 2 strings"), shown
    assert len([line for line in shown.splitlines() if hostile.line in line]) == 1, shown
    assert client.dbsize() == COUNT


def check_update(server: RunningServer, client: redis.Redis, path: Path) -> None:
    """The dump of the same server replaces damaged files."""
    code, shown, errors = kvpage("dump", "--update", str(path), "--url", server.url)
    assert (code, errors) == (0, ""), shown
    client.flushall()
    assert kvpage("restore", str(path), "--url", server.url)[0] == 0
    assert client.dbsize() == COUNT


def test_the_good_entries_of_a_bad_file_are_restored(server: RunningServer, client: redis.Redis, copied: Path) -> None:
    header = {"string:bad": tensor(note=[]), "string:good": tensor(data_offsets=[5, 10])}
    forge(copied / BAD, header, VALUE + VALUE)
    name_in_summary(copied)
    assert "string:bad: its note is not a JSON object, in " in restored(copied, server)
    assert client.get("good") == VALUE
    assert client.dbsize() == COUNT + 1


@named("options", [(), ("--replace",)], ids=["", "replace"])
def test_a_key_that_is_too_long_costs_itself(
    server: RunningServer, client: redis.Redis, copied: Path, options: tuple[str, ...]
) -> None:
    header = {"string:" + "k" * 4_200_000: tensor(), "string:good": tensor(data_offsets=[5, 10])}
    forge(copied / BAD, header, VALUE + VALUE)
    name_in_summary(copied)
    client.flushall()
    code, shown, errors = kvpage("restore", str(copied), "--url", server.url, *options)
    assert (code, errors) == (1, "")
    (line,) = (line for line in shown.splitlines() if "only a value may be longer than 4194304 bytes" in line)
    assert len(line) < 500
    assert client.get("good") == VALUE
    assert client.dbsize() == COUNT + 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_costs_itself(server: RunningServer, client: redis.Redis, copied: Path) -> None:
    forge(copied / BAD, {"string:bad": tensor()})
    name_in_summary(copied)
    (copied / BAD).chmod(0)
    assert f"{BAD}: it cannot be read: Permission denied" in restored(copied, server)
    assert client.dbsize() == COUNT


@named("left_ms", [(1 << 63) - 1, (1 << 63) - 100_000, 1 << 62, 1 << 53])
def test_a_late_expiry_is_restored(server: RunningServer, client: redis.Redis, copied: Path, left_ms: int) -> None:
    note = {**tensor()["note"], "ttl_left_ms": left_ms}
    [(name, late)] = page(ttl_left_ms=left_ms).items()
    forge(copied / BAD, {"string:late": tensor(note), name: late | {"data_offsets": [5, 10]}}, VALUE + VALUE)
    name_in_summary(copied)
    client.flushall()
    code, shown, errors = kvpage("restore", str(copied), "--url", server.url)
    assert (code, errors) == (0, ""), shown
    assert min(client.pttl("late"), client.pttl(name)) > 1 << 52


def test_a_string_expiring_near_the_maximum_is_restored(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    client.execute_command("SET", "late", "x", "PXAT", (1 << 63) - 1000)
    client.set("other", "y")
    assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
    client.flushall()
    code, shown, errors = kvpage("restore", str(tmp_path), "--url", server.url)
    assert (code, errors) == (0, "")
    assert shown.startswith("0 pages and 2 strings")
    assert client.mget("late", "other") == [b"x", b"y"]


def heavy_names(path: Path) -> None:
    forge(path / BAD, {"string:" + "x" * (30 << 20): tensor(note={})})


def heavy_pages(path: Path) -> None:
    """Many planes of very small pages: a million pages are read, the next are not."""
    header, start = {}, 0
    for number in range(60):
        note = page_note(page=number, layers=128, heads=1000, head_dim=1)
        del note["layer"], note["head"]
        offsets = [start, start := start + 128_000]
        header[f"kv:r:*:*:{number}:0"] = tensor(note, dtype="I8", shape=[128, 1000, 1, 1], data_offsets=offsets)
    forge(path / BAD, header, start)


# The peak of a process includes that of the process which forked it, so a small process starts the program.
WATCHED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@named(
    "make",
    [
        lambda path: forge(path / BAD, plane(60_000, 1000, 60_000_000), 60_000_000),
        lambda path: forge(path / BAD, plane(128, 1024, 1 << 30), 1 << 30),
        lambda path: forge(path / BAD, {"string:bad": tensor(nbytes=60 << 30)}, 60 << 30),
        lambda path: raw(path / BAD, 63 << 20, b"[" * (63 << 20)),
        lambda path: raw(path / BAD, 63 << 20, b'{"a":"' + b"x" * ((63 << 20) - 8) + b'"}'),
        heavy_names,
        heavy_pages,
    ],
    ids=["60 million heads", "sparse plane", "sparse string", "lists", "text", "names", "pages"],
)
def test_memory_is_bounded(server: RunningServer, client: redis.Redis, copied: Path, make: object) -> None:
    assert callable(make)
    make(copied)
    name_in_summary(copied)
    client.flushall()
    words = [sys.executable, "-c", WATCHED, str(PROGRAM), "restore", str(copied), "--url", server.url]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", timeout=500, check=False
    )
    shown, _, most = done.stdout.rstrip().rpartition("\n")
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in shown
    assert int(most) * (1 if sys.platform == "darwin" else 1024) < MOST_MEMORY
    assert client.mget("manifest:alice", "string") == [b"text", b"value"]


def test_inspect_escapes_names_in_a_dump(copied: Path) -> None:
    summary = copied / "dump.json"
    contents = json.loads(summary.read_text(encoding="utf-8")) | {"selection": "\x1b]0;title\x07\nanother line"}
    summary.write_text(json.dumps(contents), encoding="utf-8")
    _, shown, _ = kvpage("inspect", str(copied))
    assert shown.startswith("a dump of \\x1b]0;title\\x07\\nanother line")
    assert "\x1b" not in shown
