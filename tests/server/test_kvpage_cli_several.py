"""`kvpage` with a list of servers side by side: it answers for all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import redis
from page_batches import SHAPE, block_body
from servers import RunningServer, free_port
from slot_maps import start_mapped

from kvpage_server.cli import main
from kvpage_server.client import PageClient

PROGRAM = Path(sys.executable).with_name("kvpage")
NAMES = [(b"{segment-%d}" % i, i) for i in range(16)]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_list_of_servers_is_looked_into_and_dumped_as_a_whole(
    server: RunningServer, second_server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = f"{server.url},{second_server.url}"
    for one in (server, second_server):
        with one.client() as client:
            client.flushall()
    with PageClient(both) as pages:
        pages.mset_blocks(NAMES, SHAPE, [block_body(i) for i in range(16)])
    assert run("status", "--url", both) == 0
    said = capsys.readouterr().out
    assert server.url in said
    assert second_server.url in said
    assert run("ls", "--url", both) == 0
    said = capsys.readouterr().out
    assert all(req_id.decode() in said for req_id, _ in NAMES)
    assert run("ls", NAMES[0][0].decode(), "--url", both) == 0  # one of them has it
    assert run("ls", "nobody", "--url", both) == 1
    capsys.readouterr()
    with PageClient(server.url) as pages:
        pages.mset_blocks(NAMES, SHAPE, [block_body(i) for i in range(16)])
    assert run("ls", "--url", both) == 0
    assert f"{server.url} has requests that belong to others of the list" in capsys.readouterr().err
    with server.client() as client:
        client.flushall()
    with PageClient(both) as pages:
        pages.mset_blocks(NAMES, SHAPE, [block_body(i) for i in range(16)])
    assert run("dump", str(tmp_path), "--url", both) == 0
    for one in (server, second_server):
        with one.client() as client:
            client.flushall()
        assert run("restore", str(tmp_path / f"127-0-0-1-{one.port}"), "--url", one.url) == 0
    with PageClient(both) as pages:
        into = [np.zeros(SHAPE.nbytes, np.uint8) for _ in NAMES]
        assert all(pages.mget_blocks_into(NAMES, SHAPE, into))
        assert all((a == block_body(i)).all() for i, a in enumerate(into))


def test_a_watch_tells_of_all_servers_each_time(server: RunningServer, second_server: RunningServer) -> None:
    command = [PROGRAM, "status", "--json", "--watch", "0.2", "--url", f"{server.url},{second_server.url}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            told = [json.loads(process.stdout.readline())["url"] for _ in range(4)]
        finally:
            process.kill()
    assert told == 2 * [server.url, second_server.url]


def test_a_server_of_the_list_that_is_gone_is_named_and_the_others_answer(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"redis://127.0.0.1:{free_port()}"
    assert run("status", "--url", f"{gone},{server.url}") == 2
    said = capsys.readouterr()
    assert f"cannot reach {gone}" in said.err
    assert "kvpage-server" in said.out


def test_a_command_for_one_server_says_what_there_is_for_several(capsys: pytest.CaptureFixture[str]) -> None:
    both = "redis://127.0.0.1:1,redis://127.0.0.1:2"  # nobody is asked
    for words, instead in (
        (("top",), "kvpage status --watch shows them all"),
        (("restore", "nowhere"), "restore each into its server"),
        (("bench",), "measure one after the other"),
    ):
        assert run(*words, "--url", both) == 1
        said = capsys.readouterr().err
        assert f"kvpage {words[0]} takes one server" in said
        assert instead in said


def test_a_server_of_the_list_that_hangs_is_named_and_the_others_answer(
    server: RunningServer, second_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    both = f"{server.url},{second_server.url}"
    with PageClient(both) as pages:
        pages.mset_blocks(NAMES, SHAPE, [block_body(i) for i in range(16)])
    with second_server.client() as client:
        theirs = [name for name, _ in NAMES if client.execute_command("KVPAGEINDEX", name)]
    ours = [name for name, _ in NAMES if name not in theirs]
    second_server.process.send_signal(signal.SIGSTOP)
    try:
        assert run("ls", "--json", "--url", both) == 0
        said = capsys.readouterr()
        assert f"cannot reach {second_server.url}" in said.err
        told = json.loads(said.out)
        assert told["unreachable"] == [second_server.url]
        assert {*ours} <= {request["request"].encode() for request in told["requests"]}
        assert run("why", theirs[0].decode(), "--url", both) == 0
        assert "gone" in capsys.readouterr().out
        assert run("status", "--url", both) == 2
        said = capsys.readouterr()
        assert f"cannot reach {second_server.url}" in said.err
        assert f"at {server.url}" in said.out
    finally:
        second_server.process.send_signal(signal.SIGCONT)


def test_a_cluster_is_told_node_by_node_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    with start_mapped() as mapped:
        with redis.RedisCluster("127.0.0.1", mapped.ports[0]) as client:
            for i in range(20):
                client.set(f"key-{i}", "x")
        assert run("status", "--url", mapped.url) == 0
        said = capsys.readouterr().out
        assert all(f"redis://127.0.0.1:{port}" in said for port in mapped.ports)
        assert "2 nodes" in said
        assert "Valkey and Redis" not in said
        assert run("status", "--json", "--url", mapped.url) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["total"]["keys"] == sum(node["keys"] for node in found["nodes"]) == 20
        assert all(0 < node["keys"] < 20 for node in found["nodes"])
        with redis.RedisCluster("127.0.0.1", mapped.ports[0]) as client:
            for i in range(8):
                client.execute_command("KVPAGESET", f"{{chat-{i}}}", 0, 0, 0, 0, 1, 4, 8, 0, bytes(64))
        assert run("ls", "--json", "--url", mapped.url) == 0
        requests = json.loads(capsys.readouterr().out)["requests"]
        assert {each["request"] for each in requests} == {f"{{chat-{i}}}" for i in range(8)}
        assert {each["url"] for each in requests} == {f"redis://127.0.0.1:{port}" for port in mapped.ports}
        assert run("why", "{chat-3}", "0", "0", "9", "0", "--url", mapped.url) == 0
        assert "never stored" in capsys.readouterr().out
        mapped.servers[1].stop()
        assert run("status", "--json", "--url", mapped.url) == 2
        nodes = json.loads(capsys.readouterr().out)["nodes"]
        assert ["error" in node for node in nodes] == [False, True]
        assert run("top", "--url", mapped.url) == 1
        assert "into a cluster look status (with --watch), ls, why, and stat of an agent" in capsys.readouterr().err
