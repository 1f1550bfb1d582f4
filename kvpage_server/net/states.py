"""States of a session, and the events that change them.

    READING  receives and runs commands
             LEFT_OVER -> QUEUED; UNREAD -> CROWDED; HELD_BACK -> PAUSED
    QUEUED   has more commands to run, and waits for its turn in the run queue
             TURN -> READING
    CROWDED  too much output is unsent, because the client reads too slowly
             DRAINED -> READING
    PAUSED   a command waits for the end of CLIENT PAUSE
             PAUSE_OVER -> QUEUED
    WAITING  a command or a reply waits for an event, for example for a load from disk
             ALL_OCCURRED -> READING
    GONE     the connection has ended; final

MUST_WAIT leads to WAITING from every state but GONE, and LOST leads to GONE from every state. TURN, DRAINED and
PAUSE_OVER may occur in any state; they change nothing in a state without a row for them. A session that is WAITING or
GONE keeps its state when its command is HELD_BACK. Any other event is an error.

After QUIT or a protocol error, a session runs no more commands in any state. It sends the remaining replies before it
closes.
"""

from __future__ import annotations

from enum import Enum, auto


class SessionState(Enum):
    """A state of a session; the module's docstring describes each. Only a `READING` session runs commands."""

    READING = auto()
    QUEUED = auto()
    CROWDED = auto()
    PAUSED = auto()
    WAITING = auto()
    GONE = auto()


class SessionEvent(Enum):
    """An event that may change a session's state."""

    LEFT_OVER = auto()  # the turn is over, and commands or steps of a reply remain
    TURN = auto()  # the run queue has reached the session
    UNREAD = auto()  # too many bytes wait to be sent
    DRAINED = auto()  # the waiting output has fallen below the limit
    HELD_BACK = auto()  # a command has to wait for the end of CLIENT PAUSE
    PAUSE_OVER = auto()
    MUST_WAIT = auto()  # the session waits for one more event
    ALL_OCCURRED = auto()  # all events that the session has waited for have occurred
    LOST = auto()  # the connection has ended


READING, QUEUED, CROWDED, PAUSED, WAITING, GONE = SessionState

_ALWAYS = {SessionEvent.MUST_WAIT: WAITING, SessionEvent.LOST: GONE}
MOVES: dict[SessionState, dict[SessionEvent, SessionState]] = {
    READING: {SessionEvent.LEFT_OVER: QUEUED, SessionEvent.UNREAD: CROWDED, SessionEvent.HELD_BACK: PAUSED, **_ALWAYS},
    QUEUED: {SessionEvent.TURN: READING, **_ALWAYS},
    CROWDED: {SessionEvent.DRAINED: READING, **_ALWAYS},
    PAUSED: {SessionEvent.PAUSE_OVER: QUEUED, **_ALWAYS},
    WAITING: {SessionEvent.ALL_OCCURRED: READING, SessionEvent.HELD_BACK: WAITING, **_ALWAYS},
    GONE: dict.fromkeys((SessionEvent.ALL_OCCURRED, SessionEvent.HELD_BACK, *_ALWAYS), GONE),
}
_HARMLESS = (SessionEvent.TURN, SessionEvent.DRAINED, SessionEvent.PAUSE_OVER)


def after(state: SessionState, event: SessionEvent) -> SessionState:
    """Return the state that follows `state` after an event.

    Raises RuntimeError for an event that cannot occur in `state`.
    """
    to = MOVES[state].get(event)
    if to is None:
        if event not in _HARMLESS:
            raise RuntimeError(f"{event.name} cannot happen while {state.name}")
        return state
    return to
