"""Load or recompute: blocks that are computed faster are not fetched, and the decision records its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis
from servers import RunningServer
from test_engine_pages import SPEC, TOKENS, context, held

from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server.restore_planner import VALID_SECONDS, Decision, Rate, Rates

MB = 1 << 20


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def rates() -> Rates:
    return Rates(Clock())


def test_before_anything_is_known_it_fetches(rates: Rates) -> None:
    assert rates.decide(256, 10 * MB) == Decision(True, 256, 10 * MB, None, None, None, None, None)
    rates.prefilled(1000, 1.0)
    assert rates.decide(256, 10 * MB).fetch


def test_blocks_are_fetched_if_that_is_faster_than_computing(rates: Rates) -> None:
    rates.received(100 * MB, 1.0, 100 * MB)
    rates.prefilled(1000, 1.0)
    rates.asked(0.01)
    decision = rates.decide(1000, 50 * MB)
    assert decision == Decision(True, 1000, 50 * MB, pytest.approx(0.51), 1.0, 100 * MB, 0.01, 1000)
    assert not rates.decide(100, 50 * MB).fetch
    assert not rates.decide(5, 0).fetch  # a question alone takes longer than computing five tokens


def test_prompts_that_are_computed_at_once_share_the_time() -> None:
    clock = Clock()
    rates = Rates(clock)
    assert rates.throughput is None
    clock.now += 100
    for _ in range(8):
        rates.prefilled(250, 40.0)
    assert rates.throughput == 2000 / 40
    assert rates.prefill_rate == pytest.approx(250 / 40)
    clock.now += 60
    rates.prefilled(500, 10.0)  # alone
    assert rates.throughput == 2500 / 50
    rates.prefilled(500, 10.0, ago=20.0)  # before it, with a longer answer
    assert rates.throughput == 3000 / 60
    rates.prefilled(600, 20.0, ago=5.0)  # between and within both
    assert rates.throughput == 3600 / 70


def test_small_transfers_do_not_measure_a_link(rates: Rates) -> None:
    rates.received(1000, 1.0, 1000)
    assert rates.link_rate is None


def test_a_link_without_a_received_byte_is_not_used(rates: Rates) -> None:
    rates.prefilled(1000, 1.0)
    rates.received(0, 5.0, 10 * MB)
    assert rates.decide(1000, 10 * MB).load_seconds == float("inf")
    assert not rates.decide(1000, 10 * MB).fetch


def test_an_old_measurement_of_a_link_is_repeated() -> None:
    clock = Clock()
    rates = Rates(clock)
    rates.prefilled(1000, 1.0)
    rates.received(1, 5.0, 10 * MB)
    assert not rates.decide(1000, 10 * MB).fetch
    clock.now += VALID_SECONDS
    assert rates.decide(1000, 10 * MB).fetch


def test_newer_measurements_have_more_weight() -> None:
    rate = Rate()
    assert rate.value is None
    rate.observe(100, 1.0)
    assert rate.value == 100
    for _ in range(10):
        rate.observe(1000, 1.0)
    assert rate.value == pytest.approx(1000, rel=0.01)


@pytest.fixture
def tier(server: RunningServer, client: redis.Redis) -> Iterator[PageTier]:
    tier = PageTier(server.url, SPEC, BlockPool(32))
    assert tier.save(context())
    yield tier
    tier._remote.pool.check_empty()
    tier.close()


def test_a_slow_link_is_not_used_by_a_fast_model(tier: PageTier) -> None:
    """Its prompt is computed; blocks in memory are used in any case."""
    tier.rates.received(MB, 100.0, MB)
    tier.rates.prefilled(4400, 1.0)
    fetch = tier.fetch("alice", TOKENS)
    assert fetch.result() is None
    assert fetch.why == "recompute"
    assert fetch.report.decision
    assert (fetch.report.decision.tokens, fetch.report.decision.nbytes) == (700, 700 * SPEC.token_nbytes)
    assert not fetch.report.decision.fetch
    assert tier.misses == {"recompute": 1}
    assert tier.loads == {False: 1}
    assert held(tier._remote.pool, tier.load("alice")) == 700  # a load without a prompt always fetches
    assert held(tier._remote.pool, tier.fetch("alice", TOKENS, whole=True).result()) == 700


def test_a_fast_link_is_used_by_a_slow_model(tier: PageTier) -> None:
    tier.rates.received(100 * MB, 0.1, 100 * MB)
    tier.rates.prefilled(100, 1.0)
    fetch = tier.fetch("alice", TOKENS)
    assert held(tier._remote.pool, fetch.result()) == 700
    assert fetch.report.decision
    assert fetch.report.decision.fetch
    assert tier.loads == {True: 1}
    assert not tier.misses


def test_the_link_is_measured_by_received_bytes(tier: PageTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tiers.server.restore_planner.LEAST_MEASURED", 1000)
    assert (tier.rates.link_rate, tier.rates.latency) == (None, None)
    fetch = tier.fetch("alice", TOKENS)
    held(tier._remote.pool, fetch.result())
    assert tier.rates.latency
    assert 0 < tier.rates.latency < fetch.report.seconds
    assert tier.rates.link_rate
    assert fetch.report.nbytes / fetch.report.seconds < tier.rates.link_rate < 100e9
