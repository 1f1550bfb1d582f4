"""Every state of a load, and every event in it: the transitions match the tables in the docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from engine.tiers import load_states
from engine.tiers.load_states import FileState, LoadEvent, LoadState, Patience
from engine.tiers.server import fetch
from engine.tiers.server.fetch import FetchEvent, FetchState

FETCH_EVENTS = {
    "the work ended": FetchEvent.WORK_ENDED,
    "it failed": FetchEvent.WORK_FAILED,
    "it was cancelled": FetchEvent.WORK_CANCELLED,
    "result()": FetchEvent.RESULT,
    "cancel()": FetchEvent.CANCEL,
}
Table = dict[tuple[str, str], str]


def table(module: ModuleType, first: str) -> Table:
    """Return the table of the module's docstring that begins with `first`: the next states, by state and event."""
    lines = inspect.cleandoc(module.__doc__ or "").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.split("|")[0].strip() == first and "|" in line)
    events = [cell.strip() for cell in lines[begin].split("|")[1:]]
    found = {}
    for line in lines[begin + 2 :]:
        if "|" not in line:
            break
        state, *cells = (cell.strip() for cell in line.split("|"))
        found |= {(state, event): cell for event, cell in zip(events, cells, strict=True)}
    return found


def cases() -> Iterator[tuple[Enum, Enum, str, Callable[[Any, Any], Any]]]:
    """Yield a state, an event, the documented transition, and the function that computes it."""
    names = {event: name for name, event in FETCH_EVENTS.items()}
    for state, event in product(FetchState, FetchEvent):
        yield state, event, table(fetch, "state")[state.name, names[event]], fetch.moved
    for first, states in (("load", LoadState), ("file", FileState), ("patience", Patience)):
        rows = table(load_states, first)
        for state, moved in product(states, LoadEvent):
            yield state, moved, rows.get((state.name, moved.name), "-"), load_states.moved


@pytest.mark.parametrize(
    ("state", "event", "expected", "moved"), list(cases()), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_transitions_match_the_table(
    state: Enum, event: Enum, expected: str, moved: Callable[[Enum, Enum], Enum]
) -> None:
    assert moved(state, event) is (state if expected in ("-", "(waits)") else type(state)[expected])


@pytest.mark.parametrize(
    ("module", "first", "states"),
    [
        (fetch, "state", FetchState),
        (load_states, "load", LoadState),
        (load_states, "file", FileState),
        (load_states, "patience", Patience),
    ],
)
def test_a_table_has_a_row_for_every_state(module: ModuleType, first: str, states: type[Enum]) -> None:
    assert {state for state, _ in table(module, first)} == {state.name for state in states}


def test_every_event_moves_something() -> None:
    assert {event for _, event, expected, _ in cases() if expected not in ("-", "(waits)")} == {*FetchEvent, *LoadEvent}


def test_final_states_have_no_transition() -> None:
    for state, event in product(FetchState, FetchEvent):
        assert not state.is_over or fetch.moved(state, event).is_over
