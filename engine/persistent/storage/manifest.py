"""What is stored of an instance: everything but the bytes of its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import xxhash

from engine.persistent.errors import DamagedError
from engine.persistent.state.table import Entry, Shape

FORMAT = 1


@dataclass
class StoredLane:
    """Where the entries of a lane lie."""

    number: int
    slots: dict[int, int] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)  # not part of the manifest, which has their sum
    shapes: dict[int, Shape] = field(default_factory=dict)  # of entries that can differ in shape
    _runs: list[list[int]] | None = field(default_factory=list)  # None when it has to be found anew

    def enter(self, index: int, slot: int, digest: int, shape: Shape | None) -> None:
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
        """``[start, stop, slot]`` of consecutive entries in the same slot."""
        if self._runs is None:
            self._runs = []
            for index in sorted(self.slots):
                slot = self.slots[index]
                if self._runs and self._runs[-1][1:] == [index, slot]:
                    self._runs[-1][1] += 1
                else:
                    self._runs.append([index, index + 1, slot])
        return self._runs

    def copy(self) -> StoredLane:
        runs = None if self._runs is None else [list(run) for run in self._runs]
        return StoredLane(self.number, dict(self.slots), dict(self.digests), dict(self.shapes), runs)


@dataclass
class StoredTable:
    """A table's lengths, counts and lanes."""

    sizes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lanes: dict[Entry, StoredLane] = field(default_factory=dict)


@dataclass
class Manifest:
    """An instance as it was saved once."""

    fingerprint: int
    token: str = ""  # of the save, no two are alike
    steps: int = 0
    scalars: dict[str, int | str] = field(default_factory=dict)
    tables: dict[str, StoredTable] = field(default_factory=dict)
    next_lane: int = 0
    digest: int = 0  # the sum, modulo 2^64, of the digests of all entries

    def successor(self, token: str, steps: int) -> Manifest:
        """What the next save begins with. Lanes are shared with this one until they are replaced."""
        tables = {
            name: StoredTable(list(table.sizes), list(table.counts), dict(table.lanes))
            for name, table in self.tables.items()
        }
        return Manifest(self.fingerprint, token, steps, dict(self.scalars), tables, self.next_lane, self.digest)

    def dump(self) -> str:
        """The text that is stored: a digest of the rest, and JSON."""
        text = json.dumps(
            {
                "format": FORMAT,
                "fingerprint": f"{self.fingerprint:016x}",
                "token": self.token,
                "steps": self.steps,
                "digest": f"{self.digest:016x}",
                "next_lane": self.next_lane,
                "scalars": self.scalars,
                "tables": {name: _dump_table(table) for name, table in self.tables.items()},
            },
            separators=(",", ":"),
        )
        return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}"

    @classmethod
    def parse(cls, raw: bytes, instance: str) -> Self:
        """What `dump` made. Raises DamagedError for anything else."""
        check, _, text = raw.partition(b" ")
        if xxhash.xxh3_64_hexdigest(text).encode() != check:
            raise DamagedError(f"instance {instance}: its manifest is not what was written")
        try:
            return cls._of(json.loads(text), instance)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"instance {instance}: its manifest makes no sense: {error!r:.80}") from error

    @classmethod
    def _of(cls, stored: Any, instance: str) -> Self:
        if stored["format"] != FORMAT:
            raise DamagedError(f"instance {instance}: format {stored['format']} is not supported, only {FORMAT}")
        return cls(
            int(stored["fingerprint"], 16),
            stored["token"],
            stored["steps"],
            stored["scalars"],
            {name: _parse_table(table) for name, table in stored["tables"].items()},
            stored["next_lane"],
            int(stored["digest"], 16),
        )


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
        slots = {index: slot for start, stop, slot in lane["runs"] for index in range(start, stop)}
        shapes = {index: tuple(shape) for index, shape in lane["shapes"]}
        lanes[tuple(lane["prefix"])] = StoredLane(lane["number"], slots, {}, shapes, lane["runs"])
    return StoredTable(stored["sizes"], stored["counts"], lanes)
