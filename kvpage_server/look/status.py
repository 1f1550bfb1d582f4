"""`kvpage status`: how a store is doing, once or again and again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import redis
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.look.output import LookError
from kvpage_server.observe.asking import ask
from kvpage_server.observe.overview import DiskFigures, NotAStore, Overview, overview_of_store
from kvpage_server.system.plurals import how_many
from kvpage_server.system.terminal import Terminal, for_people, out, print_json


def status(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Show it; every `args.watch` seconds, if that is not None, until interrupted."""
    if args.watch is None:
        show(store, args)
        return True
    if args.json or not out.is_terminal:
        while True:
            show(store, args)
            time.sleep(args.watch)
    with Live(console=Terminal(highlight=False), auto_refresh=False) as live:
        while True:
            live.update(Group(*_lines(store, args.url, overview(store, args.url))), refresh=True)
            time.sleep(args.watch)


def show(store: redis.Redis, args: argparse.Namespace) -> None:
    now = overview(store, args.url)
    if args.json:
        print_json(asdict(now))
    else:
        for line in _lines(store, args.url, now):
            out.print(line)


def overview(store: redis.Redis, url: str) -> Overview:
    """The store in numbers. Raises LookError for another Redis."""
    try:
        return ask(store, overview_of_store())
    except NotAStore as other:
        raise LookError(f"{shown(url)} is {other}, not a kvpage-server") from None


def _lines(store: redis.Redis, url: str, now: Overview) -> Iterator[RenderableType]:
    yield headline(url, now)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for title, line in _told(now) if now.everything else _told_to_a_tenant(store, now):
        table.add_row(title, line)
    yield table


def headline(url: str, now: Overview) -> Text:
    """The server's version, address and uptime."""
    uptime = for_people(timedelta(seconds=now.server.uptime))
    return Text.assemble((f"kvpage-server {now.server.version}", "bold"), f" at {shown(url)}, up {uptime}\n")


def _told_to_a_tenant(store: redis.Redis, now: Overview) -> Iterator[tuple[str, Any]]:
    """What a user who may not use every key is told: nothing that depends on others."""
    limit = now.memory.limit
    yield "memory", f"limit {decimal(limit)}, {now.memory.policy}" if limit else "no limit"
    requests = how_many(sum(1 for _ in store.scan_iter(count=1000, _type="set")), "request")
    yield "store", f"{requests}, {how_many(store.dbsize(), 'key')} that you may use"
    yield "", "a user who may use every key is shown the rest"


def _told(now: Overview) -> Iterator[tuple[str, Any]]:
    memory, contents, traffic = now.memory, now.contents, now.traffic
    if memory.limit and out.is_terminal:
        yield "", ProgressBar(total=memory.limit, completed=min(memory.used, memory.limit), width=40)
    yield "memory", f"{decimal(memory.used)}{of_limit(memory.used, memory.limit)}, {memory.policy}"
    parts = f"{decimal(memory.spare)} spare, {decimal(memory.fragmentation)} between values"
    yield "", f"the process has {decimal(memory.resident)}: {decimal(memory.live)} in values, {parts}"
    counts = how_many(contents.requests, "request"), how_many(contents.blocks, "block"), how_many(contents.keys, "key")
    yield "store", ", ".join(counts)
    yield "", f"{how_many(contents.expiring, 'key')} will expire, {traffic.expired:,} did; evicted: {traffic.evicted:,}"
    yield "protected", f"{how_many(contents.protected, 'block')}, {decimal(contents.protected_bytes)}"
    ratio, reads = traffic.hit_ratio, traffic.hits + traffic.misses
    yield "reads", "none yet" if ratio is None else f"{ratio:.1%} hits ({traffic.hits:,} of {reads:,})"
    yield "misses", ", ".join(f"{count:,} {reason}" for reason, count in now.misses.items() if count) or "none"
    if now.disk is not None:
        yield from _told_of_disk(now.disk)
    clients = f"{now.connections.now:,} connected"
    yield "clients", f"{clients}, {how_many(traffic.commands, 'command')} so far"
    yield "network", f"{decimal(traffic.bytes_in)} received, {decimal(traffic.bytes_out)} sent"


def _told_of_disk(disk: DiskFigures) -> Iterator[tuple[str, Any]]:
    yield "disk", f"{how_many(disk.values, 'value')}, {decimal(disk.bytes)}{of_limit(disk.bytes, disk.limit)}"
    waiting = f"{decimal(disk.waiting_bytes)} wait to be written" if disk.waiting_bytes else "nothing waits"
    commits = f", commits take {_milliseconds(disk.commits.percentile(0.99))} at the most" if disk.commits.count else ""
    yield "", f"{waiting}; {how_many(disk.fetched, 'value')} fetched, {disk.dropped:,} dropped from memory{commits}"
    if disk.failing:
        yield "", Text(f"writes fail: {disk.failing}; a crash would cost {how_many(disk.unsaved, 'change')}", "red")
    if damaged := disk.corrupt + disk.repaired + disk.quarantined:
        yield "", Text(f"{how_many(damaged, 'value')} found damaged: the disk may be failing", "red")


def of_limit(used: int, limit: int) -> str:
    return f" of {decimal(limit)} ({used / limit:.0%})" if limit else ", no limit"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
