"""`kvpage top`: rates, memory by agent, and engine statistics, until interrupted."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import redis
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpage_server.address import shown, user_of
from kvpage_server.client.raw_commands import string
from kvpage_server.client.wire.connection import sensible
from kvpage_server.look.ls import remarks, tables_of
from kvpage_server.look.output import titled, watch
from kvpage_server.look.status import headline, is_gateway, of_limit, overview
from kvpage_server.observe.asking import QueriedStore, Reading, ask
from kvpage_server.observe.engines import ALL_CHANNELS, CHANNEL, TIERS, EngineFigures, Engines
from kvpage_server.observe.memory_by_agent import Holdings, Known, holdings_of_store
from kvpage_server.observe.observer import History, Moment, next_reading
from kvpage_server.observe.overview import STORES_NOTHING, Overview
from kvpage_server.system.terminal import out, readable, table_of
from kvpage_server.system.text import as_size, plural

# -- Engine statistics, which engines publish on channels of the store -------------------------------------------------

_DROP = "pool", "files", "shared", "memory", "store", "model"  # columns that a narrow terminal drops
_MESSAGES_PER_FRAME = 1000  # at most; the next frame reads the rest


class EngineSubscription:
    """A subscription to the statistics of all engines, or of the user's own engines if ACL forbids the others."""

    def __init__(self, store: redis.Redis, url: str) -> None:
        """Subscribe. Raises RedisError if the store does not answer."""
        self._engines = Engines()
        self._channel = store.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._listens = self._subscribe(ALL_CHANNELS) or self._subscribe(b"%b:%b" % (CHANNEL, user_of(url).encode()))

    def _subscribe(self, channel: bytes) -> bool:
        """Subscribe to a channel, or to the pattern of all channels. Return whether the ACL permits it."""
        try:
            (self._channel.psubscribe if channel == ALL_CHANNELS else self._channel.subscribe)(channel)
            with sensible("confirmation of a subscription"):
                self._channel.get_message(timeout=1.0)  # or the refusal
        except redis.ResponseError:
            self._channel.reset()
            return False
        return True

    def connected(self) -> list[EngineFigures]:
        """Return the connected engines that have published since the subscription, sorted by name. Raises
        RedisError.
        """
        if self._listens:
            for _ in range(_MESSAGES_PER_FRAME):
                with sensible("message to subscribers"):
                    message = self._channel.get_message(timeout=0)
                if message is None:
                    break
                self._engines.receive(bytes(string(message["channel"])), bytes(string(message["data"])))
        return self._engines.seen().connected


def engines_table(engines: Sequence[EngineFigures]) -> Table:
    """Return a table with each engine's prompt tokens, the reused share, the reused tokens by source, and pool
    bytes.
    """
    places = "memory", "shared", "store", "files"
    table = table_of("engine", "model", "prompts", "reused", *places, "pool", numbers_from=2, drop=_DROP)
    for engine in engines:
        tokens = engine.tokens
        every, found = sum(tokens.values()), engine.reused
        room = f" of {as_size(engine.room)}" if engine.room else ""
        table.add_row(
            readable(engine.name),
            readable(engine.model),
            f"{every:,}",
            f"{found / every:.1%}" if every else "",
            *(f"{tokens[tier]:,}" for tier in TIERS),
            as_size(engine.used) + room,
        )
    return table


_OTHER_LINES = 22  # lines of the screen outside the tables of engines, agents, shared prefixes and requests
_ROWS = 10  # of each table, without a terminal
_SHORTEST_CHART = 8  # characters; a narrower terminal shows no charts
_LEVELS = " ▁▂▃▄▅▆▇█"


