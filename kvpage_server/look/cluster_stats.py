"""`kvpage status` and `kvpage top` of a Valkey or Redis Cluster, or of several servers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import redis
from rich.console import Group, RenderableType
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.client.cluster.commands import block_key
from kvpage_server.client.cluster.side_by_side import ServerUrl
from kvpage_server.client.cluster.topology import SCHEMES, SLOTS, Address, Node, SlotMap, ranges_of, slot_of
from kvpage_server.client.wire.connection import plain_client
from kvpage_server.look.ls import remarks
from kvpage_server.look.multi_store import NO_ANSWER, MultiStore, SlotsMoved, Unavailable
from kvpage_server.look.output import LookError, leave_no_trace, watch
from kvpage_server.look.top import EngineSubscription, MemoryByAgent, room_for_rows, tables
from kvpage_server.observe.asking import QueriedStore, text
from kvpage_server.observe.engines import EngineFigures
from kvpage_server.observe.memory_by_agent import PREFIX, Holdings, holdings_of_store
from kvpage_server.system.terminal import table_of
from kvpage_server.system.text import as_size, how_many


def is_cluster(url: str) -> bool:
    """Return whether a URL lists nodes of a cluster."""
    return urlsplit(url).scheme in SCHEMES


@contextmanager
def cluster_as_one(args: argparse.Namespace) -> Iterator[MultiStore]:
    """Yield the primaries of a cluster as one store, and set `args.home`, `args.unreachable` and `args.changed`.

    Raises RedisError, ValueError, LookError.
    """
    address = Address(args.url)
    slots = _slots(address)

    def server_of(key: bytes) -> ServerUrl:
        shard = slots.shard(slot_of(key))
        if shard is None:
            raise LookError(f"no node of the cluster has slot {slot_of(key)}")
        return ServerUrl(address.url(shard.primary))

    def home(key: bytes) -> str:
        """Return the address of the server that stores a manifest, or the blocks of a request."""
        return shown(server_of(key if key.startswith(PREFIX) else block_key((key, 0))).url)

    with ExitStack() as stack:
        masters = {ServerUrl(address.url(node)): node for node in slots.primaries()}
        stores = {server: stack.enter_context(_client(address, node)) for server, node in masters.items()}
        as_one = MultiStore(stores, server_of)

        def changed() -> bool:
            """Return whether slots have other primaries now, according to the first primary that answers."""
            received = as_one.of_each(b"CLUSTER", b"SLOTS").items()
            answers = [(server, answer) for server, answer in received if not isinstance(answer, redis.ResponseError)]
            if not answers:
                return False
            server, answer = answers[0]
            return _primaries(SlotMap(ranges_of(answer, masters[server]))) != _primaries(slots)

        args.home, args.unreachable, args.changed = home, lambda: as_one.unreachable, changed
        yield as_one


def _primaries(slots: SlotMap) -> list[Node | None]:
    return [shard.primary if shard else None for shard in map(slots.shard, range(SLOTS))]


def _client(address: Address, node: Node) -> redis.Redis:
    tls = {name: value for name, value in address.options.items() if name.startswith("ssl_")}
    timeouts = {"socket_connect_timeout": 5, "socket_timeout": 10}
    connecting = {"redis_connect_func": leave_no_trace}
    return plain_client(address.url(node), protocol=3, max_connections=2, **connecting, **timeouts, **tls)


def _slots(address: Address) -> SlotMap:
    """Return the slot map of the first node in the URL that answers. Raises RedisError, LookError."""
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


# -- Statistics of several servers, and their sums ---------------------------------------------------------------------
#
# The servers are kvpage-servers, or primaries of a Valkey or Redis Cluster. INFO of such a primary reports memory, keys
# and reads, but no pages.

Share = dict[str, Any]  # the statistics of a server; only `url` and `error` if it does not answer
_COUNTS = {  # fields of INFO, by name in a share
    "used_bytes": "used_memory",
    "limit_bytes": "maxmemory",
    "hits": "keyspace_hits",
    "misses": "keyspace_misses",
    "evicted_keys": "evicted_keys",
    "clients": "connected_clients",
    "commands": "total_commands_processed",
    "bytes_in": "total_net_input_bytes",
    "bytes_out": "total_net_output_bytes",
}
_RATES = ("commands", "bytes_in", "bytes_out", "hits", "misses", "evicted_keys")  # counts that are shown per second


def _shares_of(several: MultiStore) -> list[Share]:
    """Return the statistics of each server. Raises RedisError if no server answers, or one refuses INFO."""
    return [_share(shown(server.url), answer) for server, answer in several.of_each(b"INFO", b"EVERYTHING").items()]


def _shares_now(several: MultiStore, args: argparse.Namespace) -> list[Share]:
    """Return the statistics of each server. Raises RedisError, and SlotsMoved if another server has replaced one."""
    shares = _shares_of(several)
    if any("error" in share for share in shares) and args.changed():
        raise SlotsMoved
    return shares


def _share(url: str, answer: Any) -> Share:
    if isinstance(answer, Unavailable):
        return {"url": url, "error": str(answer)}
    if isinstance(answer, redis.ResponseError):
        raise answer
    info = dict(line.split(":", 1) for line in text(answer).split("\r\n") if ":" in line)
    keys = dict(part.split("=", 1) for part in info.get("db0", "keys=0").split(","))
    return {"url": url, "server": _name(info), "keys": int(keys["keys"])} | {
        name: int(info[field]) if field in info else None for name, field in _COUNTS.items()
    }


def _name(info: Mapping[str, str]) -> str:
    if "kvpage_version" in info:
        return f"kvpage-server {info['kvpage_version']}"
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', '')}".strip()


def _reporting(shares: list[Share]) -> list[Share]:
    """Return the servers that answer and show their statistics to this user."""
    return [share for share in shares if share.get("commands") is not None]


def _silent(share: Share) -> Text:
    """Return the text for a server without statistics."""
    return Text("does not answer", "red") if "error" in share else Text("tells who may use every key", "dim")


def _total(shares: list[Share]) -> dict[str, int]:
    return {name: sum(share[name] for share in _reporting(shares)) for name in ("keys", *_COUNTS)}


# -- status ------------------------------------------------------------------------------------------------------------


def status_of_several(several: MultiStore, args: argparse.Namespace) -> bool:
    """Show the statistics of each server once, or every `args.watch` seconds. Return whether all servers answered."""
    shares: list[Share] = []

    def frame() -> RenderableType:
        shares[:] = _shares_now(several, args)
        return _status_table(shares)

    def as_json() -> dict[str, Any]:
        shares[:] = _shares_now(several, args)
        return {"url": shown(args.url), "nodes": shares, "total": _total(shares)}

    watch(args, frame, as_json)
    return not any("error" in share for share in shares)


def _status_table(shares: list[Share]) -> RenderableType:
    columns = "node", "server", "keys", "memory", "limit", "hits", "reads", "evicted", "clients"
    table = table_of(*columns, numbers_from=2, drop=("clients", "server", "limit", "evicted", "reads"))
    for share in shares:
        cells = [share["server"], *_status_cells(share)] if share in _reporting(shares) else [_silent(share)]
        table.add_row(share["url"], *cells)
    table.add_row(how_many(len(shares), "node"), "", *_status_cells(_total(shares)), style="bold")
    return Group(table, Text("Valkey and Redis tell nothing of pages, blocks or why something was missed"))


def _status_cells(share: Mapping[str, Any]) -> list[str]:
    return [
        f"{share['keys']:,}",
        as_size(share["used_bytes"]),
        as_size(share["limit_bytes"]) if share["limit_bytes"] else "none",
        _hits(share),
        f"{share['hits'] + share['misses']:,}",
        f"{share['evicted_keys']:,}",
        f"{share['clients']:,}",
    ]


def _hits(counts: Mapping[str, float]) -> str:
    reads = counts["hits"] + counts["misses"]
    return f"{counts['hits'] / reads:.1%}" if reads else ""


# -- top ---------------------------------------------------------------------------------------------------------------


def top_of_several(several: MultiStore, store: QueriedStore, args: argparse.Namespace) -> bool:
    """Show the rates of each server and the memory by agent, read from `store`, every `args.watch` seconds."""
    view = _ViewOfSeveral(several, store, args)
    return watch(args, view.frame, view.as_json, screen=True)


class _ViewOfSeveral:
    """The screen of `kvpage top` for several servers."""

    def __init__(self, several: MultiStore, store: QueriedStore, args: argparse.Namespace) -> None:
        self._several, self._args = several, args
        self._whose = MemoryByAgent(store, holdings_of_store)
        self._engines = [*_listening(several, args.url)]
        self._before: tuple[float, list[Share]] = 0.0, []  # monotonic time and statistics of the last frame

    def frame(self) -> RenderableType:
        """Return the current screen."""
        shares, holdings, engines = self._shares(), self._holdings(), self._connected()
        return Group(
            Text(f"{how_many(len(shares), 'server')} at {shown(self._args.url)}\n", "bold"),
            _top_table(shares),
            *tables(engines, holdings, room_for_rows(len(shares))),
            *map(Text, remarks(holdings)),
        )

    def as_json(self) -> dict[str, Any]:
        shares = self._shares()
        engines = [asdict(engine) for engine in self._connected()]
        total = _total(shares) | {"per_second": _total_rates(shares)}
        return {"url": shown(self._args.url), "at": time.time(), "nodes": shares, "total": total, "engines": engines}

    def _shares(self) -> list[Share]:
        """Return each server's statistics with `per_second`, which is None for the first frame and after a restart."""
        shares, now = _shares_now(self._several, self._args), time.monotonic()
        (at, before), self._before = self._before, (now, shares)
        was = {share["url"]: share for share in _reporting(before)}
        for share in _reporting(shares):
            share["per_second"] = _rates(was.get(share["url"]), share, now - at)
        return shares

    def _holdings(self) -> Holdings:
        try:
            return self._whose.now()
        except LookError:
            if self._args.changed():
                raise SlotsMoved from None
            raise

    def _connected(self) -> list[EngineFigures]:
        """Return the engines that at least one server reports, by name; an engine publishes to all servers."""
        found: dict[str, EngineFigures] = {}
        for heard in self._engines:
            with suppress(*NO_ANSWER):
                found |= {engine.name: engine for engine in heard.connected()}
        return sorted(found.values(), key=lambda engine: engine.name)


