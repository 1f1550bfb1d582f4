"""Nobody waits for longer than is documented, whatever else is going on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.acting.peers import shown
from tests.simulation.programs.step import MS

if TYPE_CHECKING:
    from tests.simulation.acting.run import Run

# A client that does not continue may hold needed memory for 10 s; a failing disk is retried every second.
LONGEST = 15_000 * MS  # nanoseconds without any answer
_EVERY = 1_000 * MS


class Patience:
    """Time limit of clients that wait for a reply and read. A client must wait for the end of a pause."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._excused = 0

    def excuse(self, nanoseconds: int) -> None:
        """A slow disk: so long everybody may have to wait."""
        self._excused = max(self._excused, self._run.machine.clock.now + nanoseconds)

    def look(self) -> None:
        """Whether somebody waits for too long; and again in a while."""
        run = self._run
        now, begun = run.machine.clock.now, max(self._excused, run.judge.model.paused_until * MS)
        for peer in run.peers:
            asked = [*peer.unanswered, *peer.unrun][:1]
            if peer.sock is None or peer.stalled or not asked:
                continue
            waits = now - max(asked[0].sent, peer.moved, begun)
            if waits > LONGEST:
                run.judge.fail(f"peer {peer.number} waits for {waits // MS} ms: {shown(asked[0].words)}")
        run.machine.later(_EVERY, self.look)
