"""A cluster: `kvpage status` of each master's share and of all of them together, and the masters looked into as one.

The masters are kvpage-servers with a map of slots, or those of a Valkey or Redis Cluster, whose INFO knows of memory,
keys and reads, and nothing of pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import redis
from rich.console import Group, RenderableType
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.client.cluster.block_value import block_key
from kvpage_server.client.cluster.side_by_side import ServerUrl
from kvpage_server.client.cluster.topology import SCHEMES, Address, Node, SlotMap, ranges_of, slot_of
from kvpage_server.client.wire.connection import plain_client
from kvpage_server.look.output import LookError, watch
from kvpage_server.look.several import AsOne
from kvpage_server.look.strings import AsStrings
from kvpage_server.observe.asking import text
from kvpage_server.observe.manifests import PREFIX
from kvpage_server.system.plurals import as_size, how_many
from kvpage_server.system.terminal import table_of

_OURS = "kvpage-server"
_COUNTS = {
    "used_bytes": "used_memory",
    "limit_bytes": "maxmemory",
    "hits": "keyspace_hits",
    "misses": "keyspace_misses",
    "evicted_keys": "evicted_keys",
    "clients": "connected_clients",
    "commands": "total_commands_processed",
}


def is_cluster(url: str) -> bool:
    """Whether a URL names a cluster by some of its nodes."""
    return urlsplit(url).scheme in SCHEMES


def status_of_cluster(args: argparse.Namespace) -> bool:
    """Show it once, or every `args.watch` seconds; whether all answered. Raises RedisError, ValueError."""
    shares: list[dict[str, Any]] = []
    with ExitStack() as stack:
        address = Address(args.url)
        masters = _slots(address).primaries()
        nodes = {shown(address.url(node)): stack.enter_context(_client(address, node)) for node in masters}

        def ask() -> None:
            shares[:] = [_share(url, store) for url, store in nodes.items()]

        def frame() -> RenderableType:
            ask()
            return _table(shares, _total(shares))

        def as_json() -> dict[str, Any]:
            ask()
            return {"url": shown(args.url), "nodes": shares, "total": _total(shares)}

        watch(args, frame, as_json)
    return not any("error" in share for share in shares)


@contextmanager
def cluster_as_one(args: argparse.Namespace) -> Iterator[AsOne | AsStrings]:
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
        args.home, args.unreachable = home, lambda: as_one.unreachable
        shares = [_share(server.url, store) for server, store in stores.items()]
        knows_pages = any(share.get("server", "").startswith(_OURS) for share in shares)
        yield as_one if knows_pages else AsStrings(as_one)


def _client(address: Address, node: Node) -> redis.Redis:
    tls = {name: value for name, value in address.options.items() if name.startswith("ssl_")}
    timeouts = {"socket_connect_timeout": 5, "socket_timeout": 10}
    return plain_client(address.url(node), protocol=3, max_connections=1, **timeouts, **tls)


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


def _share(url: str, store: redis.Redis) -> dict[str, Any]:
    """What a node has; its `error` alone if it does not answer."""
    try:
        answer = store.execute_command(b"INFO", b"EVERYTHING")  # type: ignore[no-untyped-call]
    except redis.AuthenticationError:
        raise
    except (redis.ConnectionError, redis.TimeoutError) as error:
        return {"url": url, "error": str(error)}
    info = dict(line.split(":", 1) for line in text(answer).split("\r\n") if ":" in line)
    keys = dict(part.split("=", 1) for part in info.get("db0", "keys=0").split(","))
    return {"url": url, "server": _name(info), "keys": int(keys["keys"])} | {
        name: int(info.get(field) or 0) for name, field in _COUNTS.items()
    }


def _name(info: Mapping[str, str]) -> str:
    if "kvpage_version" in info:
        return f"{_OURS} {info['kvpage_version']}"
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', '')}".strip()


def _total(shares: list[dict[str, Any]]) -> dict[str, int]:
    there = [share for share in shares if "error" not in share]
    return {name: sum(share[name] for share in there) for name in ("keys", *_COUNTS)}


def _table(shares: list[dict[str, Any]], total: dict[str, int]) -> RenderableType:
    table = table_of("node", "server", "keys", "memory", "limit", "hits", "reads", "evicted", "clients", numbers_from=2)
    for share in shares:
        if "error" in share:
            table.add_row(share["url"], Text("does not answer", "red"))
        else:
            table.add_row(share["url"], share["server"], *_cells(share))
    table.add_row(how_many(len(shares), "node"), "", *_cells(total), style="bold")
    plain = any("error" not in share and not share["server"].startswith(_OURS) for share in shares)
    remark = "Valkey and Redis tell nothing of pages, blocks or why something was missed" if plain else ""
    return Group(table, *([Text(remark)] if remark else []))


def _cells(share: Mapping[str, Any]) -> list[str]:
    reads = share["hits"] + share["misses"]
    return [
        f"{share['keys']:,}",
        as_size(share["used_bytes"]),
        as_size(share["limit_bytes"]) if share["limit_bytes"] else "none",
        f"{share['hits'] / reads:.1%}" if reads else "",
        f"{reads:,}",
        f"{share['evicted_keys']:,}",
        f"{share['clients']:,}",
    ]
