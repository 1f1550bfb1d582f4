"""Transitions of a session: every pair of a state and an event."""

from __future__ import annotations

import pytest

from kvpage_server.net.session import MOVES, SessionEvent, SessionState, after

_EXPECTED = """
             READING QUEUED  CROWDED PAUSED  WAITING GONE
LEFT_OVER    QUEUED  -       -       -       -       -
TURN         READING READING CROWDED PAUSED  WAITING GONE
UNREAD       CROWDED -       -       -       -       -
DRAINED      READING QUEUED  READING PAUSED  WAITING GONE
HELD_BACK    PAUSED  -       -       -       WAITING GONE
PAUSE_OVER   READING QUEUED  CROWDED QUEUED  WAITING GONE
MUST_WAIT    WAITING WAITING WAITING WAITING WAITING GONE
ALL_OCCURRED -       -       -       -       READING GONE
LOST         GONE    GONE    GONE    GONE    GONE    GONE
"""


def test_every_event_is_in_the_table_or_impossible() -> None:
    [names, *rows] = [line.split() for line in _EXPECTED.strip().splitlines()]
    assert {*names} == {state.name for state in SessionState} == {state.name for state in MOVES}
    assert {row[0] for row in rows} == {event.name for event in SessionEvent}
    for event, *leads_to in rows:
        for state, expected in zip(names, leads_to, strict=True):
            if expected == "-":
                with pytest.raises(RuntimeError, match=f"{event} cannot happen while {state}"):
                    after(SessionState[state], SessionEvent[event])
            else:
                assert after(SessionState[state], SessionEvent[event]) is SessionState[expected], (state, event)


def test_the_documented_states_match_the_table() -> None:
    received = SessionState.__doc__ or ""
    for state, moves in MOVES.items():
        for event, to in moves.items():
            if event not in (SessionEvent.MUST_WAIT, SessionEvent.LOST) and to is not state:
                assert f"{event.name} -> {to.name}" in received, (state, event)
