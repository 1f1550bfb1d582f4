"""Storage of persistent memory: instances on a page server, and export to safetensors files."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from math import prod
from operator import ge, gt
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
import redis
import xxhash
from numpy.typing import NDArray

from kvpage_server.bounded import batches
from kvpage_server.client import Disconnected, Page, PageClient, Unsupported
from kvpage_server.client.cluster.plan import GONE
from kvpage_server.client.raw_commands import RawCommand, ok, text, up_to
from kvpage_server.page import MAX_HEAD, MAX_KV_TYPE, MAX_LAYER, PageKey
from kvpage_server.system.durable import replacing

from ..tensor_file import Tensor, write
from .errors import ConflictError, DamagedError, StoreError, WrongProgramError
from .graph import named
from .state import MAX_DIM, MEMORY_BYTES, Entry, Layout, Memory, Shape, Table

# -- The stored form of an instance, except the bytes of its tensors ---------------------------------------------------

FORMAT = 1
LANES = (MAX_LAYER + 1) * (MAX_HEAD + 1)  # of an instance
PAIRS = (MAX_KV_TYPE + 1) // 2  # pairs of slots of an entry


@dataclass
class StoredLane:
    """State of a lane on the server: the slot, digest and shape of each entry, by the entry's last index.

    A lane is all entries that have the other indices in common. `number` identifies it within the instance.
    """

    number: int
    slots: dict[int, int] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)  # not part of the manifest, which has their sum
    shapes: dict[int, Shape] = field(default_factory=dict)  # of entries that can differ in shape
    _runs: list[list[int]] | None = field(default_factory=list)  # the result of `runs`; None if it is outdated

    def enter(self, index: int, slot: int, digest: int, shape: Shape | None) -> None:
        """Add or replace an entry."""
        runs = self._runs
        if runs and index not in self.slots and runs[-1][1:] == [index, slot]:
            runs[-1][1] += 1
        else:
            self._runs = None
        self.slots[index], self.digests[index] = slot, digest
        if shape is not None:
            self.shapes[index] = shape

    def forget(self, index: int) -> None:
        del self.slots[index], self.digests[index]
        self.shapes.pop(index, None)
        self._runs = None

    def runs(self) -> list[list[int]]:
        """Return ``[start, stop, slot]`` for each run of consecutive entries in the same slot."""
        if self._runs is None:
            self._runs = []
            for index in sorted(self.slots):
                slot = self.slots[index]
                if self._runs and self._runs[-1][1:] == [index, slot]:
                    self._runs[-1][1] += 1
                else:
                    self._runs.append([index, index + 1, slot])
        return self._runs

    def stored(self) -> Iterator[tuple[int, int]]:
        """Yield the index and slot of each entry in order. A short manifest may name more than memory has room for."""
        return ((index, slot) for start, stop, slot in self.runs() for index in range(start, stop))

    def copy(self) -> StoredLane:
        runs = None if self._runs is None else [list(run) for run in self._runs]
        return StoredLane(self.number, dict(self.slots), dict(self.digests), dict(self.shapes), runs)


@dataclass
class StoredTable:
    """A table on the server: its lengths, counts and lanes."""

    sizes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lanes: dict[Entry, StoredLane] = field(default_factory=dict)


@dataclass
class Manifest:
    """State of an instance at one save, except the bytes of its tensors."""

    fingerprint: int
    token: str = ""  # random, different for each save
    steps: int = 0
    scalars: dict[str, int | str] = field(default_factory=dict)
    tables: dict[str, StoredTable] = field(default_factory=dict)
    next_lane: int = 0
    digest: int = 0  # the sum, modulo 2^64, of the digests of all entries
    pair: int = 0  # of the slots that the save has written to
    birth: str = ""  # random, of an instance: another one that is made under its name has other pages

    def successor(self, token: str, steps: int, pair: int) -> Manifest:
        """Return a copy for the next save, with a new `token`. It shares the lanes of this manifest, which therefore
        have to be copied before a change.
        """
        tables = {
            name: StoredTable(list(table.sizes), list(table.counts), dict(table.lanes))
            for name, table in self.tables.items()
        }
        scalars, digest = dict(self.scalars), self.digest
        return Manifest(self.fingerprint, token, steps, scalars, tables, self.next_lane, digest, pair, self.birth)

    def dump(self) -> str:
        """Return the text to store: a digest of the JSON, followed by the JSON."""
        text = json.dumps(
            {
                "format": FORMAT,
                "fingerprint": f"{self.fingerprint:016x}",
                "token": self.token,
                "steps": self.steps,
                "digest": f"{self.digest:016x}",
                "next_lane": self.next_lane,
                "pair": self.pair,
                "birth": self.birth,
                "scalars": self.scalars,
                "tables": {name: _dump_table(table) for name, table in self.tables.items()},
            },
            separators=(",", ":"),
        )
        return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}"

    @classmethod
    def parse(cls, raw: bytes, instance: str) -> Self:
        """Parse a text from `dump`. Raises DamagedError for any other text. `instance` is the name for the error."""
        check, _, text = raw.partition(b" ")
        if xxhash.xxh3_64_hexdigest(text).encode() != check:
            raise DamagedError(f"instance {instance}: its manifest is not what was written")
        try:
            return cls._of(json.loads(text), instance)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DamagedError(f"instance {instance}: its manifest makes no sense: {error!r:.80}") from error

    @classmethod
    def _of(cls, stored: Any, instance: str) -> Self:
        if stored["format"] != FORMAT:
            raise DamagedError(f"instance {instance}: format {stored['format']} is not supported, only {FORMAT}")
        return cls(
            int(stored["fingerprint"], 16),
            str(stored["token"]),
            _count(stored["steps"], 2**63),
            dict(stored["scalars"]),
            {name: _parse_table(table) for name, table in stored["tables"].items()},
            _count(stored["next_lane"], LANES),
            int(stored["digest"], 16),
            _count(stored.get("pair", 0), PAIRS - 1),  # earlier versions used only the first
            _birth(stored.get("birth", "")),  # they had none
        )

    def check(self, memory: Memory) -> None:
        """Raise ValueError if this is no state of the variables in `memory`."""
        if self.tables.keys() != memory.tables.keys() or self.scalars.keys() != memory.scalars.keys():
            raise ValueError("it has other variables")
        for name, scalar in memory.scalars.items():
            _check_scalar(name, self.scalars[name], scalar.layout)
        for name, table in memory.tables.items():
            _check_table(self.tables[name], table.layout)


def _dump_table(table: StoredTable) -> dict[str, Any]:
    return {
        "sizes": table.sizes,
        "counts": table.counts,
        "lanes": [
            {"number": lane.number, "prefix": list(prefix), "runs": lane.runs(), "shapes": list(lane.shapes.items())}
            for prefix, lane in table.lanes.items()
        ],
    }


def _parse_table(stored: Mapping[str, Any]) -> StoredTable:
    lanes = {}
    for lane in stored["lanes"]:
        end = 0
        for start, stop, slot in lane["runs"]:
            if not end <= _count(start) < _count(stop) or _count(slot) >= 2 * PAIRS:
                raise ValueError(f"{start}, {stop}, {slot} are no entries after {end}")
            end = stop
        shapes = {_count(index): _counts(shape) for index, shape in lane["shapes"]}
        lanes[_counts(lane["prefix"])] = StoredLane(_count(lane["number"], LANES - 1), {}, {}, shapes, lane["runs"])
    return StoredTable([*_counts(stored["sizes"])], [*_counts(stored["counts"])], lanes)


def _birth(value: Any) -> str:
    if type(value) is not str or not _BIRTH.match(value):
        raise ValueError(f"{value!r:.40} is no birth")
    return value


def _count(value: Any, most: int = MAX_DIM) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no integer from 0 to {most}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _check_scalar(name: str, value: Any, layout: Layout) -> None:
    dtype = layout.dtype
    fits = (
        type(value) is str and len(bytes.fromhex(value)) == dtype.itemsize
        if dtype.is_float
        else type(value) is int and dtype.literal(value) is not None
    )
    if not fits:
        raise ValueError(f"{value!r:.40} is no {dtype.name}, as {name} is")


def _check_table(stored: StoredTable, layout: Layout) -> None:
    """Raise ValueError for lengths, entries or shapes that a table of this layout cannot have."""
    name, rank = layout.name, len(layout.indices)
    if (len(stored.sizes), len(stored.counts)) != (rank, len(layout.auto)):
        raise ValueError(f"{name} has other indices")
    *before, last = stored.sizes or [1]  # a tensor without indices is entry 0
    grown = [size + count for size, count in zip_longest(layout.shape, stored.counts, fillvalue=0)]
    for prefix, lane in stored.lanes.items():
        if len(prefix) != len(before) or any(map(ge, prefix, before)) or any(stop > last for _, stop, _ in lane.runs()):
            raise ValueError(f"{name} has no entries {list(prefix)}")
        for shape in lane.shapes.values():
            if not layout.auto or len(shape) != len(grown) or any(map(gt, shape, grown)):
                raise ValueError(f"an entry of {name} has the shape {list(shape)}")
    if any(size > MAX_DIM for size in grown) or prod(grown) * layout.dtype.itemsize > MEMORY_BYTES:
        raise ValueError(f"a tensor of {name} has the shape {grown}")


# -- Instances on a page server ----------------------------------------------------------------------------------------
#
# Keys::
#
#     kv:{fingerprint}.{instance}.{birth}:{layer}:{head}:{index}:{slot}   one entry of a table, or one tensor
#     persistent:{instance}                                               the manifest, written last
#
# The birth is random. Thus, a deletion that is executed late spares the pages of a new instance with the same name.
#
# A lane is all entries that have all indices but the last in common. Layer and head of its pages are the number of the
# lane: ``layer * 65536 + head``. A save writes an entry to a slot that the manifest does not name. So the last saved
# state stays readable until the manifest is replaced, and a crash in between only leaves pages that nothing refers to.
# Replaced pages are deleted after the manifest is written.
#
# An entry has three pairs of slots. The saves of a process use the two slots of one pair in turns. A request that was
# not answered may be executed late, so the process uses the next pair after it. A process that resumes the instance
# begins with the pair after that of the last save: the process that wrote this save may still be running.
#
# The manifest has the fingerprint, the scalars, the lengths and counts, the slot of each entry, and a digest of all
# entries. It is replaced only if it is still the one last read or written here, so two processes cannot both
# continue from the same state. The data must match the manifest's digest, otherwise an error is raised.

CHUNK_BYTES = 8 << 20  # of pages in one command, at most, except for a single larger page
KEY_BYTES = 256  # of an entry's key and Python objects, about
TRIES = 10  # attempts to read an instance that another process saves meanwhile
_INSTANCE = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_BIRTH = re.compile(r"[0-9a-f]{0,16}\Z")


_Received = tuple[str, Entry, mx.array]  # the name of the table, the first entry, and tensors [n, ...]


@dataclass(frozen=True, slots=True)
class SavedPages:
    """Number and total bytes of the pages that a save has written."""

    pages: int
    nbytes: int  # of pages


@dataclass
class _Version:
    """Changes of one lane in a save: entries with new slots, and removed entries, by their last index."""

    slots: dict[int, int] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)  # of tables whose entries can differ in shape
    gone: set[int] = field(default_factory=set)


class PersistentStore:
    """Store of instances on one page server, on several, or on a cluster. The simulators of one thread can share it."""

    def __init__(self, url: str, *, deadline: float = 30.0) -> None:
        """Create the client. `url` is as for PageClient, `deadline` is in seconds, for each call.

        Raises ValueError for an invalid URL.
        """
        self.server = PageClient(url, deadline=deadline)

    def close(self) -> None:
        self.server.close()

    def instance(self, name: str, fingerprint: int) -> StoredInstance:
        """Return the instance with a name, whether it is stored or not. Raises StoreError for an invalid name."""
        if not _INSTANCE.match(name):
            raise StoreError(f"an instance's name is 1 to 128 of A-Z a-z 0-9 . _ -, got {name!r}")
        return StoredInstance(self, name, fingerprint)

    def manifest(self, instance: str) -> Manifest | None:
        """Return the stored manifest of an instance; None if there is none. Raises DamagedError if it is damaged."""
        (raw,) = self.server.ask([_read(instance)])
        return None if raw is None else Manifest.parse(raw, instance)

    def delete(self, instance: str) -> bool:
        """Delete an instance. Return whether it was stored. If its manifest is damaged, its pages are left to eviction.

        Raises redis.RedisError if the server does not answer: then the instance may still be stored.
        """
        deleted: bytes | None = None

        def remove(raw: bytes | None) -> list[RawCommand]:
            nonlocal deleted
            deleted = raw
            return [] if raw is None else [RawCommand(["DEL", _key(instance)], up_to(1))]

        self.server.transaction([_key(instance)], _read(instance), remove)
        try:
            manifest = None if deleted is None else Manifest.parse(deleted, instance)
        except DamagedError:
            manifest = None
        if manifest is not None:
            request = _request(instance, manifest)
            try:
                self.server.delete_request(request)
            except Unsupported:  # a Redis or a cluster, which cannot list the pages of a request
                for keys in batches(((key, KEY_BYTES) for key in _every_page(request, manifest)), CHUNK_BYTES):
                    self.server.delete(keys)
        return deleted is not None

    def receive(self, keys: Sequence[PageKey], into: Sequence[Any]) -> list[bool]:
        """Receive pages into buffers. Return for each page whether it is stored.

        Raises Disconnected if a server that has some of the pages does not answer.
        """
        before = self.server.misses[GONE]
        found = self.server.mget_into(keys, into)
        if self.server.misses[GONE] > before:
            raise Disconnected("a server that has pages of the instance does not answer")
        return found


class StoredInstance:
    """One instance on the server, with the manifest that this process has last read or written."""

    def __init__(self, store: PersistentStore, name: str, fingerprint: int) -> None:
        self.name = name
        self._store = store
        self._fingerprint = fingerprint
        # The last manifest that was read or written; its token is "" for none.
        self._known = Manifest(fingerprint, birth=secrets.token_hex(8))
        self._request = _request(name, self._known)
        # A manifest whose write was not confirmed, so it may be stored, and the pages that no manifest refers to then.
        self._attempt: tuple[Manifest, list[PageKey]] | None = None
        self._stale: list[PageKey] = []  # pages that no manifest refers to, to delete
        self._pair = 0  # of the slots that the next save writes to

    def load(self, memory: Memory) -> int | None:
        """Load the instance into new persistent memory. Return the number of its steps, or None if it is not stored.

        Raises WrongProgramError, DamagedError, and ConflictError if another process saves it faster than it can be
        read.
        """
        for _ in range(TRIES):
            manifest = self._store.manifest(self.name)
            if manifest is None:
                return None
            self._check(manifest)
            try:
                manifest.check(memory)
            except ValueError as error:
                raise DamagedError(f"instance {self.name}: its manifest makes no sense: {error}") from error
            self._request = _request(self.name, manifest)
            try:
                received = list(self._receive(memory, manifest))
            except DamagedError:
                now = self._store.manifest(self.name)
                if now is None or now.token == manifest.token:
                    raise
                continue  # another process saved it during the read
            self._fill(memory, manifest, received)
            self._known, self._pair = manifest, (manifest.pair + 1) % PAIRS
            return manifest.steps
        raise ConflictError(f"instance {self.name} is being saved by somebody else all the time")

    def save(self, memory: Memory, steps: int) -> SavedPages:
        """Write the changed entries, then the manifest, then delete the replaced entries. Return the written pages.

        Raises WrongProgramError or ConflictError if the stored manifest is not the one that was last read or written
        here.
        """
        self._settle()
        versions: dict[tuple[str, Entry], _Version] = {}
        written = [page for name, table in memory.tables.items() for page in self._changed(name, table, versions)]
        keys = {page.key for page in written}
        stale = [key for key in self._stale if key not in keys]
        self._stale = [*stale, *keys]
        try:
            for run in batches(((page, memoryview(page.body).nbytes) for page in written), CHUNK_BYTES):
                self._store.server.mset(run)
            manifest = self._known.successor(secrets.token_hex(8), steps, self._pair)
            manifest.scalars = {name: _scalar(scalar.read()) for name, scalar in memory.scalars.items()}
            for name, table in memory.tables.items():
                manifest.tables[name].sizes, manifest.tables[name].counts = list(table.sizes), list(table.counts)
            for (name, prefix), version in versions.items():
                stale += self._apply(manifest, manifest.tables[name], prefix, version)
            self._attempt = manifest, stale
            self._publish(manifest)
        except BaseException:
            self._pair = (self._pair + 1) % PAIRS
            raise
        self._known, self._stale, self._attempt = manifest, stale, None
        for table in memory.tables.values():
            table.dirty.clear()
        try:
            self._store.server.delete(stale)
            self._stale = []
        except redis.RedisError:  # the next save deletes these pages
            self._pair = (self._pair + 1) % PAIRS
        return SavedPages(len(written), sum(memoryview(page.body).nbytes for page in written))

    # -- writing -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Check that the stored manifest is the last one that this process has read or written.

        A write whose reply was lost counts as well, if its manifest is the stored one.

        Raises WrongProgramError or ConflictError.
        """
        stored = self._store.manifest(self.name)
        if stored is not None:
            self._check(stored)
        token = stored.token if stored is not None else ""
        if self._attempt is not None and token == self._attempt[0].token:
            self._known, self._stale = self._attempt
        self._attempt = None
        if token != self._known.token:
            raise self._conflict(token)

    def _changed(self, name: str, table: Table, versions: dict[tuple[str, Entry], _Version]) -> Iterator[Page]:
        """Yield the pages of a table that a save has to write. Add their slots to `versions`, by table and lane."""
        stored = self._known.tables.setdefault(name, StoredTable())
        for entries, tensors in table.stored_runs(table.dirty):
            bodies = [None] * len(entries) if tensors is None else _bodies(tensors)
            for entry, body in zip(entries, bodies, strict=True):
                prefix, index = _place(entry)
                version = versions.setdefault((name, prefix), _Version())
                if body is None or tensors is None:
                    version.gone.add(index)
                    continue
                digest = _digest(name, entry, body)
                lane = stored.lanes.get(prefix)
                if lane is not None and lane.digests.get(index) == digest:
                    continue  # the stored content is the same
                slot = 2 * self._pair
                slot += lane is not None and lane.slots.get(index) == slot
                version.slots[index], version.digests[index] = slot, digest
                if table.layout.auto:
                    version.shapes[index] = tensors.shape[1:]
                key = self._page_key(self._number(stored, prefix), index, slot)
                if len(body):
                    yield Page(key, body, table.layout.dtype.page, *_matrix(table.layout, tensors.shape[1:]))

    def _number(self, stored: StoredTable, prefix: Entry) -> int:
        lane = stored.lanes.get(prefix)
        if lane is None:
            lane = stored.lanes[prefix] = StoredLane(self._known.next_lane)
            self._known.next_lane += 1
        return lane.number

    def _apply(self, manifest: Manifest, table: StoredTable, prefix: Entry, version: _Version) -> list[PageKey]:
        """Apply the changes of a lane to a manifest. Return the keys of the replaced pages."""
        if prefix not in table.lanes:
            return []
        lane = table.lanes[prefix] = table.lanes[prefix].copy()
        stale = []
        for index in [*version.slots, *version.gone]:
            if index in lane.slots:
                stale.append(self._page_key(lane.number, index, lane.slots[index]))
                manifest.digest -= lane.digests[index]
                lane.forget(index)
        for index, slot in version.slots.items():
            lane.enter(index, slot, version.digests[index], version.shapes.get(index))
            manifest.digest += version.digests[index]
        manifest.digest %= 2**64
        if not lane.slots:
            del table.lanes[prefix]
        return stale

    def _publish(self, manifest: Manifest) -> None:
        """Replace the stored manifest in a transaction.

        Raises ConflictError if it is not the one that was last read or written here.
        """

        def replace(raw: bytes | None) -> list[RawCommand]:
            token = Manifest.parse(raw, self.name).token if raw is not None else ""
            if token not in (self._known.token, manifest.token):  # the latter if an earlier attempt was successful
                raise self._conflict(token)
            return [RawCommand(["SET", _key(self.name), manifest.dump()], ok)]

        self._store.server.transaction([_key(self.name)], _read(self.name), replace)

    def _conflict(self, token: str) -> ConflictError:
        """Return the error for a stored manifest with another token than the known one; "" if none is stored."""
        known = "was saved by somebody else" if token else "was deleted"
        return ConflictError(f"instance {self.name} {known if self._known.token else 'is stored already: resume it'}")

    # -- reading -------------------------------------------------------------------------------------------------------

    def _check(self, manifest: Manifest) -> None:
        if manifest.fingerprint != self._fingerprint:
            raise WrongProgramError(
                f"instance {self.name} was made by program {manifest.fingerprint:016x}, this is "
                f"{self._fingerprint:016x}: another graph, other sizes or another model"
            )

    def _receive(self, memory: Memory, manifest: Manifest) -> Iterator[_Received]:
        """Yield all tensors of the instance, in runs of entries.

        Raises DamagedError if a page is missing or, after the last one, if the digest of all entries does not match.
        """
        digest = 0
        for name, stored in manifest.tables.items():
            layout = memory.tables[name].layout
            for prefix, lane in stored.lanes.items():
                for run, shape in _runs(lane, layout):
                    rows = np.empty((len(run), prod(shape) * layout.dtype.itemsize), np.uint8)
                    self._receive_rows(name, prefix, lane, run, rows)
                    for (index, slot), row in zip(run, rows, strict=True):
                        lane.slots[index] = slot
                        lane.digests[index] = _digest(name, _entry(layout, prefix, index), row)
                        digest += lane.digests[index]
                    yield name, _entry(layout, prefix, run[0][0]), _tensors(rows, layout, shape)
        if digest % 2**64 != manifest.digest:
            raise DamagedError(f"instance {self.name}: its pages are not those that its manifest was written for")

    def _receive_rows(
        self, name: str, prefix: Entry, lane: StoredLane, run: Sequence[tuple[int, int]], rows: Any
    ) -> None:
        if not rows.size:
            return
        found = self._store.receive([self._page_key(lane.number, *entry) for entry in run], list(rows))
        if not all(found):
            lost = [*prefix, run[found.index(False)][0]]
            raise DamagedError(f"instance {self.name}: the page of {name}{lost} is gone, or not what was written")

    def _fill(self, memory: Memory, manifest: Manifest, received: list[_Received]) -> None:
        for name, stored in manifest.tables.items():
            memory.tables[name].load_lengths(stored.sizes, stored.counts)
        for name, first, tensors in received:
            memory.tables[name].load(first, tensors)
        for name, value in manifest.scalars.items():
            scalar = memory.scalars[name]
            scalar.load(value if isinstance(value, int) else _float(value, scalar.layout))

    def _page_key(self, lane: int, index: int, slot: int) -> PageKey:
        return _page_key(self._request, lane, index, slot)


