"""A gateway: the page commands and strings in front of a real Valkey Cluster, which has the values."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import numpy as np
import pytest
import redis
from browsing import start_seen_server
from page_batches import SHAPE, batch, block_body, same
from servers import RunningServer, free_port, start_redis, start_server, with_constants
from test_page_client import (  # noqa: F401 - these tests of one server apply to a gateway
    test_a_block_in_several_pieces_arrives_as_one,
    test_a_missing_page_is_a_miss_and_the_others_arrive,
    test_a_page_of_another_length_is_a_miss,
    test_blocks_are_read_as_a_whole_or_not_at_all,
    test_deleted_pages_are_absent,
    test_nothing_asked_is_nothing_answered,
    test_pages_are_read_into_the_callers_memory,
)
from waiting import until

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import Cluster
from kvpage_server.cli import main
from kvpage_server.client import PageClient
from kvpage_server.client.cluster.plan import TOGETHER
from kvpage_server.commands.specs import TABLE
from kvpage_server.gateway.rows import PagesBehind, StringsBehind
from kvpage_server.gateway.upstream import MOST, Upstream
from kvpage_server.page import BlockShape, PageKey, decode_page

T = TypeVar("T")
PAGE = (0, 0, 7, 0, 1, 2, 1, 0)  # the words between the request and the body in KVPAGESET


def start_node(*options: str, port: int | None = None) -> AbstractContextManager[RunningServer]:
    """A cluster of one redis-server. The port of its bus is chosen: else it is another 10,000 further, free or not."""
    return start_redis("--cluster-enabled", "yes", "--cluster-port", str(free_port()), *options, port=port)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with valkey_cluster.run(replicas=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def gateway(cluster: Cluster) -> Iterator[RunningServer]:
    with start_server("--store", "cluster", "--cluster-nodes", cluster.addresses) as gateway:
        yield gateway


@pytest.fixture
def client(cluster: Cluster, gateway: RunningServer) -> Iterator[Any]:
    for node in cluster.masters:
        node.ask("FLUSHALL")
    with gateway.client() as client:
        yield client


@pytest.fixture
def pages(client: Any, gateway: RunningServer) -> Iterator[PageClient]:
    with PageClient(gateway.url, deadline=30) as pages:
        yield pages


# -- the page commands -------------------------------------------------------------------------------------------------


def test_a_page_is_read_by_its_command_and_as_a_string(client: Any, gateway: RunningServer) -> None:
    ask = client.execute_command
    assert ask("KVPAGESET", "test_req_001", 5, 8, 42, 0, 1, 128, 64, 3600, "BLOB_DATA") == b"OK"
    assert ask("KVPAGEGET", "test_req_001", 5, 8, 42, 0) == b"BLOB_DATA"
    assert ask("KVPAGEGET", "test_req_001", 5, 8, 43, 0) is None
    assert ask("KVPAGEEXISTS", "test_req_001", 5, 8, 42, 0) == 1
    assert client.ttl("kv:test_req_001:5:8:42:0") in (3599, 3600)
    header, body = decode_page(client.get("kv:test_req_001:5:8:42:0"))
    assert (bytes(body), header.ttl) == (b"BLOB_DATA", 3600)
    with start_server("--store", "cluster", "--cluster-nodes", node_of(gateway)) as other, other.client() as second:
        assert second.execute_command("KVPAGEGET", "test_req_001", 5, 8, 42, 0) == b"BLOB_DATA", "any number may run"


def node_of(gateway: RunningServer) -> str:
    """Some node of the cluster that a gateway stands before."""
    words = gateway.process.args
    assert isinstance(words, list)
    return str(words[words.index("--cluster-nodes") + 1]).split(",")[1]


def test_bodies_of_any_size_alone_and_in_batches(client: Any) -> None:
    ask, noise = client.execute_command, np.random.default_rng(1)
    bodies = [noise.bytes(size) for size in (0, 1, 511, 512, 513, 70_000, 3_000_001)]
    words = [word for i, body in enumerate(bodies) for word in ("r", 0, 0, i, 0, 1, 2, 1, 0, body)]
    assert ask("KVPAGEMSET", len(bodies), *words) == b"OK"
    names = [word for i in range(len(bodies) + 1) for word in ("r", 0, 0, i, 0)]
    assert ask("KVPAGEMGET", len(bodies) + 1, *names) == [*bodies, None]
    assert ask("KVPAGEMEXISTS", len(bodies) + 1, *names) == [1] * len(bodies) + [0]
    assert [ask("KVPAGEGET", "r", 0, 0, i, 0) for i in range(len(bodies))] == bodies


def test_a_batch_of_very_many_pages_arrives_in_order(client: Any) -> None:
    ask, count = client.execute_command, 1500
    for start in range(0, count, 500):
        words = [w for i in range(start, start + 500) for w in ("many", 0, 0, i, 0, 1, 2, 1, 0, b"body %d" % i)]
        assert ask("KVPAGEMSET", 500, *words) == b"OK"
    names = [word for i in range(count) for word in ("many", 0, 0, i, 0)]
    assert ask("KVPAGEMGET", count, *names) == [b"body %d" % i for i in range(count)]
    assert ask("KVPAGEMEXISTS", count, *names) == [1] * count


def test_arguments_of_a_refused_command_are_freed_at_once(client: Any) -> None:
    value = bytes(4 * 1024**2)
    before = client.info("memory")["used_memory"]
    for _ in range(20):
        with pytest.raises(redis.ResponseError, match="invalid expire time"):
            client.execute_command("SET", "a", value, "EX", 0)
    assert client.info("memory")["used_memory"] - before < 5 * len(value)


def test_one_bad_page_of_a_batch_refuses_all(client: Any) -> None:
    good, bad = ("bad", 0, 0, 1, 0, 1, 2, 1, 0, b"x"), ("bad", 0, 0, 2, 0, 99, 2, 1, 0, b"x")
    with pytest.raises(redis.ResponseError, match="page 2 of 2: dtype must be one of"):
        client.execute_command("KVPAGEMSET", 2, *good, *bad)
    assert client.execute_command("KVPAGEEXISTS", "bad", 0, 0, 1, 0) == 0


def test_blocks_their_prefix_and_page_metadata(client: Any, pages: PageClient) -> None:
    ask, names = client.execute_command, [(b"{chat}%d" % i, i) for i in range(40)]
    pages.mset_blocks(names, SHAPE, [block_body(i) for i in range(40)], ttl=100)
    asked = [word for name in [*names, (b"{chat}40", 40)] for word in name]
    assert ask("KVPAGEPREFIX", SHAPE.pages, 1000, 41, *asked) == 40
    states = [word for at in range(0, 42, 3) for word in (*asked[2 * min(at, 40) :][:2], at + 1)]
    assert ask("KVPAGEPREFIX", SHAPE.pages, 1000, 41, *asked, "LENGTHS", 14, *states) == [*range(1, 41, 3)]
    found = ask("KVBLOCKMGET", 41, *asked)
    assert found == [*(block_body(i).tobytes() for i in range(40)), None]
    assert ask("KVBLOCKGET", *names[3]) == block_body(3).tobytes()
    assert [ask("KVBLOCKEXISTS", *name) for name in (names[0], (b"{chat}0", 1))] == [1, 0]
    first = ask("KVPAGEGET", names[3][0], 0, 0, 3, 0)
    assert block_body(3).tobytes().startswith(first)
    stat = ask("KVPAGESTAT", names[3][0], 0, 0, 3, 0)
    stat = stat if isinstance(stat, dict) else dict(zip(stat[::2], stat[1::2], strict=True))
    assert stat[b"tier"] == b"cluster"
    assert 0 < stat[b"ttl_left_ms"] <= 100_000
    key = "kv:{chat}3:0:0:3:0"
    assert client.exists(key, "kv:{chat}3:0:0:4:0") == 1
    assert 0 < client.ttl(key) <= 100
    assert decode_page(client.get(key))[1] == first
    assert ask("KVPAGEDEL", names[3][0], 3) == SHAPE.pages
    assert ask("KVBLOCKGET", *names[3]) is None


def test_the_last_write_of_any_kind_is_read(client: Any, pages: PageClient) -> None:
    name, key = (b"{w}", 0), "kv:{w}:0:0:0:0"
    blob = b""
    for write in range(4):
        if write % 2 == 0:
            pages.mset_blocks([name], SHAPE, [block_body(write)])
            first = client.execute_command("KVPAGEGET", "{w}", 0, 0, 0, 0)
            assert block_body(write).tobytes().startswith(first)
            blob = client.get(key)
        else:
            client.set(key, blob[:64] + blob[64:])
            assert client.get(key) == blob
            assert client.execute_command("KVBLOCKGET", *name) is None


@pytest.mark.parametrize("req_id", ["{q}", "q"])
def test_a_page_does_not_return_after_its_replacing_block(client: Any, req_id: str) -> None:
    ask = client.execute_command
    for write in range(2):
        ask("KVPAGESET", req_id, 0, 0, 0, 0, 3, 1, 2, 0, "OL")
        ask("KVBLOCKSET", req_id, 0, 1, 1, 1, write, 2, 0, 3, 2, 1, 3, 2, "k0v0")
        assert ask("KVPAGEGET", req_id, 0, 0, 0, 0) == b"k0"
        if write:
            assert client.ttl(f"kv:{req_id}:0:0:0:0") == 1
            until(lambda: not client.execute_command("KVBLOCKEXISTS", req_id, 0), "the block to expire")
        else:
            assert ask("KVPAGEDEL", req_id, 0) == 2
        assert ask("KVPAGEGET", req_id, 0, 0, 0, 0) is None


def test_a_page_client_has_its_pages_through_a_gateway(pages: PageClient) -> None:
    written = batch(300)
    pages.mset(written, ttl=60)
    found = pages.mget([page.key for page in written])
    assert all(page is not None and same(page.body, wanted) for page, wanted in zip(found, written, strict=True))
    assert pages.delete([page.key for page in written]) == 300


# -- strings -----------------------------------------------------------------------------------------------------------


def test_strings_are_passed_on(client: Any) -> None:
    big = np.random.default_rng(2).bytes(2_000_000)
    assert client.set("a", big, ex=50)
    assert client.get("a") == big
    assert client.mget("a", "none", "a") == [big, None, big]
    assert client.strlen("a") == len(big)
    assert client.getrange("a", 0, 9) == big[:10]
    assert client.type("a") == b"string"
    assert 0 < client.ttl("a") <= 50
    assert client.persist("a")
    assert client.exists("a", "none") == 1
    assert client.delete("a", "none") == 1
    assert client.get("a") is None


NOT_THERE = """KEYS *|SCAN 0|DBSIZE|FLUSHALL|INCR n|MSET a 1|WATCH a|KVPAGEINDEX r|KVPAGEPIN r|KVPAGEWHY r
    SMEMBERS kv:r:index|CLIENT TRACKING ON|KVBLOCKMGETCODED 1 r 0|SAVE|BGSAVE|KVDECODE"""


@pytest.mark.parametrize("line", re.split(r"[|\n]", NOT_THERE))
def test_commands_a_cluster_cannot_run_are_refused(client: Any, line: str) -> None:
    with pytest.raises(redis.ResponseError, match="a gateway does not support"):
        client.execute_command(*line.split())


def test_command_info_shows_only_supported_commands(client: Any) -> None:
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command("COMMAND", "INFO", "kvblockmget", "kvblockmgetcoded", "kvblocksetcoded", "keys")
        known, *others = connection.read_response()
    finally:
        client.connection_pool.release(connection)
    assert (known[0], others) == (b"kvblockmget", [None] * 3)


def test_commands_that_must_not_run_twice_are_refused(client: Any) -> None:
    for words in (("SET", "a", "b", "NX"), ("SET", "a", "b", "GET")):
        with pytest.raises(redis.ResponseError, match="does not support SET with NX, XX, IFEQ or GET"):
            client.execute_command(*words)
    with pytest.raises(redis.ResponseError, match="a gateway has no transactions"), client.pipeline() as pipe:
        pipe.set("a", "b").execute()
    for word in ("MULTI", "EXEC", "DISCARD"):
        with pytest.raises(redis.ResponseError, match="a gateway has no transactions"):
            client.execute_command(word)
    assert client.set("a", "b"), "no transaction was begun"
    with client.pipeline(transaction=False) as pipe:
        assert pipe.set("a", "b").get("a").execute() == [True, b"b"]


def test_a_string_under_a_page_s_key_is_no_page(client: Any) -> None:
    client.set("kv:{s}:0:0:0:0", "plain")
    with pytest.raises(redis.ResponseError, match="wrong kind of value"):
        client.execute_command("KVPAGEGET", "{s}", 0, 0, 0, 0)
    assert client.get("kv:{s}:0:0:0:0") == b"plain"


def test_a_part_of_a_block_is_not_treated_as_a_string_of_its_own(client: Any, pages: PageClient) -> None:
    pages.mset_blocks([(b"{b}", 0)], SHAPE, [block_body(0)], ttl=100)
    client.execute_command("KVPAGESET", "{b}", 0, 0, 1, 0, 1, 2, 1, 100, "alone")
    of_block, alone = "kv:{b}:0:0:0:0", "kv:{b}:0:0:1:0"
    for words in (("EXPIRE", 5), ("PERSIST",), ("STRLEN",), ("GETRANGE", 0, 3)):
        with pytest.raises(redis.ResponseError, match="of a page that lies in a block can't be done before a cluster"):
            client.execute_command(words[0], of_block, *words[1:])
    assert (client.strlen(alone), client.getrange(alone, 0, 3), client.persist(alone)) == (69, b"KVPG", True)
    assert client.touch(of_block, alone, "kv:{b}:0:0:2:0") == 2
    assert (client.ttl(of_block), client.ttl(alone)) == (pytest.approx(100, abs=60), -1)


def test_a_string_under_a_pages_key_is_no_page(cluster: Cluster, client: Any) -> None:
    key = PageKey(b"{s}", 0, 0, 0, 0)
    client.set(bytes(key), b"plain" * 100)
    with PageClient(cluster.url) as pages:
        assert pages.mexists([key]) == [False]
        assert pages.delete([key]) == 0
    assert client.exists(bytes(key)) == 0


def test_the_rights_of_a_user_hold_here(cluster: Cluster) -> None:
    options = ("--user", "tenant", "on", ">secret", "~kv:mine.*", "+@all")
    with (
        start_server("--store", "cluster", "--cluster-nodes", cluster.url, *options) as gateway,
        gateway.client(username="tenant", password="secret") as client,
    ):
        assert client.execute_command("KVPAGESET", "mine.1", *PAGE, "body") == b"OK"
        with pytest.raises(redis.ResponseError, match="No permissions to access a key"):
            client.execute_command("KVPAGESET", "other.1", *PAGE, "body")


def test_the_page_shows_that_a_gateway_stores_nothing(cluster: Cluster) -> None:
    with (
        start_seen_server("--store", "cluster", "--cluster-nodes", cluster.addresses) as seen,
        seen.browser() as browser,
    ):
        assert "a gateway, which stores no values" in seen.event("holdings", browser)["unseen"]


@pytest.mark.parametrize("line", ["KVPAGEDEL {m}", "KVPAGELEASE {m} 30000"])
def test_a_request_without_page_ids_is_refused_as_documented(client: Any, line: str) -> None:
    with pytest.raises(redis.ResponseError) as received:
        client.execute_command(*line.split())
    assert str(received.value) == "a cluster does not know which blocks a request has: name their page ids"
    text = Path(__file__).parents[3].joinpath("docs", "scaling.md").read_text(encoding="utf-8")
    assert "KVPAGEDEL and KVPAGELEASE need page ids" in " ".join(text.split())


def test_an_error_of_one_command_is_no_failure_of_the_cluster(cluster: Cluster) -> None:
    for node in cluster.masters:
        node.ask("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", "-set")
    nodes = f"valkey-cluster://reader:secret@{cluster.addresses}"
    with start_server("--store", "cluster", "--cluster-nodes", nodes) as gateway, gateway.client() as client:
        for words, why in ((("KVPAGEDEL", "{m}"), "name their page ids"), (("SET", "refused", "b"), "NOPERM")):
            with pytest.raises(redis.RedisError, match=why):
                client.execute_command(*words)
            assert client.get("refused") is None  # other tests leave other keys
        assert "the cluster" not in gateway.log.replace("the cluster lets", "")


def test_options_may_stand_in_the_url(cluster: Cluster) -> None:
    nodes = f"{cluster.addresses}?node_deadline=3&read_from_replicas=yes&socket_timeout=5"
    with start_server("--store", "cluster", "--cluster-nodes", nodes) as gateway, gateway.client() as client:
        assert client.set("a", "b")
        assert client.get("a") == b"b"


FAULTY = """
from kvpage_server.app import main
from kvpage_server.gateway.rows import PagesBehind
from kvpage_server.resp import Raw

