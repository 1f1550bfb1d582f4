"""`kvpage` with a list of servers side by side: it answers for all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import redis
from page_batches import SHAPE, block_body
from servers import RunningServer, free_port, start_server

from benchmarks.valkey_cluster import Cluster
from kvpage_server.cli import main
from kvpage_server.client import Page, PageClient
from kvpage_server.client.cluster.side_by_side import Rendezvous, segment_of, servers_of
from kvpage_server.page import DType, PageKey

PROGRAM = Path(sys.executable).with_name("kvpage")
NAMES = [(b"{segment-%d}" % i, i) for i in range(16)]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@contextmanager
def watched(*words: str) -> Iterator[IO[bytes]]:
    """Yield the output of a command that runs until it is interrupted."""
    with subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            yield process.stdout
        finally:
            process.kill()


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
    output = capsys.readouterr().out
    assert server.url in output
    assert second_server.url in output
    assert run("ls", "--url", both) == 0
    output = capsys.readouterr().out
    assert all(req_id.decode() in output for req_id, _ in NAMES)
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


def test_a_watch_shows_all_servers_each_time(server: RunningServer, second_server: RunningServer) -> None:
    with watched("status", "--json", "--watch", "0.2", "--url", f"{server.url},{second_server.url}") as lines:
        received = [json.loads(lines.readline())["url"] for _ in range(4)]
    assert received == 2 * [server.url, second_server.url]


def test_top_shows_each_server_and_memory_by_agent_of_all(server: RunningServer, second_server: RunningServer) -> None:
    both = f"{server.url},{second_server.url}"
    with PageClient(both) as pages:
        pages.mset_blocks(NAMES, SHAPE, [block_body(i) for i in range(16)])
        with watched("top", "--watch", "0.2", "--url", both) as lines:
            output = b"".join(islice(lines, 30)).decode()
        assert all(one in output for one in (server.url, second_server.url, "total", "commands/s"))
        assert all(req_id.decode() in output for req_id, _ in NAMES[:3])
        with watched("top", "--json", "--watch", "0.2", "--url", both) as lines:
            first, second = (json.loads(lines.readline()) for _ in range(2))
            assert [node["url"] for node in first["nodes"]] == [server.url, second_server.url]
            assert first["total"]["keys"] == sum(node["keys"] for node in first["nodes"]) > 0
            assert first["total"]["per_second"] is None
            assert all(node["per_second"]["commands"] > 0 for node in second["nodes"])  # its own
            assert second["total"]["per_second"]["bytes_in"] == sum(
                node["per_second"]["bytes_in"] for node in second["nodes"]
            )


def test_top_continues_when_a_server_dies_and_returns(server: RunningServer) -> None:
    port = free_port()
    both = f"{server.url},redis://127.0.0.1:{port}"
    with ExitStack() as stack:
        mortal = stack.enter_context(start_server(port=port))
        lines = stack.enter_context(watched("top", "--json", "--watch", "0.2", "--url", both))
        received = (json.loads(line)["nodes"][1] for line in lines)
        assert "error" not in next(received)
        mortal.stop()
        assert f"{port} is gone" in next(node for node in received if "error" in node)["error"]
        stack.enter_context(start_server(port=port))
        back = next(node for node in received if "error" not in node)
        assert back["per_second"] is None  # rates of a restarted server are unknown, not negative
        assert next(received)["per_second"]["commands"] > 0


def test_an_unavailable_server_is_named_and_the_others_answer(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"redis://127.0.0.1:{free_port()}"
    assert run("status", "--url", f"{gone},{server.url}") == 2
    captured = capsys.readouterr()
    assert f"cannot reach {gone}" in captured.err
    assert "kvpage-server" in captured.out


def test_an_unavailable_server_is_named_once_and_is_an_error(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"redis://127.0.0.1:{free_port()}"
    both = f"{server.url},{gone}"
    home = Rendezvous(servers_of(both))
    names = {str(home.server(b"r%d" % i)): f"r{i}" for i in range(32)}
    with server.client() as client:
        client.execute_command("KVPAGESET", names[server.url], 0, 0, 0, 0, 1, 4, 8, 0, bytes(64))
    page = [f"kv:{names[gone]}:0:0:0:0"]
    for words in (
        ["ls"],
        ["stat", "nobody"],
        ["stat", *page],
        *([name, names[gone]] for name in ("verify", "ls", "why")),
    ):
        assert run(*words, "--url", both) == 2, words
        errors = capsys.readouterr().err
        assert errors.count("refused") == errors.count(f"cannot reach {gone}") == 1, words


def test_an_agent_of_an_unavailable_server_is_not_absent(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"redis://127.0.0.1:{free_port()}"
    both = f"{server.url},{gone}"
    home = Rendezvous(servers_of(both))
    for url in (server.url, gone):  # the server to which the name would belong as a request
        name = next(f"alice{i}" for i in range(100) if str(home.server(b"alice%d" % i)) == url)
        assert run("why", name, "--json", "--url", both) == 2
        found = json.loads(capsys.readouterr().out)
        wanted = {"url": both, "unreachable": [gone], "request": name, "page": [], "reason": "gone"}
        assert found == wanted
        assert run("why", name, "--url", both) == 2
        assert capsys.readouterr().out == "gone: it is not on the servers that answered\n"
        assert run("stat", name, "--url", both) == 2
        assert f"{name} is not on the servers that answered\n" in capsys.readouterr().err
    name = next(f"alice{i}" for i in range(100) if str(home.server(b"alice%d" % i)) == server.url)
    assert run("verify", name, "--url", both) == 2
    assert f"{name} is not on the servers that answered\n" in capsys.readouterr().err
    assert run("verify", name, "7", "--url", both) == 1
    assert f"request {name} has no such page" in capsys.readouterr().err


def test_a_request_of_a_dump_is_on_one_of_the_servers(
    server: RunningServer, second_server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, one in enumerate((server, second_server)):
        with one.client() as client, PageClient(one.url) as pages:
            client.flushall()
            pages.set_block((b"chat-%d" % number, 0), SHAPE, block_body(0))
    both = ("--url", f"{server.url},{second_server.url}")
    for name in ("chat-0", "chat-1"):
        assert run("dump", str(tmp_path / name), "--request", name, *both) == 0
    capsys.readouterr()
    assert run("dump", str(tmp_path / "all"), "--request", "chat-0", "--request", r"no\xff", *both) == 1
    shown = capsys.readouterr()
    assert shown.err == "kvpage: no server that answered has a page of request no\\xff\n"
    assert "no page" not in shown.out


def test_a_failed_dump_of_one_server_leaves_the_others(
    server: RunningServer, second_server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = f"{server.url},{second_server.url}"
    for one in (server, second_server):
        with one.client() as client:
            client.set("x", "y")
    assert run("dump", str(tmp_path), "--url", both) == 0
    (next(path for path in tmp_path.iterdir() if str(second_server.port) in path.name) / "dump.json").unlink()
    capsys.readouterr()
    assert run("dump", str(tmp_path), "--url", both) == 1
    shown = capsys.readouterr()
    assert "holds a finished dump" in shown.err
    assert "of them as they were" in shown.out


def test_a_command_for_one_server_names_the_one_for_several(capsys: pytest.CaptureFixture[str]) -> None:
    both = "redis://127.0.0.1:1,redis://127.0.0.1:2"  # nobody is asked
    for words, instead in (
        (("restore", "nowhere"), "restore each into its server"),
        (("bench",), "measure one after the other"),
    ):
        assert run(*words, "--url", both) == 2
        errors = capsys.readouterr().err
        assert f"kvpage {words[0]} takes one server" in errors
        assert instead in errors


def test_a_hanging_server_is_named_and_the_others_answer(
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
        assert run("ls", "--json", "--url", both) == 2
        captured = capsys.readouterr()
        assert f"cannot reach {second_server.url}" in captured.err
        received = json.loads(captured.out)
        assert received["unreachable"] == [second_server.url]
        assert {*ours} <= {request["request"].encode() for request in received["requests"]}
        assert run("why", theirs[0].decode(), "--url", both) == 2
        assert "gone" in capsys.readouterr().out
        home = Rendezvous(servers_of(both))
        for url in (server.url, second_server.url):  # the server to which the name would belong as a request
            names = (f"agent{i}" for i in range(100) if str(home.server(b"agent%d" % i)) == url)
            manifests = {f"manifest:{name}:00000000000000aa": name for name in names}
            key = next(key for key in manifests if str(home.server(segment_of(key.encode()))) == server.url)
            chain = {"count": 4, "chain": [ours[0].decode(), theirs[0].decode()], "tokens": [1] * 8}
            with server.client() as client:
                client.set(key, "0" * 16 + json.dumps(chain))
            capsys.readouterr()
            assert run("verify", manifests[key], "--json", "--url", both) == 2
            found = json.loads(capsys.readouterr().out)
            assert (found["missing_blocks"], found["corrupt"], found["checked"] > 0) == (1, [], True)
        assert run("status", "--url", both) == 2
        captured = capsys.readouterr()
        assert f"cannot reach {second_server.url}" in captured.err
        assert f"at {server.url}" in captured.out
    finally:
        second_server.process.send_signal(signal.SIGCONT)


def test_a_cluster_is_shown_node_by_node_and_together(masters: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def looked(*words: str) -> Any:
        assert run(*words, "--json", "--url", masters.url) == 0
        return json.loads(capsys.readouterr().out)

    urls = {f"redis://127.0.0.1:{node.port}" for node in masters.nodes}
    names = [f"{{chat-{i}}}" for i in range(8)]
    for node in masters.nodes:
        node.ask("FLUSHALL")
    with redis.RedisCluster("127.0.0.1", masters.nodes[0].port) as client:
        for i in range(20):
            client.set(f"key-{i}", "x")
    assert run("status", "--url", masters.url) == 0
    output = capsys.readouterr().out
    assert all(url in output for url in urls)
    assert "3 nodes" in output
    assert "Valkey and Redis" in output
    found = looked("status")
    assert found["total"]["keys"] == sum(node["keys"] for node in found["nodes"]) == 20
    assert all(0 < node["keys"] < 20 for node in found["nodes"])
    with PageClient(masters.url) as pages:
        pages.mset([Page(PageKey(name.encode(), 0, 0, 0, 0), bytes(64), DType.FLOAT16, 4, 8) for name in names])
    requests = looked("ls")["requests"]
    assert {each["request"] for each in requests} == {*names}
    assert {each["url"] for each in requests} <= urls
    assert run("why", "{chat-3}", "0", "0", "9", "0", "--url", masters.url) == 1
    assert "absent" in capsys.readouterr().out
    where = looked("verify", "{chat-3}")["url"]
    assert looked("stat", "kv:{chat-3}:0:0:0:0")["url"] == where in {each["url"] for each in requests}
    with watched("top", "--json", "--url", masters.url) as lines:
        assert json.loads(lines.readline())["total"]["keys"] == 28
    for words, instead in (
        (["dump", "x"], "BGSAVE"),
        (["restore", "x"], "one kvpage-server"),
        (["bench"], "--against"),
    ):
        assert run(*words, "--url", masters.url) == 2
        errors = capsys.readouterr().err
        assert f"kvpage {words[0]} takes no cluster" in errors
        assert instead in errors


def test_missing_blocks_of_a_request_in_a_cluster(masters: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def looked(*words: str) -> tuple[int, str]:
        code = run(*words, "--url", masters.url)
        return code, capsys.readouterr().out

    with PageClient(masters.url) as pages:
        for name, ids in ((b"{late}", [2]), (b"{gap}", [0, 2]), (b"{whole}", [0, 1])):
            pages.mset_blocks([(name, page) for page in ids], SHAPE, [block_body(0)] * len(ids))
    for name, block, found in (("{late}", 0, "finds nothing"), ("{gap}", 1, "finds block 0")):
        missing = "2 blocks" if block == 0 else "1 block"
        code, shown = looked("verify", name)
        assert code == 0
        assert f"{missing} before block 2 not stored: absent" in shown
        code, shown = looked("why", name)
        assert (code, found in shown) == (1, True)
        assert f"block {block} is not there: absent" in shown
        answer = json.loads(looked("why", name, "--json")[1])
        assert (answer["reason"], answer["block"], answer["cause"]) == ("hole", block, "absent")
    assert looked("why", "{whole}")[0] == looked("verify", "{whole}")[0] == 0


def test_a_cluster_node_that_hangs_is_named(masters: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    hung = masters.nodes[1].process
    hung.send_signal(signal.SIGSTOP)
    try:
        assert run("status", "--json", "--url", masters.url) == 2
    finally:
        hung.send_signal(signal.SIGCONT)
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert ["error" in node for node in nodes].count(True) == 1


def test_top_hides_server_statistics_from_a_tenant() -> None:
    with ExitStack() as stack:
        user = ("--user", "app", "on", ">word", "~kv:app.*", "+@all")
        both = [stack.enter_context(start_server(*user)) for _ in range(2)]
        url = ",".join(one.url.replace("//", "//app:word@") for one in both)
        with PageClient(url) as pages:
            pages.mset_blocks([(b"app.chat", 0)], SHAPE, [block_body(0)])
        lines = stack.enter_context(watched("top", "--watch", "0.2", "--url", url))
        output = b"".join(islice(lines, 8)).decode()
        assert output.count("needs access to every key") == 2
        assert "app.chat" in output
