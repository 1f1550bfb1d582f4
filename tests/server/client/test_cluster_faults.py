"""PageClient on a cluster that fails: nodes that die, hang or lie, slots that nobody serves, doors that are shut.

Never wrong bytes, only documented errors, no wait past the deadline, and surviving values are found.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from page_batches import NO_RETRY, SHAPE, block_body
from proxy import Weather, start_proxy
from servers import NO_REDIS, REDIS_SERVER, free_port, start_redis, start_server
from test_tls import issue, needs_openssl
from waiting import eventually, until

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import SLOTS, Cluster, Node
from kvpage_server.client import (
    AsyncPageClient,
    BlockName,
    DeadlineExceeded,
    Page,
    PageClient,
    PageClientError,
    Refused,
)
from kvpage_server.client.cluster.commands import block_key
from kvpage_server.client.cluster.topology import slot_of
from kvpage_server.client.page import pages_of_block
from kvpage_server.page import DType, PageKey

NAMES = [(b"prompt-%d" % i, i) for i in range(24)]
BODIES = [block_body(i) for i in range(len(NAMES))]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One of its own for a test that does it harm."""
    with valkey_cluster.run() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def masters() -> Iterator[Cluster]:
    """Three masters without replicas, that are whole again when a test is over. They are patient with each other."""
    with valkey_cluster.run("--cluster-node-timeout", "60000", replicas=False) as cluster:
        yield cluster


def empty() -> list[Any]:
    return [np.zeros(SHAPE.nbytes, np.uint8) for _ in NAMES]


def read(pages: PageClient, deadline: float = 30) -> list[bool]:
    """Return which blocks were found. Each has the right bytes."""
    into = empty()
    found = pages.mget_blocks_into(NAMES, SHAPE, into, deadline=deadline)
    assert all((a == b).all() for a, b, there in zip(into, BODIES, found, strict=True) if there)
    return found


def of(node: Node, cluster: Cluster) -> list[bool]:
    return [cluster.master_of(slot_of(block_key(name))) is node for name in NAMES]


# -- nodes that die or hang --------------------------------------------------------------------------------------------


def test_a_killed_master_costs_nothing_that_its_replica_has(cluster: Cluster) -> None:
    with PageClient(cluster.url, deadline=30) as pages:
        pages.mset_blocks(NAMES, SHAPE, BODIES)
        for node in cluster.masters:
            assert node.ask("WAIT", 1, 10_000) == 1
        lost = cluster.masters[0]
        its_own = of(lost, cluster)
        assert any(its_own)
        lost.signal(signal.SIGKILL)
        found = read(pages)
        assert all(there or its for there, its in zip(found, its_own, strict=True))  # the others still answer
        pages.mset_blocks(NAMES, SHAPE, BODIES, deadline=60)  # waits until the replica has taken over
        assert all(read(pages))
        assert pages.misses.keys() <= {"gone"}


def test_kvpage_top_continues_with_a_killed_masters_replica(cluster: Cluster) -> None:
    words = ["top", "--json", "--watch", "0.2", "--url", cluster.url]
    with subprocess.Popen([Path(sys.executable).with_name("kvpage"), *words], stdout=subprocess.PIPE) as top:
        assert top.stdout
        try:
            received = (json.loads(line)["nodes"] for line in top.stdout)
            before = {node["url"] for node in next(received)}
            lost = next(node for node in cluster.nodes if f"redis://127.0.0.1:{node.port}" in before)
            lost.signal(signal.SIGKILL)
            after = next(nodes for nodes in received if f":{lost.port}" not in str(nodes))
        finally:
            top.kill()
    assert len(after) == 3
    assert not any("error" in node for node in after)


def test_a_hanging_node_costs_its_blocks_within_the_deadline(masters: Cluster) -> None:
    with PageClient(masters.url, deadline=60, node_deadline=4) as pages:
        pages.mset_blocks(NAMES, SHAPE, BODIES)
        stopped = masters.masters[1]
        its_own = of(stopped, masters)
        stopped.signal(signal.SIGSTOP)
        try:
            assert read(pages) == [not its for its in its_own]
            assert pages.misses == {"gone": sum(its_own)}
            before = time.monotonic()
            read(pages)
            assert time.monotonic() - before < 40  # less than the call's deadline
        finally:
            stopped.signal(signal.SIGCONT)
        assert eventually(lambda: all(read(pages)))


