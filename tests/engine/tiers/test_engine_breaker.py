"""The circuit breaker: it opens after failures in a row, and probes, with growing pauses, whether to close again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.tiers.server.connection import FAILURES, LONGEST, SHORTEST, CircuitBreaker, State


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(clock)


def fail(breaker: CircuitBreaker, times: int = FAILURES) -> None:
    for _ in range(times):
        breaker.allows()
        breaker.failed()


def test_failures_in_a_row_open_it_and_scattered_ones_do_not(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        fail(breaker, FAILURES - 1)
        breaker.succeeded()
    assert (breaker.state, breaker.opened) == (State.CLOSED, 0)
    fail(breaker)
    assert (breaker.state, breaker.opened) == (State.OPEN, 1)
    assert not breaker.allows()


def test_after_the_pause_a_successful_probe_closes_the_breaker(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += SHORTEST - 0.01
    assert not breaker.allows()
    clock.now += 0.01
    assert breaker.state == State.HALF_OPEN
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert breaker.state == State.CLOSED
    assert [breaker.allows() for _ in range(3)] == [True] * 3


def test_each_failed_probe_doubles_the_pause_up_to_a_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    pauses = []
    for _ in range(9):
        begun = clock.now
        while not breaker.allows():
            clock.now += 0.25
        pauses.append(clock.now - begun)
        breaker.failed()
    assert pauses == [min(SHORTEST * 2**i, LONGEST) for i in range(9)]
    assert breaker.opened == 1
    clock.now += LONGEST
    assert breaker.allows()
    breaker.succeeded()
    fail(breaker)
    clock.now += SHORTEST
    assert breaker.allows()
    assert breaker.opened == 2


def test_a_probe_without_a_result_is_followed_by_another(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += SHORTEST
    assert breaker.allows()
    assert not breaker.allows()
    clock.now += SHORTEST
    assert breaker.allows()


def test_requests_before_the_opening_do_not_prolong_the_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += SHORTEST / 2
    breaker.failed()
    clock.now += SHORTEST / 2
    assert breaker.allows()
