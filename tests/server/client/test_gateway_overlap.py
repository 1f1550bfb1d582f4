"""Blocks that are sent to a gateway without waiting for the answers: together to the nodes, and answered in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from page_batches import SHAPE, block_body
from servers import start_server
from waiting import until
from wire import Wire, encode_command

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import Cluster, Node
from kvpage_server.client.cluster.commands import block_key
from kvpage_server.client.cluster.topology import slot_of

NUMBERS = [SHAPE.layers, SHAPE.heads, SHAPE.page_size, 0, len(SHAPE.planes)]
NUMBERS += [int(number) for plane in SHAPE.planes for number in (plane.kv_type, plane.dtype, plane.head_dim)]
SETTING = [b"%d" % number for number in NUMBERS]


def kvblockset(req_id: bytes, seed: int = 0) -> bytes:
    return encode_command([b"KVBLOCKSET", req_id, b"0", *SETTING, block_body(seed).tobytes()])


def kvblockget(req_id: bytes) -> bytes:
    return encode_command([b"KVBLOCKGET", req_id, b"0"])


def a_bulk(seed: int) -> bytes:
    return b"$%d\r\n%b\r\n" % (SHAPE.nbytes, block_body(seed).tobytes())


def block_on(cluster: Cluster, node: Node, wanted: int) -> bytes:
    """The name of a block that a node has, with all of its pages."""
    names = (b"{b%d-%d}" % (wanted, i) for i in range(1000))
    return next(name for name in names if cluster.master_of(slot_of(block_key((name, 0)))) is node)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """On a slow machine, a node's silence does not mean yet that it is dead."""
    with valkey_cluster.run("--cluster-node-timeout", "60000", replicas=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def port(cluster: Cluster) -> Iterator[int]:
    with start_server("--store", "cluster", "--cluster-nodes", cluster.addresses) as gateway:
        yield gateway.port


@pytest.fixture
def wire(port: int) -> Iterator[Wire]:
    with Wire(port) as wire:
        yield wire


def test_a_block_does_not_wait_for_the_block_before_it(wire: Wire, cluster: Cluster) -> None:
    silent, other = cluster.masters[:2]
    first, second = block_on(cluster, silent, 1), block_on(cluster, other, 2)
    wire.send(kvblockset(first) + kvblockset(second))  # so that there are connections
    assert [wire.reply(), wire.reply()] == [b"+OK\r\n"] * 2
    other.ask("FLUSHALL")
    silent.signal(signal.SIGSTOP)
    try:
        wire.send(kvblockset(first) + kvblockset(second))
        until(lambda: other.ask("EXISTS", block_key((second, 0))) == 1, "the second one is stored")
    finally:
        silent.signal(signal.SIGCONT)
    assert [wire.reply() for _ in range(2)] == [b"+OK\r\n"] * 2


def test_a_pipelined_read_finds_the_write_before_it(wire: Wire) -> None:
    wire.send(kvblockset(b"r", 1) + kvblockset(b"other") + kvblockget(b"r") + kvblockset(b"r", 2) + kvblockset(b"r", 3))
    wire.send(encode_command([b"KVBLOCKEXISTS", b"r", b"0"]) + kvblockget(b"r") + encode_command([b"PING"]))
    replies = [wire.reply() for _ in range(8)]
    assert replies == [b"+OK\r\n", b"+OK\r\n", a_bulk(1), b"+OK\r\n", b"+OK\r\n", b":1\r\n", a_bulk(3), b"+PONG\r\n"]


def test_errors_are_answered_in_their_place(wire: Wire) -> None:
    misshapen = encode_command([b"KVBLOCKSET", b"r", b"0", *SETTING, b"short"])
    wire.send(kvblockset(b"r") + misshapen + kvblockset(b"bad:name") + encode_command([b"NOSUCH", *[b"x"] * 100_000]))
    wire.send(encode_command([b"KVBLOCKSET"]))
    wire.send(
        encode_command([b"CLIENT", b"REPLY", b"SKIP"]) + kvblockset(b"unsaid") + kvblockset(b"s") + b"*1\r\n!broken\r\n"
    )
    replies = [wire.reply() for _ in range(7)]
    assert replies[0] == replies[5] == b"+OK\r\n"
    assert [reply[:29] for reply in replies[1:5]] == [
        b"-ERR body must be %d bytes" % SHAPE.nbytes,
        b"-ERR req_id must be 1 to 256 ",
        b"-ERR unknown command 'NOSUCH'",
        b"-ERR wrong number of argument",
    ]
    assert replies[6].startswith(b"-ERR Protocol error")
    with pytest.raises(EOFError):
        wire.reply()


def test_a_node_that_refuses_a_block_refuses_no_other(wire: Wire, cluster: Cluster) -> None:
    full = cluster.masters[0]
    names = [block_on(cluster, node, i) for i, node in enumerate(cluster.masters * 3)]
    full.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        wire.send(b"".join(map(kvblockset, names)))
        replies = [wire.reply()[:4] for _ in names]
    finally:
        full.ask("CONFIG", "SET", "maxmemory", "0")
    assert replies == [b"-OOM", b"+OK\r", b"+OK\r"] * 3


def test_blocks_of_a_client_that_leaves_are_written(wire: Wire, cluster: Cluster) -> None:
    node = cluster.masters[0]
    node.ask("FLUSHALL")
    names = [block_on(cluster, node, i) for i in range(40)]
    wire.send(b"".join(map(kvblockset, names)))
    assert wire.reply() == b"+OK\r\n"
    wire.close()
    assert node.ask("EXISTS", block_key((names[0], 0))) == 1
    until(lambda: node.ask("DBSIZE") >= 16, "those that were begun")
