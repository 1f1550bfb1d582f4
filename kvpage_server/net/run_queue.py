"""The run queue: sessions with much work wait in it, so that sessions with little work are served soon.

In every round of the event loop, each session runs the commands that have arrived, for one turn (`TURN`) at most. A
session that needs more stops reading and joins the queue; the whole queue gets at most `ROUND` nanoseconds per round.
So a new client waits for little more than `ROUND`, however long the queue is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvpage_server.resp import Reply, Wait

TURN = 1_000_000  # nanoseconds of one session
ROUND = 2_000_000  # nanoseconds of the whole queue
_LOOK = 0.005  # seconds between two checks for incomplete commands

log = logging.getLogger("kvpage")


class Waiting(Protocol):
    """Member of the run queue: a session, or the remaining steps of a disconnected client's command."""

    def take_turn(self) -> None:
        """Continue for one turn, and join the queue again if another turn is needed."""


class RunQueue:
    """Sessions that wait for a turn, first in, first out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: deque[Waiting] = deque()
        self._stopped = False
        self._rests = 0

    def stop(self) -> None:
        """Give sessions no more turns. Remaining steps of all-or-none writes are still completed."""
        self._stopped = True

    async def completed(self, within: float) -> None:
        """Wait until the steps passed to `finish` are complete, for `within` seconds at most. Then log an error, and
        return.
        """
        end = time.monotonic() + within
        while self._rests:
            if time.monotonic() > end:
                log.error(
                    "after %g s %d commands are not complete; the rest of them is left undone", within, self._rests
                )
                return
            await asyncio.sleep(_LOOK)

    def join(self, waiting: Waiting) -> None:
        """Append a session or remaining steps, which must not be in the queue yet. After `stop`, sessions are not
        appended.
        """
        if self._stopped and not isinstance(waiting, _Unfinished):
            return
        self._line.append(waiting)
        if len(self._line) == 1:
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        line = self._line
        if self._stopped:
            rests = [waiting for waiting in line if isinstance(waiting, _Unfinished)]
            line.clear()
            line.extend(rests)
        end = time.monotonic_ns() + ROUND
        for _ in range(len(line)):
            try:
                line[0].take_turn()  # it stays in the queue meanwhile, so `join` does not schedule `_serve` again
            except Exception:
                log.exception("the turn of a client failed; the other clients are served")
            line.popleft()
            if time.monotonic_ns() > end:
                break
        if line:
            self._loop.call_soon(self._serve)

    def finish(self, steps: Iterator[Reply] | None) -> None:
        """Run the remaining steps of a disconnected client's command in turns. None stands for no steps."""
        if steps is None:
            return
        self._rests += 1
        self.join(_Unfinished(self, steps))

    def note_completed(self) -> None:
        """Note that the steps of one call of `finish` are complete, or have failed."""
        self._rests -= 1


class _Unfinished:
    """The remaining steps of a disconnected client's command, as a member of the run queue."""

    def __init__(self, line: RunQueue, steps: Iterator[Reply]) -> None:
        self._line = line
        self._steps = steps

    def take_turn(self) -> None:
        """Run steps for one turn."""
        goes_on = False
        try:
            goes_on = self._take_batch()
        finally:
            if not goes_on:
                self._line.note_completed()

    def _take_batch(self) -> bool:
        end = time.monotonic_ns() + TURN
        for step in self._steps:
            if type(step) is Wait:
                step.start(self._advance)
                return True
            if time.monotonic_ns() > end:
                self._advance()
                return True
        return False

    def _advance(self) -> None:
        self._line.join(self)
