"""The changes that can be made to values on disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Write:
    """Store a value. `digest` is the body's XXH3-64, or 0 to have it computed."""

    name: bytes
    meta: bytes
    body: memoryview | bytes
    expires: int = 0
    used: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    name: bytes


@dataclass(frozen=True, slots=True)
class Retime:
    """Change a value's expiry."""

    name: bytes
    expires: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Set a value aside: it is not found any more, but can be looked at."""

    name: bytes


class Clear:
    """Remove everything."""


Change = Write | Delete | Retime | Quarantine | Clear