def at_once(self, client, args):
    yield ()
    yield 1 // 0

def in_the_middle(self, client, args):
    yield Raw(b"*2\\r\\n")
    yield 1 // 0

PagesBehind.kvpageexists, PagesBehind.kvpagemexists = at_once, in_the_middle
main()
"""


def test_an_unexpected_error_ends_one_command(cluster: Cluster) -> None:
    results: list[str] = []
    with pytest.raises(AssertionError, match="kvpageexists failed between its steps; the connection goes on"):
        _ask_a_faulty_gateway(cluster, results)
    assert results == ["internal error, the server's log says more", "the same connection", "closed"]


def _ask_a_faulty_gateway(cluster: Cluster, results: list[str]) -> None:
    """Raises AssertionError with its log at the end, as there is a traceback in it."""
    options = ("--store", "cluster", "--cluster-nodes", cluster.addresses)
    with (
        start_server(*options, program=("-c", FAULTY)) as gateway,
        gateway.client(single_connection_client=True, retry=None) as client,
    ):
        before = client.client_id()
        try:
            client.execute_command("KVPAGEEXISTS", "r", 0, 0, 0, 0)
        except redis.RedisError as error:
            results.append(str(error))
        results.append("the same connection" if client.client_id() == before else "another connection")
        try:
            client.execute_command("KVPAGEMEXISTS", 1, "r", 0, 0, 0, 0)
        except redis.ConnectionError:
            results.append("closed")


# -- a cluster that fails ----------------------------------------------------------------------------------------------


def test_rights_on_pages_suffice_and_ls_names_missing_commands(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in cluster.masters:
        node.ask("ACL", "SETUSER", "pages", "on", ">secret", "~kv:*", "+@read", "+@write", "+cluster|slots")
    url = f"valkey-cluster://pages:secret@{cluster.addresses}"
    log = tmp_path / "log"
    with start_server("--store", "cluster", "--cluster-nodes", url, "--logfile", str(log)) as gateway:
        with gateway.client() as client:
            client.execute_command("KVPAGESET", "r", *PAGE, b"body")
        for words in (["ls"], ["stat", "alice"], ["why", "r"], ["verify", "r"], ["dump", str(tmp_path / "dump")]):
            with pytest.raises(SystemExit) as ended:
                main([*words, "--url", gateway.url])
            assert ended.value.code == 1
            captured = capsys.readouterr()
            assert "a gateway does not support" in captured.err
            assert "look into the cluster by its own URL" in captured.err
            assert not captured.out
        with pytest.raises(SystemExit):
            main(["status", "--url", gateway.url])
        shown = capsys.readouterr().out
        assert "a gateway, which stores no values" in shown
        assert "allkeys" not in shown
        program = Path(sys.executable).with_name("kvpage")
        with subprocess.Popen([program, "top", "--url", gateway.url], stdout=subprocess.PIPE) as top:
            assert top.stdout
            assert b"a gateway, which stores no values" in b"".join(islice(top.stdout, 4))
            top.kill()
    assert "can't be used" not in log.read_text(encoding="utf-8")


def test_it_starts_without_a_cluster_and_works_once_there_is_one() -> None:
    port = free_port()
    options = ("--store", "cluster", "--cluster-nodes", f"127.0.0.1:{port}")
    with start_server(*options) as gateway, gateway.client() as client:
        until(lambda: "refused" in _error_of(client, "KVPAGEGET", "r", 0, 0, 0, 0), "the refusal")
        until(lambda: "the cluster can't be used yet" in gateway.log, "its report")
        assert client.ping()
        with start_node(port=port) as node, node.client() as alone:
            until(lambda: "nobody serves slot" in _error_of(client, "SET", "a", "1"), "the connection to the node")
            alone.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            until(lambda: _works(client), "it recovers")
            until(lambda: "the cluster answers again" in gateway.log, "the report of it")


def test_the_log_names_a_dead_node_once() -> None:
    names = [word for i in range(30) for word in (f"r{i}", 0, 0, 0, 0)]
    with valkey_cluster.run("--cluster-require-full-coverage", "no", replicas=False) as cluster:
        options = ("--store", "cluster", "--cluster-nodes", cluster.addresses)
        program = with_constants("kvpage_server.gateway.upstream", _RECOVERY_SECONDS=4)
        with start_server(*options, program=program) as gateway, gateway.client() as client:
            assert client.execute_command("KVPAGEMGET", 30, *names) == [None] * 30
            dead = cluster.masters[0]
            dead.process.send_signal(signal.SIGSTOP)
            for _ in range(2):  # a batch in which the values of a node are missing is a failure, too
                client.execute_command("KVPAGEMGET", 30, *names)
                assert sum(bool(_error_of(client, "KVPAGEGET", *names[i : i + 5])) for i in range(0, 150, 5)) < 30
            assert gateway.log.count("the cluster fails") == 1
            assert "answers again" not in gateway.log
            assert f":{dead.port}" in gateway.log.partition("the cluster fails")[2]
            dead.process.send_signal(signal.SIGCONT)
            until(lambda: _works(client) and "the cluster answers again" in gateway.log, "the report of it")


def test_mget_skips_values_of_other_types(client: Any, cluster: Cluster) -> None:
    for node in cluster.masters:
        for key in ("list", "kv:r:0:0:0:0"):
            with suppress(redis.exceptions.MovedError):
                node.ask("RPUSH", key, "a")
    assert client.set("a", "1")
    assert client.mget("a", "list", "kv:r:0:0:0:0", "none") == [b"1", None, None, None]
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.execute_command("GET", "list")


def test_a_value_that_is_too_large_costs_its_reader_alone(cluster: Cluster) -> None:
    options = ("--store", "cluster", "--cluster-nodes", cluster.addresses, "--maxmemory-clients", "8mb")
    with start_server(*options) as gateway, gateway.client() as reader, gateway.client() as other:
        for node in cluster.masters:
            with suppress(redis.exceptions.MovedError):
                node.ask("SET", "{huge}", bytes(24 << 20))
        with pytest.raises(redis.ConnectionError):
            reader.mget("{huge}", "absent")
        assert other.mget("absent", "{huge}:other") == [None, None]


def _error_of(client: Any, *words: str | int) -> str:
    """Return the text of a command's error; empty without one. While the gateway looks for its cluster again, it may
    answer with the error of its last attempt, or close a connection that waits for too long.
    """
    try:
        client.execute_command(*words)
    except redis.RedisError as error:
        return str(error)
    return ""


def _works(client: Any) -> bool:
    try:
        return bool(client.execute_command("KVPAGESET", "r", *PAGE, "body"))
    except redis.RedisError:
        return False


def test_half_of_the_slots_are_unserved() -> None:
    with start_node("--cluster-require-full-coverage", "no") as node:
        with node.client() as alone:
            alone.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
        nodes = f"127.0.0.1:{node.port}"
        with start_server("--store", "cluster", "--cluster-nodes", nodes) as gateway, gateway.client() as client:
            until(lambda: _sets(client, "{b}"), "its half")  # slot 3300
            with pytest.raises(redis.ResponseError, match="nobody serves slot 15495"):
                client.set("{a}", "1")  # slot 15495
            words = [w for tag in ("{b}", "{a}") for w in (tag, 0, 0, 7, 0)]
            client.execute_command("KVPAGESET", "{b}", *PAGE, "body")
            assert client.execute_command("KVPAGEMGET", 2, *words) == [b"body", None]


def _sets(client: Any, key: str) -> bool:
    try:
        return bool(client.set(key, "1"))
    except redis.RedisError:
        return False


def test_wrong_passwords_and_plain_servers_are_reported(redis_server: RunningServer) -> None:
    with start_node("--requirepass", "right") as node:
        for nodes, why in (
            (f"valkey-cluster://:wrong@127.0.0.1:{node.port}", "the cluster refuses this gateway's user: WRONGPASS"),
            (f"127.0.0.1:{redis_server.port}", "cluster support disabled"),
        ):
            with start_server("--store", "cluster", "--cluster-nodes", nodes) as gateway, gateway.client() as client:
                with pytest.raises(redis.RedisError, match=why):
                    client.get("a")
                assert client.ping()
                assert "wrong" not in str(client.config_get("*"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--store", "cluster"), "`store cluster` needs cluster-nodes"),
        (("--cluster-nodes", "a:1"), "cluster-nodes needs `store cluster`, and store is memory"),
        (("--store", "cluster", "--cluster-nodes", "redis://a:1"), "cluster's URL is valkey-cluster://host:port"),
        (("--store", "cluster", "--cluster-nodes", "http://a:1"), "cluster's URL is valkey-cluster://host:port"),
        (("--store", "cluster", "--cluster-nodes", "a:port"), "cluster-nodes: "),
        (("--store", "cluster", "--cluster-nodes", "a:1?nodedeadline=3"), "unknown option 'nodedeadline' in"),
        (("--store", "cluster", "--cluster-nodes", "a:1?node_deadline=x"), "must be a number of seconds, more than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple[str, ...], why: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=re.escape(why)), start_server(*options):
        pass


def test_del_of_many_pages_counts_each_once(client: Any) -> None:
    client.execute_command("KVBLOCKSET", "r", 0, 1, 4, 1, 0, 1, 0, 8, 2, bytes(8))
    absent = [f"kv:other:0:0:{page}:0" for page in range(600)]
    of_block = [f"kv:r:0:{head}:0:0" for head in range(4)]
    keys = [*of_block[:2], *absent, *of_block]
    assert client.exists(*keys) == 6
    assert client.delete(*keys) == 4
    assert client.exists(*keys) == 0


def test_lengths_of_very_many_blocks_and_states(client: Any, pages: PageClient) -> None:
    names = [(b"{chat-%d}" % (i // 4), i) for i in range(600)]
    small = BlockShape(1, 1, 1, SHAPE.planes[:1])
    pages.mset_blocks(names, small, [bytes(small.nbytes)] * len(names), ttl=50)
    states = [(*(names[0] if need % 2 else (b"nobody's", 0)), need) for need in range(1, 900)]
    random.Random(1).shuffle(states)
    assert pages.lengths(names[:500], states, pages_per_block=1, lease_ms=90_000) == [*range(1, 501, 2)]
    left = [client.ttl(f"kv:{req_id.decode()}:0:0:{page}:0") for req_id, page in names]
    assert [ttl > 60 for ttl in left] == [True] * 499 + [False] * 101


def test_lengths_are_found_in_small_parts() -> None:
    sizes: list[int] = []

    def examine(names: Sequence[object], states: Sequence[object], _: int, lease_ms: int) -> tuple[int, list[bool]]:
        sizes.append(len(names) + len(states))
        return len(names), [True] * len(states)

    def do(found: T) -> Generator[object, None, T]:
        yield ()
        return found

    upstream = Mock()
    upstream.plans.calls.examine, upstream.do = examine, do
    names = [word for page in range(2000) for word in (b"r", b"%d" % page)]
    states = [word for need in range(1, 2001) for word in (b"s", b"0", b"%d" % need)]
    args = [b"1", b"1000", b"2000", *names, b"LENGTHS", b"2000", *states]
    *steps, reply = PagesBehind(upstream, Mock()).kvpageprefix(Mock(), args)
    assert reply == [*range(1, 2001)]
    assert sum(sizes) == 4000 + 2001
    assert max(sizes) <= TOGETHER
    assert len(steps) >= len(sizes)


@pytest.mark.parametrize("command", ["del", "exists", "touch"])
def test_commands_of_many_keys_ask_in_small_parts(command: str) -> None:
    """A request for all keys at once would be one step, and other clients would wait meanwhile."""
    sizes: list[int] = []

    def plan(some: Sequence[object]) -> list[int]:
        sizes.append(len(some))
        return [0] * len(some)

    def do(found: list[int]) -> Generator[object, None, list[int]]:
        yield ()
        return found

    upstream = Mock()
    upstream.plans.ask = upstream.plans.calls.taken = upstream.plans.calls.delete = plan
    upstream.do = do
    upstream.each = partial(Upstream.each, upstream)
    args = [b"kv:r:0:0:%d:0" % page for page in range(2000)] + [b"string %d" % number for number in range(2000)]
    steps = StringsBehind(upstream).counted(TABLE[command], Mock(), args)
    assert len([*steps]) > 2 * len(args) // MOST
    assert max(sizes) <= 2 * MOST
