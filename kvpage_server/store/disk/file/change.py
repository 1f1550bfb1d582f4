"""What can be done to values on disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Write:
    """A value that is to be stored. `digest`: the body's XXH3-64, 0 to have it computed."""

    name: bytes
    meta: bytes
    body: memoryview | bytes
    expires: int = 0
    used: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """A value that is to go."""

    name: bytes


@dataclass(frozen=True, slots=True)
class Retime:
    """A value that is to expire at another time."""

    name: bytes
    expires: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A value that is to be set aside: it is not found any more, and can be looked at."""

    name: bytes


class Clear:
    """Everything is to go."""


Change = Write | Delete | Retime | Quarantine | Clear
