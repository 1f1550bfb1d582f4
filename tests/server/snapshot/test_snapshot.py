"""`kvpage dump` and `kvpage restore` against a real server: a restore returns the dumped values."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keyspaces import BINARY, HALVES, block, check_same, everything, fill, set_block
from servers import RunningServer, start_server
from stored_pages import set_page
from test_kvpage_cli import flip_a_bit, kvpage
from waiting import until

from kvpage_server.page import DType, PageKey, encode_page
from kvpage_server.snapshot.dump import Dumped, Selection, dump
from kvpage_server.snapshot.format import DumpError, intact, opened, read_contents, read_summary
from kvpage_server.snapshot.restore import Restored, restore
from kvpage_server.snapshot.store import RunningStore

EVERYTHING = Selection()


@pytest.fixture
def store(server: RunningServer, client: redis.Redis) -> Iterator[RunningStore]:
    """The emptied server, as a dump speaks to it."""
    with RunningStore(server.url) as store:
        yield store


def whole_files(directory: Path) -> list[Path]:
    """The files that a restore would take."""
    return sorted(directory.glob("*.safetensors"))


def inodes(directory: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in whole_files(directory)}


# -- there and back ------------------------------------------------------------------------------------------------


def test_a_dump_is_restored(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    before = everything(client)
    dumped = dump(store, tmp_path, EVERYTHING, file_bytes=100_000)
    assert (dumped.amount.pages + dumped.amount.strings, dumped.corrupt.texts) == (len(before[0]), [])
    assert dumped.amount.strings == 5
    client.flushall()
    restored = restore(store, tmp_path)
    assert (restored.amount.pages, restored.amount.strings) == (dumped.amount.pages, dumped.amount.strings)
    assert (restored.there, restored.expired, restored.corrupt.texts, restored.finished) == (0, 0, [], True)
    check_same(client, before)


def test_values_on_disk_only_are_dumped_and_restored(tmp_path: Path) -> None:
    with start_server("--store", "tiered", "--maxmemory", "1mb") as server, server.client() as client:
        client.set("string", random.Random(1).randbytes(300_000))
        for page in range(30):
            set_block(client, "large", page, block([(0, DType.BFLOAT16, 256), (1, DType.BFLOAT16, 256)], page_size=32))
        client.execute_command("SAVE")
        assert client.info("kvpage")["disk_dropped_from_memory"] > 15
        before = everything(client)
        with RunningStore(server.url) as store:
            dumped = dump(store, tmp_path, EVERYTHING, file_bytes=500_000)
            assert dumped.amount.pages + dumped.amount.strings == len(before[0])
            client.flushall()
            assert restore(store, tmp_path).amount.pages == dumped.amount.pages
        check_same(client, before)


def test_a_single_page_and_a_string_are_restored_exactly(
    client: redis.Redis, store: RunningStore, tmp_path: Path
) -> None:
    key = PageKey(b"r", 3, 1, 4, 1)
    blob = encode_page(key, b"abcd", dtype=DType.FLOAT16, page_size=2, head_dim=1, ttl=77, created_ms=1234)
    client.set(bytes(key), blob, px=50_000)
    dump(store, tmp_path, EVERYTHING)
    client.flushall()
    restore(store, tmp_path)
    assert client.get(bytes(key)) == blob
    assert 45_000 < client.pttl(bytes(key)) <= 50_000


req_ids = st.binary(min_size=1, max_size=8).map(
    lambda raw: bytes(b | 0x80 if b <= 0x20 or b in b":\x7f" else b for b in raw)
)
keyspaces = st.lists(
    st.one_of(
        st.tuples(
            st.just("page"),
            req_ids,
            st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)),
            st.sampled_from(DType),
            st.sampled_from([0, 4, 6]),  # bytes
        ),
        st.tuples(st.just("block"), req_ids, st.integers(0, 2), st.sampled_from(DType), st.integers(1, 3)),
        st.tuples(st.just("string"), st.binary(min_size=1, max_size=8), st.binary(max_size=3)),
    ),
    max_size=12,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keyspace=keyspaces)
def test_any_keyspace_is_restored(
    client: redis.Redis, store: RunningStore, tmp_path_factory: pytest.TempPathFactory, keyspace: list[tuple]
) -> None:
    client.flushall()
    for kind, name, *rest in keyspace:
        if kind == "page":
            (layer, head, page, kv_type), dtype, size = rest
            client.execute_command("KVPAGESET", name, layer, head, page, kv_type, int(dtype), 1, 1, 0, bytes(size))
        elif kind == "block":
            page, dtype, heads = rest
            set_block(client, name, page, block([(0, dtype, 2), (1, DType.INT8, 3)], heads=heads))
        else:
            client.set(name, rest[0])
    before = everything(client)
    directory = tmp_path_factory.mktemp("dump")
    dump(store, directory, EVERYTHING, file_bytes=50)
    client.flushall()
    restored = restore(store, directory)
    assert (restored.corrupt.texts, restored.there) == ([], 0)
    check_same(client, before)


def test_requests_are_dumped_and_restored_by_name(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    fill(client)
    url = ("--url", server.url)
    assert kvpage("dump", str(tmp_path / "some"), "--request", "chat-7", "--request", r"r\xff\xe9%41*", *url)[0] == 0
    assert kvpage("dump", str(tmp_path / "all"), *url)[0] == 0
    for name in ("some", "all"):
        client.flushall()
        assert kvpage("restore", str(tmp_path / name), "--request", r"r\xff\xe9%41*", *url)[0] == 0
        assert list(client.scan_iter(_type="set")) == [b"kv:" + BINARY + b":index"]
        assert client.dbsize() == HALVES.pages
    client.flushall()
    assert kvpage("restore", str(tmp_path / "some"), *url)[0] == 0
    assert client.dbsize() == 5 * HALVES.pages


def test_a_request_without_a_page_is_reported(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    set_block(client, "r", 0, HALVES)
    assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
    for command in (
        ("dump", str(tmp_path / "new"), "--url", server.url),
        ("restore", str(tmp_path), "--url", server.url),
        ("inspect", str(tmp_path)),
    ):
        code, _, errors = kvpage(*command, "--request", "nobody")
        assert code == 1
        assert "--request names" in errors


def test_each_request_without_a_page_is_reported(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    fill(client)
    assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
    some = tmp_path / "some"
    for command in (
        ("dump", str(some), "--url", server.url),
        ("dump", str(some), "--update", "--url", server.url),
        ("restore", str(tmp_path), "--replace", "--url", server.url),
        ("inspect", str(tmp_path)),
    ):
        named = ("--request", "torn", "--request", r"no\xff", "--request", "chat-7")
        code, shown, _ = kvpage(*command, *named)
        assert (code, shown.count("no page")) == (1, 1)
        assert "request no\\xff has no page\n" in shown
    client.flushall()
    found = [
        json.loads(kvpage(*command, *named, "--json")[1])
        for command in (
            ("restore", str(some), "--url", server.url),
            ("inspect", str(tmp_path)),
        )
    ]
    pages = 5 * HALVES.pages - 1  # a page of the request torn is deleted
    for counts in found:
        assert counts["absent"] == [r"no\xff"]
        assert (counts["pages"], counts["strings"]) == (pages, 0)
    assert found[0]["bytes"] == found[1]["bytes"]
    code, shown, _ = kvpage("restore", str(some), *named, "--json", "--url", server.url)
    assert (code, json.loads(shown)["absent"], json.loads(shown)["there"]) == (1, [r"no\xff"], pages)


def test_a_pattern_selects_pages_and_strings(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    dumped = dump(store, tmp_path, Selection(match=b"*:alice"))
    assert (dumped.amount.pages, dumped.amount.strings) == (0, 1)
    dumped = dump(store, tmp_path / "pages", Selection(match=b"kv:chat-7:*:2:?"))
    assert (dumped.amount.pages, dumped.amount.strings) == (HALVES.pages, 0)


def test_a_user_dumps_only_visible_keys(tmp_path: Path) -> None:
    with start_server() as server, server.client() as client:
        needed = ["+time", "+watch", "+multi", "+exec"]
        keys = ["kv:alice.*", "alice:*"]
        client.acl_setuser("alice", enabled=True, nopass=True, keys=keys, categories=["+@read"], commands=needed)
        set_block(client, "alice.chat", 0, HALVES)
        set_block(client, "bob.chat", 0, HALVES)
        client.mset({"alice:x": 1, "bob:x": 2})
        with RunningStore(server.url.replace("//", "//alice:any@")) as store:
            dumped = dump(store, tmp_path, EVERYTHING)
        assert (dumped.amount.pages, dumped.amount.strings) == (HALVES.pages, 1)


# -- existing files ----------------------------------------------------------------------------------------------------


def test_existing_keys_stay_unless_replace_is_given(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    old = client.get("kv:chat-7:0:0:1:0")
    dump(store, tmp_path, EVERYTHING)
    client.delete("kv:chat-7:1:1:1:1", "empty")
    client.execute_command("KVPAGESET", "chat-7", 0, 0, 1, 0, 3, 1, 3, 0, "new")
    client.execute_command("KVPAGESET", "chat-7", 9, 0, 1, 0, 3, 1, 3, 0, "own")
    client.set("manifest:alice", "new")
    before = client.dbsize()
    restored = restore(store, tmp_path)
    assert (restored.amount.pages, restored.amount.strings, restored.there) == (1, 1, before - 1)
    assert client.execute_command("KVPAGEGET", "chat-7", 0, 0, 1, 0) == b"new"
    assert client.get("manifest:alice") == b"new"
    restored = restore(store, tmp_path, replace=True)
    assert restored.there == 0
    assert client.get("kv:chat-7:0:0:1:0")[64:] == old[64:]
    assert client.get("manifest:alice") == b"\x00\xff" * 40
    assert not client.exists("kv:chat-7:9:0:1:0")  # a block equals its dump


def test_a_string_with_the_key_of_a_page_is_there_already(
    client: redis.Redis, store: RunningStore, tmp_path: Path
) -> None:
    for page in range(3):
        set_block(client, "chat-7", page, HALVES)
    bodies = {key: client.get(key) for key in everything(client)[0]}
    dump(store, tmp_path, EVERYTHING)
    client.flushall()
    client.set("kv:chat-7:1:1:1:1", "mine")
    restored = restore(store, tmp_path)
    assert (restored.amount.pages, restored.there) == (3 * HALVES.pages - 1, 1)
    assert client.get("kv:chat-7:1:1:1:1") == b"mine"
    here = {key: client.get(key) for key in everything(client)[0]}
    assert {key: body[64:] for key, body in here.items() if body != b"mine"} == {
        key: body[64:] for key, body in bodies.items() if key != b"kv:chat-7:1:1:1:1"
    }
    restored = restore(store, tmp_path, replace=True)
    assert (restored.amount.pages, restored.there) == (3 * HALVES.pages, 0)
    assert client.get("kv:chat-7:1:1:1:1")[64:] == bodies[b"kv:chat-7:1:1:1:1"][64:]


def test_an_interrupted_restore_continues(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    before = everything(client)
    dump(store, tmp_path, EVERYTHING, file_bytes=500)
    client.flushall()

    def stop(count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        restore(store, tmp_path, done=stop)
    some = client.dbsize()
    assert 0 < some < len(before[0])
    restored = restore(store, tmp_path)
    assert restored.there == some
    check_same(client, before)


def test_keys_that_expired_meanwhile_are_not_restored(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    client.set("short", "lived", px=100_000)
    client.set("kept", "x")
    dump(store, tmp_path, EVERYTHING)
    summary = (tmp_path / "dump.json").read_text(encoding="utf-8")
    began = read_summary(tmp_path).dumped_ms
    (tmp_path / "dump.json").write_text(
        summary.replace(str(began), str(began + 100_000)), encoding="utf-8"
    )  # as an update leaves it
    client.flushall()
    restored = restore(store, tmp_path)
    assert (restored.amount.strings, restored.expired) == (1, 1)


# -- interrupted dumps, and updated ones -------------------------------------------------------------------------------


KILLED = """
from pathlib import Path
from kvpage_server.snapshot.dump import Selection, dump
from kvpage_server.snapshot.store import RunningStore
with RunningStore({!r}) as store:
    dump(store, Path({!r}), Selection(), file_bytes=300)
