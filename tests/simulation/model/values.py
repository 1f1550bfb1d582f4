"""State of a store in plain Python: keys, their values and expiries; and uncertain ones."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import xxhash

from tests.simulation.model.replies import ANYTHING, blob, one_of

_HEADER = struct.Struct("<4sBBBBIIIIQQQIIQ")
MOST_VARIANTS = 32
SWEPT_WITHIN = 2000  # milliseconds after which nothing that is due is counted any more
FORGOTTEN_WITHIN = 4000  # after which its removal is on disk, too: it is swept, and committed a second later


@dataclass(frozen=True, slots=True)
class Value:
    """A string; or a page's body, and its layer, head, page, kv_type, dtype, rows, columns and ttl.

    `checksum` says whether its header has one; None where nobody knows.
    """

    data: bytes
    expires: int = 0  # unix milliseconds, 0 for never
    page: tuple[int, int, int, int, int, int, int, int] | None = None
    checksum: bool | None = True

    @property
    def size(self) -> int:
        """Bytes of the string."""
        return len(self.data) + (64 if self.page else 0)

    @property
    def string(self) -> Any:
        """Return GET's reply."""
        return self.data if self.page is None else blob(self.header, self.data)

    @property
    def header(self) -> bytes:
        """The 64 bytes before a page's body; but for when it was written."""
        assert self.page is not None
        layer, head, page, kv_type, dtype, rows, columns, ttl = self.page
        digest = xxhash.xxh3_64_intdigest(self.data) if self.checksum else 0
        size = len(self.data)
        return _HEADER.pack(b"KVPG", 2, dtype, kv_type, 0, rows, columns, layer, head, page, 0, ttl, size, 0, digest)


Cell = Value | None
Change = tuple[bytes, Cell, Cell]  # key, before, after
# the number of changes when a batch was begun; its parts: before and after each; the number when each became visible
Batch = tuple[int, list[dict[bytes, tuple[Cell, Cell]]], list[int]]


@dataclass(eq=False)
class Doubt:
    """Keys that are in one of some states together, and nobody knows yet in which."""

    variants: list[dict[bytes, Cell]]
    pending: bool = False  # the first may become true at any moment
    evicted: dict[bytes, Cell] = field(default_factory=dict)  # keys, and their intended values
    rest_of: Doubt | None = None  # changes by others since, and values that will be stored in any case
    still: dict[bytes, Cell] = field(default_factory=dict)
    later: dict[bytes, Cell] = field(default_factory=dict)  # pages of a batch whose parts are not visible yet
    seen: list[int] = field(default_factory=list)  # of the batch: see `Batch`

    @property
    def coming(self) -> dict[bytes, Cell]:
        """Return values that may become true at any moment."""
        if self.rest_of is not None:
            return self.still if self.rest_of.pending else {}
        return self.variants[0] if self.pending else {}


