"""`kvpage status`: memory, contents, hit ratio, disk and clients of a store, shown once or repeatedly."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import redis
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.look.output import LookError, titled, watch
from kvpage_server.observe.asking import ask
from kvpage_server.observe.overview import (
    STORES_NOTHING,
    DiskFigures,
    MemoryFigures,
    NotAStore,
    Overview,
    QuotaFigures,
    overview_of_store,
)
from kvpage_server.system.terminal import for_people, out, readable
from kvpage_server.system.text import as_size, plural

_MAX_TENANTS = 5  # with the largest contexts that have a lifetime
_MAX_QUOTAS = 5  # with the largest used share


def status(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Print the state of a store once, or every `args.watch` seconds. Return True.

    A user without access to every key gets only the counts of their own keys. Raises RedisError, and LookError if the
    server is not a kvpage-server.
    """

    def frame() -> RenderableType:
        now = overview(store, args.url)
        lines = _all_lines(now) if now.everything else _tenant_lines(store, now)
        return Group(headline(args.url, now), titled(lines))

    return watch(args, frame, lambda: _as_json(store, args.url))


def _as_json(store: redis.Redis, url: str) -> dict[str, Any]:
    """Return the state for JSON. Values that the server hides from restricted users are None."""
    now = overview(store, url)
    found = {"url": shown(url)} | asdict(now)
    if not now.everything:
        found |= dict.fromkeys(found.keys() - {"url", "at", "everything", "server"})
        found["memory"] = {"limit": now.memory.limit, "policy": now.memory.policy}
        found["contents"] = {"requests": _requests_of(store), "keys": store.dbsize()}
    return found


def _requests_of(store: redis.Redis) -> int:
    """Return the number of requests whose keys the user may read, by a scan."""
    return sum(1 for _ in store.scan_iter(count=1000, _type="set"))


def overview(store: redis.Redis, url: str) -> Overview:
    """Return the statistics of a store. Raises LookError if the server is not a kvpage-server."""
    try:
        return ask(store, overview_of_store())
    except NotAStore as other:
        raise LookError(f"{shown(url)} is {other}, not a kvpage-server") from None


def is_gateway(now: Overview) -> bool:
    return now.server.store == "cluster"


def headline(url: str, now: Overview) -> Text:
    """Return the line with the server's version, address and uptime."""
    uptime = for_people(now.server.uptime)
    return Text.assemble((f"kvpage-server {now.server.version}", "bold"), f" at {shown(url)}, up {uptime}\n")


def _tenant_lines(store: redis.Redis, now: Overview) -> Iterator[tuple[str, Any]]:
    """Yield titles and lines for a user without access to every key: limits, and counts of the user's own keys."""
    limit = now.memory.limit
    yield "memory", f"limit {as_size(limit)}, {now.memory.policy}" if limit else "no limit"
    requests = plural(_requests_of(store), "request")
    yield "store", f"{requests}, {plural(store.dbsize(), 'key')} that this user may access"
    yield "", "other statistics need a user with access to every key"


def _all_lines(now: Overview) -> Iterator[tuple[str, Any]]:
    """Yield titles and lines for a user with access to every key. A line without a title continues the one above."""
    traffic = now.traffic
    if is_gateway(now):
        yield "memory", f"RSS {as_size(now.memory.resident)}"
        yield "store", STORES_NOTHING
    else:
        yield from _memory_lines(now.memory)
        yield from _store_lines(now)
    clients = f"{now.connections.now:,} connected"
    yield "clients", f"{clients}, {plural(traffic.commands, 'command')} processed"
    yield "network", f"{as_size(traffic.bytes_in)} received, {as_size(traffic.bytes_out)} sent"


def _memory_lines(memory: MemoryFigures) -> Iterator[tuple[str, Any]]:
    if memory.limit and out.is_terminal:
        yield (
            "",
            ProgressBar(total=memory.limit, completed=min(memory.used, memory.limit), width=min(40, out.width - 12)),
        )
    yield "memory", f"{as_size(memory.used)}{of_limit(memory.used, memory.limit)}, {memory.policy}"
    free = f"{as_size(memory.spare)} allocated and free, {as_size(memory.fragmentation)} fragmentation"
    yield "", f"RSS {as_size(memory.resident)}: {as_size(memory.live)} values, {free}"
    if memory.coded:
        yield "", saving_text(memory.coded_raw, memory.coded)