def _read(instance: str) -> RawCommand:
    return RawCommand(["GET", _key(instance)], text)


def _key(instance: str) -> str:
    return f"persistent:{instance}"


def _request(instance: str, manifest: Manifest) -> bytes:
    name = f"{manifest.fingerprint:016x}.{instance}"
    return (f"{name}.{manifest.birth}" if manifest.birth else name).encode()


def _page_key(request: bytes, lane: int, index: int, slot: int) -> PageKey:
    layer, head = divmod(lane, MAX_HEAD + 1)
    return PageKey(request, layer, head, index, slot)


def _every_page(request: bytes, manifest: Manifest) -> Iterator[PageKey]:
    """Yield the keys of all slots of every entry, because interrupted saves may have written the unused ones."""
    for table in manifest.tables.values():
        for lane in table.lanes.values():
            for index, _ in lane.stored():
                yield from (_page_key(request, lane.number, index, slot) for slot in range(2 * PAIRS))


def _place(entry: Entry) -> tuple[Entry, int]:
    """Return the lane of an entry, which is its indices but the last, and the last index. A tensor without indices is
    entry 0 of the lane ().
    """
    return (entry[:-1], entry[-1]) if entry else ((), 0)


def _entry(layout: Layout, prefix: Entry, index: int) -> Entry:
    return (*prefix, index) if layout.indices else ()


