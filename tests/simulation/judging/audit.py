"""Checks of an idle server: its keys, survivors of a kill, and remains at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.acting.peers import Asked, Peer, shown
from tests.simulation.judging import accounts
from tests.simulation.model.replies import agrees, is_error
from tests.simulation.model.values import Cell, Doubt, Value, read_page

if TYPE_CHECKING:
    from tests.simulation.acting.run import Run

MS = 1_000_000
PATIENCE = 60_000 * MS  # nanoseconds of the world, for all that was asked
SECOND = 1_000 * MS
_SLACK = 400 * MS  # of everysec, for a commit that had just begun
_TURNS = 30  # of 5 ms, for messages behind the last reply, and for evictions, every 100 ms (SWEEP_EVERY)
_ROOM_IS_MADE = 3_000 * MS  # for evictions before it, on a slow disk
_AT_ONCE = 32  # keys that are asked for
_BEGUN_LATE = 5000  # milliseconds
_MAY_ROT = 24  # bytes
_GONE = -2  # what PEXPIRETIME says of a key that is not there
_OWN_TASKS = 5  # of a server: serving, sweeping, shrinking, watching, renewing
_OWN_TIMERS = 5  # the sweeper's, the shrinker's and the watch's pauses, the next commit's, the scrubber's


class Found(NamedTuple):
    """A key as the next process has it, and the unix milliseconds at which it was asked: time passes meanwhile."""

    value: Any
    at: int
    expires: int
    expires_at: int


class Audit:
    """Audit of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._judge = run.judge
        self._since = 0
        self._mode = run.seed.options.get("appendfsync", "")
        self._found: dict[bytes, Found] = {}
        self._told: dict[bytes, list[Any]] = {}  # results, as they arrive
        self._least = 0  # changes that have to be there after a death
        self._most = 0  # and that can be
        self._overdue: dict[bytes, list[Value]] = {}  # expired values
        self._gone: set[bytes] = set()  # keys that were removed meanwhile: a full disk gets these removals first
        self._let_go: set[bytes] = set()  # keys removed before the start of the log, which may still be on disk
        self._failed_at = -1  # changes that there were when the disk began to fail

    # -- quiet -----------------------------------------------------------------------------------------------------

    def settle(self, then: Callable[[], None], *, check: bool = True) -> None:
        """Continue after every client has received its replies and messages."""
        self._since = self._run.machine.clock.now
        self._wait(then, check)

    def _wait(self, then: Callable[[], None], check: bool, turns: int = _TURNS) -> None:
        run = self._run
        if run.process.over:
            return
        loud = [peer for peer in run.peers if peer.sock is not None and not (peer.quiet and not peer.stalled)]
        if not loud:
            if check and turns and self._unsettled():
                turns -= not run.process.server.channels.busy  # or many messages wait for their turn
                run.machine.later(5 * MS, lambda: self._wait(then, check, turns))
                return
            if check:
                self._check_quiet()
            then()
            return
        begun = max(self._since, self._judge.model.paused_until * MS)  # clients wait for the end of a pause
        if run.machine.clock.now - begun > PATIENCE:
            self._judge.fail("\n".join(f"waits for ever: {_of(peer)}" for peer in loud))
        run.machine.later(5 * MS, lambda: self._wait(then, check))

    def _check_quiet(self) -> None:
        judge, run = self._judge, self._run
        server, store = run.process.server, judge.model.store
        if untold := self._untold():
            judge.fail(untold)
        store.now = run.machine.clock.unix_ms
        if not store.doubts and not store.fog:
            there, known = set(server.keyspace.listing.names()), set(store.living())
            if known - there:
                judge.fail(f"the server has lost {sorted(known - there)[:5]!r}")
            late, expires_of = {*store.lately_expired()}, server.keyspace.contents.expires_of
            if extra := [key for key in there - known if key not in late or not 0 < expires_of(key) <= store.now]:
                judge.fail(f"the server has kept {sorted(extra)[:5]!r}")
        for mistake in accounts.mistakes(server, judge.just_stored) if self._is_well() else ():
            judge.fail(mistake)
        if self._is_well():
            judge.model.disk_fails, self._failed_at = False, -1

    def _unsettled(self) -> str:
        """Return a mistake that the server may still correct: a message that a client's own command causes follows its
        reply, and values are evicted some time after memory has become full.
        """
        return self._untold() or accounts.excess_of_memory(self._run.process.server, self._judge.just_stored)

    def _untold(self) -> str:
        """Return a message or change that a client has not received yet."""
        late = {*self._judge.model.store.lately_expired()}
        for peer in self._run.peers:
            if peer.pushes and peer.sock is not None:
                return f"peer {peer.number} was not told {peer.pushes[0]!r:.200}"
            if peer.sock is not None and peer.talk.ends:
                return f"peer {peer.number} is still there, whose connection was ended"
            if peer.sock is not None and peer.talk.to_show:
                return f"peer {peer.number}, who monitors, was not shown {peer.talk.to_show[0]!r:.200}"
            if peer.sock is not None and (unheard := peer.talk.unheard - late):
                return f"peer {peer.number} was not notified of {sorted(unheard)[:4]!r}"
        there = {peer.talk: peer.number for peer in self._run.peers if peer.sock is not None}
        for talk, what in self._judge.model.untold(there, late):
            return f"peer {there[talk]} {what}"
        return ""

    def _is_well(self) -> bool:
        faults, tiered = self._run.machine.disk.faults, self._run.process.server.tiered
        return not (faults.full or faults.refuses or faults.unreadable or faults.slow) and (
            tiered is None or (not tiered.behind.failing and tiered.behind.settled)
        )

    def disk_failed(self) -> None:
        """From now on the disk may be blamed."""
        self._judge.model.disk_fails = True
        if self._failed_at < 0:
            self._failed_at = self._position_at(self._run.machine.clock.now - SECOND - _SLACK)

    # -- deaths ----------------------------------------------------------------------------------------------------

    def _position_at(self, when: int) -> int:
        """How many changes there were then."""
        least = 0
        for time, position in self._judge.positions:
            if time > when:
                break
            least = position
        return least

    def died(self, *, in_order: bool) -> None:
        """Note the ended process' work that the next one must know."""
        judge, store = self._judge, self._judge.model.store
        self._overdue = store.overdue()
        self._most = len(store.log)
        if in_order:
            self._least = self._most
        elif self._mode == "always":
            self._least = judge.acknowledged
        else:
            slack = _SLACK + (self._run.seed.maxdisk > 0) * _ROOM_IS_MADE
            self._least = self._position_at(self._run.machine.clock.now - max(SECOND, self._two_commits()) - slack)
            if judge.model.disk_fails and self._failed_at >= 0:
                self._least = min(self._least, self._failed_at)
        if not in_order:
            store.fog |= self._let_go
            store.fog.update(key for end, key in store.cleared if end > self._least)
        makes_room = judge.model.disk_fails or self._run.seed.maxdisk
        self._gone = self._went_since() if makes_room else set()
        if not self._run.seed.disk:
            for key in list(store.keys):
                store.drop(key)
            store.doubts.clear()
            store.fog.clear()
            self._least = self._most = len(store.log)
        judge.model.talks = []

    def _two_commits(self) -> int:
        """Return the nanoseconds of the last commit and of an unfinished one. Changes during them may be lost: a change
        waits for the end of the commit that is going on, and for the next one.
        """
        tiered, now = self._run.process.server.tiered, self._run.machine.clock.now
        if tiered is None:
            return 0
        behind = tiered.behind
        return int(behind._took * SECOND) + (now - int(behind._now.began * SECOND) if behind._now is not None else 0)

    def _went_since(self) -> set[bytes]:
        """Keys whose removal may be on disk already, as it made room: they were deleted, or due."""
        store, now = self._judge.model.store, self._run.machine.clock.unix_ms
        return {key for key, _, cell in store.log[self._least :] if cell is None or 0 < cell.expires <= now}

    def begin(self) -> None:
        """Ask the next process for everything, and compare.

        Also for expired values: their removal may not be on disk, and they count until a lookup.
        """
        store = self._judge.model.store
        every = {*self._told, *store.keys, *store.doubtful(), *store.fog, *(key for key, _, _ in store.log)}
        self._told = {key: [] for key in sorted(every)}
        self._ask()

    def _ask(self) -> None:
        """Ask for keys without a complete result: a client that receives too much may be closed."""
        run, peer = self._run, self._run.peers[0]
        unknown = [key for key, received in self._told.items() if len(received) < len(Found._fields)][:_AT_ONCE]
        if not unknown:
            self._compare()
            return
        if peer.sock is None:
            run._enter(peer)
        for key in unknown:
            self._told[key].clear()
            for words in ((b"GET", key), (b"PEXPIRETIME", key)):
                run.send(peer, 0, words).audit = self._collect
        self.settle(self._ask, check=False)

    def _collect(self, asked: Asked, reply: Any) -> None:
        if not (is_error(reply) and self._judge.model.disk_fails):  # or it is asked again, as often as the disk fails
            self._told[asked.words[1]] += [reply, asked.ran]

    def _compare(self) -> None:
        """Find the moment of the past that is there."""
        judge, store = self._judge, self._judge.model.store
        self._found = {key: Found(*received) for key, received in self._told.items()}
        self._find_moment()
        store.expired = [(store.elapsed(), key, value) for key, value in self._due()]
        store.keys = {key: self._alive(key, store) for key in self._found if self._alive(key, store) is not None}
        self._let_go = set(judge.let_go)
        judge.model.went.clear()  # keys that were due before this process are only now known to be
        store.log.clear()
        store.batches.clear()
        store.late.clear()
        store.cleared.clear()
        store.doubts.clear()
        store.fog.clear()
        judge.boundaries.clear()
        judge.positions.clear()
        judge.acknowledged = 0
        self._failed_at = 0 if judge.model.disk_fails else -1
        self._run.begin_work()

    def _due(self) -> Iterable[tuple[bytes, Value]]:
        """Values that were due when they were not found. The disk may have them; a clock set back shows them."""
        store = self._judge.model.store
        looked = {key: found.at for key, found in self._found.items() if found.value is None}
        cells = [(key, cell) for key, *both in store.log[self._least :] for cell in both]
        cells += [one for doubt in store.doubts for variant in doubt.variants for one in variant.items()]
        cells += store.keys.items()
        overdue = [(key, value) for key, values in self._overdue.items() for value in values]
        overdue += [(key, cell) for key, cell in cells if cell and 0 < cell.expires <= looked.get(key, 0)]
        return dict.fromkeys(overdue)

    def _find_moment(self) -> None:
        judge, store = self._judge, self._judge.model.store
        store.now = self._run.machine.clock.unix_ms
        doubtful = {key: [v.get(key) for d in store.doubts for v in d.variants if key in v] for key in store.doubtful()}
        for key, cells in store.moments_of_late(self._least).items():
            doubtful[key] = [store.keys.get(key), *doubtful.get(key, []), *cells]
        state: dict[bytes, Cell] = dict(store.keys)
        for name, *cells in store.log[self._least :]:
            if name in doubtful:
                doubtful[name] += cells
        for key, options in doubtful.items():
            state[key] = next((cell for cell in options if self._is(key, cell)), options[0])
        wrong = {key for key in self._found if not self._is(key, state.get(key))}
        fewest, boundaries = set(wrong), {self._most, self._least, *judge.boundaries}
        for at in range(self._most, self._least - 1, -1):
            if not wrong and at in boundaries:
                self._check_batches()
                self._believe(state)
                return
            if at in boundaries and len(wrong) < len(fewest):
                fewest = set(wrong)
            if at > self._least:
                key, old, _ = store.log[at - 1]
                if key in doubtful:
                    continue
                state[key] = old
                (wrong.discard if self._is(key, old) else wrong.add)(key)
        shown_ones = [
            f"{key!r} is {self._found[key]!r:.200}, was {state.get(key)!r:.200}" for key in sorted(fewest)[:4]
        ]
        judge.fail(
            f"after a death the store is as it was at no moment from change {self._least}, which was promised, "
            f"to {self._most}, the last:\n  " + "\n  ".join(shown_ones)
        )

    def _check_batches(self) -> None:
        """Check that the first parts of each batch are there, whole, and no other. Others may have changed some."""
        store, unsure = self._judge.model.store, self._judge.model.store.fog | self._judge.let_go | self._let_go
        if self._judge.model.disk_fails or self._run.seed.maxdisk:
            return  # a commit may be done in several
        for end, parts, _ in store.batches:
            others = unsure.union(key for key, _, _ in store.log[end:])
            missing = b""
            for part in parts:
                fits = [
                    (key, *(self._is(key, cell) for cell in cells)) for key, cells in part.items() if key not in others
                ]
                missing = next((key for key, before, after in fits if before and not after), missing)
                there = next(
                    (key for key, before, after in fits if after and not before and self._found[key].value), b""
                )
                if missing and there:
                    self._judge.fail(f"after a death {there!r} of a batch is there, and {missing!r} before it is not")

    def _is(self, key: bytes, cell: Cell) -> bool:
        found = self._found[key]
        if key in self._judge.model.store.fog or key in self._judge.let_go:
            return True
        if found.value is None:
            overdue = self._overdue.get(key, [])  # by the clock of then
            if cell is None or 0 < cell.expires <= found.at or cell in overdue:
                return True
            return key in self._gone or self._may_be_lost(cell)
        if cell is None:  # or it was due then, and is not by the current clock
            return any(self._is(key, value) for value in self._overdue.get(key, []))
        if not agrees(cell.string, found.value):
            return False
        if found.expires == _GONE:
            return 0 < cell.expires <= found.expires_at
        # when a batch reached it, no client may have been notified
        late = _BEGUN_LATE if cell.page and cell.expires else 0
        return 0 <= found.expires - (cell.expires or -1) <= late and not 0 < found.expires <= found.at

    def _may_be_lost(self, cell: Cell) -> bool:
        """Whether bits that have flipped may be the reason that a value is not there."""
        rotted = self._judge.rotted
        return cell is not None and (b"records" in rotted or (b"pieces" in rotted and cell.size >= _MAY_ROT))

    def _believe(self, state: dict[bytes, Cell]) -> None:
        for key, found in self._found.items():
            if found.value is not None and state.get(key) is None:  # it was due, and is not any more
                state[key] = next((value for value in self._overdue.get(key, []) if self._is(key, value)), None)
        self._judge.model.store.keys = {key: cell for key, cell in state.items() if cell is not None}

    def _alive(self, key: bytes, store: Any) -> Any:
        value, _, expires, _ = self._found[key]
        if value is None or expires == _GONE or key in self._judge.let_go:
            return None
        known = self._judge.seen(key, store.keys.get(key), value, expires)
        if known is not None and known.page is not None:
            known = replace(known, checksum=read_page(key, value, 0).checksum)  # see `blob`
        return known and replace(known, expires=max(expires, 0))

    # -- the end ---------------------------------------------------------------------------------------------------

    def final(self) -> None:
        """Engines and tools end, all but one peer leave, and that one has everything removed."""
        run = self._run
        for engine in run.engines:
            engine.close()
        self._since = run.machine.clock.now
        self._wait_for_engines()

    def _wait_for_engines(self) -> None:
        run = self._run
        going = [one for one in (*run.engines, *run.dumpers) if not one.over]
        if going and run.machine.clock.now - self._since > 5 * PATIENCE:
            self._judge.fail(f"{len(going)} engines and tools do not end")
        if going:
            run.machine.later(20 * MS, self._wait_for_engines)
        else:
            self._remove_all()

    def _remove_all(self) -> None:
        run = self._run
        going = any(doubt.pending for doubt in self._judge.model.store.doubts)  # of commands without a reply
        going = going or not self._is_well()  # FLUSHALL would be refused
        if going and run.machine.clock.now - self._since < 5 * PATIENCE:
            run.machine.later(20 * MS, self._remove_all)
            return
        for peer in run.peers[1:]:
            peer.drop()
        last = run.peers[0]
        if last.half or last.talk.silent:
            last.drop()
        if last.sock is None:
            run._enter(last)
        if last.talk.queued is not None:
            run.send(last, 0, (b"DISCARD",))
        run.send(last, 0, (b"FLUSHALL",))
        self.settle(self._leave)

    def _leave(self) -> None:
        self._run.peers[0].drop()
        self._run.machine.later(5_000 * MS, self._check_empty)

    def _check_empty(self) -> None:
        run, judge = self._run, self._judge
        found = {
            **accounts.left(run.process.server),
            "tasks": len(run.process.tasks) - _OWN_TASKS,
            "timers": max(len(run.process.timers) - _OWN_TIMERS, 0),
        }
        if any(found.values()):
            judge.fail(f"all have gone, and there is left: { {name: n for name, n in found.items() if n} }")
        run.finish()


