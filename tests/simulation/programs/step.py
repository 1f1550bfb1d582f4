"""A step of a program, and its permitted peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.simulation.model.model import Words

MS = 1_000_000  # nanoseconds
PEERS = 5  # clients of the server
TENANTS = (3, 4)  # peers that are somebody else than the default user, where there are tenants
NO_TENANTS = 3  # the first peers, with all rights
LISTENERS = (1, 2)  # peers that listen to channels; the others may always say everything
CHANNELS = (b"news", b"art")


@dataclass(frozen=True)
class Step:
    """One thing that happens, `gap` nanoseconds after the one before. `peer` is -1 where it is the world's."""

    number: int
    gap: int
    kind: str
    peer: int = -1
    words: Words = ()
    extra: dict[str, Any] = field(default_factory=dict)


def name_of(peer: int) -> bytes:
    """Return the placeholder of a peer's connection id, which is unknown before it is connected."""
    return b"@%d" % peer