@dataclass
class Store:
    """`keys` has the values. Uncertain ones have the value of the first variant."""

    keys: dict[bytes, Value] = field(default_factory=dict)
    log: list[Change] = field(default_factory=list)  # every change so far
    doubts: list[Doubt] = field(default_factory=list)
    fog: set[bytes] = field(default_factory=set)  # keys of which nothing is known
    batches: list[Batch] = field(default_factory=list)  # that were to become visible in parts
    late: list[tuple[int, bytes, list[Cell]]] = field(default_factory=list)  # see `moments_of_late`
    cleared: list[tuple[int, bytes]] = field(default_factory=list)  # numbers of changes, and keys, see `clear`
    now: int = 0  # unix milliseconds
    changed: Callable[[bytes], None] = lambda key: None
    # due values, with the time of their detection
    expired: list[tuple[int, bytes, Value]] = field(default_factory=list)
    gone: int = 0  # how often a key was found to be due
    due: Counter[bytes] = field(default_factory=Counter)  # the same of each, in the case that is supposed
    sure: bool = True  # whether a noted change is certain
    expires: bool = False  # whether a change is an expiry, which the server may have notified before
    elapsed: Callable[[], int] = lambda: 0  # milliseconds that no one can set back
    paused_until: Callable[[], int] = lambda: 0  # in these milliseconds: no key is swept during a CLIENT PAUSE

    def get(self, key: bytes) -> Cell:
        """A living value."""
        value = self.keys.get(key)
        if value is not None and 0 < value.expires <= self.now:
            self.expired.append((self.elapsed(), key, value))
            self.due[key] += 1
            self.expires = True
            self.gone += self.drop(key)
            self.expires = False
            return None
        return value

    def put(self, key: bytes, value: Value) -> None:
        """Have a value."""
        self.log.append((key, self.get(key), value))
        self.keys[key] = value
        self.changed(key)

    def overdue(self, within: int = FORGOTTEN_WITHIN) -> dict[bytes, list[Value]]:
        """Return values that were due lately, so that the disk may still have one of them, by key."""
        now, paused_until = self.elapsed(), self.paused_until()
        self.expired[:] = [one for one in self.expired if max(one[0], paused_until) > now - FORGOTTEN_WITHIN]
        result: dict[bytes, list[Value]] = {}
        for when, key, value in self.expired:
            if max(when, paused_until) > now - within:
                result.setdefault(key, []).append(value)
        return result

    def lately_expired(self) -> list[bytes]:
        """Keys that the server may not have swept yet."""
        return list(self.overdue(SWEPT_WITHIN))

    def drop(self, key: bytes) -> bool:
        """Have it no more."""
        old = self.keys.pop(key, None)
        if old is not None:
            self.log.append((key, old, None))
            self.changed(key)
        return old is not None

    def forget(self, key: bytes) -> None:
        """Note a key that was removed without a command. A command in steps may still store it."""
        pending = [doubt for doubt in self.doubts if key in doubt.coming]
        for doubt in pending:
            (doubt.rest_of or doubt).evicted[key] = doubt.coming[key]
        self.settle([key])
        self.drop(key)
        if pending:
            self.fog.add(key)

    def retime(self, key: bytes, expires: int) -> None:
        """Have it go at another time."""
        self.put(key, replace(self.keys[key], expires=expires))

    def living(self) -> Iterator[bytes]:
        """Every key."""
        return (key for key in list(self.keys) if self.get(key) is not None)

    def expire(self) -> None:
        """Let all go that is due."""
        for _ in self.living():
            pass

    # -- doubts ----------------------------------------------------------------------------------------------------

    def in_every_case(self, run: Callable[[], Any], keys: Iterable[bytes] | None) -> Any:
        """Return a command's reply in every possible state of `keys`, None for all."""
        asked = None if keys is None else set(keys)
        if self.fog and (asked is None or asked & self.fog):
            self._lose_sight(run, asked)
            return ANYTHING
        doubts = [d for d in self.doubts if asked is None or any(asked & v.keys() for v in d.variants)]
        if not doubts:
            return run()
        many = 1
        for doubt in doubts:
            many *= len(doubt.variants)
        if many > MOST_VARIANTS:
            self._lose_sight(run, asked)
            return ANYTHING
        replies, after, own = [], [], set[bytes]()
        for choice in product(*(doubt.variants for doubt in doubts)):
            with self._supposed(choice) as (log, done):
                replies.append(run())
                after.append((log, choice))
            own |= done
        self._conclude(after, doubts, own)
        return one_of(replies)

    def _lose_sight(self, run: Callable[[], Any], asked: set[bytes] | None) -> None:
        """Too many cases: changed values are unknown, until all values are read again.

        Its changes may depend on unknown values, so it is also run without any of them, and with all of them in their
        first variants, their second ones, and so on.
        """
        unsure = self.doubtful() | self.fog
        choices = [[dict.fromkeys(unsure if asked is None else unsure & asked)]]
        most = max((len(doubt.variants) for doubt in self.doubts), default=0)
        choices += [[doubt.variants[min(i, len(doubt.variants) - 1)] for doubt in self.doubts] for i in range(most)]
        may_change = set[bytes]()
        for choice in choices:
            with self._supposed(choice) as (log, _):
                run()
            may_change |= log.keys()
        start = len(self.log)
        self.sure = False
        run()
        self.sure = True
        changed = {key for key, _, _ in self.log[start:]} | may_change
        self.settle(changed)
        self.fog |= changed

    @contextmanager
    def _supposed(self, choice: Iterable[dict[bytes, Cell]]) -> Iterator[tuple[dict[bytes, Cell], set[bytes]]]:
        """Suppose that state; yield the differences at the end, and the differences that are no expiry.

        All is as before after it.
        """
        before, start, changed, gone = dict(self.keys), len(self.log), self.changed, self.gone
        self.due = Counter()
        self.changed = lambda key: None  # it is known afterwards whether it did
        for variant in choice:
            for key, value in variant.items():
                if value is None:
                    self.keys.pop(key, None)
                else:
                    self.keys[key] = value
        result: dict[bytes, Cell] = {}
        done: set[bytes] = set()
        try:
            yield result, done
        finally:
            result.update({key: self.keys.get(key) for key, _, _ in self.log[start:]})
            changes = Counter(key for key, _, _ in self.log[start:])
            done.update(key for key, times in changes.items() if times > self.due[key])
            del self.log[start:]
            self.keys, self.changed, self.gone = before, changed, gone

    def _conclude(self, after: list[tuple[dict[bytes, Cell], Any]], doubts: list[Doubt], own: set[bytes]) -> None:
        """Continue with a command's effects in each case: certain where all agree, uncertain elsewhere.

        Changes other than its `own` are detected expiries, which need no notification.
        """
        touched = {key for log, _ in after for key in log}
        self.sure = False
        for key in sorted(touched):
            ends: list[Cell] = []
            for log, choice in after:
                end = log[key] if key in log else next((v[key] for v in choice if key in v), self.keys.get(key))
                if end not in ends:
                    ends.append(end)
            pending = [(doubt.rest_of or doubt, doubt.coming[key]) for doubt in doubts if key in doubt.coming]
            for _, value in pending:
                if value not in ends:
                    ends.append(value)
            self.settle([key])
            old, start, gone = self.keys.get(key), len(self.log), self.gone
            self._set(key, ends[0])
            if len(self.log) == start and key in own:
                self.changed(key)  # it was set and removed
            if key not in own:
                self.gone = gone + len(self.log) - start
            elif old is not None and ends[0] is None and 0 < old.expires <= self.now:
                self.gone = gone + 1
            if len(ends) > 1:
                rest = Doubt([{key: end} for end in ends])
                for source, value in pending:
                    if value is not None:
                        rest.rest_of, rest.still = source, {key: value}
                self.doubts.append(rest)
        self.sure = True

    def _set(self, key: bytes, value: Cell) -> None:
        if value is None:
            self.drop(key)
        else:
            self.put(key, value)

    def settle(self, keys: Iterable[bytes]) -> None:
        """End the uncertainty of these keys: `keys` has their values. Their earlier values stay uncertain."""
        for key in keys:
            past = [variant.pop(key) for doubt in self.doubts for variant in doubt.variants if key in variant]
            if past:
                self.late.append((len(self.log) + 1, key, past))
        self.doubts = [doubt for doubt in self.doubts if any(doubt.variants)]

    def note_late(self, start: int, keys: Iterable[bytes]) -> None:
        """Note that changes of these keys from `start` on happened at some moment between then and now."""
        past: dict[bytes, list[Cell]] = {key: [] for key in keys}
        for key, *cells in self.log[start:]:
            if key in past:
                past[key] += cells
        self.late += [(len(self.log), key, cells) for key, cells in past.items()]

    def clear(self, key: bytes) -> None:
        """End the fog around a key: `keys` has its value from now on. The values before stay unknown."""
        if key in self.fog:
            self.fog.discard(key)
            self.cleared.append((len(self.log) + 1, key))

    def moments_of_late(self, least: int) -> dict[bytes, list[Cell]]:
        """Return keys whose values after `least` changes or later are unknown, with their possible values."""
        result: dict[bytes, list[Cell]] = {}
        for end, key, cells in self.late:
            if end > least:
                result.setdefault(key, []).extend(cells)
        return result

    def doubt_checksums(self) -> None:
        """The parameter for checksums was changed: a page that is stored in steps may have one, or none."""
        for doubt in self.doubts:
            for key, cell in [*doubt.coming.items(), *doubt.later.items()]:
                if cell is None or not cell.page:
                    continue
                unsure, states = replace(cell, checksum=None), [*doubt.variants, doubt.still, doubt.later, self.keys]
                for state in states:
                    if state.get(key) is cell:
                        state[key] = unsure

    def options(self) -> dict[bytes, list[Cell]]:
        """Return the keys in doubt with the values that each may have: none are listed where nothing is known."""
        result = dict[bytes, list[Cell]]()
        for key in self.doubtful() | self.fog:
            result[key] = [variant[key] for doubt in self.doubts for variant in doubt.variants if key in variant]
        return result

    def doubtful(self) -> set[bytes]:
        """Keys in doubt."""
        return {key for doubt in self.doubts for variant in doubt.variants for key in variant}


def read_page(key: bytes, data: bytes, expires: int) -> Value:
    """The page that a blob is."""
    _, _, dtype, kv_type, _, rows, columns, layer, head, page, _, ttl, _, _, digest = _HEADER.unpack(data[:64])
    return Value(data[64:], expires, (layer, head, page, kv_type, dtype, rows, columns, ttl), digest != 0)
