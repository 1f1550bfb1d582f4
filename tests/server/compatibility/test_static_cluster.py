"""Several kvpage-servers with a map of slots are a cluster for clients that never heard of them."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from page_batches import SHAPE, batch, block_body, same
from servers import RunningServer, free_port, start_server
from slot_maps import HALVES, IDS, MappedServers, map_text, start_mapped
from waiting import until

from kvpage_server import slot_map
from kvpage_server.client import PageClient, Refused
from kvpage_server.commands.context import Server
from kvpage_server.commands.placing import Placing
from kvpage_server.configuration.config import Config
from kvpage_server.service.renewal import renew_when
from kvpage_server.slot_map import MapError, parse_map, slot_of
from kvpage_server.store.keyspace import Keyspace

PAGE = (0, 0, 7, 0, 1, 2, 1, 0, b"body")  # what follows the request in KVPAGESET


@pytest.fixture(scope="module")
def mapped() -> Iterator[MappedServers]:
    with start_mapped() as mapped:
        yield mapped


@pytest.fixture
def cluster(mapped: MappedServers) -> Iterator[Any]:
    """redis-py's client of a cluster, as it is."""
    with redis.RedisCluster("127.0.0.1", mapped.ports[0], protocol=2) as client:
        client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
        yield client


def of_slot_in(first: int, last: int, spelt: str = "{tag-%d}") -> str:
    """A name whose slot lies there."""
    return next(name for i in range(10_000) if first <= slot_of((name := spelt % i).encode()) <= last)


def told(server: RunningServer, *words: str) -> Any:
    with server.client(protocol=2) as client:
        return client.execute_command(*words)


# -- stock clients -----------------------------------------------------------------------------------------------------


def test_redis_py_s_cluster_client_uses_strings_and_pages_unchanged(cluster: Any, mapped: MappedServers) -> None:
    requests = [f"{{chat-{i}}}" for i in range(20)]
    for req in requests:
        assert cluster.execute_command("KVPAGESET", req, *PAGE) == b"OK"
        assert cluster.set(f"plain:{req}", "value")
    for req in requests:
        assert cluster.execute_command("KVPAGEGET", req, 0, 0, 7, 0) == b"body"
        assert cluster.get(f"kv:{req}:0:0:7:0")[64:] == b"body"
        assert cluster.execute_command("KVPAGEMGET", 2, req, 0, 0, 7, 0, req, 0, 0, 8, 0) == [b"body", None]
        assert cluster.execute_command("KVPAGEPREFIX", 1, 0, 2, req, 7, req, 8) == 1
        assert cluster.execute_command("KVPAGEDEL", req, 7) == 1
    assert all(told(server, "DBSIZE") for server in mapped.servers)


def test_bodies_are_not_sent_twice_to_learn_where_keys_stand(cluster: Any, mapped: MappedServers) -> None:
    cluster.execute_command("KVPAGEMSET", 2, "{a}", *PAGE, "{a}", 0, 0, 8, *PAGE[3:])
    stats = [told(server, "INFO", "commandstats") for server in mapped.servers]
    assert not any("cmdstat_command|getkeys" in each for each in stats)