def _of(peer: Peer) -> str:
    asked = [*peer.unanswered, *peer.unrun]
    return f"peer {peer.number}: {shown(asked[0].words) if asked else ''} (stalled {peer.stalled}, {peer.sending} sent)"


def doubt_overdue(run: Run) -> None:
    """The clock will be set back: due keys may have been removed, or may exist, and also return.

    A killed server may leave it on disk, without a record of the removal.
    """
    store = run.judge.model.store
    store.now = run.machine.clock.unix_ms
    store.expire()
    unclear = store.doubtful()
    for key, values in store.overdue().items():
        if key in unclear and key not in store.keys:
            store.settle([key])
            store.fog.add(key)
        elif key not in store.keys:
            store.doubts.append(Doubt([{key: None}, *({key: value} for value in values)]))


def doubt_lifetimes(run: Run, milliseconds: int) -> None:
    """The clock will be set forward: a value whose lifetime has begun is due then. That of a command in steps may begin
    later.
    """
    store = run.judge.model.store
    due = run.machine.clock.unix_ms + milliseconds
    for coming in [doubt.coming for doubt in store.doubts]:
        unclear = [key for key, cell in coming.items() if cell is not None and 0 < cell.expires <= due]
        store.settle(unclear)
        store.fog.update(unclear)
