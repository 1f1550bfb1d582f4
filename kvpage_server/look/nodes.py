"""A Valkey or Redis Cluster, whose masters are looked into as one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import redis

from kvpage_server.address import shown
from kvpage_server.client.cluster.block_value import block_key
from kvpage_server.client.cluster.side_by_side import ServerUrl
from kvpage_server.client.cluster.topology import SCHEMES, SLOTS, Address, Node, SlotMap, ranges_of, slot_of
from kvpage_server.client.wire.connection import plain_client
from kvpage_server.look.output import LookError
from kvpage_server.look.several import AsOne, Gone
from kvpage_server.observe.manifests import PREFIX


def is_cluster(url: str) -> bool:
    """Whether a URL names a cluster by some of its nodes."""
    return urlsplit(url).scheme in SCHEMES


@contextmanager
def cluster_as_one(args: argparse.Namespace) -> Iterator[AsOne]:
    """The store that the masters are together. Raises RedisError, ValueError, LookError."""
    address = Address(args.url)
    slots = _slots(address)

    def server_of(key: bytes) -> ServerUrl:
        shard = slots.shard(slot_of(key))
        if shard is None:
            raise LookError(f"no node of the cluster has slot {slot_of(key)}")
        return ServerUrl(address.url(shard.primary))

    def home(key: bytes) -> str:
        """Of a manifest, or of the blocks of a request."""
        return shown(server_of(key if key.startswith(PREFIX) else block_key((key, 0))).url)

    with ExitStack() as stack:
        masters = {ServerUrl(address.url(node)): node for node in slots.primaries()}
        stores = {server: stack.enter_context(_client(address, node)) for server, node in masters.items()}
        as_one = AsOne(stores, server_of)

        def changed() -> bool:
            """Whether slots are served by other masters now, as one says that still answers."""
            told = as_one.of_each(b"CLUSTER", b"SLOTS").items()
            server, answer = next((server, answer) for server, answer in told if not isinstance(answer, Gone))
            return _primaries(SlotMap(ranges_of(answer, masters[server]))) != _primaries(slots)

        args.home, args.unreachable, args.changed = home, lambda: as_one.unreachable, changed
        yield as_one


def _primaries(slots: SlotMap) -> list[Node | None]:
    return [shard.primary if shard else None for shard in map(slots.shard, range(SLOTS))]


def _client(address: Address, node: Node) -> redis.Redis:
    tls = {name: value for name, value in address.options.items() if name.startswith("ssl_")}
    timeouts = {"socket_connect_timeout": 5, "socket_timeout": 10}
    return plain_client(address.url(node), protocol=3, max_connections=2, **timeouts, **tls)


def _slots(address: Address) -> SlotMap:
    """The first node of the URL that answers knows them all."""
    failure: redis.RedisError | None = None
    for seed in address.seeds:
        try:
            with _client(address, seed) as store:
                slots = store.execute_command(b"CLUSTER", b"SLOTS")
        except (redis.ConnectionError, redis.TimeoutError) as error:
            failure = error
            continue
        return SlotMap(ranges_of(slots, seed))
    raise failure or LookError("no node of the cluster is named")