@pytest.mark.skipif(not shutil.which("redis-cli"), reason="redis-cli is not installed")
def test_redis_cli_follows_the_map(mapped: MappedServers) -> None:
    for i in range(4):
        words = ["KVPAGESET", f"{{cli-{i}}}", *map(str, PAGE[:-1]), "body"]
        cli = ["redis-cli", "-c", "-p", str(mapped.ports[i % 2])]
        assert subprocess.run([*cli, *words], capture_output=True, text=True, check=True).stdout.strip() == "OK"
        found = subprocess.run(
            [*cli, "KVPAGEGET", words[1], "0", "0", "7", "0"], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == "body"


def test_page_client_keeps_pages_and_blocks_there_as_in_any_cluster(mapped: MappedServers) -> None:
    with PageClient(mapped.url, deadline=30) as pages:
        written = batch(24)
        pages.mset(written)
        found = pages.mget([page.key for page in written])
        assert all(page is not None and same(page.body, wanted) for page, wanted in zip(found, written, strict=True))
        names = [(b"prompt-%d" % i, i) for i in range(12)]
        pages.mset_blocks(names, SHAPE, [block_body(i) for i in range(12)])
        into = [np.zeros(SHAPE.nbytes, np.uint8) for _ in names]
        assert all(pages.mget_blocks_into(names, SHAPE, into))
        assert all(body.tobytes() == block_body(i).tobytes() for i, body in enumerate(into))


def test_valkey_glide_follows_the_map(mapped: MappedServers) -> None:
    import glide_sync  # here, or every worker of the tests would take a third of a second to import it

    addresses = [glide_sync.NodeAddress("127.0.0.1", mapped.ports[0])]
    client = glide_sync.GlideClusterClient.create(glide_sync.GlideClusterClientConfiguration(addresses))
    try:
        for i in range(8):
            req = f"{{glide-{i}}}"
            assert client.custom_command(["KVPAGESET", req, *(str(w) for w in PAGE[:-1]), b"body"]) == "OK"
            assert client.custom_command(["KVPAGEGET", req, "0", "0", "7", "0"]) == b"body"
            assert client.custom_command(["KVPAGEMGET", "1", req, "0", "0", "7", "0"]) == [b"body"]
            assert client.set(f"plain-{i}", "value") == "OK"
            assert client.get(f"plain-{i}") == b"value"
    finally:
        client.close()


# -- what a server says ------------------------------------------------------------------------------------------------


def test_every_server_tells_the_same_map(mapped: MappedServers) -> None:
    for me, server in enumerate(mapped.servers):
        with server.client(protocol=2) as client:
            ask: Any = client.execute_command
            assert ask("CLUSTER MYID") in (IDS[me], IDS[me].encode())
            assert ask("CLUSTER KEYSLOT", "{chat}1") == ask("CLUSTER KEYSLOT", "chat")
            shards = [dict(zip(shard[::2], shard[1::2], strict=True)) for shard in ask("CLUSTER SHARDS")]
            assert [shard[b"slots"] for shard in shards] == [[0, 8191], [8192, 16383]]
            nodes = ask("CLUSTER NODES")
            assert [key for key, node in nodes.items() if "myself" in node["flags"]] == [f"127.0.0.1:{server.port}"]
            info = ask("CLUSTER INFO")
            assert (info["cluster_state"], info["cluster_current_epoch"]) == ("ok", "1")
            assert client.info("server")["redis_mode"] == "cluster"
            assert client.info("cluster")["cluster_enabled"] == 1
    digests = {told(server, "CLUSTER INFO")["cluster_map_digest"] for server in mapped.servers}
    assert len(digests) == 1


def test_a_key_of_another_server_is_asked_for_there(mapped: MappedServers) -> None:
    here, there = of_slot_in(0, 8191), of_slot_in(8192, 16383)
    with mapped.servers[0].client() as client:
        ask: Any = client.execute_command
        moved = rf"MOVED {slot_of(there.encode())} 127.0.0.1:{mapped.ports[1]}"
        for words in (
            ("GET", there),
            ("SET", there, "x"),
            ("KVPAGEGET", there, 0, 0, 7, 0),
            ("KVPAGESET", there, *PAGE),
            ("KVBLOCKGET", there, 0),
            ("KVPAGEMEXISTS", 400, *(there, 0, 0, 7, 0) * 400),
        ):
            with pytest.raises(redis.ResponseError) as caught:
                ask(*words)
            assert moved.removeprefix("MOVED ") in str(caught.value), words
        cross = ("MGET", here, there), ("KVPAGEMEXISTS", 2, here, 0, 0, 7, 0, there, 0, 0, 7, 0)
        for words in (*cross, ("KVPAGEMEXISTS", 401, *(here, 0, 0, 7, 0) * 400, there, 0, 0, 7, 0)):
            with pytest.raises(redis.ResponseError, match="Keys in request don't hash to the same slot"):
                ask(*words)


def test_a_transaction_with_a_key_of_another_server_is_refused_whole(mapped: MappedServers) -> None:
    with mapped.servers[0].client() as client, client.pipeline() as pipe:
        here, there = of_slot_in(0, 8191), of_slot_in(8192, 16383)
        with pytest.raises(redis.RedisError):
            pipe.set(here, "1").set(there, "2").execute()
        assert client.get(here) is None


def test_a_request_whose_pages_would_be_everywhere_is_refused_with_a_reason(mapped: MappedServers) -> None:
    with mapped.servers[0].client() as client:
        for req in ("chat-7", "a{}b", "{open"):
            with pytest.raises(redis.ResponseError, match=r"only if its name has braces, such as \{chat-7\}: got"):
                client.execute_command("KVPAGESET", req, *PAGE)


def test_a_server_without_a_map_says_that_it_has_none(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="This instance has cluster support disabled"):
        client.execute_command("CLUSTER INFO")


# -- another map -------------------------------------------------------------------------------------------------------


def test_a_changed_map_deletes_nothing_and_counts_what_is_elsewhere() -> None:
    with start_mapped() as mapped, mapped.servers[0].client(protocol=2) as client:
        ask: Any = client.execute_command
        req = of_slot_in(4096, 8191)
        for i in range(3):
            ask("KVPAGESET", req, *PAGE[:2], i, *PAGE[3:])
        mapped.file.write_text(map_text(mapped.ports, (["0-4095"], ["4096-16383"]), version=2))
        for server in mapped.servers:
            server.process.send_signal(signal.SIGHUP)
        until(lambda: ask("CLUSTER INFO")["cluster_keys_elsewhere"] == "3")
        assert client.info("cluster")["cluster_keys_elsewhere"] == 3
        assert client.dbsize() == 3
        with pytest.raises(redis.ResponseError, match=str(mapped.ports[1])):
            ask("KVPAGEGET", req, 0, 0, 0, 0)
        mapped.file.write_text(map_text(mapped.ports, HALVES, version=3))
        mapped.servers[0].process.send_signal(signal.SIGHUP)
        until(lambda: ask("CLUSTER INFO")["cluster_keys_elsewhere"] == "0")
        assert ask("KVPAGEGET", req, 0, 0, 0, 0) == b"body"


@pytest.mark.parametrize(
    ("slots", "version", "why"),
    [
        ((["0-4095"], ["4096-16383"]), 1, "has the same version, 1: raise its version"),
        (HALVES, 0, "version must be a whole number between 1 and"),
        ((["0-8191"], ["8000-16383"]), 2, "slot 8000 is given to both"),
    ],
)
def test_a_map_that_can_t_be_right_is_refused_and_the_old_one_stays(slots: Any, version: int, why: str) -> None:
    with start_mapped() as mapped, mapped.servers[0].client(protocol=2) as client:
        mapped.file.write_text(map_text(mapped.ports, slots, version))
        mapped.servers[0].process.send_signal(signal.SIGHUP)
        until(lambda: why in mapped.servers[0].log)
        assert "version 1 of the map of slots stays in use" in mapped.servers[0].log
        info: Any = client.execute_command("CLUSTER INFO")
        assert info["cluster_current_epoch"] == "1"


def test_servers_with_two_maps_of_one_version_are_said_to_disagree(tmp_path: Path) -> None:
    """Each says that the other one has what is asked for."""
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        for port, slots in zip(ports, (HALVES[::-1], HALVES), strict=True):
            file = tmp_path / f"{port}.toml"
            file.write_text(map_text(ports, slots))
            mapped = ("--cluster-config", str(file), "--cluster-node", f"127.0.0.1:{port}")
            stack.enter_context(start_server(*mapped, port=port))
        pages = stack.enter_context(PageClient(f"redis-cluster://127.0.0.1:{ports[0]}", deadline=60))
        names = [(b"{a}", 0), (b"{b}", 0)]  # in slots of both halves
        with pytest.raises(Refused, match="CLUSTERDOWN the nodes disagree about who serves slot 3300"):
            pages.mset_blocks(names, SHAPE, [block_body()] * 2, deadline=2)


def test_a_map_nested_too_deeply_is_refused_and_the_next_one_is_used() -> None:
    with start_mapped() as mapped, mapped.servers[0].client(protocol=2) as client:
        mapped.file.write_text(f"version = 1\nnodes = {NESTED}")
        mapped.servers[0].process.send_signal(signal.SIGHUP)
        until(lambda: "stays in use" in mapped.servers[0].log)
        assert "nested too deeply" in mapped.servers[0].log
        mapped.file.write_text(map_text(mapped.ports, version=2))
        mapped.servers[0].process.send_signal(signal.SIGHUP)
        until(lambda: "cluster_current_epoch:2" in str(told(mapped.servers[0], "CLUSTER", "INFO")))
        assert client.ping()


def test_an_error_nobody_expects_ends_no_further_renewals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "slots.toml"
    file.write_text(map_text([1, 2]))
    server = Server(Config(), Keyspace(), placing=Placing(file, IDS[0]))

    async def renewed() -> None:
        asked = asyncio.Event()
        task = asyncio.create_task(renew_when(asked, server))
        with monkeypatch.context() as patch:
            patch.setattr(slot_map.tomllib, "loads", lambda text: 1 // 0)
            asked.set()
            await asyncio.to_thread(until, lambda: "the map of slots could not be renewed" in caplog.text)
        assert "ZeroDivisionError" in caplog.text
        file.write_text(map_text([1, 2], version=2))
        asked.set()
        await asyncio.to_thread(until, lambda: server.placing is not None and server.placing.map.version == 2)
        task.cancel()

    asyncio.run(renewed())


# -- maps that are none ------------------------------------------------------------------------------------------------

NESTED = "[" * 5000 + "]" * 5000
NODE = f'[[nodes]]\nid = "{IDS[0]}"\nhost = "h"\nport = 1\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("version = 1", "a map lacks nodes; it has nodes, version"),
        ("version = 1\nnodes = []", "nodes must be one"),
        (f"version = 1\nnodes = {NESTED}", "nested too deeply"),
        (f"version{'.a' * 3000} = 1\nnodes = []", "nested too deeply"),
        ("version = 1\nnodes = [3]", "node 1 must be a table"),
        (f"version = true\n{NODE}slots = []", "version must be a whole number"),
        (f"version = 1\nextra = 2\n{NODE}slots = []", "has an unknown 'extra'"),
        (f'version = 1\n{NODE}slots = ["0-9", "20-16383"]', "nobody has the slots 10-19;"),
        (f'version = 1\n{NODE}slots = ["0-9", 9, "10-16383"]', "slot 9 is given to h:1 twice"),
        (f'version = 1\n{NODE}slots = ["9-0"]', "slots are numbers and ranges of 0 to 16383"),
        (f'version = 1\n{NODE}slots = ["0-16384"]', "slots are numbers and ranges of 0 to 16383"),
        (f'version = 1\n{NODE}slots = "0-16383"', "slots must be a list"),
        (f"version = 1\n{NODE}slots = [0]\n{NODE}slots = [1]", f"2 nodes have the id {IDS[0]}"),
        ('version = 1\n[[nodes]]\nid = "x"\nhost = "h"\nport = 1\nslots = []', "id must be 40 hexadecimal digits"),
        (f'version = 1\n[[nodes]]\nid = "{IDS[0]}"\nhost = "a b"\nport = 1\nslots = []', "host must be"),
        (f'version = 1\n[[nodes]]\nid = "{IDS[0]}"\nhost = "h"\nport = 0\nslots = []', "port must be a whole number"),
    ],
)
def test_what_is_wrong_with_a_map_is_said(text: str, why: str) -> None:
    with pytest.raises(MapError, match=re.escape(why)):
        parse_map(text)