def _listening(several: MultiStore, url: str) -> Iterator[EngineSubscription]:
    for store in several.stores.values():
        with suppress(*NO_ANSWER):
            yield EngineSubscription(store, url)


def _rates(was: Share | None, share: Share, seconds: float) -> dict[str, float] | None:
    if was is None or share["commands"] < was["commands"]:
        return None
    return {name: max(share[name] - was[name], 0) / seconds for name in _RATES}


def _total_rates(shares: list[Share]) -> dict[str, float] | None:
    known = [share["per_second"] for share in _reporting(shares) if share["per_second"]]
    return {name: sum(rates[name] for rates in known) for name in _RATES} if known else None


def _top_table(shares: list[Share]) -> RenderableType:
    a_second = "commands/s", "received/s", "sent/s", "reads/s", "hits", "evicted/s"
    drop = "clients", "limit", "evicted/s", "received/s", "sent/s"
    table = table_of("server", "memory", "limit", "clients", *a_second, numbers_from=1, drop=drop)
    for share in shares:
        cells = _top_cells(share, share["per_second"]) if share in _reporting(shares) else [_silent(share)]
        table.add_row(share["url"], *cells)
    if _reporting(shares):
        table.add_row("together", *_top_cells(_total(shares), _total_rates(shares)), style="bold")
    return table


def _top_cells(share: Mapping[str, Any], rates: Mapping[str, float] | None) -> list[str]:
    limit = as_size(share["limit_bytes"]) if share["limit_bytes"] else "none"
    cells = [as_size(share["used_bytes"]), limit, f"{share['clients']:,}"]
    if rates is None:
        return cells
    moved = [as_size(int(rates[name])) for name in ("bytes_in", "bytes_out")]
    reads = f"{rates['hits'] + rates['misses']:,.0f}"
    return [*cells, f"{rates['commands']:,.0f}", *moved, reads, _hits(rates), f"{rates['evicted_keys']:,.0f}"]
