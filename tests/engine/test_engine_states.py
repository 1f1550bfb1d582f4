"""Every state of a load, and every event in it: the transitions match the tables in the docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from engine.tiers import loading
from engine.tiers.loading import LoadEvent, LoadState
from engine.tiers.server import fetch
from engine.tiers.server.fetch import FetchEvent, FetchState

FETCH_EVENTS = {
    "the work ended": FetchEvent.WORK_ENDED,
    "it failed": FetchEvent.WORK_FAILED,
    "it was cancelled": FetchEvent.WORK_CANCELLED,
    "result()": FetchEvent.RESULT,
    "cancel()": FetchEvent.CANCEL,
}
LOAD_EVENTS = {
    "the sources ended": LoadEvent.SOURCES_ENDED,
    "result()": LoadEvent.RESULT,
    "cancel()": LoadEvent.CANCEL,
}
Table = dict[tuple[str, str], str]


def table(module: ModuleType) -> Table:
    """Return the table of the module's docstring: the next states, by state and event."""
    lines = inspect.cleandoc(module.__doc__ or "").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.split("|")[0].strip() == "state" and "|" in line)
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
    for state, (name, fetch_event) in product(FetchState, FETCH_EVENTS.items()):
        yield state, fetch_event, table(fetch)[state.name, name], fetch.moved
    for load_state, (name, load_event) in product(LoadState, LOAD_EVENTS.items()):
        yield load_state, load_event, table(loading)[load_state.name, name], loading.moved


@pytest.mark.parametrize(
    ("state", "event", "documented", "moved"), list(cases()), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_transitions_match_the_table(
    state: Enum, event: Enum, documented: str, moved: Callable[[Enum, Enum], Enum]
) -> None:
    assert moved(state, event) is (state if documented in ("-", "(waits)") else type(state)[documented])


@pytest.mark.parametrize(("module", "states"), [(fetch, FetchState), (loading, LoadState)])
def test_a_table_has_a_row_for_every_state(module: ModuleType, states: type[Enum]) -> None:
    assert {state for state, _ in table(module)} == {state.name for state in states}


def test_every_event_moves_something() -> None:
    moving = {event for _, event, documented, _ in cases() if documented not in ("-", "(waits)")}
    assert moving == {*FetchEvent, *LoadEvent}


def test_final_states_have_no_transition() -> None:
    for state, event in product(FetchState, FetchEvent):
        assert not state.is_over or fetch.moved(state, event).is_over
    for load_state, load_event in product((LoadState.TAKEN, LoadState.CANCELLED), LoadEvent):
        assert loading.moved(load_state, load_event) is load_state
