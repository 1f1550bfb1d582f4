"""What the store counts, and what it says of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier

Tier = Literal["hot", "prefix", "page", "cold", "none"]  # where a context came from


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went to a tier and came from it."""

    hits: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0  # of the hits
    saves: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0  # of the saves


@dataclass(frozen=True, slots=True)
class PageServer:
    """How it goes with the page server, and what load-or-recompute is decided from."""

    misses: Mapping[str, int]  # by reason, of loads that found less than they might have, too
    unsaved: Mapping[str, int]  # writes that failed, by reason
    unasked: Mapping[str, int]  # other questions without an answer, by reason
    fetched: int  # loads of which it was decided that fetching is sooner
    recomputed: int  # and of which computing is
    link_rate: float | None  # bytes a second; None when it was not measured lately
    latency: float | None  # seconds
    prefill_rate: float | None  # tokens a second
    breaker: str  # "closed", "open" or "half-open"
    opened: int  # how often the breaker has opened

    @classmethod
    def of(cls, pages: PageTier) -> Self:
        """Now."""
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
        )


@dataclass(frozen=True, slots=True)
class StoreMetrics:
    """The store at one moment. Counts are since it was made."""

    hot: Traffic
    prefix: Traffic
    page: Traffic
    cold: Traffic
    misses: Mapping[str, int]  # loads that found nothing, by reason
    disk_loads: int  # cold files read, whether they were used or not
    evictions: int  # contexts that left memory
    dirty_flushes: int  # contexts written to all the tiers they were owed
    lost: int  # contexts dropped because no tier could be written to
    unsaved: Mapping[str, int]  # writes that failed, by tier; they are tried again
    hedges: int  # cold loads started beside a slow fetch
    hedges_won: int  # of these, how often the file was there first
    published: int  # prompts made known to other engines before their answer was complete
    hot_agents: int
    hot_bytes: int
    dirty_agents: int
    dirty_bytes: int
    prefix_blocks: int
    prefix_bytes: int
    prefix_hits: int  # prompts of which memory had a beginning, used in the end or not
    server: PageServer | None  # None without one
    cold_misses: Mapping[str, int]  # files that were of no use, by reason
    cold_unsaved: Mapping[str, int]  # files that could not be written, by reason

    @property
    def hot_hits(self) -> int:
        """Loads that the agent's own context in memory answered."""
        return self.hot.hits

    @property
    def page_hits(self) -> int:
        """Loads that the page server answered."""
        return self.page.hits

    @property
    def warm_hits(self) -> int:
        """Loads that a safetensors file answered."""
        return self.cold.hits


@dataclass(slots=True)
class Tally:
    """Counts as they come, from any thread."""

    traffic: dict[str, Traffic] = field(
        default_factory=lambda: {t: Traffic() for t in ("hot", "prefix", "page", "cold")}
    )
    misses: Counter[str] = field(default_factory=Counter)
    unsaved: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, event: str) -> None:
        """Something happened once."""
        with self._lock:
            self.events[event] += 1

    def loaded(self, tier: Tier, nbytes: int, seconds: float, why: str | None) -> None:
        """A load ended; `why` it found nothing."""
        with self._lock:
            if tier == "none":
                self.misses[why or "absent"] += 1
                return
            was = self.traffic[tier]
            self.traffic[tier] = replace(
                was,
                hits=was.hits + 1,
                loaded_bytes=was.loaded_bytes + nbytes,
                load_seconds=was.load_seconds + seconds,
            )

    def saved(self, tier: Tier, nbytes: int | None, seconds: float) -> None:
        """A save ended; None bytes when it failed."""
        with self._lock:
            if nbytes is None:
                self.unsaved[tier] += 1
                return
            was = self.traffic[tier]
            self.traffic[tier] = replace(
                was,
                saves=was.saves + 1,
                saved_bytes=was.saved_bytes + nbytes,
                save_seconds=was.save_seconds + seconds,
            )

    def snapshot(self, pages: PageTier | None, cold: SafetensorsCacheAdapter | None, **now: int) -> StoreMetrics:
        """All of it, with what the tiers have counted and what there is `now` in memory."""
        with self._lock:
            return StoreMetrics(
                hot=self.traffic["hot"],
                prefix=self.traffic["prefix"],
                page=self.traffic["page"],
                cold=self.traffic["cold"],
                misses=dict(self.misses),
                unsaved=dict(self.unsaved),
                disk_loads=self.events["disk_loads"],
                dirty_flushes=self.events["dirty_flushes"],
                hedges=self.events["hedges_won"] + self.events["hedges_lost"],
                hedges_won=self.events["hedges_won"],
                published=self.events["published"],
                server=PageServer.of(pages) if pages else None,
                cold_misses=dict(cold.misses) if cold else {},
                cold_unsaved=dict(cold.unsaved) if cold else {},
                **now,
            )
