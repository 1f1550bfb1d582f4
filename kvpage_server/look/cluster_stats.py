"""Statistics of several servers, for `kvpage status` and `kvpage top`: the primaries of a cluster, or
kvpage-servers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import redis
from rich.console import Group, RenderableType
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.look.ls import remarks
from kvpage_server.look.multi_store import NO_ANSWER, MultiStore, SlotsMoved, Unavailable
from kvpage_server.look.output import LookError, watch
from kvpage_server.look.top import EngineSubscription, MemoryByAgent, room_for_rows, tables
from kvpage_server.observe.asking import QueriedStore, text
from kvpage_server.observe.engines import EngineFigures
from kvpage_server.observe.memory_by_agent import Holdings, holdings_of_store
from kvpage_server.system.terminal import readable, table_of
from kvpage_server.system.text import as_size, plural

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
    """Return the statistics of each server.

    Raises RedisError as `_shares_of`, and SlotsMoved if a server does not answer and another has taken its slots.
    """
    shares = _shares_of(several)
    if any("error" in share for share in shares) and args.changed():
        raise SlotsMoved
    return shares


def _share(url: str, answer: Any) -> Share:
    """Return the statistics of a server from its reply to INFO. Raises ResponseError if `answer` is one."""
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
    """Return the name and version of the server software."""
    if "kvpage_version" in info:
        return f"kvpage-server {info['kvpage_version']}"
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', '')}".strip()


def _reporting(shares: list[Share]) -> list[Share]:
    """Return the statistics of servers that answer and permit this user to read them."""
    return [share for share in shares if share.get("commands") is not None]


def _no_statistics(share: Share) -> Text:
    """Return the cell for a server without statistics: it does not answer, or hides them from a restricted user."""
    return Text("does not answer", "red") if "error" in share else Text("needs access to every key", "dim")


def _totals(shares: list[Share]) -> dict[str, int]:
    """Return the sum of each count over the servers that report it."""
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
        return {"url": shown(args.url), "nodes": shares, "total": _totals(shares)}

    watch(args, frame, as_json)
    return not any("error" in share for share in shares)


def _status_table(shares: list[Share]) -> RenderableType:
    columns = "node", "server", "keys", "memory", "limit", "hit ratio", "reads", "evicted", "clients"
    table = table_of(*columns, numbers_from=2, drop=("clients", "server", "limit", "evicted", "reads"))
    for share in shares:
        cells = [share["server"], *_status_cells(share)] if share in _reporting(shares) else [_no_statistics(share)]
        table.add_row(readable(share["url"]), *cells)
    table.add_row(plural(len(shares), "node"), "", *_status_cells(_totals(shares)), style="bold")
    return Group(table, Text("Valkey and Redis report no pages, blocks or reasons of misses"))


def _status_cells(share: Mapping[str, Any]) -> list[str]:
    return [
        f"{share['keys']:,}",
        as_size(share["used_bytes"]),
        as_size(share["limit_bytes"]) if share["limit_bytes"] else "none",
        _hit_ratio(share),
        f"{share['hits'] + share['misses']:,}",
        f"{share['evicted_keys']:,}",
        f"{share['clients']:,}",
    ]


def _hit_ratio(counts: Mapping[str, float]) -> str:
    """Return hits as a percentage of reads; empty if there were no reads."""
    reads = counts["hits"] + counts["misses"]
    return f"{counts['hits'] / reads:.1%}" if reads else ""


# -- top ---------------------------------------------------------------------------------------------------------------


def top_of_several(several: MultiStore, store: QueriedStore, args: argparse.Namespace) -> bool:
    """Show the rates of each server and the memory by agent, read from `store`, every `args.watch` seconds.

    Return True. Raises SlotsMoved after a change of the cluster, RedisError if no server answers.
    """
    view = _ScreenOfServers(several, store, args)
    return watch(args, view.frame, view.as_json, screen=True)


class _ScreenOfServers:
    """The screen of `kvpage top` for several servers."""

    def __init__(self, several: MultiStore, store: QueriedStore, args: argparse.Namespace) -> None:
        self._several, self._args = several, args
        self._memory_by_agent = MemoryByAgent(store, holdings_of_store)
        self._engines = [*_subscriptions(several, args.url)]
        self._before: tuple[float, list[Share]] = 0.0, []  # monotonic time and statistics of the last frame

    def frame(self) -> RenderableType:
        """Return the current screen."""
        shares, holdings, engines = self._shares(), self._holdings(), self._connected_engines()
        return Group(
            Text(f"{plural(len(shares), 'server')} at {shown(self._args.url)}\n", "bold"),
            _top_table(shares),
            *tables(engines, holdings, room_for_rows(len(shares))),
            *map(Text, remarks(holdings)),
        )

    def as_json(self) -> dict[str, Any]:
        shares = self._shares()
        engines = [asdict(engine) for engine in self._connected_engines()]
        total = _totals(shares) | {"per_second": _total_rates(shares)}
        return {"url": shown(self._args.url), "at": time.time(), "nodes": shares, "total": total, "engines": engines}

    def _shares(self) -> list[Share]:
        """Return each server's statistics, and in `per_second` its rates since the last frame.

        `per_second` is None in the first frame, and in the first frame after a restart of the server.
        """
        shares, now = _shares_now(self._several, self._args), time.monotonic()
        (at, before), self._before = self._before, (now, shares)
        was = {share["url"]: share for share in _reporting(before)}
        for share in _reporting(shares):
            share["per_second"] = _rates(was.get(share["url"]), share, now - at)
        return shares

    def _holdings(self) -> Holdings:
        """Return the memory by agent. Raises SlotsMoved instead of LookError if the cluster has changed."""
        try:
            return self._memory_by_agent.now()
        except LookError:
            if self._args.changed():
                raise SlotsMoved from None
            raise

    def _connected_engines(self) -> list[EngineFigures]:
        """Return the engines that published to at least one server, sorted by name. An engine publishes to all servers,
        so the same engine is listed once.
        """
        found: dict[str, EngineFigures] = {}
        for subscription in self._engines:
            with suppress(*NO_ANSWER):
                found |= {engine.name: engine for engine in subscription.connected()}
        return sorted(found.values(), key=lambda engine: engine.name)


def _subscriptions(several: MultiStore, url: str) -> Iterator[EngineSubscription]:
    """Yield a subscription to the engines' statistics on each server that answers."""
    for store in several.stores.values():
        with suppress(*NO_ANSWER):
            yield EngineSubscription(store, url)


