"""The counters of loads and saves, and the statistics that an engine publishes on its page server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from kvpage_server.client import Refused
from kvpage_server.client.raw_commands import RawCommand, integer

from ..pool import UNLIMITED, BlockPool
from .cold import SafetensorsCacheAdapter
from .pages import PageTier
from .server.connection import SHORTEST, ServerConnection, State
from .server.manifest import WRITER
from .server.restore_planner import Rates

Tier = Literal["hot", "prefix", "page", "cold", "none"]  # the tier that a context was loaded from


@dataclass(slots=True)
class Traffic:
    """Loads from a tier, and saves to it."""

    hits: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0  # of the hits
    saves: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0  # of the saves


@dataclass(frozen=True, slots=True)
class PageServer:
    """State of the page server, and the rates for the choice between fetching and computing."""

    misses: Mapping[str, int]  # by reason; loads that found only a part count, too
    unsaved: Mapping[str, int]  # writes that failed, by reason
    unasked: Mapping[str, int]  # other failed requests, by reason
    fetched: int  # loads for which fetching was estimated to be faster
    recomputed: int  # loads for which computing was estimated to be faster
    link_rate: float | None  # bytes a second; None without a recent measurement
    latency: float | None  # seconds
    prefill_rate: float | None  # tokens a second
    breaker: str  # "closed", "open" or "half-open"
    opened: int  # number of times that the breaker has opened
    reachable: bool  # False during an outage, and before the first answer
    saving: bool  # False if the last save failed

    @classmethod
    def of(cls, pages: PageTier) -> Self:
        return cls(
            misses=dict(pages.misses),
            unsaved=dict(pages.unsaved),
            unasked=dict(pages.unasked),
            fetched=pages.loads[True],
            recomputed=pages.loads[False],
            link_rate=pages.rates.link_rate,
            latency=pages.rates.latency,
            prefill_rate=pages.rates.prefill_rate,
            breaker=pages.breaker.state,
            opened=pages.breaker.opened,
            reachable=pages.outage is None and pages.connected,
            saving=pages.save_failure is None,
        )


@dataclass(frozen=True, slots=True)
class StoreMetrics:
    """The counters of a store since its construction, and its present use of memory."""

    hot: Traffic
    prefix: Traffic
    page: Traffic
    cold: Traffic
    misses: Mapping[str, int]  # loads that found nothing, by reason
    disk_loads: int  # cold files read, used or not
    evictions: int  # contexts evicted from memory
    dirty_flushes: int  # contexts written to all their tiers
    lost: int  # contexts dropped because no tier could store them
    unsaved: Mapping[str, int]  # writes that failed, by tier; they are tried again
    hedges: int  # cold loads that started because a fetch was slow
    hedges_won: int  # of these, loads that took the file
    published: int  # prompts whose blocks were written before their answer was complete
    unnamed_written: int  # contexts without a name that the page server has
    unnamed_left: int  # contexts without a name that were not worth writing
    hot_agents: int
    hot_bytes: int
    dirty_agents: int
    dirty_bytes: int
    prefix_blocks: int
    prefix_bytes: int
    kept_bytes: int  # of blocks with a lifetime
    prefix_hits: int  # prompts with a prefix in memory, used or not
    server: PageServer | None  # None without a page server
    cold_misses: Mapping[str, int]  # loads of files that found nothing, by reason
    cold_unsaved: Mapping[str, int]  # files that could not be written, by reason


@dataclass(slots=True)
class Tally:
    """Counters of events. Thread-safe."""

    traffic: dict[str, Traffic] = field(
        default_factory=lambda: {t: Traffic() for t in ("hot", "prefix", "page", "cold")}
    )
    misses: Counter[str] = field(default_factory=Counter)
    unsaved: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)  # of prompts, by supplying tier; "none": computed
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, event: str) -> None:
        with self._lock:
            self.events[event] += 1

    def loaded(self, tier: Tier, nbytes: int, seconds: float, why: str | None) -> None:
        """Count a load. `why` is the reason if it found nothing."""
        with self._lock:
            if tier == "none":
                self.misses[why or "absent"] += 1
                return
            traffic = self.traffic[tier]
            traffic.hits += 1
            traffic.loaded_bytes += nbytes
            traffic.load_seconds += seconds

    def answered(self, tier: Tier, reused: int, computed: int) -> None:
        """Count the tokens of a prompt. `tier` supplied the `reused` tokens."""
        with self._lock:
            self.events["answers"] += 1
            self.tokens[tier] += reused
            self.tokens["none"] += computed

    def figures(self) -> dict[str, Any]:
        """Return the published statistics: the tokens that each tier supplied."""
        with self._lock:
            tiers = {
                name: {
                    "hits": traffic.hits,
                    "tokens": self.tokens[name],
                    "bytes": traffic.loaded_bytes,
                    "seconds": traffic.load_seconds,
                }
                for name, traffic in self.traffic.items()
            }
            return {"answers": self.events["answers"], "computed": self.tokens["none"], "tiers": tiers}

    def saved(self, tier: Tier, nbytes: int | None, seconds: float) -> None:
        """Count a save. `nbytes` is None if it failed."""
        with self._lock:
            if nbytes is None:
                self.unsaved[tier] += 1
                return
            traffic = self.traffic[tier]
            traffic.saves += 1
            traffic.saved_bytes += nbytes
            traffic.save_seconds += seconds

    def snapshot(self, pages: PageTier | None, cold: SafetensorsCacheAdapter | None, **now: int) -> StoreMetrics:
        """Return all counters, including the counters of the tiers, and the current values `now`."""
        with self._lock:
            return StoreMetrics(
                hot=replace(self.traffic["hot"]),
                prefix=replace(self.traffic["prefix"]),
                page=replace(self.traffic["page"]),
                cold=replace(self.traffic["cold"]),
                misses=dict(self.misses),
                unsaved=dict(self.unsaved),
                disk_loads=self.events["disk_loads"],
                dirty_flushes=self.events["dirty_flushes"],
                hedges=self.events["hedges_won"] + self.events["hedges_lost"],
                hedges_won=self.events["hedges_won"],
                published=self.events["published"],
                unnamed_written=self.events["unnamed_written"],
                unnamed_left=self.events["unnamed_left"],
                server=PageServer.of(pages) if pages else None,
                cold_misses=dict(cold.misses) if cold else {},
                cold_unsaved=dict(cold.unsaved) if cold else {},
                **now,
            )


# -- The statistics channel --------------------------------------------------------------------------------------------
#
# For `kvpage top` and the web page of the page server, the engine publishes a JSON object every few seconds: its name,
# and the tokens that each tier has supplied. Nothing is stored. It uses the channel of its ACL user, or, if the server
# refuses that, the channel of all engines. Each message is also a heartbeat, by which an idle engine notices the
# beginning and the end of an outage of the server.

CHANNEL = "kvpage:engines"  # the channel of a user has ":" and the user's name appended
EVERY_SECONDS = 5.0
MAX_NAME_LENGTH = 100  # of the model's name


def figures(model_id: str, pool: BlockPool, tally: Tally, rates: Rates) -> str:
    """Return the message with the current statistics, as JSON."""
    room = 0 if pool.total_bytes == UNLIMITED else pool.total_bytes
    statistics = {"name": WRITER, "model": model_id[:MAX_NAME_LENGTH], "used": pool.used_bytes, "room": room}
    return json.dumps(statistics | tally.figures() | {"prefill_rate": rates.throughput})


async def publish_statistics(connection: ServerConnection, make_message: Callable[[], str]) -> None:
    """Publish to every server, until the connection is closed. If the server refuses both channels, send PING
    instead."""
    for channel in (f"{CHANNEL}:{connection.user}", CHANNEL):
        with suppress(_NotAllowed):
            await _repeat(connection, lambda to=channel: _publish(connection, to, make_message()))  # type: ignore[misc]
    await _repeat(connection, lambda: connection.ask_every(RawCommand(["PING"], lambda _: None)))


async def _repeat(connection: ServerConnection, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call `send` every few seconds, and sooner after a failure, until the circuit breaker opens."""
    while True:
        failures: list[str] = []
        await connection.attempt(send(), failures.append)
        soon = connection.in_doubt or (failures and connection.breaker.state is State.CLOSED)
        await asyncio.sleep(SHORTEST if soon else EVERY_SECONDS)


class _NotAllowed(Exception):
    """Error: the server refused a channel. It is not tried again, because each refusal is an entry in the ACL LOG."""


async def _publish(connection: ServerConnection, channel: str, message: str) -> None:
    """Publish to every server. Raises an outage if none of them answers, and _NotAllowed."""
    try:
        await connection.ask_every(RawCommand(["PUBLISH", channel, message], integer))
    except Refused as error:
        if error.code == "NOPERM":
            raise _NotAllowed from error
        raise
