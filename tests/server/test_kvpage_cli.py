"""`kvpage` in a terminal, against a real server: its output and exit codes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import datetime
from io import StringIO
from pathlib import Path

import pexpect
import pytest
import redis
from servers import RunningServer, free_port, start_server
from waiting import eventually, until

from kvpage_server import __version__, core
from kvpage_server.cli import main
from kvpage_server.client import AsyncPageClient, PageClient
from kvpage_server.page import DType, PageKey, encode_page

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())


def kvpage(*words: str, url: str = "") -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr."""
    with redirect_stdout(StringIO()) as shown, redirect_stderr(StringIO()) as errors:
        try:
            main([*words, *(["--url", url] if url else [])])
        except SystemExit as end:
            return int(end.code or 0), shown.getvalue(), errors.getvalue()
    raise AssertionError("it did not exit")


def set_block(client: redis.Redis, req: str, page: int = 0, ttl: int = 0) -> None:
    client.execute_command("KVBLOCKSET", req, page, 2, 3, 4, ttl, 2, 0, 1, 8, 1, 1, 8, bytes(2 * 2 * 3 * 64))


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_to_look_is_no_error_in_the_servers_counts(tmp_path: Path) -> None:
    with start_server() as server, server.client() as client:
        set_block(client, "r")
        before = client.info("stats")["total_error_replies"]
        for words in (["status"], ["ls"], ["dump", str(tmp_path / "d")]):
            assert kvpage(*words, url=server.url)[0] == 0, words
        assert client.info("stats")["total_error_replies"] == before


def test_status_shows_the_state_of_a_store() -> None:
    with start_server("--maxmemory", "1gb") as server, server.client() as client:
        set_block(client, "r", ttl=1000)
        client.execute_command("KVPAGEPIN", "r")
        client.execute_command("KVBLOCKGET", "r", 0)
        client.execute_command("KVPAGEGET", "r", 9, 9, 9, 0)
        code, shown, _ = kvpage("status", url=server.url)
        assert "quota" not in shown
        client.config_set("quota", "kv:one:* 0 kv:r:* 1mb " + " ".join(f"kv:{n}:* 2mb" for n in range(5)))
        with_quotas = kvpage("status", url=server.url)[1]
    assert code == 0
    assert re.search(r"quotas +kv:r:\*: 1\.5 KiB of 1\.0 MiB \(0%\)\n +kv:0:\*: 0 bytes of 2\.0 MiB", with_quotas)
    assert re.search(r"kv:3:.*\n +2 others with a smaller used share\n", with_quotas)
    assert f"kvpage-server {__version__} at {server.url}, up " in shown
    assert "of 1.0 GiB (0%), allkeys-prefix" in shown
    assert "1 request, 1 block, 12 keys" in shown
    assert "12 keys with a TTL; expired: 0; evicted: 0" in shown
    assert "protected  1 value leased, pinned or kept, " in shown
    assert "hit ratio  50.0% (1 of 2 reads)" in shown
    assert "1 never stored" in shown


def test_ls_shows_pins_and_lifetimes_with_their_tenants(server: RunningServer, client: redis.Redis) -> None:
    names = "kept", "pinned", "other"
    for req in names:
        set_block(client, req)
    client.execute_command("KVPAGEPIN", "pinned")
    client.execute_command("KVPAGEKEEP", "alice", 1, 3600, "kv:kept:0:0:0:0")
    code, shown, _ = kvpage("ls", url=server.url)
    assert code == 0
    [kept, pinned, other] = [
        next(line for line in shown.splitlines() if req in line) for req in ("kept", "pinned", "other")
    ]
    assert re.search(r"until (\d{4}-\d\d-\d\d )?\d\d:\d\d for alice", kept)
    assert pinned.rstrip().endswith("pinned")
    assert other.split()[-1] not in ("pinned", "alice")
    rows = {row["request"]: row for row in json.loads(kvpage("ls", "--json", url=server.url)[1])["requests"]}
    assert rows["kept"]["kept_by"] == "alice"
    assert rows["kept"]["kept_until_ms"] > 0
    assert (rows["pinned"]["pinned"], rows["other"]["pinned"]) == (True, False)
    for words in (("ls", "kept"), ("stat", "kv:kept:0:0:0:0")):
        assert re.search(r"until (\d{4}-\d\d-\d\d )?\d\d:\d\d for alice", kvpage(*words, url=server.url)[1])
    shown = kvpage("status", url=server.url)[1]
    assert re.search(r"protected +2 values leased, pinned or kept, .*\n.* 1 value with a lifetime, .* for alice", shown)
    client.execute_command("KVPAGEKEEP", "a,b=c\n", 1, 7200, "kv:kept:0:0:0:0")
    assert r" for a,b=c\n" in kvpage("status", url=server.url)[1]


def test_a_lifetime_that_ends_tomorrow_has_a_date(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "kept")
    client.execute_command("KVPAGEKEEP", "alice", 1, 86400, "kv:kept:0:0:0:0")
    (row,) = json.loads(kvpage("ls", "--json", url=server.url)[1])["requests"]
    end = datetime.fromtimestamp(row["kept_until_ms"] / 1000)
    for words in (("ls",), ("ls", "kept"), ("stat", "kv:kept:0:0:0:0")):
        assert f"until {end:%Y-%m-%d %H:%M} for alice" in kvpage(*words, url=server.url)[1]


