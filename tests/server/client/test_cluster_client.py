"""PageClient on a real Valkey Cluster: the same pages and blocks, wherever their slots are by now."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from page_batches import SHAPE, batch, block_body, same
from test_page_client import (  # noqa: F401 - these tests of one server apply to a cluster
    test_a_block_and_its_pages_are_the_same_data,
    test_a_block_in_several_pieces_arrives_as_one,
    test_a_missing_page_is_a_miss_and_the_others_arrive,
    test_a_page_of_another_length_is_a_miss,
    test_a_string_under_a_page_s_key_is_no_page,
    test_any_array_can_be_sent_and_one_of_its_kind_received,
    test_blocks_are_read_as_a_whole_or_not_at_all,
    test_deleted_pages_are_absent,
    test_nothing_asked_is_nothing_answered,
    test_pages_are_read_into_the_callers_memory,
    test_pages_of_any_size_alone_and_together,
    test_pages_of_blocks_are_moved_without_objects,
    test_truncated_and_short_replies_are_not_waited_for,
)
from waiting import until

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import Cluster, Node
from kvpage_server.cli import main
from kvpage_server.client import AsyncPageClient, Disconnected, Page, PageClient, Refused, Unsupported
from kvpage_server.client.cluster.commands import (
    OPENING_SIZE,
    READ_TRIES,
    Router,
    Scattered,
    block_key,
    head_size,
    simple,
)
from kvpage_server.client.cluster.plan import Failed
from kvpage_server.client.cluster.store import ClusterCalls
from kvpage_server.client.cluster.topology import (
    SLOTS,
    Address,
    Shard,
    SlotMap,
    has_tag,
    ranges_of,
    redirection,
    slot_of,
)
from kvpage_server.client.cluster.topology import Node as NodeAddress
from kvpage_server.client.errors import WrongReply
from kvpage_server.client.page import pages_of_block
from kvpage_server.client.wire.connection import Deadline
from kvpage_server.client.wire.reply import Lines
from kvpage_server.page import BlockShape, DType, KVType, PageKey, Plane, decode_page

NAMES = [(b"{prompt-%d}" % i, i) for i in range(24)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with valkey_cluster.run() as cluster:
        yield cluster


@pytest.fixture(params=[True, False], ids=["verify", "no verify"])
def pages(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[PageClient]:
    for node in cluster.masters:
        node.ask("FLUSHALL")
    with PageClient(cluster.url, verify=request.param, deadline=30) as pages:
        yield pages


def bodies(count: int = len(NAMES)) -> list[Any]:
    return [block_body(i) for i in range(count)]


def empty(count: int = len(NAMES)) -> list[Any]:
    return [np.zeros(SHAPE.nbytes, np.uint8) for _ in range(count)]


def trips(pages: PageClient) -> int:
    assert pages._several
    return pages._several.peers.round_trips


def node_of(cluster: Cluster, name: tuple[bytes, int]) -> Node:
    return cluster.master_of(slot_of(block_key(name)))


# -- stored values -----------------------------------------------------------------------------------------------------


def test_a_block_of_another_shape_is_a_miss(pages: PageClient) -> None:
    shape, name = BlockShape(2, 2, 4, (Plane(0, DType.FLOAT16, 8), Plane(1, DType.FLOAT16, 8))), (b"shapes", 0)
    pages.set_block(name, shape, bytes(shape.nbytes))
    for planes, why in (
        ((Plane(0, DType.FLOAT16, 8), Plane(1, DType.BFLOAT16, 8)), "header"),
        ((Plane(0, DType.FLOAT16, 16),), "size"),
    ):
        other = BlockShape(2, 2, 4, planes)
        assert pages.fetch_blocks_into([name], other, [bytearray(other.nbytes)]) == [why]


def test_a_batch_costs_one_round_trip_per_node(pages: PageClient) -> None:
    pages.prefix(NAMES, pages_per_block=SHAPE.pages)  # it has asked for the map
    for ask in (
        lambda: pages.mset_blocks(NAMES, SHAPE, bodies()),
        lambda: pages.mget_blocks_into(NAMES, SHAPE, empty()),
        lambda: pages.prefix(NAMES, pages_per_block=SHAPE.pages, lease_ms=1000),
    ):
        before = trips(pages)
        ask()
        assert trips(pages) - before == 3


def test_a_prefix_ends_at_a_missing_block_and_leases_extend_ttls(pages: PageClient, cluster: Cluster) -> None:
    pages.mset_blocks(NAMES, SHAPE, bodies(), ttl=50)
    assert pages.prefix(NAMES, pages_per_block=SHAPE.pages) == len(NAMES)
    assert pages.prefix([*NAMES[:5], (b"nobody's", 0), *NAMES[5:]], pages_per_block=SHAPE.pages, lease_ms=90_000) == 5
    assert pages.prefix(NAMES, pages_per_block=SHAPE.pages + 1) == 0
    states = [(*NAMES[2], 3), (b"nobody's", 0, 4), (*NAMES[4], 5), (*NAMES[5], 5)]
    assert pages.lengths(NAMES, states, pages_per_block=SHAPE.pages, lease_ms=90_000) == [3, 5]
    assert pages.lengths(
        [NAMES[0], (b"nobody's", 0)], [(*NAMES[0], 1), (*NAMES[0], 2)], pages_per_block=SHAPE.pages
    ) == [1]
    assert 80 < node_of(cluster, NAMES[0]).ask("TTL", block_key(NAMES[0])) <= 90
    assert pages.lease(NAMES[1][0], 200_000, [NAMES[1][1], 999]) == 1
    assert 190 < node_of(cluster, NAMES[1]).ask("TTL", block_key(NAMES[1])) <= 200
    assert pages.lease(NAMES[1][0], 1_000, [NAMES[1][1]]) == 1
    assert node_of(cluster, NAMES[1]).ask("TTL", block_key(NAMES[1])) > 190


def with_ttl(cluster: Cluster, names: list[tuple[bytes, int]]) -> list[bool]:
    """Return whether each block has at least a minute to live."""
    return [node_of(cluster, name).ask("TTL", block_key(name)) > 60 for name in names]


def test_exactly_the_longest_length_is_leased(pages: PageClient, cluster: Cluster) -> None:
    names, states = NAMES[:16], [(*name, need) for name, need in zip(NAMES[16:20], (3, 7, 7, 12), strict=True)]
    stored = [name for name in NAMES[:20] if name != NAMES[9]]
    pages.mset_blocks(stored, SHAPE, bodies(len(stored)), ttl=50)
    assert pages.lengths(names, states, pages_per_block=SHAPE.pages) == [3, 7]
    assert not any(with_ttl(cluster, stored))
    before = trips(pages)
    assert pages.lengths(names, states, pages_per_block=SHAPE.pages, lease_ms=90_000) == [3, 7]
    assert trips(pages) - before <= 2 * 3
    assert with_ttl(cluster, NAMES[:20]) == [True] * 7 + [False] * 10 + [True] * 2 + [False]


def test_lengths_of_very_many_blocks_and_states(pages: PageClient) -> None:
    names = [(b"{prompt-%d}" % (i // 4), i) for i in range(700)]
    small = BlockShape(1, 1, 1, SHAPE.planes[:1])
    pages.mset_blocks(names, small, [bytes(small.nbytes)] * len(names))
    states = [(*(names[0] if need % 2 else (b"nobody's", 0)), need) for need in range(1, 1000)]
    random.Random(1).shuffle(states)
    assert pages.lengths(names, states, pages_per_block=1, lease_ms=1000) == [*range(1, 701, 2)]


@pytest.mark.parametrize("lost", [NAMES[3], NAMES[10], NAMES[11]])
def test_a_length_that_is_lost_before_its_lease_is_omitted(
    pages: PageClient, monkeypatch: pytest.MonkeyPatch, lost: tuple[bytes, int]
) -> None:
    pages.mset_blocks(NAMES, SHAPE, bodies())
    examine = ClusterCalls.examine

    def delete_before(calls: ClusterCalls, names: Any, states: Any, count: int, lease_ms: int) -> Any:
        if lease_ms:
            pages.delete_request(lost[0], [lost[1]])
        return examine(calls, names, states, count, lease_ms)

    monkeypatch.setattr(ClusterCalls, "examine", delete_before)
    states = [(*NAMES[10], 5), (*NAMES[11], 5), (*NAMES[12], 2)]
    assert pages.lengths(NAMES[:8], states, pages_per_block=SHAPE.pages, lease_ms=60_000) == [2]


def test_a_page_is_the_blob_that_it_is_everywhere(pages: PageClient, cluster: Cluster) -> None:
    (page,) = batch(1)
    pages.set_page(page, ttl=1000)
    node = cluster.master_of(slot_of(bytes(page.key)))
    header, body = decode_page(node.ask("GET", bytes(page.key)))
    assert (header.names(page.key), header.ttl, same(body, page)) == (True, 1000, True)
    assert 990 < node.ask("TTL", bytes(page.key)) <= 1000


def test_a_block_is_one_string_with_the_headers_of_its_pages(pages: PageClient, cluster: Cluster) -> None:
    body = block_body(7)
    pages.set_block((b"whole", 3), SHAPE, body)
    value = node_of(cluster, (b"whole", 3)).ask("GET", block_key((b"whole", 3)))
    assert value[head_size(SHAPE) :] == body.tobytes()
    for i, span in enumerate(SHAPE.page_spans()):
        blob = value[64 + 64 * i : 128 + 64 * i] + body[span].tobytes()
        header, _ = decode_page(blob)  # verified
        assert header.page == 3


def test_the_last_write_is_read(pages: PageClient) -> None:
    old, new = block_body(1), block_body(2)
    pages.set_block((b"agent", 0), SHAPE, old)
    one = PageKey(b"agent", 1, 1, 0, KVType.K)
    found = pages.get_page(one)
    assert found
    pages.set_page(found._replace(body=new[SHAPE.page_span(1, 1, KVType.K)]))
    again = pages.get_page(one)
    assert again
    assert bytes(again.body) == new[SHAPE.page_span(1, 1, KVType.K)].tobytes()
    assert not pages.get_block_into((b"agent", 0), SHAPE, empty(1)[0])  # it would be old and new in one
    pages.set_block((b"agent", 0), SHAPE, old)
    again = pages.get_page(one)
    assert again
    assert bytes(again.body) == old[SHAPE.page_span(1, 1, KVType.K)].tobytes()


@pytest.mark.parametrize("req_id", [b"{agent}7", b"agent"], ids=["braces", "no braces"])
def test_a_page_does_not_return_after_its_replacing_block(pages: PageClient, cluster: Cluster, req_id: bytes) -> None:
    alone = PageKey(req_id, 1, 1, 3, KVType.K)
    pages.set_page(Page(alone, b"old", DType.INT8, 1, 3))
    pages.set_block((req_id, 3), SHAPE, block_body())
    node_of(cluster, (req_id, 3)).ask("UNLINK", block_key((req_id, 3)))  # as if it had expired, or had been evicted
    assert pages.get_page(alone) is None
    assert [node.ask("DBSIZE") for node in cluster.masters] == [0, 0, 0]


@given(
    req_id=st.binary(min_size=1, max_size=256).filter(lambda name: not re.search(rb"[:\x00-\x20\x7f]", name)),
    page_id=st.integers(0, 2**32 - 1),
    shape=st.builds(
        BlockShape,
        st.integers(1, 12),
        st.integers(1, 12),
        st.just(1),
        st.sampled_from([SHAPE.planes, SHAPE.planes[:1]]),
    ),
)
def test_both_encodings_of_page_deletions_are_equal(req_id: bytes, page_id: int, shape: BlockShape) -> None:
    scattered = Scattered((req_id, page_id), shape)
    singly = [*scattered.singly()]
    slots, texts = scattered.encode()
    assert texts == [bytes(piece) for one in singly for piece in one.pieces()]
    if not has_tag(req_id):
        assert slots == [slot_of(one.key) for one in singly]


def test_a_string_that_is_no_page_is_a_miss_and_others_arrive(pages: PageClient, cluster: Cluster) -> None:
    keys = [PageKey(b"{one}%d" % i, 0, 0, 0, KVType.K) for i in range(3)]
    pages.mset([Page(key, b"body", DType.INT8, 1, 4) for key in keys])
    for value in (b"", b"x", bytes(3 << 20)):
        cluster.master_of(slot_of(b"{one}")).ask("SET", bytes(keys[1]), value)
        into = [np.zeros(4, np.uint8) for _ in keys]
        assert pages.mget_into(keys, into) == [True, False, True]
        assert pages.misses == {"size": 1}
        pages.misses.clear()


def test_a_block_that_was_cut_off_costs_no_page_of_another(pages: PageClient, cluster: Cluster) -> None:
    pages.mset_blocks(NAMES[:3], SHAPE, bodies(3))
    node, key = node_of(cluster, NAMES[1]), block_key(NAMES[1])
    node.ask("SET", key, node.ask("GETRANGE", key, 0, OPENING_SIZE - 1))
    wanted = [next(pages_of_block(name, SHAPE))[0] for name in NAMES[:3]]
    assert [page is not None for page in pages.mget(wanted)] == [True, False, True]


def test_a_delete_of_a_foreign_page_keeps_the_block(pages: PageClient) -> None:
    pages.set_block(NAMES[0], SHAPE, block_body())
    assert pages.delete([PageKey(NAMES[0][0], SHAPE.layers, 0, NAMES[0][1], KVType.K)]) == 0
    assert pages.get_block_into(NAMES[0], SHAPE, empty(1)[0])


def test_a_redirection_without_a_host_means_the_same_host() -> None:
    asked = NodeAddress("10.0.0.1", 7000)
    assert redirection("MOVED 3999 :6381", asked) == (3999, NodeAddress("10.0.0.1", 6381))
    assert redirection("ASK 3999 [::1]:6381", asked) == (3999, NodeAddress("::1", 6381))
    assert redirection("MOVED 3999 host:x", asked) is None
    assert redirection("MOVED 3999 ?:6381", asked) == (3999, NodeAddress("10.0.0.1", 6381))
    assert [shard.primary for *_, shard in ranges_of([[0, 9, [b"?", 6381], [b"", 1]]], asked)] == [("10.0.0.1", 6381)]


@pytest.mark.parametrize(
    ("host", "port"), [("host/?password=x", 1), ("a@b", 1), ("a:b", 1), ("host", 0), ("host", 65536)]
)
def test_a_node_that_cannot_be_in_a_url_is_refused(host: str, port: int) -> None:
    asked = NodeAddress("10.0.0.1", 7000)
    assert redirection(f"MOVED 3999 {host}:{port}", asked) is None
    with pytest.raises(WrongReply, match=r"is not a port|is not a host|does not appear to be"):
        list(ranges_of([[0, 9, [host.encode(), port]]], asked))


def test_lines_may_arrive_in_any_pieces() -> None:
    lines = Lines(3)
    for byte in b":1\r\n-ERR no\r\n:0\r\n":
        assert not lines.done
        lines.feed(bytes([byte]))
    assert (lines.done, lines.result()) == (True, [b":1", b"-ERR no", b":0"])


def test_blocks_of_a_segment_of_a_prompt_are_on_one_node(pages: PageClient, cluster: Cluster) -> None:
    names = [(b"{%d}%d" % (i // 4, i), 0) for i in range(16)]
    pages.mset_blocks(names, SHAPE, bodies(16))
    by_segment = [{node_of(cluster, name).port for name in names[i : i + 4]} for i in range(0, 16, 4)]
    assert all(len(ports) == 1 for ports in by_segment)
    assert len(set.union(*by_segment)) > 1


def test_blocks_of_a_request_are_deleted_by_their_page_ids(pages: PageClient) -> None:
    pages.mset_blocks([(b"agent", i) for i in range(3)], SHAPE, bodies(3))
    assert pages.delete_request(b"agent", [0, 2, 9]) == 2 * SHAPE.pages
    assert pages.mget_blocks_into([(b"agent", i) for i in range(3)], SHAPE, empty(3)) == [False, True, False]
    with pytest.raises(Unsupported, match="name their page ids"):
        pages.delete_request(b"agent")
    with pytest.raises(Unsupported, match="name their page ids"):
        pages.lease(b"agent", 1000)


def test_threads_may_share_a_client(pages: PageClient) -> None:
    def work(thread: int) -> bool:
        names, written = [(b"thread%d" % thread, i) for i in range(6)], bodies(6)
        for _ in range(5):
            pages.mset_blocks(names, SHAPE, written)
            into = empty(6)
            assert all(pages.mget_blocks_into(names, SHAPE, into))
            assert all((a == b).all() for a, b in zip(into, written, strict=True))
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))


# -- wrong bytes -------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_block_is_a_miss(cluster: Cluster) -> None:
    name, body, into = (b"bits", 5), block_body(3), empty(1)[0]
    node = node_of(cluster, name)
    with PageClient(cluster.url) as pages:
        pages.set_block(name, SHAPE, body)
        whole = node.ask("GET", block_key(name))
        places = [*range(70), *random.Random(5).sample(range(len(whole)), 100)]
        for place in places:
            node.ask("SETRANGE", block_key(name), place, bytes([whole[place] ^ 1 << place % 8]))
            assert not pages.get_block_into(name, SHAPE, into), place
            node.ask("SETRANGE", block_key(name), place, bytes([whole[place]]))
        assert pages.misses.keys() == {"header", "checksum"}
        assert pages.get_block_into(name, SHAPE, into)
        assert (into == body).all()


@pytest.mark.parametrize("verify", [True, False])
def test_a_string_that_is_not_the_named_block_is_a_miss(cluster: Cluster, verify: bool) -> None:
    with PageClient(cluster.url, verify=verify) as pages:
        pages.mset_blocks([(b"{a}", 0), (b"{a}", 1)], SHAPE, bodies(2))
        node = node_of(cluster, (b"{a}", 0))
        other = node.ask("GET", block_key((b"{a}", 1)))
        node.ask("SET", block_key((b"{a}", 0)), other)  # another block's
        node.ask("SET", block_key((b"{a}", 2)), bytes(len(other)))
        node.ask("SET", block_key((b"{a}", 3)), b"short")
        node.ask("LPUSH", block_key((b"{a}", 4)), b"a list")
        assert pages.mget_blocks_into([(b"{a}", i) for i in range(4)], SHAPE, empty(4)) == [False, True, False, False]
        assert pages.misses == {"header": 2, "size": 1}
        with pytest.raises(Refused, match="WRONGTYPE"):
            pages.get_block_into((b"{a}", 4), SHAPE, empty(1)[0])
        node.ask("DEL", block_key((b"{a}", 4)))


# -- slots that move ---------------------------------------------------------------------------------------------------


def node_ids(cluster: Cluster) -> dict[int, str]:
    return {node.port: node.ask("CLUSTER", "MYID").decode() for node in cluster.masters}


def set_slot(cluster: Cluster, slot: int, to: Node) -> None:
    """The importing node has the slot in a new epoch, so older claims that other nodes receive are void."""
    ids = node_ids(cluster)
    with suppress(redis.ResponseError):  # it has the slot
        to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", next(other for port, other in ids.items() if port != to.port))
    for node in (to, *cluster.masters):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[to.port])
    for node in cluster.masters:
        until(lambda node=node: _serves(node, slot) == to.port, "the cluster to agree")


def _serves(node: Node, slot: int) -> int:
    """Return the port of a slot's owner, as a node knows it."""
    return next(entry[2][1] for entry in node.ask("CLUSTER", "SLOTS") if entry[0] <= slot <= entry[1])


