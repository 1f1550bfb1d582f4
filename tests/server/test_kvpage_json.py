"""`kvpage --json`: an object per line, with the keys in docs/json.md; and commands that run until interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
import redis
from servers import RunningServer, free_port, start_server
from test_kvpage_cli import kvpage, set_block

from kvpage_server.client.cluster.side_by_side import Rendezvous, servers_of

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "json.md").read_text(encoding="utf-8").partition("These keys stay")[2]
LISTED = {
    row[0]: re.findall(r"`(\w+)`", row[1].partition("; of ")[0])
    for row in re.findall(r"^\| ([\w ]+) \| (`.*)", TABLE, re.M)
}
PARTS = {
    (row[0], what): re.findall(r"`(\w+)`", part)
    for row in re.findall(r"^\| ([\w ]+) \| (`.*)", TABLE, re.M)
    for what, part in re.findall(r"; of (an agent|a request|a shared prefix|a block|a place) ([^;]*)", row[1])
}
PROGRAM = str(Path(sys.executable).with_name("kvpage"))


def json_of(*words: str, url: str = "") -> dict[str, Any]:
    code, shown, errors = kvpage(*words, "--json", url=url)
    assert (code, errors) == (0, "")
    assert shown.count("\n") == 1
    found: dict[str, Any] = json.loads(shown)
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("status", ["status"]),
        ("ls", ["ls"]),
        ("ls REQ", ["ls", "chat-7"]),
        ("stat KEY", ["stat", "kv:chat-7:0:0:0:0"]),
        ("verify REQ", ["verify", "chat-7"]),
        ("verify AGENT", ["verify", "alice"]),
        ("why REQ", ["why", "chat-7"]),
        ("stat AGENT", ["stat", "alice"]),
        ("why AGENT", ["why", "alice"]),
        ("why KEY of a string", ["why", "manifest:alice:00000000000000aa"]),
    ],
)
def test_its_keys_match_the_documentation(
    server: RunningServer, client: redis.Redis, name: str, words: list[str]
) -> None:
    set_block(client, "chat-7")
    remember(client, "alice")
    found = json_of(*words, url=server.url)
    assert set(LISTED[name]) <= found.keys()
    assert found["url"] == server.url


def test_the_keys_of_parts_match_the_documentation(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "chat-7")
    remember(client, "alice")
    remember(client, "bob", "alice")
    looked = json_of("ls", url=server.url)
    assert PARTS["ls", "an agent"] == [*looked["agents"][0]]
    assert PARTS["ls", "a shared prefix"] == [*looked["shared"][0]]
    assert PARTS["ls", "a request"] == [*looked["requests"][0]]
    assert set(PARTS["ls REQ", "a block"]) == json_of("ls", "chat-7", url=server.url)["blocks"][0].keys()
    context = json_of("stat", "alice", url=server.url)["contexts"][0]
    assert context.keys() == {*PARTS["ls", "an agent"], "places"}
    assert PARTS["stat AGENT", "a place"] == [*context["places"][0]]


def remember(client: redis.Redis, agent: str, of: str = "") -> None:
    """A context of one block, which may be another agent's."""
    set_block(client, f"of-{of or agent}")
    manifest = {"agent_id": agent, "model": "tiny", "chain": [f"of-{of or agent}"], "count": 4, "tokens": [1] * 4}
    client.set(f"manifest:{agent}:00000000000000aa", "0" * 16 + json.dumps(manifest))


def test_stat_shows_the_lifetimes_of_an_agents_blocks(server: RunningServer, client: redis.Redis) -> None:
    remember(client, "alice")
    client.execute_command("KVPAGEKEEP", "bob", 1, 3600, "kv:of-alice:0:0:0:0")
    [place] = json_of("stat", "alice", url=server.url)["contexts"][0]["places"]
    assert (place["kept_by"], place["kept_until_ms"] > 0) == ("bob", True)
    assert "for bob" in kvpage("stat", "alice", url=server.url)[1]