"""


@pytest.mark.parametrize("times", [2, pytest.param(30, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_a_killed_dump_leaves_no_torn_file_and_continues(
    server: RunningServer, client: redis.Redis, store: RunningStore, tmp_path: Path, times: int
) -> None:
    for page in range(10):
        set_block(client, f"r{page % 7}", page, HALVES)
    before = everything(client)
    for number in range(times):
        directory = tmp_path / str(number)
        process = subprocess.Popen([sys.executable, "-c", KILLED.format(server.url, str(directory))])
        deadline = time.monotonic() + 60
        while not directory.exists() or len(whole_files(directory)) < 1 + 4 * number % 9:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished = (directory / "dump.json").exists()
        for file in whole_files(directory):
            contents = read_contents(file)
            with opened(contents) as data:
                assert all(all(intact(data, contents, span)) for span in contents.spans)
        restored = restore(store, directory)
        assert (restored.corrupt.texts, restored.finished) == ([], finished)
        kept = inodes(directory)
        dumped = dump(store, directory, EVERYTHING, update=finished, file_bytes=300)
        assert dumped.kept == len(kept)
        assert inodes(directory).items() >= kept.items()
        assert not list(directory.glob(".*"))
        client.flushall()
        assert restore(store, directory).finished
        check_same(client, before)


def test_a_dump_is_brought_up_to_date(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    dump(store, tmp_path, EVERYTHING, file_bytes=300)
    files = inodes(tmp_path)
    with pytest.raises(DumpError, match="continue with --update"):
        dump(store, tmp_path, EVERYTHING)
    dumped = dump(store, tmp_path, EVERYTHING, update=True, file_bytes=300)
    unsure = len(files) - dumped.kept
    assert unsure == 1  # the one with the page that has no checksum
    client.delete("empty")
    set_block(client, "chat-7", 2, HALVES, seed=1)
    client.execute_command("KVPAGESET", "quantised", 2, 0, 0, 0, 7, 4, 2, 0, bytes(32))
    client.persist("kv:fading:1:1:0:0")
    before = everything(client)
    assert 3 < dump(store, tmp_path, EVERYTHING, update=True, file_bytes=300).kept < len(files) - 3
    client.flushall()
    restore(store, tmp_path)
    check_same(client, before)


def test_while_a_dump_is_brought_up_to_date_the_old_one_stays(
    client: redis.Redis, store: RunningStore, tmp_path: Path
) -> None:
    fill(client)
    before = everything(client)
    dump(store, tmp_path, EVERYTHING, file_bytes=1000)
    client.flushall()
    set_block(client, "other", 0, HALVES)
    set_block(client, "third", 0, HALVES)

    def stop(count: int) -> None:
        if len(list(tmp_path.glob("pages-*"))) > 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        dump(store, tmp_path, EVERYTHING, update=True, file_bytes=1, done=stop)
    client.flushall()
    assert restore(store, tmp_path).finished
    check_same(client, before)


def test_a_directory_holds_one_dump(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)
    dump(store, tmp_path, Selection(requests=(b"chat-7",)))
    for update in (False, True):
        with pytest.raises(DumpError, match="holds a dump of --request chat-7, not of everything"):
            dump(store, tmp_path, EVERYTHING, update=update)
    (tmp_path / "dump.json").unlink()
    with pytest.raises(DumpError, match="holds a dump of --request chat-7"):
        dump(store, tmp_path, Selection(match=b"x*"))


def test_one_dump_at_a_time_writes_into_a_directory(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    fill(client)

    def another(count: int) -> None:
        with pytest.raises(DumpError, match="another kvpage dump or restore is using"):
            restore(store, tmp_path)
        with pytest.raises(DumpError, match="another kvpage dump or restore is using"):
            dump(store, tmp_path, EVERYTHING)

    assert isinstance(dump(store, tmp_path, EVERYTHING, done=another), Dumped)
    assert isinstance(restore(store, tmp_path), Restored)


def test_a_full_disk_is_reported_and_leaves_no_torn_file(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    client.set("long", random.Random(1).randbytes(3_000_000))
    limited = ["sh", "-c", 'ulimit -f 1000; exec "$@"', "sh"]  # blocks of 512 bytes or 1 KiB
    command = [sys.executable, "-m", "kvpage_server.cli", "dump", str(tmp_path), "--url", server.url]
    done = subprocess.run([*limited, *command], capture_output=True, encoding="utf-8", timeout=100)
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert done.stderr == f"kvpage: {tmp_path / 'strings-000001.safetensors'}: File too large\n"


# -- output of the commands --------------------------------------------------------------------------------------------


def test_the_commands_report_their_results(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    set_block(client, "r", 0, HALVES)
    client.set("x", "y")
    url = ("--url", server.url)
    code, shown, _ = kvpage("dump", str(tmp_path), *url)
    assert code == 0
    assert shown.startswith("8 pages and 1 string, 449 bytes in 2 files, ")
    code, _, errors = kvpage("dump", str(tmp_path), *url)
    advice = "continue with --update, which brings it up to date"
    assert (code, errors) == (1, f"kvpage: {tmp_path} holds a finished dump; {advice}\n")
    code, shown, _ = kvpage("dump", str(tmp_path), "--update", *url)
    assert code == 0
    assert "in 2 files, 2 of them as they were, " in shown
    client.delete("x")
    code, shown, _ = kvpage("restore", str(tmp_path), *url)
    assert code == 0
    assert shown.startswith("0 pages and 1 string, 1 byte restored, ")
    assert "8 keys there already, left unchanged\n" in shown
    assert kvpage("restore", str(tmp_path), "--replace", *url)[1].startswith("8 pages and 1 string, 449 bytes")
    code, _, errors = kvpage("restore", str(tmp_path / "nowhere"), *url)
    assert code == 1
    assert "No such file or directory" in errors
    (tmp_path / "empty").mkdir()
    assert kvpage("restore", str(tmp_path / "empty"), *url)[2] == f"kvpage: {tmp_path / 'empty'} holds no dump\n"


def test_the_dump_of_another_server_is_not_updated(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    client.set("string", "value")
    kvpage("dump", str(tmp_path), "--url", server.url)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with start_server() as other:
        code, _, errors = kvpage("dump", str(tmp_path), "--update", "--url", other.url)
        assert code == 1
        assert f"holds a dump of {server.url}, not of {other.url}: name another directory" in errors
        assert errors.endswith(", or the old URL of a server that was restarted\n")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert kvpage("dump", str(tmp_path), "--update", "--url", server.url)[0] == 0
    other_name = server.url.replace("127.0.0.1", "localhost")
    assert kvpage("dump", str(tmp_path), "--update", "--url", other_name)[0] == 0


def test_a_database_that_does_not_exist_is_a_wrong_argument(server: RunningServer, tmp_path: Path) -> None:
    for command in (["ls"], ["why", "r"], ["dump", str(tmp_path)]):
        code, _, errors = kvpage(*command, "--url", f"{server.url}/3")
        assert (code, errors) == (
            2,
            f"kvpage: {server.url}/3: the server has no such database; allowed: 0 of a kvpage-server\n",
        )


@pytest.mark.parametrize("command", ["dump", "restore", "inspect"])
def test_an_empty_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = kvpage(command, "")
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "a path has at least one character" in errors


def test_only_a_kvpage_server_can_be_dumped(redis_server: RunningServer, tmp_path: Path) -> None:
    code, _, errors = kvpage("dump", str(tmp_path), "--url", redis_server.url)
    assert (code, errors) == (1, "kvpage: only a kvpage-server can be dumped, this is another Redis\n")


def test_a_dump_larger_than_the_store_is_reported(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    for page in range(40):
        set_block(client, "r", page, block([(0, DType.INT8, 1024)], page_size=16))
    kvpage("dump", str(tmp_path), "--url", server.url)
    with start_server("--maxmemory", "1mb") as small:
        code, shown, _ = kvpage("restore", str(tmp_path), "--url", small.url)
        with small.client() as other:
            lost = client.dbsize() - other.dbsize()
    assert code == 1
    assert (
        f"\n{lost} keys evicted meanwhile, {lost} of them from the dump: the dump may be larger than maxmemory\n"
        in shown
    )


def test_a_restore_that_evicts_other_keys_is_complete(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    client.set("dumped", bytes(100_000))
    client.set("short-lived", bytes(100_000), px=3_600_000)
    kvpage("dump", str(tmp_path), "--url", server.url)
    with start_server("--maxmemory", "1mb", "--maxmemory-policy", "allkeys-lru") as small, small.client() as other:
        for number in range(20):
            other.set(f"older {number}", bytes(100_000))
        code, shown, _ = kvpage("restore", str(tmp_path), "--url", small.url)
        assert other.exists("dumped", "short-lived") == 2
    assert (code, re.search(r"^\d+ keys? evicted meanwhile: the dump may", shown, re.MULTILINE) is not None) == (
        0,
        True,
    )


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_restore_names_maxdisk_if_the_disk_is_full(
    server: RunningServer, client: redis.Redis, tmp_path: Path, policy: str
) -> None:
    for number in range(300):
        client.set(f"string {number}", bytes(100_000))
    kvpage("dump", str(tmp_path / "dump"), "--url", server.url)
    (tmp_path / "store").mkdir()
    options = ("--store", "tiered", "--maxdisk", "16mb", "--maxmemory", "100mb", "--maxmemory-policy", policy)
    with start_server(*options, directory=tmp_path / "store") as small:
        code, shown, errors = kvpage("restore", str(tmp_path / "dump"), "--url", small.url)
    assert errors == ""
    if policy == "noeviction":
        assert code == 1
        assert re.search(r"^  string \d+: OOM command not allowed when used disk > 'maxdisk': ", shown, re.MULTILINE)
    else:
        assert code == 1
        assert re.search(
            r"keys evicted meanwhile, \d+ of them from the dump: the dump may be larger than maxdisk\n", shown
        )


def test_a_restore_names_the_quota_that_evicts(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    for number in range(100):
        client.set(f"string {number}", bytes(100_000))
    kvpage("dump", str(tmp_path), "--url", server.url)
    with start_server("--quota", "string*", "1mb") as small:
        code, shown, _ = kvpage("restore", str(tmp_path), "--url", small.url)
        assert code == 1
        assert re.search(
            r"keys evicted meanwhile, \d+ of them from the dump: the dump may be larger than a quota\n", shown
        )
        found = json.loads(kvpage("restore", str(tmp_path), "--url", small.url, "--json")[1])
        with small.client() as other:
            assert found["lost"] == 100 - other.dbsize()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux lets one process reach another's memory so")
def test_damaged_values_of_the_server_are_not_dumped(
    server: RunningServer, client: redis.Redis, tmp_path: Path
) -> None:
    body = random.Random(6).randbytes(20_000)
    for page, content in enumerate((body, bytes(20_000))):
        client.execute_command("KVPAGESET", "r", 0, 0, page, 0, 3, 1, len(content), 0, content)
    flip_a_bit(server.pid, body[5000:5100])
    code, shown, _ = kvpage("dump", str(tmp_path), "--url", server.url)
    assert code == 1
    assert "1 page and 0 strings" in shown
    assert "kv:r:0:0:0:0: the body does not match the checksum in its header" in shown
    assert os.listdir(tmp_path)


def test_a_page_replaced_during_its_dump_is_not_called_damaged(
    client: redis.Redis, store: RunningStore, tmp_path: Path
) -> None:
    for layer in range(2):
        client.execute_command("KVPAGESET", "r", layer, 0, 0, 0, 3, 1, 6, 0, b"a page")
    dumped = dump(
        store, tmp_path, Selection(requests=(b"r",)), done=lambda count: client.set("kv:r:1:0:0:0", "a string")
    )
    assert (dumped.amount.pages, dumped.amount.strings, dumped.corrupt.texts) == (1, 1, [])
    client.flushall()
    restore(store, tmp_path)
    assert client.get("kv:r:1:0:0:0") == b"a string"
    assert client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0) == b"a page"


def test_a_key_alternating_between_kinds_is_not_called_damaged(
    server: RunningServer, store: RunningStore, client: redis.Redis, tmp_path: Path
) -> None:
    for page in range(500):
        client.execute_command("KVPAGESET", "still", page // 100, 0, page % 100, 0, 3, 1, 6, 0, b"a page")
    over = threading.Event()

    def turn() -> None:
        with redis.Redis(port=server.port) as other:
            while not over.is_set():
                for page in range(20):
                    other.set(f"kv:turns:0:0:{page}:0", "a string")
                    other.execute_command("KVPAGESET", "turns", 0, 0, page, 0, 3, 1, 6, 0, b"a page")

    turning = threading.Thread(target=turn)
    turning.start()
    try:
        found = [dump(store, tmp_path / str(number), EVERYTHING).corrupt.texts for number in range(8)]
    finally:
        over.set()
        turning.join()
    assert found == [[]] * 8


def test_a_value_is_dumped_with_the_time_to_live_that_it_had(
    server: RunningServer, store: RunningStore, client: redis.Redis
) -> None:
    keys = [b"still:%d" % number for number in range(900)]
    client.mset(dict.fromkeys([*keys, b"turns"], "lives for ever"))
    over = threading.Event()

    def turn() -> None:
        with redis.Redis(port=server.port) as other:
            while not over.is_set():
                other.set("turns", "lives for a while", ex=1000)
                other.set("turns", "lives for ever")

    turning = threading.Thread(target=turn)
    turning.start()
    try:
        found = [store.values([*keys, b"turns"]) for _ in range(60)]
    finally:
        over.set()
        turning.join()
    assert {len(values) for values in found} == {901}
    kinds = {(bytes(value.data), value.expires_ms < 0) for values in found for value in values}
    assert kinds == {(b"lives for a while", False), (b"lives for ever", True)}


def test_a_restore_sends_requests_a_smaller_server_accepts(
    store: RunningStore, client: redis.Redis, tmp_path: Path
) -> None:
    shape = [(0, DType.BFLOAT16, 256), (1, DType.BFLOAT16, 256)]
    set_block(client, "large", 0, block(shape, layers=8, heads=8, page_size=64))  # 4 MiB
    client.set("string", random.Random(2).randbytes(3 << 20))
    dump(store, tmp_path, EVERYTHING)
    with start_server("--maxmemory-clients", "2mb") as smaller, smaller.client() as other:
        code, shown, errors = kvpage("restore", str(tmp_path), url=smaller.url)
        assert (code, errors) == (1, "")
        assert "1 did not fit into the store, and was not restored:" in shown
        assert "string, 3145728 bytes: the server takes 2097152 at once (maxmemory-clients, " in shown
        pages = other.execute_command("KVPAGEINDEX", "large", "WITHSIZES")
        assert [found[b"bytes"] for found in pages] == [4 << 20]
        for page in itertools.product(range(8), range(8), [0], range(2)):
            assert other.execute_command("KVPAGEGET", "large", *page) == client.execute_command(
                "KVPAGEGET", "large", *page
            )


def test_a_restore_reports_errors_of_a_full_server(store: RunningStore, client: redis.Redis, tmp_path: Path) -> None:
    for page in range(8):
        set_block(client, "large", page, block([(0, DType.BFLOAT16, 256)], layers=4, heads=4, page_size=64))  # 512 KiB
    dump(store, tmp_path, EVERYTHING, file_bytes=1_000_000)
    with start_server("--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as smaller, smaller.client() as other:
        code, shown, errors = kvpage("restore", str(tmp_path), url=smaller.url)
        assert (code, errors) == (1, "")
        kept = other.execute_command("KVPAGEINDEX", "large")
        assert 0 < len(kept) < 8
        assert f"{(8 - len(kept)) * 16} did not fit into the store, and were not restored:" in shown
        assert shown.count("OOM command not allowed when used memory > 'maxmemory'.\n") == (8 - len(kept)) * 16
        for page in range(len(kept)):
            assert other.execute_command("KVBLOCKGET", "large", page)


def test_a_restore_names_the_size_of_a_block_larger_than_memory(
    store: RunningStore, client: redis.Redis, tmp_path: Path
) -> None:
    set_block(client, "large", 0, block([(0, DType.BFLOAT16, 256)], layers=4, heads=4, page_size=512))  # 4 MiB
    dump(store, tmp_path, EVERYTHING)
    with start_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as smaller:
        code, shown, _ = kvpage("restore", str(tmp_path), url=smaller.url)
    assert code == 1
    assert shown.count("when used memory > 'maxmemory'. It has 4194304 bytes, and maxmemory is 3145728.\n") == 16


def test_a_restore_omits_values_that_its_user_may_not_write(tmp_path: Path) -> None:
    """Every other value is restored, and each omitted one is listed with the reason."""
    user = ("--user", "tenantA", "on", ">password", "~kv:tenantA.*", "+@all")
    with start_server(*user) as server, server.client() as client:
        for req_id in ("tenantA.q", "other"):
            set_block(client, req_id, 0, HALVES)
            client.execute_command("KVPAGESET", req_id, 0, 0, 9, 0, 1, 1, 1, 0, b"ab")
        client.set("string", "value")
        assert kvpage("dump", str(tmp_path), "--url", server.url)[0] == 0
        for options in ((), ("--replace",)):
            client.flushall()
            client.set("kv:tenantA.q:0:0:9:0", "another value")
            arguments = ("restore", str(tmp_path), "--url", f"redis://tenantA:password@127.0.0.1:{server.port}")
            code, shown, errors = kvpage(*arguments, *options)
            assert (code, errors) == (1, "")
            there = 0 if options else 1
            assert shown.startswith(f"{HALVES.pages + 1 - there} pages and 0 strings"), shown
            assert shown.count("NOPERM No permissions to access a key") == HALVES.pages + 2
            assert client.dbsize() == HALVES.pages + 1


def test_a_dump_leaves_values_in_memory_and_on_disk(tmp_path: Path) -> None:
    options = ("--store", "tiered", "--maxmemory", "8mb")
    (tmp_path / "store").mkdir()
    with start_server(*options, directory=tmp_path / "store") as server, server.client() as client:
        for i in range(100):
            client.execute_command("KVPAGESET", f"r{i}", 0, 0, 0, 0, 1, 1, 1 << 17, 0, random.randbytes(1 << 18))
        until(lambda: client.info("kvpage")["disk_waiting_bytes"] == 0)
        client.set("x", "y")  # makes room
        before = client.info("memory")["used_memory"], client.info("kvpage")["disk_dropped_from_memory"]
        assert before[1] > 50
        assert kvpage("dump", str(tmp_path / "dump"), "--url", server.url)[0] == 0
        assert (client.info("memory")["used_memory"], client.info("kvpage")["disk_dropped_from_memory"]) == before


def test_a_request_with_few_pages_costs_few_commands(client: redis.Redis, store: RunningStore, tmp_path: Path) -> None:
    """KVPAGEINDEX, which takes long, asks for the sizes of requests with many pages only."""
    for number in range(300):
        set_page(client, req=f"one.{number}")
    for number in range(20):
        set_page(client, req="many", page=number)
    client.config_resetstat()
    assert dump(store, tmp_path / "dump", Selection()).amount.pages == 320
    calls = {name: about["calls"] for name, about in client.info("commandstats").items()}
    assert calls["cmdstat_kvpageindex"] == 1
    assert sum(calls.values()) < 5 * 300