def test_moving_and_moved_slots_are_followed(pages: PageClient, cluster: Cluster) -> None:
    names = [(b"{moving}%d" % i, 0) for i in range(8)]
    written = bodies(8)
    pages.mset_blocks(names, SHAPE, written)
    alone = [PageKey(b"{moving}new%d" % i, 1, 1, 0, KVType.K) for i in range(2)]
    slot, ids = slot_of(b"{moving}"), node_ids(cluster)
    others = (PageKey(b"without-braces-%d" % i, 1, 1, 0, KVType.K) for i in count())
    there = next(key for key in others if slot_of(bytes(key)) == slot)
    pages.mset([Page(key, b"old", DType.INT8, 1, 3) for key in (*alone, there)])
    source = cluster.master_of(slot)
    target = next(node for node in cluster.masters if node is not source)
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
    try:
        gone = [*(block_key(name) for name in names[:4]), bytes(alone[0])]
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *gone)
        into = empty(8)
        assert pages.mget_blocks_into(names, SHAPE, into) == [True] * 8  # four by ASK
        assert all((a == b).all() for a, b in zip(into, written, strict=True))
        new = [(b"{moving}new%d" % i, 0) for i in range(3)]
        pages.mset_blocks(new, SHAPE, written[:3])  # all by ASK; of several keys nobody deletes any now
        assert [pages.delete_request(req_id, [0]) for req_id, _ in new[:2]] == [SHAPE.pages] * 2
        assert pages.mexists(alone) == [False, False]
        pages.mset_blocks(new, SHAPE, written[:3])
        assert pages.prefix([*names, *new], pages_per_block=SHAPE.pages) == 11
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *map(block_key, names[4:]), bytes(there))
        for node in (target, source, *cluster.masters):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
        assert target.ask("EXISTS", bytes(there)) == 1
        pages.set_block((there.req_id, 0), SHAPE, written[0])  # its page is deleted by MOVED
        assert target.ask("EXISTS", bytes(there)) == 0
        into = empty(11)
        assert pages.mget_blocks_into([*names, *new], SHAPE, into) == [True] * 11  # by MOVED
        assert all((a == b).all() for a, b in zip(into, [*written, *written[:3]], strict=True))
        pages.mset_blocks(names, SHAPE, written)
    finally:
        for node in cluster.masters:
            node.ask("FLUSHALL")
        set_slot(cluster, slot, source)