def test_ls_lists_requests_and_the_blocks_of_one(server: RunningServer, client: redis.Redis) -> None:
    for page in range(3):
        set_block(client, "agent-[bold]7", page)
    set_block(client, "other")
    code, shown, _ = kvpage("ls", url=server.url)
    assert code == 0
    assert [row[:4] for row in rows(shown)[1:]] == [
        ["agent-[bold]7", "3", "36", "2.2"],
        ["other", "1", "12", "768"],
    ]
    client.delete("kv:agent-[bold]7:0:0:1:1")
    code, shown, _ = kvpage("ls", "agent-[bold]7", url=server.url)
    assert code == 0
    assert [row[:7] for row in rows(shown)[1:]] == [
        ["0", "yes", "K", "V", "2", "3", "12"],
        ["1", "no", "K", "V", "2", "3", "11"],
        ["2", "yes", "K", "V", "2", "3", "12"],
    ]


def test_ls_of_an_empty_store_and_of_nothing(server: RunningServer, client: redis.Redis) -> None:
    assert kvpage("ls", url=server.url)[:2] == (0, "no request has a page\n")
    code, shown, errors = kvpage("ls", "nobody", url=server.url)
    assert (code, shown) == (1, "")
    assert errors == "kvpage: request nobody has no page; kvpage why nobody may say why\n"


def test_ls_asks_for_many_requests_in_parts(server: RunningServer, client: redis.Redis) -> None:
    for number in range(250):
        set_block(client, f"r{number:03}")
    _, shown, _ = kvpage("ls", "--limit", "0", url=server.url)
    assert [row[0] for row in rows(shown)[1:]] == [f"r{number:03}" for number in range(250)]