@pytest.mark.parametrize("gone", [False, True])
def test_each_part_of_several_servers_names_its_server(
    server: RunningServer, second_server: RunningServer, gone: bool, tmp_path: Path
) -> None:
    urls = [server.url, f"redis://127.0.0.1:{free_port()}" if gone else second_server.url]
    both = ",".join(urls)
    where = Rendezvous(servers_of(both))
    names = [f"request-{i}" for i in range(32)]  # servers have random names
    for url in urls[: 1 if gone else 2]:
        with redis.Redis.from_url(url) as one:
            one.flushall()
            for name in names:
                if str(where.server(name.encode())) == url:
                    set_block(one, name)
            if str(where.server(b"manifest:alice:00000000000000aa")) == url:
                remember(one, "alice")
    here = [name for name in names if not gone or str(where.server(name.encode())) == server.url]
    assert 0 < len(here) <= 32

    _, shown, _ = kvpage("ls", "--json", url=both)
    found = json.loads(shown)
    assert (found["url"], found["unreachable"]) == (both, urls[1:] if gone else [])
    assert {each["request"]: each["url"] for each in found["requests"] if each["request"] in names} == {
        name: str(where.server(name.encode())) for name in here
    }
    for words in (["ls", here[0]], ["why", here[0]], ["verify", here[0]], ["stat", f"kv:{here[0]}:0:0:0:0"]):
        _, shown, _ = kvpage(*words, "--json", url=both)
        assert json.loads(shown)["url"] == str(where.server(here[0].encode())), words
    for words in (["status"], ["dump", str(tmp_path / "dump")]):
        code, shown, errors = kvpage(*words, "--json", url=both)
        objects = [json.loads(line) for line in shown.splitlines()]
        assert [each["url"] for each in objects] == urls
        assert ["error" in each for each in objects] == [False, gone]
        assert (code, f"cannot reach {urls[1]}" in errors) == (2 * gone, gone)
    code, shown, errors = kvpage("restore", str(tmp_path), "--json", url=both)
    assert (code, shown, "names several" in errors) == (2, "", True)


def test_hidden_values_of_a_tenant_are_null() -> None:
    with start_server("--user", "app", "on", ">word", "~kv:app.*", "+@all") as server, server.client() as client:
        set_block(client, "app.chat")
        set_block(client, "other")
        found = json_of("status", url=server.url.replace("//", "//app:word@"))
    assert set(LISTED["status"]) <= found.keys()
    assert found["contents"] == {"requests": 1, "keys": 12}
    assert found["traffic"] is found["connections"] is found["misses"] is None
    assert found["url"] == server.url


def test_dumps_report_their_results(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    set_block(client, "chat-7")
    dumped = json_of("dump", str(tmp_path / "dump"), url=server.url)
    assert (dumped["pages"], dumped["strings"], dumped["corrupt"]) == (12, 0, [])
    assert set(LISTED["dump"]) == dumped.keys()
    found = json_of("inspect", str(tmp_path / "dump"))
    assert set(LISTED["inspect"]) == found.keys()
    assert (found["requests"], found["pages"]) == (1, 12)
    client.flushall()
    restored = json_of("restore", str(tmp_path / "dump"), url=server.url)
    assert set(LISTED["restore"]) == restored.keys()
    assert (restored["pages"], restored["there"], restored["finished"]) == (12, 0, True)


def test_values_equal_those_of_info(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "chat-7")
    info, found = client.info("everything"), json_of("status", url=server.url)
    assert found["memory"]["used"] == info["used_memory"]
    assert found["contents"]["blocks"] == info["blocks"] == 1
    assert found["commands"]["kvblockset"]["count"] == info["cmdstat_kvblockset"]["calls"]


def test_bytes_that_are_no_text_are_shown(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "x")
    client.execute_command("KVPAGESET", b"\xff\xfe<script>", 0, 0, 0, 0, 1, 1, 1, 0, b"ab")
    assert "\\xff\\xfe<script>" in {each["request"] for each in json_of("ls", url=server.url)["requests"]}


@pytest.mark.parametrize("words", [["status", "--watch", "0.2"], ["top", "--watch", "0.2"]])
def test_a_watch_prints_lines_until_it_is_interrupted(server: RunningServer, words: list[str]) -> None:
    process = subprocess.Popen(
        [PROGRAM, *words, "--json", "--url", server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    try:
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert [line["at"] for line in lines] == sorted({line["at"] for line in lines})
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, b"kvpage: interrupted\n")


@pytest.mark.parametrize("columns", [60, 100])
def test_top_fills_a_terminal_and_no_more(server: RunningServer, client: redis.Redis, columns: int) -> None:
    for number in range(60):
        set_block(client, f"a-request-with-rather-a-long-name-{number:03}")
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {
        "TERM": "xterm"
    }
    with pexpect.spawn(
        PROGRAM, ["top", "--url", server.url], dimensions=(30, columns), timeout=60, env=environment
    ) as shown:
        shown.expect("a-request-with")
        shown.expect("reads/s")
        shown.sendintr()
        shown.expect(pexpect.EOF)
        drawn = (shown.before or b"").partition(b"^C")[0].replace(b"\x1b[H", b"\n")
        frame = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", drawn).decode()
    assert max((len(line) for line in frame.splitlines()), default=0) <= columns


@pytest.mark.parametrize("wrong", ["0", "nan", "-1", "x", "1e9"])
def test_an_interval_that_is_none_is_refused(server: RunningServer, wrong: str) -> None:
    code, _, errors = kvpage("status", "--watch", wrong, url=server.url)
    assert code == 2
    assert "--watch" in errors
