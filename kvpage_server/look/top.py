"""`kvpage top`: the store as it works, in a terminal, until interrupted."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import redis
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpage_server.look.ls import remarks, tables_of
from kvpage_server.look.output import leave_no_trace
from kvpage_server.look.status import headline, of_limit, overview
from kvpage_server.observe.asking import ask
from kvpage_server.observe.history import History, Moment
from kvpage_server.observe.observer import HOLDINGS_SECONDS, HOLDINGS_SHARE
from kvpage_server.observe.overview import Overview
from kvpage_server.observe.whose import Holdings, Known, holdings_of_store
from kvpage_server.system.plurals import how_many
from kvpage_server.system.terminal import Terminal, out, print_json, table_of

_OTHER_LINES = 22  # of the terminal, beside agents, what they share and requests
_LEVELS = " ▁▂▃▄▅▆▇█"


def top(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Every `args.watch` seconds; with --json, or where there is no terminal, as many frames one below the other."""
    leave_no_trace(store)
    view = _View(store, args.url)
    if args.json:
        while True:
            print_json(view.as_json())
            time.sleep(args.watch)
    if not out.is_terminal:
        while True:
            out.print(view.frame(10))
            time.sleep(args.watch)
    with Live(console=Terminal(highlight=False), auto_refresh=False, screen=True) as live:
        while True:
            rows = max((out.height - _OTHER_LINES) // 2, 3)
            live.update(view.frame(rows), refresh=True)
            time.sleep(args.watch)


class _View:
    """The store's last minutes, as shown on the screen."""

    def __init__(self, store: redis.Redis, url: str) -> None:
        self._store = store
        self._url = url
        self._history = History()
        self._known: Known = {}
        self._holdings = Holdings()
        self._until = 0.0  # monotonic seconds: so long the holdings are good enough

    def frame(self, rows: int) -> RenderableType:
        """What there is to be seen now, with so many rows of each table."""
        now = overview(self._store, self._url)
        self._history.add(now)
        holdings = self._whose()
        return Group(
            headline(self._url, now),
            *_figures(now, [*self._history.moments]),
            *(part for table in tables_of(holdings, rows) for part in (Text(), table)),
            *map(Text, remarks(holdings)),
        )

    def as_json(self) -> dict[str, object]:
        now = overview(self._store, self._url)
        moment = self._history.add(now)
        rates = None if moment is None else {name: getattr(moment, name) for name in _RATES}
        return {"at": now.at, "used_bytes": now.memory.used, "clients": now.connections.now, "per_second": rates}

    def _whose(self) -> Holdings:
        began = time.monotonic()
        if began >= self._until:
            self._holdings = ask(self._store, holdings_of_store(known=self._known))
            took = time.monotonic() - began
            self._until = began + max(HOLDINGS_SECONDS, took / HOLDINGS_SHARE)
        return self._holdings


_RATES = ("commands", "bytes_in", "bytes_out", "hits", "misses", "evicted", "expired", "page_misses")


def _figures(now: Overview, moments: list[Moment]) -> Iterator[RenderableType]:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    if now.everything:
        used = f"{decimal(now.memory.used)}{of_limit(now.memory.used, now.memory.limit)}"
        table.add_row("memory", used, _line([moment.used for moment in moments]))
    if now.disk is not None:
        table.add_row("disk", decimal(now.disk.bytes), _line([moment.waiting for moment in moments]))
    if moments:
        last = moments[-1]
        ratio = "" if last.hit_ratio is None else f"{last.hit_ratio:.1%} hits, "
        missed = ", ".join(f"{count:,.0f} {reason}" for reason, count in last.page_misses.items() if count >= 1)
        for name, said, values in (
            ("commands", f"{last.commands:,.0f} a second", [moment.commands for moment in moments]),
            ("received", f"{decimal(int(last.bytes_in))} a second", [moment.bytes_in for moment in moments]),
            ("sent", f"{decimal(int(last.bytes_out))} a second", [moment.bytes_out for moment in moments]),
            ("reads", f"{ratio}{last.hits + last.misses:,.0f} a second", [moment.hit_ratio or 0 for moment in moments]),
            ("misses", missed or "none", [sum(moment.page_misses.values()) for moment in moments]),
            ("evicted", how_many(round(last.evicted), "key") + " a second", [moment.evicted for moment in moments]),
        ):
            table.add_row(name, said, _line(values))
    yield table
    if moments and moments[-1].p99:
        families = table_of("commands", "99 of 100 within", "so far", numbers_from=1)
        for name, seconds in sorted(moments[-1].p99.items()):
            calls = now.families[name]
            families.add_row(name, f"{1000 * seconds:,.3g} ms", f"{calls.count:,}")
        yield Text()
        yield families


def _line(values: list[float] | list[int]) -> str:
    """The last minute as a row of blocks."""
    some = values[-60:]
    most = max(some, default=0)
    return "".join(_LEVELS[round(8 * value / most)] if most else " " for value in some)