def test_stat_shows_a_page(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r", ttl=3600)
    client.execute_command("KVPAGELEASE", "r", 60_000)
    code, shown, _ = kvpage("stat", "kv:r:1:2:0:1", url=server.url)
    assert code == 0
    lines = {row[0]: " ".join(row[1:]) for row in rows(shown)}
    assert lines["content"] == "V, 4 tokens x 8 float16, 64 bytes"
    assert lines["position"] == "layer 1, head 2, page 0"
    assert lines["TTL"].startswith("59 min 5")
    assert lines["leased"].startswith("5")
    assert (lines["protected"], lines["tier"]) == ("by the lease", "memory")


def test_stat_of_a_missing_page(server: RunningServer, client: redis.Redis) -> None:
    code, _, errors = kvpage("stat", "kv:r:1:2:0:1", url=server.url)
    assert (code, errors) == (1, "kvpage: kv:r:1:2:0:1 is not there; kvpage why r 1 2 0 1 may say why\n")
    for key, why in (
        ("kv:r:1:2:0", "a page key is kv:{req_id}:{layer}:{head}:{page}:{kv_type}, numbers without leading zeros"),
        ("kv:r:0:0:0:9", "kv_type must be between 0 and 5, got 9"),
        ("kv:r:0:100000:0:0", "head_idx must be between 0 and 65535, got 100000"),
        ("kv:r:index", "kv:r:index is the index of a request: kvpage ls r lists its blocks"),
    ):
        assert kvpage("stat", key, url=server.url)[::2] == (2, f"kvpage: {why}\n")
    set_block(client, "chat-7", 3)
    code, _, errors = kvpage("stat", "chat-7", url=server.url)
    assert (code, "chat-7 is a request: kvpage ls chat-7 lists its blocks" in errors) == (1, True)
    assert "kvpage stat kv:chat-7:LAYER:HEAD:3:TYPE" in errors
    for name in ("nobody", "no request"):
        assert "is no agent" in kvpage("stat", name, url=server.url)[2]


def test_verify_reports_whether_pages_are_intact(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r")
    assert kvpage("verify", "r", url=server.url)[:2] == (0, "12 pages checked, all intact\n")
    key = PageKey(b"r", 0, 0, 1, 0)
    client.set(bytes(key), encode_page(key, b"x", dtype=DType.INT8, page_size=1, head_dim=1, with_checksum=False))
    code, shown, _ = kvpage("verify", "r", "1", url=server.url)
    assert (code, shown) == (0, "1 page written without a checksum\n0 pages checked, all intact\n")


def test_a_name_is_any_bytes(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    name, key = "\udcc0\udcaf", "kv:\udcc0\udcaf:0:0:0:0"  # as Python has bytes of its arguments that are not UTF-8
    client.execute_command("KVPAGESET", b"\xc0\xaf", 0, 0, 0, 0, 1, 16, 8, 0, bytes(256))
    chain = {"count": 4, "chain": ["r"], "tokens": [1] * 4}
    client.set(b"manifest:\xaf:00000000000000aa", "0" * 16 + json.dumps(chain))
    assert kvpage("verify", name, url=server.url)[:2] == (0, "1 page checked, all intact\n")
    for words in (["ls", name], ["verify", name], ["why", name], ["stat", key], ["why", "\udcaf"], ["stat", "\udcaf"]):
        expected = 1 if words[1] == "\udcaf" else 0  # a block of that agent is missing
        assert kvpage(*words, url=server.url)[::2] == (expected, ""), words
        code, shown, errors = kvpage(*words, "--json", url=server.url)
        assert (code, errors) == (expected, ""), words
        assert "\\\\xaf" in shown, words
    code, shown, _ = kvpage("dump", str(tmp_path), "--request", name, "--json", url=server.url)
    assert (code, json.loads(shown)["pages"]) == (0, 1)


def test_lines_in_a_pipe_have_no_trailing_spaces(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r", 0)
    for words in (["status"], ["ls"], ["ls", "r"], ["stat", "kv:r:0:0:0:0"], ["top", "--help"], ["doctor"]):
        shown = kvpage(*words, url=server.url)[1]
        assert len(shown.splitlines()) > 1, words
        assert [line for line in shown.splitlines() if line.endswith(" ")] == [], words


def test_text_to_be_pasted_is_quoted(server: RunningServer, client: redis.Redis) -> None:
    assert "; kvpage why 'a*' may say why" in kvpage("ls", "a*", url=server.url)[2]
    assert "; kvpage why 'a*' 0 0 0 0 may say why" in kvpage("stat", "kv:a*:0:0:0:0", url=server.url)[2]
    for words in (["ls", "\udcff"], ["verify", r"\xff"], ["stat", "kv:\udcff:0:0:0:0"]):
        assert r"; kvpage why '\xff' " in kvpage(*words, url=server.url)[2]
    assert r"; kvpage why '\x2dx' may say why" in kvpage("ls", r"\x2dx", url=server.url)[2]
    for name in (b"a*", b"\xff"):
        client.execute_command("KVPAGESET", name, 1, 0, 0, 0, 1, 16, 8, 0, bytes(256))
    assert "kvpage ls 'a*' lists its blocks, kvpage stat kv:'a*':LAYER" in kvpage("stat", "a*", url=server.url)[2]
    assert r"\xff is a request: kvpage ls '\xff' lists its blocks" in kvpage("stat", "\udcff", url=server.url)[2]
    assert "kvpage why 'a*' LAYER" in kvpage("why", "a*", url=server.url)[1]
    assert r"kvpage why '\xff' LAYER" in kvpage("why", "\udcff", url=server.url)[1]


def flip_a_bit(pid: int, wanted: bytes) -> None:
    """Flip a bit, as a defective memory chip would, at every place where a process has `wanted`; at least one."""
    flipped = 0
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            start, end = (int(address, 16) for address in span.split("-"))
            if not rights.startswith("rw"):
                continue
            memory.seek(start)
            try:
                held = memory.read(end - start)
            except OSError:  # given back since it was listed
                continue
            for found in re.finditer(re.escape(wanted), held):
                memory.seek(start + found.start())
                flipped += memory.write(bytes([wanted[0] ^ 1]))
    assert flipped


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux lets one process reach another's memory so")
def test_verify_finds_a_flipped_bit(server: RunningServer, client: redis.Redis) -> None:
    body = random.Random(5).randbytes(20_000)
    for page, content in enumerate((body, bytes(20_000))):
        client.execute_command("KVPAGESET", "r", 0, 0, page, 0, 3, 1, len(content), 0, content)
    flip_a_bit(server.pid, body[5000:5100])
    code, shown, _ = kvpage("verify", "r", url=server.url)
    assert (code, shown) == (1, "corrupt, and removed: 1 of 2 pages\n  kv:r:0:0:0:0\n")
    assert client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0) is None
    assert kvpage("why", "r", "0", "0", "0", "0", url=server.url)[1] == "corrupt, just now\n"
    missing = "1 block missing: kvpage why r says why\n1 page in block 1 checked, none corrupt\n"
    assert kvpage("verify", "r", url=server.url)[:2] == (1, missing)


def test_verify_reports_missing_blocks_of_a_request(server: RunningServer, client: redis.Redis) -> None:
    for page in range(4):
        set_block(client, "r", page)
    assert kvpage("verify", "r", "1", "3", url=server.url)[:2] == (0, "24 pages checked, all intact\n")
    client.execute_command("KVPAGEDEL", "r", 1, 3)
    missing = "1 block missing: kvpage why r says why\n"
    assert kvpage("verify", "r", "0", "1", url=server.url)[:2] == (1, missing + "12 pages checked, none corrupt\n")
    assert kvpage("verify", "r", url=server.url)[:2] == (1, missing + "24 pages in blocks 0, 2 checked, none corrupt\n")
    assert json.loads(kvpage("verify", "r", "--json", url=server.url)[1])["missing_blocks"] == 1
    client.execute_command("KVPAGESET", "single", 0, 0, 42, 0, 1, 16, 8, 0, bytes(256))
    code, shown, _ = kvpage("verify", "single", url=server.url)
    checked, gap = shown.splitlines()
    assert (code, checked) == (0, "1 page in block 42 checked, all intact")
    unknown = "never stored, or removed before the records of removals began, "
    assert gap.startswith(f"42 blocks before block 42 not stored: {unknown}")
    code, shown, errors = kvpage("verify", "nosuch", url=server.url)
    assert (code, shown) == (1, "")
    assert errors.startswith(f"kvpage: request nosuch has no page: {unknown}")
    client.execute_command("KVPAGEDEL", "single", 42)
    assert kvpage("verify", "single", url=server.url)[::2] == (
        1,
        "kvpage: request single has no page: deleted, just now\n",
    )
    index = "kvpage: kv:r:index is the index of a request: kvpage why r explains the request\n"
    assert kvpage("why", "kv:r:index", url=server.url)[::2] == (2, index)


def test_why_reports_the_removal_of_a_page(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r", 0)
    set_block(client, "r", 2)
    assert kvpage("why", "r", "0", "0", "0", "0", url=server.url)[:2] == (0, "stored: a read would not miss\n")
    client.pexpire("kv:r:0:0:2:0", 50)
    time.sleep(0.06)
    code, shown, _ = kvpage("why", "r", "0", "0", "2", "0", url=server.url)
    assert code == 1
    assert shown.startswith("expired, ")
    code, shown, _ = kvpage("why", "r", url=server.url)
    first, second = shown.splitlines()
    assert (code, first) == (1, "23 pages stored, in blocks 0, 2")
    received = "a read from the start finds block 0; block 1 is not there: never stored, or removed before "
    assert second.startswith(received)
    client.execute_command("KVPAGESET", "test_req_001", 5, 8, 42, 0, 1, 128, 64, 3600, b"BLOB_DATA")
    code, shown, _ = kvpage("why", "test_req_001", url=server.url)
    lines = shown.splitlines()
    assert code == 1
    assert lines[:2] == [
        "1 page stored, in block 42",
        "no block is complete: kvpage why test_req_001 LAYER HEAD PAGE TYPE explains one page",
    ]
    assert lines[2].startswith("a read from the start finds nothing; block 0 is not there: never stored, or removed ")
    of_page = kvpage("why", "test_req_001", "5", "8", "42", "0", url=server.url)
    assert of_page[:2] == (0, "stored: a read would not miss\n")
    assert kvpage("why", "kv:test_req_001:5:8:42:0", url=server.url)[0] == 0
    assert kvpage("why", "kv:test_req_001:5:8:42:1", url=server.url)[0] == 1
    code, _, errors = kvpage("why", "r", "0", "0", url=server.url)
    assert (code, errors) == (2, "kvpage: a page is named by LAYER HEAD PAGE TYPE, got 2 of the four\n")


def test_why_reports_the_removal_of_a_string(server: RunningServer, client: redis.Redis) -> None:
    client.mset({"model@1@0@a3": "x", "with: space": "y", "\udcff*[x]".encode("utf-8", "surrogateescape"): "z"})
    assert kvpage("why", "model@1@0@a3", url=server.url)[:2] == (0, "stored: a read would not miss\n")
    for name in ("model@1@0@a3", "with: space", "\udcff*[x]"):
        client.delete(os.fsencode(name))
        code, shown, _ = kvpage("why", name, url=server.url)
        assert (code, shown) == (1, "deleted, just now\n")
    code, shown, _ = kvpage("why", "with: space", "--json", url=server.url)
    received = json.loads(shown)
    assert (code, received["string"], received["reason"]) == (1, "with: space", "deleted")
    for name in ("never", "never: stored"):
        code, shown, _ = kvpage("why", name, url=server.url)
        assert (code, shown.split(",")[0]) == (1, "never stored")


def test_a_string_under_the_key_of_a_page_is_no_page(server: RunningServer, client: redis.Redis) -> None:
    client.set("kv:blk:0:0:9:0", "a string")
    received = (1, "", "kvpage: kv:blk:0:0:9:0: this key holds a string, not a page\n")
    for words in (("why", "kv:blk:0:0:9:0"), ("why", "blk", "0", "0", "9", "0"), ("stat", "kv:blk:0:0:9:0")):
        assert kvpage(*words, url=server.url) == received, words


def test_why_reports_the_state_of_an_agent(server: RunningServer, client: redis.Redis) -> None:
    manifest = b"0123456789abcdef" + json.dumps({"chain": ["b1"], "count": 4, "model": "m"}).encode()
    client.mset({"manifest:alice@acme:f1": manifest, "manifest:alice@acme:f2": manifest, "manifest:alicexacme:f1": "x"})
    set_block(client, "b1")
    assert kvpage("why", "alice@acme", url=server.url)[0] == 0
    client.delete("manifest:alice@acme:f2", "manifest:alicexacme:f1")
    code, shown, _ = kvpage("why", "alice@acme", url=server.url)
    gone = "an agent's context of model f2 is missing: its manifest was deleted, just now"
    assert (code, shown.splitlines()[-1]) == (0, gone)
    client.delete("manifest:alice@acme:f1")
    code, shown, _ = kvpage("why", "alice@acme", url=server.url)
    assert (code, len(shown.splitlines())) == (1, 2)
    received = json.loads(kvpage("why", "alice@acme", "--json", url=server.url)[1])
    assert [(lost["key"], lost["reason"]) for lost in received["lost"]] == [
        ("manifest:alice@acme:f1", "deleted"),
        ("manifest:alice@acme:f2", "deleted"),
    ]


def test_why_names_the_limit_that_removed_strings_and_manifests() -> None:
    with start_server("--maxmemory", "1mb", "--maxmemory-policy", "allkeys-lru") as server, server.client() as client:
        client.mset({"manifest:alice:f1": b"x" * 1000, "chunk": b"x" * 1000})
        for number in range(200):
            client.set(f"filler {number}", bytes(10_000))
        code, shown, _ = kvpage("why", "chunk", url=server.url)
        assert (code, shown.split(",")[0]) == (1, "evicted by allkeys-lru at maxmemory")
        code, shown, _ = kvpage("why", "alice", url=server.url)
        assert code == 1
        assert " is missing: its manifest was evicted by allkeys-lru at maxmemory, " in shown


def test_an_impossible_query_is_one_line(redis_server: RunningServer, server: RunningServer) -> None:
    port = free_port()
    code, _, errors = kvpage("status", url=f"redis://127.0.0.1:{port}")
    assert code == 2
    assert errors.startswith(f"kvpage: cannot reach redis://127.0.0.1:{port}: ")
    assert errors.count("\n") == 1
    code, _, errors = kvpage("status", url=f"redis://user:secret@127.0.0.1:{port}")
    assert code == 2
    assert "secret" not in errors
    code, _, errors = kvpage("status", url=redis_server.url)
    assert code == 1
    assert "not a kvpage-server" in errors
    code, _, errors = kvpage("ls", "a:b", url=server.url)
    assert (code, errors.count("\n")) == (2, 1)
    assert "req_id must be 1 to 256 bytes" in errors
    code, _, errors = kvpage("status", url="nonsense")
    assert code == 2
    assert errors.count("\n") == 1
    assert (
        "begins with redis://, rediss:// or unix://, and that of a cluster with valkey-cluster://, got 'nons" in errors
    )


def test_the_command_is_installed(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r")
    command = [Path(sys.executable).with_name("kvpage"), "ls", "--url", server.url]
    shown = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=100).stdout
    assert rows(shown)[1][0] == "r"


@pytest.mark.parametrize("command", ["", "status", "ls", "stat", "verify", "why", "dump", "restore", "inspect"])
def test_help_is_there_for_every_command(command: str) -> None:
    code, shown, _ = kvpage(*command.split(), "--help")
    assert code == 0
    assert f"usage: kvpage {command}".rstrip() in shown


# -- users, and exit codes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    """A server that wants a password, and has a tenant."""
    users = ("--requirepass", "right p@ss/word", "--user", "app", "on", ">word", "~kv:app.*", "+@all")
    with start_server("--maxmemory", "1gb", *users) as server:
        with server.client(password="right p@ss/word") as client:
            set_block(client, "app.chat")
            set_block(client, "other")
        yield server


@pytest.mark.parametrize("variable", ["KVPAGE_PASSWORD", "REDISCLI_AUTH"])
def test_a_password_is_read_from_the_environment(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "right p@ss/word")
    code, shown, _ = kvpage("status", url=guarded.url)
    assert code == 0
    assert "2 requests, 2 blocks, 24 keys" in shown
    monkeypatch.setenv("KVPAGE_URL", guarded.url)
    assert kvpage("ls")[0] == 0
    # the credentials of the URL are used
    code, _, errors = kvpage("status", url=guarded.url.replace("//", "//app:word@"))
    assert (code, errors) == (0, "")


def test_wrong_and_missing_passwords_have_different_errors(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = kvpage("status", url=guarded.url)
    wanted = "needs a password: set KVPAGE_PASSWORD or REDISCLI_AUTH in the environment, or use --askpass"
    assert (code, errors) == (1, f"kvpage: {guarded.url} {wanted}\n")
    monkeypatch.setenv("KVPAGE_PASSWORD", "wrong")
    code, _, errors = kvpage("status", "--user", "app", url=guarded.url)
    assert (code, errors) == (1, f"kvpage: {guarded.url} does not take this password for user app\n")
    code, _, errors = kvpage("dump", "nowhere", url=guarded.url)
    assert (code, errors) == (1, f"kvpage: {guarded.url} does not take this password for user default\n")


def test_a_password_is_asked_for_at_the_terminal(guarded: RunningServer) -> None:
    command = Path(sys.executable).with_name("kvpage")
    with pexpect.spawn(str(command), ["ls", "--url", guarded.url, "--user", "app", "--askpass"], timeout=100) as typed:
        typed.expect(f"Password for app at {guarded.url}: ")
        typed.sendline("word")
        typed.expect("app.chat")
        typed.expect(pexpect.EOF)
        assert b"word" not in typed.before
    code, _, errors = run_kvpage("ls", "--url", guarded.url, "--askpass")
    assert code == 1
    assert "no terminal" in errors


def test_a_tenant_sees_its_own_data(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGE_PASSWORD", "word")
    code, shown, errors = kvpage("status", "--user", "app", url=guarded.url)
    assert (code, errors) == (0, "")
    assert "1 request, 12 keys that this user may access" in shown
    for command in (["ls"], ["ls", "app.chat"], ["stat", "kv:app.chat:0:0:0:0"], ["why", "app.chat"]):
        assert kvpage(*command, "--user", "app", url=guarded.url)[0] == 0
    for command in (["ls", "other"], ["stat", "kv:other:0:0:0:0"], ["why", "other"], ["verify", "other"]):
        code, _, errors = kvpage(*command, "--user", "app", url=guarded.url)
        assert code == 1
        assert errors.startswith("kvpage: NOPERM") or "No permissions" in errors


def test_no_message_shows_a_password() -> None:
    port = free_port()
    for url in (f"redis://:p@ss@127.0.0.1:{port}", f"redis://user:secret@127.0.0.1:{port}"):
        code, _, errors = kvpage("status", url=url)
        assert (code, errors.count("\n")) == (2, 1)
        assert "ss@" not in errors
        assert "secret" not in errors


def run_kvpage(*words: str, program: str = "kvpage", **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the process."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words],
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("url", ["valkey-cluster://127.0.0.1:1", "redis://a:1,redis://b:2", "http://a"])
def test_inspect_ignores_the_url_in_the_environment(url: str, tmp_path: Path) -> None:
    code, _, errors = run_kvpage("inspect", str(tmp_path), KVPAGE_URL=url)
    assert (code, "holds no dump" in errors) == (1, True), errors


def test_wrong_arguments_have_the_exit_status_of_argparse(server: RunningServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}', encoding="utf-8")
    for words, why in (
        (["why", "r", "0", "0", "0"], "a page is named by LAYER HEAD PAGE TYPE, got 3 of the four"),
        (["why", "r", "0", "0", "0", "6"], "kv_type must be between 0 and 5, got 6"),
        (["verify", "a:b"], "req_id must be 1 to 256 bytes without ':', spaces or control characters"),
        (["bench", "--against", "nonsense"], "begins with redis://, rediss:// or unix://"),
        (["replay", str(trace), "--nodes", "2", "--capacity", "1", "2"], "--nodes takes one --policy"),
        (["replay", str(trace), "--nodes", "2", "--block-bytes", "2mb"], "--nodes counts blocks"),
        (["savings", "--rate", "5"], "--block-tokens are for a trace"),
        (["connectors", "verify", "lmcache", "--model", "folder"], "lmcache runs no model"),
        (["connectors", "verify", "mlx-lm", "--model", "folder", "--tier"], "are for vllm, not for mlx-lm"),
    ):
        code, _, errors = kvpage(*words, url="" if words[0] == "replay" else server.url)
        assert (code, errors.count("\n"), why in errors) == (2, 1, True), (words, errors)


def test_missing_files_have_the_exit_status_1(server: RunningServer, tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    for words in (["inspect", nothing], ["replay", nothing], ["restore", nothing, "--url", server.url]):
        assert kvpage(*words)[::2] == (1, f"kvpage: {nothing}: No such file or directory\n")
    (tmp_path / "empty").touch()
    assert kvpage("replay", str(tmp_path / "empty"))[0] == 1


def test_another_redis_has_no_list_of_requests(redis_server: RunningServer) -> None:
    for words in (["ls"], ["stat", "alice"]):
        code, shown, errors = kvpage(*words, url=redis_server.url)
        assert (code, shown, "no kvpage-server" in errors) == (1, "", True)


def test_json_of_an_unreachable_server_is_an_object() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    code, text, _ = kvpage("status", "--json", url=url)
    assert (code, json.loads(text)["url"]) == (2, url)
    assert "cannot reach" in json.loads(text)["error"]


def test_no_connection_of_top_counts_as_a_use(server: RunningServer, client: redis.Redis) -> None:
    command = [str(Path(sys.executable).with_name("kvpage")), "top", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        own = client.client_id()

        def flags() -> list[str]:
            return sorted(other["flags"].strip("P") for other in client.client_list() if int(other["id"]) != own)

        until(lambda: flags() == ["T", "T"], "two connections with CLIENT NO-TOUCH")
        process.send_signal(signal.SIGINT)


def test_top_names_the_right_that_its_user_lacks(client: redis.Redis, server: RunningServer) -> None:
    client.execute_command("ACL", "SETUSER", "m", "on", "nopass", "allkeys", "allchannels", "+@all", "-scan")
    command = [str(Path(sys.executable).with_name("kvpage")), "top", "--url", server.url, "--user", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "KVPAGE_PASSWORD": "x"}) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if b"requests" in line)
        process.send_signal(signal.SIGINT)
    client.execute_command("ACL", "DELUSER", "m")
    assert line.startswith(b"agents and requests cannot be listed: ")
    assert line.endswith(b"User m has no permissions to run the 'scan' command\n")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("foo=1", "unknown option 'foo' in a server's URL; allowed: client_name, "),
        ("ssl_ca_certs=x", "needs rediss://"),
    ],
)
def test_a_url_with_an_unknown_option_is_refused(options: str, why: str) -> None:
    code, _, errors = kvpage("status", url=f"redis://127.0.0.1:1?{options}")
    assert code == 2
    assert why in errors
    with pytest.raises(ValueError, match=why):
        PageClient(f"redis://127.0.0.1:1?{options}")


@pytest.mark.parametrize("url", ["redis://h:1", "rediss://h:1,redis://h:2", "valkey-cluster://h:1", "unix:///none"])
def test_an_unknown_option_of_a_client_is_refused_at_once(url: str) -> None:
    for kind in (PageClient, AsyncPageClient):
        with pytest.raises(ValueError, match="unknown option 'nonsense' of a client"):
            kind(url, nonsense=1, socket_timeout=1)
        kind(url, socket_timeout=1, client_name="x", max_connections=3)


def test_a_url_with_a_wrong_port_is_named_without_its_password() -> None:
    code, _, errors = kvpage("status", url="redis://u:secret@127.0.0.1:99999")
    assert (code, errors) == (2, "kvpage: Port out of range 0-65535, got 'redis://127.0.0.1:99999'\n")


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf"])
def test_bench_refuses_a_duration_that_is_none(seconds: str) -> None:
    code, _, errors = kvpage("bench", "--seconds", seconds)
    assert code == 2
    assert "must be 0.001 to 86400 seconds" in errors


@pytest.mark.parametrize("command", ["restore", "bench"])
def test_help_offers_one_url_where_a_command_takes_one_server(command: str) -> None:
    _, text, _ = run_kvpage(command, "--help")
    assert "URL of the store (default" in " ".join(text.split())


def test_bench_names_the_server_that_does_not_answer(server: RunningServer) -> None:
    other = f"redis://127.0.0.1:{free_port()}"
    code, _, errors = kvpage("bench", "--quick", "--against", other, url=server.url)
    assert (code, errors.startswith(f"kvpage: cannot reach {other}: ")) == (2, True)


def test_a_closed_pipe_ends_it_silently(server: RunningServer, client: redis.Redis) -> None:
    for number in range(3000):
        client.execute_command("KVPAGESET", f"a-request-with-a-long-name-{number}", 0, 0, 0, 0, 3, 1, 1, 0, b"x")
    command = [str(Path(sys.executable).with_name("kvpage")), "ls", "--limit", "0", "--url", server.url]
    # otherwise the interpreter drops the part that a pipe does not take immediately
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(100) == 141


def test_ctrl_c_ends_it_with_one_line(server: RunningServer, client: redis.Redis) -> None:
    command = [str(Path(sys.executable).with_name("kvpage")), "bench", "--url", server.url, "--seconds", "60"]
    before = len(client.client_list())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: len(client.client_list()) > before, "its connection")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors.strip()) == (130, b"kvpage: interrupted")


def test_a_stopped_server_is_reported_in_one_line() -> None:
    with start_server(killed=True) as server, server.client() as client:
        command = [str(Path(sys.executable).with_name("kvpage")), "bench", "--url", server.url, "--seconds", "60"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            until(lambda: len(client.client_list()) > 1, "its connection")
            server.process.kill()
            _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors.count(b"\n")) == (2, 1)
    assert errors.startswith(b"kvpage: cannot reach")


COMMAND = re.compile(rb"(?:^|\r\n)\*\d+\r\n\$\d+\r\n(\w+)")  # the beginning of one
GREETING = b"%2\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n"


@contextmanager
def strange_server(replies: Mapping[bytes, bytes]) -> Iterator[str]:
    """Yield the URL of a server that has one reply to each command of a name, and one, under b"", to all others."""

    def handle(sock: socket.socket) -> None:
        with suppress(OSError):
            while asked := sock.recv(65536):
                sock.sendall(b"".join(replies.get(name, replies[b""]) for name in COMMAND.findall(asked)))

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=handle, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("reply", [b"+OK\r\n", b"*0\r\n", b"%0\r\n", b"*1\r\n:1\r\n", b"$3\r\na:b\r\n", b"_\r\n"])
@pytest.mark.parametrize("greeting", [GREETING, None], ids=["", "greeting"])
def test_an_unexpected_reply_is_one_line(
    reply: bytes, greeting: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpage_server.look.savings._LISTEN_SECONDS", 0.1)
    page = "kv:x:0:0:0:0"
    with strange_server({b"": reply, b"HELLO": greeting or reply}) as url:
        for words in (["ls"], ["ls", "x"], ["status"], ["savings"], ["verify", "x"], ["why", "x"], ["stat", page]):
            code, _, errors = kvpage(*words, url=url)
            assert (code in (1, 2), errors.count("\n")) == (True, 1), (words, errors)
        code, _, errors = kvpage("dump", str(tmp_path / "d"), url=url)
        assert (code in (1, 2), errors.count("\n")) == (True, 1), errors
        assert kvpage("doctor", url=url)[::2] == (2, "")


@pytest.mark.parametrize(
    ("words", "command", "reply", "message"),
    [
        (["ls", "x"], b"KVPAGEINDEX", b"*1\r\n%1\r\n+page\r\n+a\r\n", "instead of a number came b'a'"),
        (["ls", "x"], b"KVPAGEINDEX", b"*1\r\n%1\r\n+page\r\n:1\r\n", "a reply has no field planes"),
        (["why", "x"], b"KVPAGEWHY", b"%1\r\n+reason\r\n:1\r\n", "instead of a string came 1"),
        (["stat", "kv:x:0:0:0:0"], b"KVPAGESTAT", b"%0\r\n", "a reply has no field dtype"),
        (["ls"], b"SCAN", b"*2\r\n+0\r\n*1\r\n:1\r\n", "instead of a string came 1"),
    ],
)
def test_the_line_about_a_malformed_reply_has_its_beginning(
    words: list[str], command: bytes, reply: bytes, message: str
) -> None:
    with strange_server({b"": b"+OK\r\n", b"HELLO": GREETING, command: reply}) as url:
        said = f"kvpage: {url}: {message}: is it a kvpage-server of this version?\n"
        assert kvpage(*words, url=url) == (1, "", said)


def test_a_defect_of_a_command_is_no_malformed_reply(monkeypatch: pytest.MonkeyPatch, server: RunningServer) -> None:
    monkeypatch.setattr("kvpage_server.look.ls.tables_of", lambda *_: None)
    with pytest.raises(TypeError):
        kvpage("ls", url=server.url)


@pytest.mark.parametrize(
    "missing", ["mlx", *(pytest.param(name, marks=pytest.mark.soak) for name in ("mlx_lm", "pydantic")), "uvicorn"]
)
def test_an_extra_that_is_not_installed_is_named(missing: str) -> None:
    program = f"import sys; sys.modules['{missing}'] = None; from engine.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", "--port", "0"], capture_output=True, encoding="utf-8", timeout=100
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"kvpage-engine: {missing} is not installed: pip install '.[engine]' in a checkout of kvpage\n"
    )
    assert "Traceback" not in done.stderr


def test_the_server_is_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpage_server", "--version"], capture_output=True, encoding="utf-8", timeout=100
    )
    assert done.stdout == f"kvpage-server {__version__}, page core: {core.NAME}\n"


# -- values on disk ----------------------------------------------------------------------------------------------------


def test_a_block_without_a_record_is_removed_or_elsewhere(server: RunningServer, client: redis.Redis) -> None:
    """The server has forgotten removals, for example by a restart, or the engine has stored the block elsewhere."""
    manifest = {"count": 8, "block_tokens": 4, "chain": ["there", "lost"], "tokens": [1] * 8}
    set_block(client, "there")
    client.set("manifest:alice:00000000000000aa", "0" * 16 + json.dumps(manifest))
    code, shown, _ = kvpage("why", "alice", url=server.url)
    unknown = "; then: never stored here, or removed before the records of removals began, "
    assert (code, unknown in shown) == (1, True)
    code, shown, _ = kvpage("stat", "alice", url=server.url)
    assert (code, bool(re.search(r"^ +1 +4 +0 bytes +missing ", shown, re.MULTILINE))) == (1, True)


def test_queries_leave_values_on_disk_and_idle(tmp_path: Path) -> None:
    manifest = {"agent_id": "alice", "count": 4, "chain": ["r"], "tokens": [1] * 4, "by": "x" * 1000}
    tiered = ("--store", "tiered", "--appendfsync", "always")
    with start_server(*tiered, directory=tmp_path) as server, server.client() as client:
        set_block(client, "r")
        client.set("manifest:alice:00000000000000aa", "0" * 16 + json.dumps(manifest))
    with start_server(*tiered, directory=tmp_path) as server, server.client() as client:
        before = client.info("memory")["used_memory"]
        until(lambda: client.object("idletime", "manifest:alice:00000000000000aa") >= 2, "the manifest to be idle")
        looks = (["ls"], ["stat", "alice"], ["why", "alice"], ["verify", "r"], ["stat", "kv:r:1:2:0:1"], ["ls", "r"])
        for words in (*looks, ["dump", str(tmp_path / "dump")]):
            code, shown, errors = kvpage(*words, url=server.url)
            assert (code, errors) == (0, ""), words
            assert eventually(lambda: client.info("memory")["used_memory"] == before), words
            if words[0] == "stat":
                assert "disk" in shown
        code, shown, _ = kvpage("ls", "--json", url=server.url)
        assert json.loads(shown)["agents"][0]["idle_seconds"] >= 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("replay", "trace", "--capacity", "0"), "must be a whole number between 1 and 1000000000000, got '0'"),
        (("replay", "trace", "--block-bytes", "much"), "must be a number of bytes from 1 on, such as 512mb or 4gb"),
        (("replay", "trace", "--json", "-"), "- is not a path"),
        (("replay", "trace", "--plot", "chart.gif"), "must end with .png, .svg or .pdf, got chart.gif"),
        (("bench", "--seconds", "long"), "seconds, got long"),
        (("bench", "--json", "/nosuch/figures"), "argument --json: there is no directory /nosuch"),
        (("replay", "trace", "--plot", "/nosuch/chart.svg"), "argument --plot: there is no directory /nosuch"),
        (("why", ""), "argument REQ|AGENT|KEY: must not be empty"),
        (("dump", "dump", "--request", ""), "argument --request: must not be empty"),
        (("dump", "dump", "--match", ""), "argument --match: must not be empty"),
        (("status", "--url", ""), "argument --url: must not be empty"),
        (("restore", "dump", "--user", ""), "argument --user: must not be empty"),
        (("doctor", "--url", ""), "argument --url: must not be empty"),
        (("verify", "r", "4294967296"), "must be a whole number between 0 and 4294967295, got '4294967296'"),
        (("verify", "r", "x"), "must be a whole number between 0 and 4294967295, got 'x'"),
        (("why", "r", "0", "0", "-1", "0"), "must be a whole number between 0 and 4294967295, got '-1'"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_allowed_ones(words: tuple[str, ...], reason: str) -> None:
    code, _, errors = kvpage(*words)
    assert code == 2
    assert reason in errors


def interrupted_at(imported: str, program: str, *words: str) -> tuple[int, list[bytes]]:
    """Run a program, and interrupt it when it has imported a module. Return the exit code and the lines on stderr."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"][program].partition(":")
    command = [sys.executable, "-X", "importtime", "-c", f"from {module} import {function} as main; main()", *words]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "connectors")])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **path}
    ) as process:
        assert process.stderr is not None
        while not process.stderr.readline().endswith(f" {imported}\n".encode()):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        lines = process.stderr.read().splitlines()
        return process.wait(100), [line for line in lines if not line.startswith(b"import time:")]


@pytest.mark.parametrize("program", ["kvpage", "kvpage-server", "kvpage-engine"])
def test_ctrl_c_during_the_imports_ends_a_program_with_one_line(program: str) -> None:
    assert interrupted_at("numpy.version", program, "--help") == (130, [f"{program}: interrupted".encode()])


def test_ctrl_c_before_the_imports_is_no_traceback() -> None:
    code, lines = interrupted_at("json.decoder", "kvpage", "--help")
    assert code in (130, -signal.SIGINT)
    assert lines in ([], [b"kvpage: interrupted"])


@pytest.mark.parametrize("imported", ["numpy.random._common", "numpy.random._pcg64"])
def test_ctrl_c_during_late_imports_is_not_lost(server: RunningServer, imported: str) -> None:
    words = ("bench", "--url", server.url, "--seconds", "60")
    assert interrupted_at(imported, "kvpage", *words) == (130, [b"kvpage: interrupted"])


@pytest.mark.parametrize("words", [("fetch-model", "nosuch"), ("run", "nosuch", "--instance", "x")])
def test_ctrl_c_during_imports_of_mlx_is_not_lost(words: tuple[str, ...]) -> None:
    assert interrupted_at("mlx.core", "kvpage-engine", *words) == (130, [b"kvpage-engine: interrupted"])


def test_ctrl_c_during_imports_of_a_connector_is_not_lost(server: RunningServer) -> None:
    words = ("connectors", "verify", "mlx-lm", "--model", "nosuch", "--url", server.url)
    code, lines = interrupted_at("kvpage_connectors.verify", "kvpage", *words)
    assert (code, lines[-1:]) == (130, [b"kvpage: interrupted"])
    assert all(line.startswith(b"process 1 of 2") for line in lines[:-1]), "it may have begun on a busy machine"
