"""A step as it runs: its values, its loop variables, and what it has done so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from engine.persistent.errors import GraphError, Place
from engine.persistent.state.memory import Memory


@dataclass(frozen=True, slots=True)
class Event:
    """What a statement did: `to` which variable, and what that holds then."""

    step: int
    what: str
    line: int | None
    loops: dict[str, int]
    to: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(slots=True)
class Frame:
    """The state of one step."""

    step: int
    memory: Memory
    values: dict[str, mx.array] = field(default_factory=dict)
    loops: dict[str, int] = field(default_factory=dict)
    trace: list[Event] | None = None

    def run(self, actions: Sequence[Action]) -> bool:
        """Do them in turn; whether one of them said that the block is over."""
        trace = self.trace
        action = None
        try:
            for action in actions:
                over = action.do(self)
                if trace is not None:
                    trace.append(self._event(action))
                if over:
                    return True
        except GraphError as error:
            error.at = error.at or (action.at if action else None)
            raise
        return False

    def _event(self, action: Action) -> Event:
        value = self.values.get(action.to) if action.to else None
        line = action.at.line if action.at else None
        return Event(
            self.step, action.what, line, dict(self.loops), action.to, value.shape if value is not None else None
        )


@dataclass(frozen=True, slots=True)
class Action:
    """A statement, ready to be done. `do` says whether the block is over."""

    do: Callable[[Frame], bool | None]
    what: str
    to: str | None = None
    at: Place | None = None
