"""A map of slots: which of several servers has which of a cluster's 16384 slots.

It is a file in TOML, which people edit. Every server has the same one::

    version = 1

    [[nodes]]
    id = "0f3c0c0b9a5b4c1e8d7a6f5e4d3c2b1a00000001"  # 40 hexadecimal digits; a node never changes its id
    host = "10.0.0.1"
    port = 9221
    slots = ["0-8191"]

Whoever changes the map raises its version.
"""

from __future__ import annotations

import re
import tomllib
from binascii import crc_hqx
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

SLOTS = 16384
_MOST_SHOWN = 3  # ranges in an error


class MapError(ValueError):
    """A map is invalid; the message says what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class MappedNode:
    """A server of the map. Its slots are ranges with both ends included."""

    id: str
    host: str
    port: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class StaticMap:
    """Every slot has one node."""

    version: int
    nodes: tuple[MappedNode, ...]
    owners: tuple[MappedNode, ...]  # by slot

    @property
    def digest(self) -> str:
        """Equal for equal maps."""
        said = sorted((node.id, node.host, node.port, node.ranges) for node in self.nodes)
        return sha256(repr((self.version, said)).encode()).hexdigest()[:16]

    def node(self, name: str) -> MappedNode:
        """The node with this id or address. Raises MapError."""
        for node in self.nodes:
            if name in (node.id, node.address):
                return node
        there = ", ".join(node.address for node in self.nodes)
        raise MapError(f"the map has no node '{name}': cluster-node is an id or one of {there}")

    def follow(self, new: StaticMap) -> bool:
        """Whether a new map differs from this one. Raises MapError if it is older, or differs in the same version."""
        if new.digest == self.digest:
            return False
        if new.version == self.version:
            raise MapError(
                f"it differs from the map in use but has the same version, {self.version}: raise its version"
            )
        if new.version < self.version:
            raise MapError(f"it has version {new.version}, and the map in use has version {self.version}")
        return True


def slot_of(key: bytes) -> int:
    """The slot of a key: the CRC of the part in its first braces, or of the whole key."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start) if start else -1
    return crc_hqx(key[start:end] if end > start else key, 0) % SLOTS


def read_map(path: Path) -> StaticMap:
    """The map in a file. Raises MapError, which names the file; OSError."""
    try:
        return parse_map(path.read_text("utf-8"))
    except ValueError as error:
        raise MapError(f"{path}: {error}") from None


def parse_map(text: str) -> StaticMap:
    """The map in a text. Raises MapError, or ValueError if it is not TOML."""
    try:
        return _map(text)
    except RecursionError:
        raise MapError("lists or tables are nested too deeply; a map is a version and one [[nodes]] or more") from None


def _map(text: str) -> StaticMap:
    said = tomllib.loads(text)
    _check_names("a map", said, {"version", "nodes"})
    version = _integer("version", said["version"], 1, 2**53)
    if not isinstance(said["nodes"], list) or not said["nodes"]:
        raise MapError("nodes must be one [[nodes]] or more")
    nodes = tuple(_node(number, node) for number, node in enumerate(said["nodes"], start=1))
    for what in ("id", "address"):
        name, times = Counter(getattr(node, what) for node in nodes).most_common(1)[0]
        if times > 1:
            raise MapError(f"{times} nodes have the {what} {name}")
    return StaticMap(version, nodes, _owners(nodes))


def _owners(nodes: Iterable[MappedNode]) -> tuple[MappedNode, ...]:
    owners: list[MappedNode | None] = [None] * SLOTS
    for node in nodes:
        for first, last in node.ranges:
            for slot in range(first, last + 1):
                other = owners[slot]
                if other is not None:
                    twice = f"{node.address} twice" if other is node else f"both {other.address} and {node.address}"
                    raise MapError(f"slot {slot} is given to {twice}; each has one node")
                owners[slot] = node
    missing = [*_ranges(slot for slot, owner in enumerate(owners) if owner is None)]
    if missing:
        shown = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in missing[:_MOST_SHOWN])
        more = f" and {len(missing) - _MOST_SHOWN} more ranges" if len(missing) > _MOST_SHOWN else ""
        raise MapError(f"nobody has the slots {shown}{more}; all of 0 to {SLOTS - 1} need a node")
    return tuple(owner for owner in owners if owner is not None)


def _ranges(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The ranges of sorted numbers."""
    for _, run in groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
        found = [slot for _, slot in run]
        yield found[0], found[-1]


def _node(number: int, said: Any) -> MappedNode:
    where = f"node {number}"
    if not isinstance(said, dict):
        raise MapError(f"{where} must be a table, [[nodes]]")
    _check_names(where, said, {"id", "host", "port", "slots"})
    if not isinstance(said["id"], str) or not re.fullmatch(r"[0-9a-f]{40}", said["id"]):
        raise MapError(f"{where}: id must be 40 hexadecimal digits in lower case, got {said['id']!r:.60}")
    if not isinstance(said["host"], str) or not re.fullmatch(r"[0-9A-Za-z.:_-]{1,253}", said["host"]):
        raise MapError(f"{where}: host must be an IP address or a name, got {said['host']!r:.60}")
    port = _integer(f"{where}: port", said["port"], 1, 65535)
    if not isinstance(said["slots"], list):
        raise MapError(f'{where}: slots must be a list such as ["0-5460", 9000], got {said["slots"]!r:.60}')
    ranges = sorted(_range(where, slots) for slots in said["slots"])
    return MappedNode(said["id"], said["host"], port, tuple(ranges))


def _range(where: str, said: Any) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(said)) if type(said) in (int, str) else None
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < SLOTS:
        raise MapError(f'{where}: slots are numbers and ranges of 0 to {SLOTS - 1} such as "0-5460", got {said!r:.60}')
    return first, last


def _integer(name: str, said: Any, low: int, high: int) -> int:
    if type(said) is not int or not low <= said <= high:
        raise MapError(f"{name} must be a whole number between {low} and {high}, got {said!r:.60}")
    return said


def _check_names(where: str, said: dict[str, Any], names: set[str]) -> None:
    if said.keys() != names:
        wrong = [f"lacks {name}" for name in sorted(names - said.keys())]
        wrong += [f"has an unknown {name!r:.60}" for name in sorted(said.keys() - names)]
        raise MapError(f"{where} {', '.join(wrong)}; it has {', '.join(sorted(names))}")