def test_values_of_living_nodes_are_found_despite_a_dead_one(masters: Cluster) -> None:
    """Pages and blocks by the ways that take more than one round."""
    dead, names = masters.masters[1], [(b"name-%d" % i, 0) for i in range(100)]

    def lives(key: bytes) -> bool:
        return masters.master_of(slot_of(key)) is not dead

    def page_of(name: BlockName) -> PageKey:
        return next(key for key, *_ in pages_of_block(name, SHAPE))

    there = next(name for name in names if lives(block_key(name)) and lives(bytes(page_of(name))))
    absent = next(name for name in names if lives(block_key(name)) and not lives(bytes(page_of(name))))
    unknown = next(name for name in names if not lives(block_key(name)) and lives(bytes(page_of(name))))
    lone = page_of(unknown)
    with PageClient(masters.url, deadline=60, node_deadline=1) as pages:
        pages.mset([Page(lone, b"alone", DType.INT8, 1, 5)])
        pages.mset_blocks([there], SHAPE, BODIES[:1])
        dead.signal(signal.SIGSTOP)
        try:
            [page] = pages.mget([lone])
            assert page
            assert bytes(page.body) == b"alone"
            into = empty()[:2]
            assert pages.fetch_blocks_into([there, absent], SHAPE, into) == [None, "gone"]
            assert (into[0] == BODIES[0]).all()
            before = time.monotonic()
            assert pages.prefix([there], pages_per_block=SHAPE.pages, lease_ms=1000) == 1
            assert pages.prefix([there, unknown], pages_per_block=SHAPE.pages, lease_ms=1000) == 1
            assert time.monotonic() - before < 40  # less than the call's deadline
        finally:
            dead.signal(signal.SIGCONT)
        assert eventually(lambda: pages.get_page(lone) is not None)


def test_without_a_node_the_error_says_so_until_they_return(masters: Cluster) -> None:
    with PageClient(masters.url, deadline=2, node_deadline=0.5) as pages:
        pages.mset_blocks(NAMES, SHAPE, BODIES, deadline=30)
        for node in masters.masters:
            node.signal(signal.SIGSTOP)
        try:
            with pytest.raises(PageClientError):
                read(pages, deadline=2)
            with pytest.raises(PageClientError):
                pages.mset_blocks(NAMES, SHAPE, BODIES)
        finally:
            for node in masters.masters:
                node.signal(signal.SIGCONT)

        def whole() -> bool:
            try:
                return all(read(pages))
            except PageClientError:
                return False

        assert eventually(whole)