# -- replicas ----------------------------------------------------------------------------------------------------------


def gets(nodes: list[Node]) -> int:
    """How many strings they were asked for."""
    calls = [node.info_of("INFO", "commandstats").get("cmdstat_get", "calls=0,") for node in nodes]
    return sum(int(call.removeprefix("calls=").split(",")[0]) for call in calls)


def test_replicas_answer_reads_when_they_are_asked_to(pages: PageClient, cluster: Cluster) -> None:
    pages.mset_blocks(NAMES, SHAPE, bodies())
    for node in cluster.masters:
        assert node.ask("WAIT", 1, 10_000) == 1
    masters, replicas = gets(cluster.masters), gets(cluster.replicas)
    with PageClient(cluster.url, read_from_replicas=True, deadline=30) as reader:
        into = empty()
        assert reader.mget_blocks_into(NAMES, SHAPE, into) == [True] * len(NAMES)
    assert all((a == b).all() for a, b in zip(into, bodies(), strict=True))
    assert (gets(cluster.masters) - masters, gets(cluster.replicas) - replicas) == (0, len(NAMES))


def test_a_value_missing_on_a_replica_is_read_from_its_master(pages: PageClient, cluster: Cluster) -> None:
    for node in cluster.replicas:
        node.ask("CONFIG", "SET", "masteruser", "nobody", "masterauth", "nothing")
        node.ask("CLIENT", "KILL", "TYPE", "master")
    try:
        for node in cluster.replicas:
            until(lambda node=node: node.info_of("INFO", "replication")["master_link_status"] == "down")
        pages.mset_blocks(NAMES, SHAPE, bodies())
        with PageClient(cluster.url, read_from_replicas=True, deadline=30) as reader:
            into = empty()
            assert reader.mget_blocks_into(NAMES, SHAPE, into) == [True] * len(NAMES)
            assert reader.prefix(NAMES, pages_per_block=SHAPE.pages) == len(NAMES)
            key, _, span = next(pages_of_block(NAMES[0], SHAPE))
            page = reader.get_page(key)
            assert page
            assert bytes(page.body) == bodies()[0][span].tobytes()
        assert all((a == b).all() for a, b in zip(into, bodies(), strict=True))
    finally:
        for node in cluster.replicas:
            node.ask("CONFIG", "SET", "masteruser", "", "masterauth", "")
            until(lambda node=node: node.info_of("INFO", "replication")["master_link_status"] == "up")