def _store_lines(now: Overview) -> Iterator[tuple[str, Any]]:
    contents, traffic = now.contents, now.traffic
    counts = (
        plural(contents.requests, "request"),
        plural(contents.blocks, "block"),
        plural(contents.keys, "key"),
    )
    yield "store", ", ".join(counts)
    yield (
        "",
        f"{plural(contents.expiring, 'key')} with a TTL; expired: {traffic.expired:,}; evicted: {traffic.evicted:,}",
    )
    yield (
        "protected",
        f"{plural(contents.protected, 'value')} leased, pinned or kept, {as_size(contents.protected_bytes)}",
    )
    if contents.kept:
        tenants = sorted(contents.kept_by_tenant.items(), key=lambda one: -one[1])[:_MAX_TENANTS]
        of_tenants = "; ".join(f"{as_size(size)} for {readable(name)}" for name, size in tenants if name)
        lifetimes = f"{plural(contents.kept, 'value')} with a lifetime, {as_size(contents.kept_bytes)}"
        yield "", f"{lifetimes}: {of_tenants}" if of_tenants else lifetimes
    yield from _quota_lines(now.quotas)
    ratio, reads = traffic.hit_ratio, traffic.hits + traffic.misses
    yield (
        "hit ratio",
        "no reads yet" if ratio is None else f"{ratio:.1%} ({traffic.hits:,} of {plural(reads, 'read')})",
    )
    yield "misses", ", ".join(f"{count:,} {reason}" for reason, count in now.misses.items() if count) or "none"
    if now.disk is not None:
        yield from _disk_lines(now, now.disk)


def _quota_lines(quotas: Sequence[QuotaFigures]) -> Iterator[tuple[str, Any]]:
    fullest = sorted(quotas, key=lambda quota: quota.bytes / quota.limit if quota.limit else -1, reverse=True)
    for number, quota in enumerate(fullest[:_MAX_QUOTAS]):
        evicted = f", {plural(quota.evicted, 'key')} evicted" if quota.evicted else ""
        used = f": {as_size(quota.bytes)}{of_limit(quota.bytes, quota.limit)}{evicted}"
        yield "" if number else "quotas", Text.assemble(readable(quota.pattern), used)
    if others := fullest[_MAX_QUOTAS:]:
        yield "", f"{plural(len(others), 'other')} with a smaller used share"


def _disk_lines(now: Overview, disk: DiskFigures) -> Iterator[tuple[str, Any]]:
    limit = f"; maxdisk is {as_size(disk.limit)}" if disk.limit else ""
    yield (
        "disk",
        f"{plural(disk.values, 'value')}, {as_size(disk.bytes)}{of_limit(disk.bytes, disk.for_values)}{limit}",
    )
    if disk.is_full:
        is_over = disk.bytes > disk.limit > 0
        state = f"more than maxdisk by {as_size(disk.bytes - disk.limit)}" if is_over else "maxdisk is reached"
        yield "", Text(f"{state}: {plural(disk.evicted, 'value')} evicted from disk", "red")
    if disk.coded_bytes:
        yield "", saving_text(disk.coded_raw_bytes, disk.coded_bytes)
    waiting = f"{as_size(disk.waiting_bytes)} in the write queue" if disk.waiting_bytes else "write queue empty"
    commits = f", commit p99 {_milliseconds(disk.commits.percentile(0.99))}" if disk.commits.count else ""
    yield (
        "",
        f"{waiting}; {plural(disk.fetched, 'value')} fetched, {disk.dropped:,} dropped from memory{commits}",
    )
    full = sum(one.keys for one in now.evictions if one.reason == "filesystem")
    if full:
        yield "", Text(f"the file system was full: {plural(full, 'key')} evicted for that since the start", "red")
    if disk.failing:
        yield (
            "",
            Text(f"writes fail: {disk.failing}; a crash would lose {plural(disk.unsaved, 'change')}", "red"),
        )
    # the counts begin at the server's start, and the quarantine may have records of earlier runs
    if damaged := max(disk.corrupt + disk.repaired, disk.quarantined):
        yield "", Text(f"{plural(damaged, 'value')} corrupt: the disk may be failing", "red")


def saving_text(raw: int, coded: int) -> str:
    """Return the text about the lossless codes of values: the bytes without and with the code."""
    return f"{as_size(raw)} coded in {as_size(coded)}: {raw / coded:.2f} to 1, {as_size(raw - coded)} saved"


def of_limit(used: int, limit: int) -> str:
    """Return a limit in bytes, and the used share of it, as text that follows the used bytes."""
    return f" of {as_size(limit)} ({used / limit:.0%})" if limit else ", no limit"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