def _runs(lane: StoredLane, layout: Layout) -> Iterator[tuple[list[tuple[int, int]], Shape]]:
    """Group a lane's entries into runs of consecutive indices with the same shape, of at most CHUNK_BYTES. Yield the
    indices with their slots, and the shape.
    """
    entries = enumerate(lane.stored())
    for (_, shape), run in groupby(entries, lambda at: (at[1][0] - at[0], lane.shapes.get(at[1][0], layout.shape))):
        sized = ((entry, prod(shape) * layout.dtype.itemsize + KEY_BYTES) for _, entry in run)
        yield from ((some, shape) for some in batches(sized, CHUNK_BYTES))


def _bodies(tensors: mx.array) -> list[Any]:
    """Return the bytes of each tensor of ``[n, ...]``."""
    if not tensors.size:
        return [memoryview(b"")] * len(tensors)
    flat = mx.contiguous(tensors).reshape(len(tensors), -1)
    return list(np.asarray(flat.view(mx.uint8)))


def _tensors(rows: Any, layout: Layout, shape: Shape) -> mx.array:
    """Return the tensors ``[n, *shape]`` with the bytes ``rows``, a uint8 array ``[n, bytes]``."""
    if not rows.size:
        return mx.zeros((len(rows), *shape), dtype=layout.dtype.mlx)
    return mx.array(rows.reshape(-1)).view(layout.dtype.mlx).reshape(len(rows), *shape)


