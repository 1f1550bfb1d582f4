"""The states of a load. An event that a table does not name changes nothing.

The load itself::

    load      | SETTLE  | RESULT | CANCEL
    ----------+---------+--------+----------
    WAITING   | SETTLED | -      | CANCELLED
    SETTLED   | -       | TAKEN  | CANCELLED
    TAKEN     | -       | -      | -
    CANCELLED | -       | -      | -

Its agent's file::

    file    | LOOKED | READ_BEGAN | READ_ENDED
    --------+--------+------------+-----------
    LOOKING | SEEN   | -          | -
    SEEN    | -      | READING    | -
    READING | -      | -          | DONE
    DONE    | -      | -          | -

The wait of the load for the page server::

    patience | HEDGE_TIMER | DEADLINE
    ---------+-------------+---------
    FRESH    | LATE        | OVERDUE
    LATE     | -           | OVERDUE
    OVERDUE  | -           | -
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TypeVar


class LoadState(Enum):
    """State of a load."""

    WAITING = auto()  # for the page server or the file
    SETTLED = auto()  # the available blocks can be taken
    TAKEN = auto()  # its blocks are the caller's
    CANCELLED = auto()  # its blocks are free


class FileState(Enum):
    """State of the agent's file."""

    LOOKING = auto()  # its header is being read, for the number of tokens
    SEEN = auto()  # the number of tokens is known; it is not read so far
    READING = auto()
    DONE = auto()  # it was read, or is not needed


class Patience(Enum):
    """State of the wait for the page server."""

    FRESH = auto()
    LATE = auto()  # the file is read in addition to the page server
    OVERDUE = auto()  # the received blocks are taken


class LoadEvent(Enum):
    """Event that changes these states."""

    SETTLE = auto()
    RESULT = auto()
    CANCEL = auto()
    LOOKED = auto()
    READ_BEGAN = auto()
    READ_ENDED = auto()
    HEDGE_TIMER = auto()
    DEADLINE = auto()


State = TypeVar("State", LoadState, FileState, Patience)

_MOVES: dict[tuple[Enum, LoadEvent], Enum] = {
    (LoadState.WAITING, LoadEvent.SETTLE): LoadState.SETTLED,
    (LoadState.WAITING, LoadEvent.CANCEL): LoadState.CANCELLED,
    (LoadState.SETTLED, LoadEvent.RESULT): LoadState.TAKEN,
    (LoadState.SETTLED, LoadEvent.CANCEL): LoadState.CANCELLED,
    (FileState.LOOKING, LoadEvent.LOOKED): FileState.SEEN,
    (FileState.SEEN, LoadEvent.READ_BEGAN): FileState.READING,
    (FileState.READING, LoadEvent.READ_ENDED): FileState.DONE,
    (Patience.FRESH, LoadEvent.HEDGE_TIMER): Patience.LATE,
    (Patience.FRESH, LoadEvent.DEADLINE): Patience.OVERDUE,
    (Patience.LATE, LoadEvent.DEADLINE): Patience.OVERDUE,
}


def moved(state: State, event: LoadEvent) -> State:
    following = _MOVES.get((state, event), state)
    assert isinstance(following, type(state))
    return following
