"""Commands that do in steps what they do: it is in doubt from the first step until they say what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.acting.peers import Asked, shown
from tests.simulation.acting.process import Process
from tests.simulation.model.model import Model
from tests.simulation.model.pages import block_of
from tests.simulation.model.replies import A_NUMBER, Err, May, between, is_error
from tests.simulation.model.values import Cell, Doubt

_AT_ONCE = frozenset((b"FLUSHALL",))  # it frees in steps what it has removed at once


class Unfinished:
    """Of one process. `fail` is told of what must not become of a command."""

    def __init__(self, model: Model, process: Process, fail: Callable[[str], None]) -> None:
        self._model = model
        self._process = process
        self._clock = process.machine.clock
        self._fail = fail

    def begin(self, asked: Asked, unclear: set[bytes]) -> None:
        """What a command does in steps may or may not be done, until it says so.

        `unclear`: keys of which nobody knew what they were before it.
        """
        if asked.changes and asked.words[0] not in _AT_ONCE:
            store = self._model.store
            before: dict[bytes, Cell] = {}
            for key, old, _ in store.log[asked.at :]:
                before.setdefault(key, old)
            after = {key: store.keys.get(key) for key in before}
            asked.doubt = Doubt([after, before], pending=True)
            store.doubts.append(asked.doubt)
            asked.unclear = unclear & before.keys()
        elif asked.words[0].lower() == b"kvpagedel" and asked.expected == 0:
            asked.doubt = Doubt([{}, {}], pending=True)  # there may be pages before it is done

    def resolve(self, asked: Asked, reply: Any) -> None:
        """A command in steps has said what became of it."""
        store, doubt = self._model.store, asked.doubt
        if doubt is None:
            return  # the client has gone, or was quick
        changed, now = store.log[asked.at : asked.end], self._clock.unix_ms
        self._model.may_have_changed({key for variant in doubt.variants for key in variant} | asked.deleted)
        settled = {key for key, _, _ in changed}.difference(asked.deleted, *doubt.variants)  # by others
        settled |= {key for key, old, new in changed if old and not new and asked.ran < old.expires <= now}  # by time
        asked.expected = _fewer(asked.expected, len(settled | doubt.evicted.keys()))
        asked.doubt, doubt.pending = None, False
        for talk in self._model.talks:
            talk.unheard -= settled  # by FLUSHALL perhaps, of which nobody is notified
        if asked.came:
            asked.expected = (
                A_NUMBER if isinstance(asked.expected, May) else between(asked.expected, asked.expected + asked.came)
            )
        if is_error(reply):
            if not self._may_fail_late(reply):
                self._fail(f"step {asked.step}: {shown(asked.words)} failed: {reply!r:.300}")
            asked.expected = Err(str(reply)[:12])
            self._may_not_be_told(asked)
        if doubt not in store.doubts:  # all of it is settled
            if not is_error(reply):
                self._learn_evicted(doubt)
            return
        store.doubts.remove(doubt)
        if len(store.log) > asked.end:
            store.note_late(asked.at, doubt)
        if not is_error(reply):
            self._learn_times(asked, doubt)
            self._learn_evicted(doubt)
            return
        self._model.need_not_tell(doubt.variants[0])
        for talk in self._model.talks:
            talk.unheard.difference_update(doubt.variants[0])
        store.sure = False
        for key, value in doubt.variants[1].items():
            store._set(key, value)
        store.sure = True
        store.fog |= asked.unclear

    def learn_deleted(self, asked: Asked, doubt: Doubt) -> None:
        """A step of a deletion is done: others see what is left.

        Pages that come meanwhile may be deleted, too, in any of the steps.
        """
        store, there = self._model.store, set(self._process.server.keyspace.listing.names())
        others = {key for one in store.doubts if one is not doubt for variant in one.variants for key in variant}
        done = {key for key, cell in doubt.variants[0].items() if cell is None} - there - others
        store.settle(sorted(done))
        asked.deleted |= done
        _, req, *pages = asked.words
        named = {(req, int(page)) for page in pages}
        new = {key for key, _, cell in store.log[asked.end :] if cell is not None and key.startswith(b"kv:%b:" % req)}
        store.now = self._clock.unix_ms
        new = {key for key in new if (not named or block_of(key) in named) and store.get(key) is not None}
        gone = new - there
        for key in sorted(gone):
            store.forget(key)
        asked.came += len(gone)

    def _learn_evicted(self, doubt: Doubt) -> None:
        """What was evicted while a command in steps came to it was so before, or afterwards: then it is not there."""
        keyspace, store = self._process.server.keyspace, self._model.store
        there = set(keyspace.listing.names()) if doubt.evicted else set()
        store.sure = False
        for key, cell in doubt.evicted.items():
            store.fog.discard(key)
            store._set(key, replace(cell, expires=keyspace.expires_of(key)) if cell and key in there else None)
        store.sure = True

    def _learn_times(self, asked: Asked, doubt: Doubt) -> None:
        """A time to live begins when a command in steps comes to it, which is not when it was begun."""
        took = self._model.store.elapsed() - asked.elapsed
        moved = self._clock.unix_ms - asked.ran - took  # somebody has set the clock, or it is rounded
        soonest, latest = min(moved, 0), took + max(moved, 0) + 1
        for key, cell in doubt.variants[0].items():
            now = self._model.store.keys.get(key)
            if cell is None or now is not cell or not cell.expires:
                continue
            expires = self._process.server.keyspace.expires_of(key)
            if expires and not soonest <= expires - cell.expires <= latest:
                self._fail(f"step {asked.step}: {key!r} expires at {expires}, asked was {cell.expires}")
            if expires:
                self._model.store.keys[key] = replace(cell, expires=expires)

    def _may_fail_late(self, reply: Any) -> bool:
        limited = self._process.server.keyspace.memory.maxmemory > 0 or self._process.may_refuse
        return (is_error(reply, "OOM") and limited) or (
            is_error(reply, "MISCONF", "ERR reading from disk") and self._model.disk_fails
        )

    def abandon(self, asked: Asked) -> None:
        """Nobody will know what became of it: what it may have done stays in doubt."""
        if asked.doubt is not None:
            asked.doubt.pending = False
            asked.doubt = None
            self._model.store.settle(asked.unclear)
            self._model.store.fog |= asked.unclear
            self._may_not_be_told(asked)

    def _may_not_be_told(self, asked: Asked) -> None:
        """Of what it has perhaps not changed, nobody is notified for sure."""
        changed = {key for key, _, _ in self._model.store.log[asked.at : asked.end]}
        self._model.need_not_tell(changed)
        for talk in self._model.talks:
            talk.unheard -= changed


def _fewer(expected: Any, by: int) -> Any:
    """What a command may count that has come too late for so many keys."""
    options = [one for one in (expected.options if isinstance(expected, May) else [expected]) if type(one) is int]
    return between(max(min(options) - by, 0), max(options)) if by and options else expected