def top(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Print the rates of a store, its engines and the memory by agent every `args.watch` seconds, until interrupted.

    Raises RedisError, and LookError if the server is not a kvpage-server.
    """
    view = _View(store, args.url)
    return watch(args, view.frame, view.as_json, screen=True)


class _View:
    """The screen of `kvpage top` for one store, with the history of its rates."""

    def __init__(self, store: redis.Redis, url: str) -> None:
        self._store = store
        self._url = url
        self._history = History()
        self._engines = EngineSubscription(store, url)
        known = Known()
        self._memory_by_agent = MemoryByAgent(store, lambda: holdings_of_store(known=known))

    def frame(self) -> RenderableType:
        """Return the current screen."""
        now = overview(self._store, self._url)
        self._history.add(now)
        gateway = is_gateway(now)
        holdings, engines = Holdings() if gateway else self._memory_by_agent.now(), self._engines.connected()
        return Group(
            headline(self._url, now),
            *_figures(now, [*self._history.moments]),
            *tables(engines, holdings, room_for_rows()),
            *map(Text, [STORES_NOTHING] if gateway else remarks(holdings)),
        )

    def as_json(self) -> dict[str, object]:
        now = overview(self._store, self._url)
        moment = self._history.add(now)
        rates = None if moment is None else {name: getattr(moment, name) for name in _RATES}
        return {
            "url": shown(self._url),
            "at": now.at,
            "used_bytes": now.memory.used if now.everything else None,
            "clients": now.connections.now if now.everything else None,
            "per_second": rates,
            "engines": [asdict(engine) for engine in self._engines.connected()],
        }


class MemoryByAgent:
    """A cached reading of the memory by agent, which is read again at `next_reading`."""

    def __init__(self, store: QueriedStore, look: Callable[[], Reading[Holdings]]) -> None:
        self._store, self._look = store, look
        self._holdings = Holdings()
        self._until = 0.0  # time of the next reading, in monotonic seconds

    def now(self) -> Holdings:
        """Return the memory by agent; read it from the store if the cached reading is too old."""
        began, used = time.monotonic(), time.thread_time()
        if began >= self._until:
            self._holdings = ask(self._store, self._look())
            self._until = next_reading(began, time.thread_time() - used)
        return self._holdings


_RATES = ("commands", "bytes_in", "bytes_out", "hits", "misses", "evicted", "expired", "page_misses")


def room_for_rows(more_lines: int = 0) -> int:
    """Return the number of rows for each of two tables, so that they fit below the statistics and `more_lines`
    lines.
    """
    return max((out.height - _OTHER_LINES - more_lines) // 2, 3) if out.is_terminal else _ROWS


def tables(engines: list[EngineFigures], holdings: Holdings, rows: int) -> Iterator[RenderableType]:
    """Yield the tables of engines and of memory by agent, each after an empty line and with at most `rows` rows."""
    if engines:
        yield from (Text(), engines_table(engines[:rows]))
    for table in tables_of(holdings, rows):
        yield from (Text(), table)


def _figures(now: Overview, moments: list[Moment]) -> Iterator[RenderableType]:
    """Yield the table of current values with a chart of each, and the latencies by family of commands."""
    rows = [*_rows(now, moments)]
    room = out.width - max(len(name) + len(label) for name, label, _ in rows) - 4 if rows and out.is_terminal else 60
    if room < _SHORTEST_CHART:
        yield titled((name, label) for name, label, _ in rows)
    else:
        yield titled((name, label, Text(_chart(values, room), "dim")) for name, label, values in rows)
    if moments and moments[-1].p99:
        families = table_of("commands", "p99", "calls", numbers_from=1)
        for name, seconds in sorted(moments[-1].p99.items()):
            calls = now.families[name]
            families.add_row(name, f"{1000 * seconds:,.3g} ms", f"{calls.count:,}")
        yield Text()
        yield families


def _rows(now: Overview, moments: list[Moment]) -> Iterator[tuple[str, str, list[float]]]:
    """Yield for each line its title, its current value as text, and the values of its chart, oldest first."""
    if now.everything and not is_gateway(now):
        used = f"{as_size(now.memory.used)}{of_limit(now.memory.used, now.memory.limit)}"
        yield "memory", used, [moment.used for moment in moments]
    if now.disk is not None:
        yield "disk", as_size(now.disk.bytes), [moment.waiting for moment in moments]
    if moments and now.everything:
        last = moments[-1]
        ratio = "" if last.hit_ratio is None else f"{last.hit_ratio:.1%}, "
        missed = ", ".join(f"{count:,.0f} {reason}" for reason, count in last.page_misses.items() if count >= 1)
        yield "commands", f"{last.commands:,.0f}/s", [moment.commands for moment in moments]
        yield "received", f"{as_size(int(last.bytes_in))}/s", [moment.bytes_in for moment in moments]
        yield "sent", f"{as_size(int(last.bytes_out))}/s", [moment.bytes_out for moment in moments]
        reads = f"{ratio}{last.hits + last.misses:,.0f} reads/s"
        yield "hit ratio", reads, [moment.hit_ratio or 0 for moment in moments]
        yield "misses", missed or "none", [sum(moment.page_misses.values()) for moment in moments]
        yield "evictions", plural(round(last.evicted), "key") + "/s", [moment.evicted for moment in moments]


def _chart(values: list[float], room: int) -> str:
    """Return a bar chart of the last 60 values, or the last `room` if that is less, with a character for each value."""
    some = values[-min(room, 60) :]
    most = max(some, default=0)
    return "".join(_LEVELS[round(8 * value / most)] if most else " " for value in some)
