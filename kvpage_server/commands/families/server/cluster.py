"""CLUSTER: the static map of slots that several servers share, as clients of a Redis Cluster ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvpage_server.commands.arguments import plain
from kvpage_server.commands.context import Client
from kvpage_server.commands.placing import Placing
from kvpage_server.commands.registry import command, container
from kvpage_server.core import Argument
from kvpage_server.resp.reply import Reply, ReplyError, Verbatim
from kvpage_server.slot_map import SLOTS, MappedNode, slot_of

_cluster = partial(command, flags="stale", group="cluster", since="3.0.0")

container("cluster", group="cluster", since="3.0.0", summary="A container for Redis Cluster's commands.")


def _placing(client: Client) -> Placing:
    placing = client.server.placing
    if placing is None:
        raise ReplyError("ERR This instance has cluster support disabled")
    return placing


@_cluster(
    "cluster|slots",
    complexity="O(N) with N ranges of slots",
    reply="array of array",
    summary="Returns which server has which slots.",
)
def cluster_slots(client: Client, args: list[Argument]) -> Reply:
    """An array for each range, in order: its first and last slot, and its server's host, port and id."""
    ranges = [(span, node) for node in _placing(client).map.nodes for span in node.ranges]
    ranges.sort(key=lambda pair: pair[0])
    return [[*span, [node.host, node.port, node.id, []]] for span, node in ranges]


@_cluster(
    "cluster|shards",
    since="7.0.0",
    complexity="O(N) with N servers",
    reply="array of map",
    summary="Describes the servers and their slots.",
)
def cluster_shards(client: Client, args: list[Argument]) -> Reply:
    """A map for each server: its slots as first, last, first, last, and `nodes`, which has only this server."""
    return [
        {"slots": [slot for span in node.ranges for slot in span], "nodes": [_described(node)]}
        for node in _placing(client).map.nodes
    ]


def _described(node: MappedNode) -> dict[str, Reply]:
    return {
        "id": node.id,
        "port": node.port,
        "ip": node.host,
        "endpoint": node.host,
        "role": "master",
        "replication-offset": 0,
        "health": "online",
    }


@_cluster(
    "cluster|nodes",
    complexity="O(N) with N servers",
    reply="bulk",
    summary="Describes the servers and their slots, a line each.",
)
def cluster_nodes(client: Client, args: list[Argument]) -> Reply:
    """Lines as in Redis's nodes.conf. All servers are masters. A server does not know whether the others run."""
    return Verbatim("".join(_lines(_placing(client))).encode())


def _lines(placing: Placing) -> Iterator[str]:
    for node in placing.map.nodes:
        flags = "myself,master" if node is placing.me else "master"
        slots = "".join(f" {first}-{last}" if first < last else f" {first}" for first, last in node.ranges)
        yield f"{node.id} {node.host}:{node.port}@0 {flags} - 0 0 {placing.map.version} connected{slots}\n"


@_cluster("cluster|info", reply="bulk", summary="Describes the map of slots.")
def cluster_info(client: Client, args: list[Argument]) -> Reply:
    """`name:value` lines. The epochs are the map's version. `cluster_map_digest` is equal for equal maps."""
    placing = _placing(client)
    told = {
        "cluster_state": "ok",
        "cluster_slots_assigned": SLOTS,
        "cluster_slots_ok": SLOTS,
        "cluster_slots_pfail": 0,
        "cluster_slots_fail": 0,
        "cluster_known_nodes": len(placing.map.nodes),
        "cluster_size": sum(bool(node.ranges) for node in placing.map.nodes),
        "cluster_current_epoch": placing.map.version,
        "cluster_my_epoch": placing.map.version,
        "cluster_map_digest": placing.map.digest,
        "cluster_keys_elsewhere": placing.keys_elsewhere,
    }
    return Verbatim("".join(f"{name}:{value}\r\n" for name, value in told.items()).encode())


@_cluster("cluster|myid", reply="bulk", summary="Returns this server's id.")
def cluster_myid(client: Client, args: list[Argument]) -> Reply:
    """The server's id in the map."""
    return _placing(client).me.id


@_cluster("cluster|keyslot key", complexity="O(N) with N bytes", reply="integer", summary="Returns the slot of a key.")
def cluster_keyslot(client: Client, args: list[Argument]) -> Reply:
    """The slot, from the part in the first braces, or from the whole key."""
    _placing(client)
    return slot_of(plain(args[0]))
