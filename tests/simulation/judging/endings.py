"""Connections that the server closes: at a command, and beyond a limit. No others."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.acting.peers import Peer, shown
from tests.simulation.acting.process import Process
from tests.simulation.model.model import Model


class Endings:
    """Endings of one process' connections. `fail` is called with a connection that was closed without a reason."""

    def __init__(self, process: Process, model: Model, fail: Callable[[str], None]) -> None:
        self._process = process
        self._model = model
        self._fail = fail
        self._explained = 0  # of the connections that were beyond a limit, so many are accounted for

    def lost(self, peer: Peer) -> None:
        """A peer finds its connection ended, and not by itself."""
        process, talk = self._process, peer.talk
        if process.ending or process.over:
            return
        if talk.quits and peer.unanswered and not peer.has_stalled:
            self._fail(f"peer {peer.number} has quit, and was not answered {shown(peer.unanswered[0].words)}")
        if talk.ends or (talk.client is None and self._model.has_killed):  # it has said nothing yet
            return
        if self._model.disk_fails and peer.unanswered:  # the promised write is not on disk
            return
        stats = process.server.stats
        if self._explained < stats.evicted_clients + stats.overflown_inputs + stats.overflown_outputs:
            self._explained += 1
            return
        waits = [shown(asked.words) for asked in (*peer.unanswered, *peer.unrun)][:1]
        self._fail(f"peer {peer.number} has lost its connection, which nobody has ended; it waits for {waits}")