@pytest.mark.parametrize("way", ["a cluster", "side by side"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_error_names_the_node_that_used_the_time(masters: Cluster, way: str, kind: str) -> None:
    side_by_side = ",".join(f"redis://127.0.0.1:{node.port}" for node in masters.masters)
    url = {"a cluster": masters.url, "side by side": side_by_side}[way]

    async def written_by_asyncio() -> None:
        async with AsyncPageClient(url, node_deadline=0.3) as pages:
            await pages.mset_blocks(NAMES, SHAPE, BODIES, deadline=2)

    def written() -> None:
        with PageClient(url, node_deadline=0.3) as pages:
            pages.mset_blocks(NAMES, SHAPE, BODIES, deadline=2)

    for node in masters.masters:
        node.signal(signal.SIGSTOP)
    try:
        with pytest.raises(PageClientError) as received:
            written() if kind == "sync" else asyncio.run(written_by_asyncio())
    finally:
        for node in masters.masters:
            node.signal(signal.SIGCONT)
    spent = r"127\.0\.0\.1:\d+ (was silent for|did not answer within) 0\.3 s; ([\d.e-]+) of the call's 2 s left"
    late = re.search(spent, str(received.value))
    assert late, received.value
    assert 0 <= float(late[2]) < 2


def test_a_cluster_that_starts_later_is_found() -> None:
    with PageClient(f"valkey-cluster://127.0.0.1:{free_port()}", deadline=1) as pages:
        with pytest.raises(PageClientError, match="refused"):
            read(pages, deadline=1)
        with pytest.raises(PageClientError, match="refused"):
            pages.mset_blocks(NAMES, SHAPE, BODIES)


# -- nodes that lie ----------------------------------------------------------------------------------------------------


def test_bad_weather_before_a_node_never_becomes_wrong_bytes(masters: Cluster) -> None:
    """Bits are turned over, bytes left out, connections cut, everything is late: on one node of three."""
    node = masters.masters[0]
    chance = random.Random(24)
    with start_proxy(node.port) as proxy, PageClient(masters.url, deadline=30) as pages:
        pages.mset_blocks(NAMES, SHAPE, BODIES)
        announce(node, proxy.port, masters)
        try:
            proxy.weather = Weather(flips=60, cuts=30, truncations=30, delays=60, random=chance)
            with PageClient(masters.url, deadline=20, node_deadline=1.0, retry=NO_RETRY) as other:
                kinds = set()
                for _ in range(20):
                    try:
                        found = read(other, deadline=20)
                        kinds.add("found" if any(found) else "missed")
                    except PageClientError as error:
                        kinds.add(type(error).__name__)
                    try:
                        other.prefix(NAMES, pages_per_block=SHAPE.pages)
                    except PageClientError as error:
                        kinds.add(type(error).__name__)
                assert "found" in kinds
                assert sum(proxy.weather.happened.values()) > 0
        finally:
            proxy.weather = None
            announce(node, 0, masters)
        assert all(read(pages))


def announce(node: Node, port: int, cluster: Cluster) -> None:
    """Make a node announce another address, and wait until the others know it."""
    node.ask("CONFIG", "SET", "cluster-announce-port", port)
    for other in cluster.masters:
        until(lambda other=other: (port or node.port) in [entry[2][1] for entry in other.ask("CLUSTER", "SLOTS")])


# -- slots that nobody serves ------------------------------------------------------------------------------------------


def test_unserved_slots_are_an_error_until_they_are_served(masters: Cluster) -> None:
    node = masters.masters[2]
    with PageClient(masters.url, deadline=10) as pages:
        pages.mset_blocks(NAMES, SHAPE, BODIES)
        try:
            until(lambda: all(_gave_up(other) for other in (node, *masters.masters[:2])))
            tried = r"\(tried \d+ times in [\d.]+ of 2 s\)"
            with pytest.raises((Refused, DeadlineExceeded), match=tried):  # it is tried until the deadline
                pages.mset_blocks(NAMES, SHAPE, BODIES, deadline=2)
            with PageClient(masters.url, node_deadline=30) as new, pytest.raises(Refused, match="CLUSTERDOWN"):
                read(new)
        finally:
            node.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS * 2 // 3, SLOTS - 1)
        for other in masters.masters:
            until(lambda other=other: other.info_of("CLUSTER", "INFO")["cluster_state"] == "ok")
        pages.mset_blocks(NAMES, SHAPE, BODIES, deadline=60)
        assert all(read(pages))


def _gave_up(node: Node) -> bool:
    """Whether it knows nobody who serves the last third of the slots. The owner may have announced them again."""
    with suppress(redis.ResponseError):  # nobody serves them
        node.ask("CLUSTER", "DELSLOTSRANGE", SLOTS * 2 // 3, SLOTS - 1)
    return bool(node.info_of("CLUSTER", "INFO")["cluster_state"] == "fail")


# -- doors that are shut -----------------------------------------------------------------------------------------------


def test_a_server_that_is_no_cluster_is_named() -> None:
    with start_server() as server, PageClient(f"valkey-cluster://127.0.0.1:{server.port}") as pages:
        with pytest.raises(Refused, match=f"127.0.0.1:{server.port}"):
            read(pages)
        with pytest.raises(Refused, match=f"127.0.0.1:{server.port}"):
            pages.mset_blocks(NAMES, SHAPE, BODIES)


@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
def test_nodes_without_slots_and_plain_servers_are_skipped(masters: Cluster) -> None:
    """First in the URL they may be, as when a node was removed, and its address is another's."""
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with start_server() as other, start_redis(*options) as anew:
        first = f"valkey-cluster://127.0.0.1:{other.port},127.0.0.1:{anew.port}"
        with PageClient(f"{first},{masters.addresses}", deadline=30) as pages:
            pages.mset_blocks(NAMES, SHAPE, BODIES)
            assert all(read(pages))
        with PageClient(first) as pages, pytest.raises(Refused, match="nobody serves slots"):
            read(pages)


def test_missing_rights_are_an_error(masters: Cluster) -> None:
    for node in masters.masters:
        node.ask("ACL", "SETUSER", "reader", "on", ">secret", "~kv:*", "+@read", "+cluster|slots", "+@connection")
    with PageClient(masters.url, deadline=30) as pages:
        pages.mset_blocks(NAMES, SHAPE, BODIES)
    with PageClient(f"valkey-cluster://reader:secret@{masters.addresses}", deadline=30) as reader:
        assert all(read(reader))
        with pytest.raises(Refused, match="NOPERM"):
            reader.mset_blocks(NAMES, SHAPE, BODIES)
    with (
        PageClient(f"valkey-cluster://reader:wrong@{masters.addresses}") as stranger,
        pytest.raises(Refused, match="WRONGPASS"),
    ):
        read(stranger)


@needs_openssl
@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
def test_tls_to_a_cluster_of_redis(tmp_path: Path) -> None:
    """It has one node, as the Valkey of the other tests was built without TLS."""
    issue(tmp_path)
    given = {"tls-cert-file": "server.crt", "tls-key-file": "server.key", "tls-ca-cert-file": "ca.crt"}
    files = [word for name, file in given.items() for word in (f"--{name}", str(tmp_path / file))]
    port, bus = free_port(), free_port()
    options = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--tls-port", str(port), "--tls-cluster", "yes"]
    with start_redis(*options, "--tls-auth-clients", "no", *files) as server, server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        url = f"rediss-cluster://localhost:{port}"
        with PageClient(url, ssl_ca_certs=str(tmp_path / "ca.crt"), deadline=30) as pages:
            pages.mset_blocks(NAMES, SHAPE, BODIES)
            assert all(read(pages))
        with PageClient(url, deadline=30) as unsure, pytest.raises(PageClientError, match="certificate"):
            read(unsure)