def test_a_relative_map_is_looked_for_in_dir_and_an_error_says_so(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "slots.toml"

    def start() -> AbstractContextManager[RunningServer]:
        options = ("--cluster-config", file.name, "--cluster-node", f"127.0.0.1:{port}")
        return start_server(*options, port=port, directory=tmp_path)

    with pytest.raises(RuntimeError, match=re.escape(f"{file}: No such file")), start():
        pass
    file.write_text(map_text([port], (["0-100"],)))
    with pytest.raises(RuntimeError, match=re.escape(f"{file}: nobody has")), start():
        pass
    file.write_text(map_text([port], (["0-16383"],)))
    with start() as server, server.client() as client:
        assert client.set("a", "1")


def test_a_start_with_a_wrong_map_or_none_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "slots.toml"
    file.write_text(map_text([1], (["0-100"],)))
    deep = tmp_path / "deep.toml"
    deep.write_text(f"version = 1\nnodes = {NESTED}")
    long = tmp_path / "long.toml"
    long.write_text(f"version = {'1' * 5000}\nnodes = []")
    whole = tmp_path / "whole.toml"
    whole.write_text(map_text([1, 2]))
    for options, why in (
        (("--cluster-config", str(file), "--cluster-node", IDS[0]), f"{file}: nobody has the slots 101-16383"),
        (("--cluster-config", str(deep), "--cluster-node", IDS[0]), f"{deep}: lists or tables are nested too deeply"),
        (("--cluster-config", str(long), "--cluster-node", IDS[0]), f"{long}: Exceeds the limit"),
        (("--cluster-config", str(whole)), "cluster-config needs cluster-node"),
        (("--cluster-config", str(whole), "--cluster-node", "h:1"), "the map has no node 'h:1'"),
        (("--cluster-config", str(tmp_path / "none"), "--cluster-node", "h:1"), "No such file"),
        (("--cluster-node", "h:1"), "cluster-node needs cluster-config"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(why)), start_server(*options):
            pass
