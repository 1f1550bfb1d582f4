"""The run queue: sessions with much work wait in it, so that sessions with little work are served soon.

In each iteration of the event loop (a *round*), each session that has received commands runs them for one *turn* at
most (`TURN`). A session that needs more time stops receiving and joins the queue. All sessions of the queue together
get at most `ROUND` nanoseconds in a round. So a new client waits for little more than `ROUND`, however long the queue
is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvpage_server.resp import Reply, Wait

TURN = 1_000_000  # nanoseconds that one session runs without interruption
ROUND = 2_000_000  # nanoseconds that the whole queue gets in a round
_POLL = 0.005  # seconds between two checks for incomplete commands

log = logging.getLogger("kvpage")


class Waiting(Protocol):
    """Member of the run queue: a session, or the remaining steps of a disconnected client's command."""

    def take_turn(self) -> None:
        """Continue for one turn, and join the queue again if another turn is needed."""


class RunQueue:
    """The queue of sessions that wait for a turn, first in, first out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._members: deque[Waiting] = deque()
        self._stopped = False
        self._incomplete = 0

    def stop(self) -> None:
        """Give sessions no more turns. Remaining steps of all-or-none writes are still completed."""
        self._stopped = True

    async def completed(self, within: float) -> None:
        """Wait until all steps that were passed to `finish` are complete.

        After `within` seconds, log an error and return.
        """
        end = time.monotonic() + within
        while self._incomplete:
            if time.monotonic() > end:
                log.error(
                    "after %g s %d commands are not complete; the rest of them is left undone", within, self._incomplete
                )
                return
            await asyncio.sleep(_POLL)

    def join(self, waiting: Waiting) -> None:
        """Append a member that is not in the queue yet. After `stop`, a session is not appended."""
        if self._stopped and not isinstance(waiting, _Unfinished):
            return
        self._members.append(waiting)
        if len(self._members) == 1:
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        members = self._members
        if self._stopped:
            unfinished = [waiting for waiting in members if isinstance(waiting, _Unfinished)]
            members.clear()
            members.extend(unfinished)
        end = time.monotonic_ns() + ROUND
        for _ in range(len(members)):
            try:
                members[0].take_turn()  # it is still in the queue, so `join` does not schedule `_serve` again
            except Exception:
                log.exception("the turn of a client failed; the other clients are served")
            members.popleft()
            if time.monotonic_ns() > end:
                break
        if members:
            self._loop.call_soon(self._serve)

    def finish(self, steps: Iterator[Reply] | None) -> None:
        """Run the remaining steps of a disconnected client's command in turns; None if there are no steps."""
        if steps is None:
            return
        self._incomplete += 1
        self.join(_Unfinished(self, steps))

    def note_completed(self) -> None:
        """Note that the steps of one call of `finish` are complete, or have failed."""
        self._incomplete -= 1


class _Unfinished:
    """The remaining steps of a disconnected client's command, as a member of the run queue."""

    def __init__(self, run_queue: RunQueue, steps: Iterator[Reply]) -> None:
        self._run_queue = run_queue
        self._steps = steps

    def take_turn(self) -> None:
        """Run steps until TURN nanoseconds have passed, and join the queue again if there are more."""
        has_more = False
        try:
            has_more = self._run_steps()
        finally:
            if not has_more:
                self._run_queue.note_completed()

    def _run_steps(self) -> bool:
        end = time.monotonic_ns() + TURN
        for step in self._steps:
            if type(step) is Wait:
                step.start(self._join_again)
                return True
            if time.monotonic_ns() > end:
                self._join_again()
                return True
        return False

    def _join_again(self) -> None:
        self._run_queue.join(self)
