"""Commands in steps: their effects are uncertain from the first step until their reply."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.acting.peers import Asked, shown
from tests.simulation.acting.process import Process
from tests.simulation.model.model import Model
from tests.simulation.model.pages import block_of
from tests.simulation.model.replies import A_NUMBER, ANYTHING, Err, May, between, is_error
from tests.simulation.model.rights import keys_used
from tests.simulation.model.values import Cell, Doubt, Value
from tests.simulation.programs import batches

_AT_ONCE = frozenset((b"FLUSHALL",))  # it frees values in steps that it has removed together


class Unfinished:
    """Commands of one process. `fail` is called with an invalid result."""

    def __init__(self, model: Model, process: Process, fail: Callable[[str], None]) -> None:
        self._model = model
        self._process = process
        self._clock = process.machine.clock
        self._fail = fail

    def begin(self, asked: Asked, unclear: dict[bytes, list[Cell]]) -> None:
        """The effects of a command in steps are uncertain until its reply.

        `unclear`: keys that were in doubt before it, with the values that each may have had.
        """
        store, deletes = self._model.store, asked.words[0].lower() == b"kvpagedel"
        before: dict[bytes, Cell] = {}
        for key, old, _ in store.log[asked.at :]:
            before.setdefault(key, old)
        if deletes:  # its answer has settled keys that another deletion may have removed: they may still exist
            before = dict.fromkeys(unclear.keys() - store.doubtful() - store.fog) | before
        if (asked.changes or (deletes and before)) and asked.words[0] not in _AT_ONCE:
            after = {key: store.keys.get(key) for key in before}
            asked.doubt = Doubt([after, before], pending=True)
            store.doubts.append(asked.doubt)
            asked.unclear = unclear.keys() & before.keys()
            if asked.words[0].lower() == b"kvpagemset":
                self._begin_parts(asked, asked.doubt)
            options = {key: unclear[key] for key in asked.unclear}
            for i in range(max(map(len, options.values()), default=0)):
                other = before | {key: cells[i] for key, cells in options.items() if i < len(cells)}
                if other not in asked.doubt.variants:
                    asked.doubt.variants.append(other)
        elif deletes and asked.expected in (0, ANYTHING):
            asked.doubt = Doubt([{}, {}], pending=True)  # there may be pages before it is done

    def resolve(self, asked: Asked, reply: Any) -> None:
        """Process the result of a command in steps."""
        store, doubt = self._model.store, asked.doubt
        if doubt is None:  # the client has disconnected, or it was fast
            if asked.abandoned is not None and not is_error(reply):
                self._learn_times(asked, asked.abandoned)
            return
        changed, now = store.log[asked.at : asked.end], self._clock.unix_ms
        self._model.may_have_changed({key for variant in doubt.variants for key in variant} | asked.done)
        if asked.parts and not is_error(reply):
            self._fail(f"step {asked.step}: a batch was answered {reply!r} before {asked.parts[0][:3]!r} were visible")
        settled = {key for key, _, _ in changed}.difference(asked.done, *doubt.variants)  # by others
        settled |= {key for key, old, new in changed if old and not new and asked.ran < old.expires <= now}  # by time
        if asked.words[0].lower() == b"kvpagedel":
            settled |= asked.unclear  # an unfinished batch or block replaced a part of them before a step reached them
        asked.expected = _fewer(asked.expected, len(settled | doubt.evicted.keys()))
        asked.doubt, doubt.pending = None, False
        for talk in self._model.talks:
            talk.unheard -= settled  # for example by FLUSHALL, which sends no notification
        if asked.also_stored:
            asked.expected = (
                A_NUMBER
                if isinstance(asked.expected, May)
                else between(asked.expected, asked.expected + asked.also_stored)
            )
        if is_error(reply):
            if asked.done and asked.words[0].lower() == b"kvpagemset":
                self._fail(f"step {asked.step}: a batch was refused after a part of it was visible: {reply!r:.300}")
            if not self._may_fail_late(reply):
                self._fail(f"step {asked.step}: {shown(asked.words)} failed: {reply!r:.300}")
            asked.expected = Err(str(reply)[:12])
            self._may_not_be_told(asked)
        if doubt not in store.doubts:  # all of it is settled
            if not is_error(reply):
                self._learn_evicted(asked, doubt)
            return
        store.doubts.remove(doubt)
        if len(store.log) > asked.end:
            store.note_late(asked.at, {key for variant in doubt.variants for key in variant})
        if not is_error(reply):
            self._learn_times(asked, doubt)
            self._learn_evicted(asked, doubt)
            return
        self._model.need_not_tell(doubt.variants[0])
        for talk in self._model.talks:
            talk.unheard.difference_update(doubt.variants[0])
        store.sure = False
        for key, value in doubt.variants[1].items():
            store._set(key, value)
        store.sure = True
        store.fog |= asked.unclear

    def _begin_parts(self, asked: Asked, doubt: Doubt) -> None:
        """Note the parts of a batch. They become visible in order, so a reader sees any number of the first ones."""
        keys, at_once = keys_used(asked.words), batches.at_once(self._process.seed.number)
        parts = [list(keys[at : at + at_once]) for at in range(0, len(keys), at_once)] if at_once else []
        if len(parts) < 2:
            return
        after, before = doubt.variants
        for part in parts[:-1]:
            doubt.variants.append(doubt.variants[-1] | {key: after[key] for key in part})
        asked.parts, doubt.later = deque(parts), {key: after[key] for key in keys}
        clear = after.keys() - asked.unclear
        begun = [{key: (before[key], after[key]) for key in part if key in clear} for part in parts]
        self._model.store.batches.append((asked.end, begun, doubt.seen))

    def learn_stored(self, asked: Asked, doubt: Doubt, stored: list[list[bytes]]) -> None:
        """Note that a step has made the next parts of a batch visible, whatever others did to their keys."""
        store, store.now = self._model.store, self._clock.unix_ms
        for keys in stored:
            if not asked.parts or keys != asked.parts[0]:
                next_ones = asked.parts[0][:3] if asked.parts else []
                self._fail(f"step {asked.step}: {keys[:3]!r} of a batch are visible before {next_ones!r}")
            part = {key: doubt.later.pop(key) for key in asked.parts.popleft()}
            doubt.seen.append(len(store.log))
            self._model.may_have_changed(part.keys())
            store.settle(part)
            if len(doubt.variants) > 2:
                del doubt.variants[2]  # with nothing of the next part: that is the second one now
            timed = self._timed(asked, part)
            store.sure = False
            for key, cell in part.items():
                store.clear(key)
                doubt.evicted.pop(key, None)
                if store.keys.get(key) == cell:
                    store.keys[key] = timed[key]
                else:
                    store._set(key, timed[key])
            store.sure = True
            asked.done |= part.keys()

    def learn_deleted(self, asked: Asked, doubt: Doubt) -> None:
        """A step of a deletion is done: other clients see the rest.

        Pages that are stored meanwhile may be deleted, too, in any step.
        """
        store, there = self._model.store, set(self._process.server.keyspace.listing.names())
        others = {key for one in store.doubts if one is not doubt for variant in one.variants for key in variant}
        done = {key for key, cell in doubt.variants[0].items() if cell is None} - there - others
        store.settle(sorted(done))
        asked.done |= done
        self._model.may_have_changed(done)  # a client may have read them since the beginning
        _, req, *pages = asked.words
        named = {(req, int(page)) for page in pages}
        new = {key for key, _, cell in store.log[asked.end :] if cell is not None and key.startswith(b"kv:%b:" % req)}
        store.now = self._clock.unix_ms
        # A block that another command is storing replaces some of them later than in the model.
        doubts = [one for one in store.doubts if one is not doubt]
        maybe = {key for one in doubts for variant in one.variants for key, cell in variant.items() if cell}
        new = {key for key in new if not named or block_of(key) in named}
        new = {key for key in new if store.get(key) is not None or key in maybe}
        gone = new - there
        for key in sorted(gone):
            store.forget(key)
        asked.also_stored += len(gone)

    def _learn_evicted(self, asked: Asked, doubt: Doubt) -> None:
        """Values evicted before a command in steps reached them are absent, unless it has stored them afterwards."""
        keyspace, store = self._process.server.keyspace, self._model.store
        there = set(keyspace.listing.names()) if doubt.evicted else set()
        store.sure = False
        for key, cell in doubt.evicted.items():
            store.clear(key)
            store._set(key, replace(cell, expires=keyspace.contents.expires_of(key)) if cell and key in there else None)
        store.sure = True
        store.note_late(asked.at, doubt.evicted)

    def _learn_times(self, asked: Asked, doubt: Doubt) -> None:
        """Take over when pages expire that a command in steps has stored and nobody has changed since."""
        keys, written = self._model.store.keys, doubt.variants[0]
        timed = self._timed(asked, {key: cell for key, cell in written.items() if cell and cell is keys.get(key)})
        keys |= timed
        written |= timed

    def _timed(self, asked: Asked, cells: dict[bytes, Value]) -> dict[bytes, Value]:
        """Return cells with the server's expiry: a time to live begins when a command in steps reaches its page."""
        took = self._model.store.elapsed() - asked.elapsed
        moved = self._clock.unix_ms - asked.ran - took  # somebody has set the clock, or it is rounded
        soonest, latest = min(moved, 0), took + max(moved, 0) + 1
        result = dict[bytes, Value]()
        for key, cell in cells.items():
            if not cell.expires:
                result[key] = cell
                continue
            expires = self._process.server.keyspace.contents.expires_of(key)
            if expires and not soonest <= expires - cell.expires <= latest:
                self._fail(f"step {asked.step}: {key!r} expires at {expires}, asked was {cell.expires}")
            result[key] = replace(cell, expires=expires or cell.expires)
        return result

    def _may_fail_late(self, reply: Any) -> bool:
        limited = self._process.server.keyspace.memory.limit > 0 or self._process.may_refuse
        return (is_error(reply, "OOM") and limited) or (
            is_error(reply, "MISCONF", "ERR reading from disk") and self._model.disk_fails
        )

    def abandon(self, asked: Asked) -> None:
        """Its result will never be known: its possible effects stay uncertain."""
        if asked.doubt is not None:
            asked.doubt.pending = False
            asked.abandoned, asked.doubt = asked.doubt, None
            self._model.store.settle(asked.unclear)
            self._model.store.fog |= asked.unclear
            self._may_not_be_told(asked)

    def _may_not_be_told(self, asked: Asked) -> None:
        """No notification of its uncertain effects is required."""
        changed = {key for key, _, _ in self._model.store.log[asked.at : asked.end]}
        self._model.need_not_tell(changed)
        for talk in self._model.talks:
            talk.unheard -= changed


def _fewer(expected: Any, by: int) -> Any:
    """Return the permitted counts of a command that was too late for `by` keys."""
    options = [one for one in (expected.options if isinstance(expected, May) else [expected]) if type(one) is int]
    return between(max(min(options) - by, 0), max(options)) if by and options else expected