def _matrix(layout: Layout, shape: Shape) -> tuple[int, int]:
    """Return the number of rows, and of elements in a row, for a page's header.

    If the dtype is stored as bytes, the elements are bytes.
    """
    width = shape[-1] if shape else 1
    elements = layout.dtype.itemsize // layout.dtype.page.itemsize
    return prod(shape) // width, width * elements


def _digest(name: str, entry: Entry, body: Any) -> int:
    digest = xxhash.xxh3_64(f"{name}{list(entry)}".encode())
    digest.update(body)
    return digest.intdigest()


def _scalar(value: mx.array) -> int | str:
    """Return a scalar for the manifest: an integer, or the bytes of a float in hexadecimal, which are exact."""
    if value.dtype in (mx.float16, mx.bfloat16, mx.float32, mx.float64):
        return bytes(np.asarray(value.reshape(-1).view(mx.uint8))).hex()
    return int(value.item())  # type: ignore[arg-type]


def _float(text: str, layout: Layout) -> mx.array:
    return mx.array(np.frombuffer(bytes.fromhex(text), np.uint8)).view(layout.dtype.mlx).reshape(())


# -- Persistent memory as a safetensors file, for any tool -------------------------------------------------------------


def body(array: mx.array) -> NDArray[np.uint8]:
    """Return an array's bytes, in row-major order."""
    flat = mx.contiguous(array).reshape(-1)
    return np.asarray(flat.view(mx.uint8)) if flat.size else np.empty(0, np.uint8)


def export(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata to a safetensors file, which appears complete or not at all. Raises OSError."""
    described = {name: Tensor(named(array.dtype).upper(), array.shape) for name, array in tensors.items()}
    bodies: list[NDArray[Any]] = [body(array) for array in tensors.values()]
    with replacing(path) as file:
        write(file, described, metadata, bodies)