def _rates(was: Share | None, share: Share, seconds: float) -> dict[str, float] | None:
    """Return counts per second between two readings of a server; None without an earlier one, or after a restart."""
    if was is None or share["commands"] < was["commands"]:
        return None
    return {name: max(share[name] - was[name], 0) / seconds for name in _RATES}


def _total_rates(shares: list[Share]) -> dict[str, float] | None:
    """Return the sum of each rate over the servers that have rates; None if no server has."""
    known = [share["per_second"] for share in _reporting(shares) if share["per_second"]]
    return {name: sum(rates[name] for rates in known) for name in _RATES} if known else None


def _top_table(shares: list[Share]) -> RenderableType:
    a_second = "commands/s", "received/s", "sent/s", "reads/s", "hit ratio", "evicted/s"
    drop = "clients", "limit", "evicted/s", "received/s", "sent/s"
    table = table_of("server", "memory", "limit", "clients", *a_second, numbers_from=1, drop=drop)
    for share in shares:
        cells = _top_cells(share, share["per_second"]) if share in _reporting(shares) else [_no_statistics(share)]
        table.add_row(readable(share["url"]), *cells)
    if _reporting(shares):
        table.add_row("total", *_top_cells(_totals(shares), _total_rates(shares)), style="bold")
    return table


def _top_cells(share: Mapping[str, Any], rates: Mapping[str, float] | None) -> list[str]:
    limit = as_size(share["limit_bytes"]) if share["limit_bytes"] else "none"
    cells = [as_size(share["used_bytes"]), limit, f"{share['clients']:,}"]
    if rates is None:
        return cells
    moved = [as_size(int(rates[name])) for name in ("bytes_in", "bytes_out")]
    reads = f"{rates['hits'] + rates['misses']:,.0f}"
    return [*cells, f"{rates['commands']:,.0f}", *moved, reads, _hit_ratio(rates), f"{rates['evicted_keys']:,.0f}"]