# -- statements of the documentation -----------------------------------------------------------------------------------


def test_the_documented_example_runs(cluster: Cluster) -> None:
    text = Path(__file__).parents[3].joinpath("docs", "scaling.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [example] = [each for each in examples if "127.0.0.1:7000" in each]
    done = subprocess.run(
        [sys.executable, "-c", example.replace("127.0.0.1:7000,127.0.0.1:7001", cluster.addresses)],
        capture_output=True,
        encoding="utf-8",
        timeout=100,
    )
    assert done.stdout == "2\n[True, True]\n", done.stderr


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("valkey-cluster://", "valkey-cluster://host:port"),
        ("valkey-cluster://a:1,", "has no host"),
        ("valkey-cluster://a:70000", "Port out of range"),
        ("valkey-cluster://a:x", "Port could not be cast"),
        ("valkey-cluster://a:1/3", "one database"),
        ("valkey-cluster://a:1?silence=3", "unknown option 'silence' in a cluster's URL; allowed: node_deadline,"),
        ("valkey-cluster://a:1?node_deadline=0", "node_deadline of a cluster's URL must be a number of seconds"),
        ("valkey-cluster://a:1?node_deadline=nan", "node_deadline of a cluster's URL must be a number of seconds"),
        ("valkey-cluster://a:1?node_deadline=", "node_deadline of a cluster's URL must be a number of seconds"),
        ("valkey-cluster://a:1?node_deadline=1&node_deadline=2", "node_deadline is given twice"),
        ("valkey-cluster://a:1?read_from_replicas=maybe", "must be true or false, got 'maybe'"),
        ("valkey-cluster://a:1?socket_timeout=soon", "socket_timeout of a cluster's URL must be a number of seconds"),
        ("valkey-cluster://a:1?ssl_cert_reqs=none", "ssl_cert_reqs of a cluster's URL needs rediss-cluster://"),
        (
            "rediss-cluster://a:1?ssl_cert_reqs=some",
            "ssl_cert_reqs of a cluster's URL must be none, optional",
        ),
    ],
)
@pytest.mark.parametrize("kind", [PageClient, AsyncPageClient])
def test_a_url_that_names_no_cluster_is_refused(kind: type[PageClient | AsyncPageClient], url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kind(url)


def test_options_may_stand_in_the_url(cluster: Cluster) -> None:
    name = PageKey(b"{in-the-url}", 0, 0, 0, 0)
    page = Page(name, b"12345678", DType.FLOAT16, 1, 4)
    options = "node_deadline=3&read_from_replicas=true&client_name=of-the-url"
    with PageClient(f"{cluster.url}?{options}", deadline=30) as pages:
        pages.set_page(page)
        assert pages.exists(name)
        assert any(b"of-the-url" in node.ask("CLIENT", "LIST") for node in cluster.masters)


def test_kvpage_status_shows_the_share_of_each_master(
    cluster: Cluster, pages: PageClient, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.mset_blocks(NAMES, SHAPE, bodies())
    with pytest.raises(SystemExit) as ended:
        main(["status", "--json", "--url", cluster.url])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["total"]["keys"] == len(NAMES)
    assert {node["server"].split()[0] for node in found["nodes"]} == {"Valkey"}
    with pytest.raises(SystemExit):
        main(["status", "--url", cluster.url])
    assert "Valkey and Redis report no pages" in capsys.readouterr().out


def test_kvpage_lists_requests_and_blocks(
    cluster: Cluster, pages: PageClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks, and pages that were written one by one; a name with glob characters."""

    def json_of(*words: str) -> Any:
        with pytest.raises(SystemExit):
            main([*words, "--json", "--url", cluster.url])
        return json.loads(capsys.readouterr().out)

    pages.mset_blocks(NAMES, SHAPE, bodies())
    alone = [PageKey(b"a*[x]", 0, head, 7, 0) for head in range(3)]
    for name in (b"a*[x]", b"aa[x]"):
        pages.mset([Page(PageKey(name, 0, head, 7, 0), bytes(64), DType.FLOAT16, 4, 8) for head in range(3)])
    looked = {each["request"]: each for each in json_of("ls")["requests"]}
    assert looked.keys() == {name.decode() for name, _ in NAMES} | {"a*[x]", "aa[x]"}
    assert (looked["{prompt-3}"]["blocks"], looked["{prompt-3}"]["bytes"]) == (1, SHAPE.nbytes)
    assert (looked["a*[x]"]["pages"], looked["a*[x]"]["bytes"]) == (3, 3 * 64)
    assert len({each["url"] for each in looked.values()}) == 3
    assert [(block["page"], block["complete"]) for block in json_of("ls", "a*[x]")["blocks"]] == [(7, True)]
    pages.delete(alone[1:2])
    assert json_of("why", "a*[x]")["block"] == 0  # the first of the missing blocks
    assert [json_of("why", "a*[x]", "0", head, "7", "0")["reason"] for head in "012"] == ["stored", "absent", "stored"]
    assert json_of("why", "{prompt-3}", "0", "0", "3", "0")["reason"] == "stored"


@pytest.mark.parametrize("pages", [True], indirect=True)
def test_kvpage_verifies_and_inspects_pages(
    cluster: Cluster, pages: PageClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages of a block, and pages that were written one by one. Damaged pages are removed."""

    def json_of(*words: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--json", "--url", cluster.url])
        assert ended.value.code == code
        return json.loads(capsys.readouterr().out)

    pages.mset_blocks(NAMES, SHAPE, bodies(), ttl=100)
    alone = [PageKey(b"alone", 0, head, 7, 0) for head in range(3)]
    pages.mset([Page(key, bytes(64), DType.FLOAT16, 4, 8) for key in alone])
    assert json_of("verify", "{prompt-3}")["checked"] == SHAPE.pages
    assert json_of("verify", "alone", "7")["checked"] == 3
    assert json_of("stat", "kv:{prompt-3}:1:0:3:1")["lease_left_ms"] is None
    for words in (
        ["stat", "kv:{prompt-3}:1:0:3:1"],
        ["stat", "kv:nobody:0:0:0:0"],
        ["ls", "nobody"],
        ["verify", "nobody"],
    ):
        with pytest.raises(SystemExit):
            main([*words, "--url", cluster.url])
        shown, errors = capsys.readouterr()
        assert not {"leased", "pinned", "why"} & {*shown.split(), *errors.split()}, words
    page = json_of("stat", "kv:{prompt-3}:1:0:3:1")
    assert (page["layer"], page["page"], page["type"], page["dtype"], page["ttl"]) == (1, 3, 1, "float16", 100)
    assert 0 < page["ttl_left_ms"] <= 100_000
    page = json_of("stat", "kv:alone:0:1:7:0")
    assert (page["bytes"], page["ttl_left_ms"]) == (64, -1)
    there = f"redis://127.0.0.1:{cluster.master_of(slot_of(bytes(alone[1]))).port}"
    assert there == page["url"] == json_of("why", "alone", "0", "1", "7", "0")["url"]

    with redis.RedisCluster("127.0.0.1", cluster.nodes[0].port) as client:
        client.setrange("kv:{prompt-3}:block:3", 64 * (1 + SHAPE.pages) + 5, b"\xff\xfe")
        client.setrange(bytes(alone[1]), 70, b"x")
    found = json_of("verify", "{prompt-3}", code=1)
    assert len(found["corrupt"]) == SHAPE.pages
    assert "kv:{prompt-3}:1:0:3:1" in found["corrupt"]
    assert json_of("verify", "alone", code=1)["corrupt"] == [bytes(alone[1]).decode()]
    assert json_of("why", "{prompt-3}", code=1)["reason"] == "absent"
    assert pages.mexists(alone) == [True, False, True]


@pytest.mark.parametrize("pages", [True], indirect=True)
def test_kvpage_top_shows_masters_and_memory_by_agent(cluster: Cluster, pages: PageClient) -> None:
    pages.mset_blocks(NAMES, SHAPE, bodies())
    program = Path(sys.executable).with_name("kvpage")
    with subprocess.Popen([program, "top", "--watch", "0.2", "--url", cluster.url], stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            output = b"".join(islice(process.stdout, 20)).decode()
        finally:
            process.kill()
    assert all(f"redis://127.0.0.1:{node.port}" in output for node in cluster.masters)
    assert "total" in output
    assert NAMES[0][0].decode() in output


def test_calls_for_a_node_that_fails_share_a_refresh() -> None:
    node = NodeAddress("127.0.0.1", 1)
    router = Router(Address("valkey-cluster://127.0.0.1:1"), False, SlotMap([(0, SLOTS - 1, Shard(node))]), False)
    rounds = 0
    for _ in range(3):
        plan = router.ask([simple(b"GET", b"k")], Deadline(60.0))
        asked = next(plan)
        with suppress(Disconnected):
            while True:
                rounds += 1
                asked = plan.send([Failed(Disconnected("it fails")) for _ in asked.requests])
    assert rounds == 3 * READ_TRIES + 1
    router.slots.moved(7, NodeAddress("127.0.0.1", 2))
    assert router.slots.nodes() == [node, NodeAddress("127.0.0.1", 2)]
