"""Refusals of commands that are right: for want of memory or of a disk that works, and not otherwise.

A refusal for want of memory is also demanded, where the values that the model is sure of exceed maxmemory.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpage_server.commands.specs import named
from tests.simulation.acting.peers import shown
from tests.simulation.acting.process import Process
from tests.simulation.model.model import Model, Words

TOO_MUCH = "would have to be in memory at once, maxmemory-clients allows"


class Refusals:
    """Refusals of one process. `fail` is called with a refusal without a reason."""

    def __init__(self, model: Model, process: Process, fail: Callable[[str], None]) -> None:
        self._model = model
        self._process = process
        self._fail = fail

    def must_refuse(self, words: Words) -> bool:
        """Whether a command that stores something has to be refused: `noeviction`, and values alone exceed maxmemory.

        Call it before the model runs the command. It counts only keys that do not expire and of which the model is
        sure, and of a page only its body: a block that is stored whole has no header for each page. A server with a
        disk is never required to refuse: it can drop values from memory without an eviction. Unread replies raise the
        limit by their bytes, which count for maxmemory-clients.
        """
        keyspace, spec = self._process.server.keyspace, named(words[0])
        memory = keyspace.memory
        if spec is None or not spec.stores or not memory.limit or self._process.server.tiered is not None:
            return False
        if keyspace.eviction_order.policy != "noeviction":
            return False
        store = self._model.store
        unsure = store.doubtful() | store.fog
        sizes = (len(cell.data) for key, cell in store.keys.items() if key not in unsure and not cell.expires)
        return sum(sizes) > memory.limit + memory.unread

    def why(self, error: str, words: Words) -> str:
        """Why the server may refuse a command that is right, empty when it does not."""
        if TOO_MUCH in error:
            return error
        if error.startswith(("OOM", "EXECABORT Transaction discarded because of: OOM")):
            keyspace = self._process.server.keyspace
            queued = words[0].lower() == b"exec" and keyspace.memory.limit > 0  # its waiters are finished by now
            if not (keyspace.memory.is_full() or self._process.may_refuse or queued):
                self._fail(f"{shown(words)} was refused for want of memory: {keyspace.memory.used} are used")
            return error
        if error.endswith("because of previous errors.") or "Can't execute" in error:
            return ""
        if error.startswith(("MISCONF", "ERR reading from disk failed", "EXECABORT Transaction discarded because of")):
            if not self._model.disk_fails:
                self._fail(f"{shown(words)} was refused though the disk works: {error}")
            return error
        return ""
