"""Whose turn it is: clients that ask for much wait in line, so that those who ask for little do not.

In every round of the event loop what has just arrived is answered, each session for one turn at the most. Who needs
more stops reading and joins the line, and in a round the whole line gets no more than `ROUND`. However many are in it,
a newcomer waits for little more than that.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

TURN = 1_000_000  # nanoseconds
ROUND = 2_000_000  # nanoseconds


class Waiting(Protocol):
    """Somebody in the line."""

    def take_turn(self) -> None:
        """Go on, for one turn. Whoever needs another one joins the line again."""


class Line:
    """Those who wait for their turn, first come, first served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: deque[Waiting] = deque()

    def join(self, waiting: Waiting) -> None:
        """Wait for a turn. Nobody joins twice."""
        self._line.append(waiting)
        if len(self._line) == 1:
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        line = self._line
        end = time.monotonic_ns() + ROUND
        for _ in range(len(line)):
            line[0].take_turn()  # it stays in its place meanwhile: who joins now finds that the line is being served
            line.popleft()
            if time.monotonic_ns() > end:
                break
        if line:
            self._loop.call_soon(self._serve)
