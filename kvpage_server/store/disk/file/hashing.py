"""Copying and hashing bytes of LMDB's map. They may have to come from the disk, so the GIL is released meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

_HASHED_WITH_GIL = 64 * 1024  # bytes: xxhash releases the GIL for more


def copy(piece: memoryview, into: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(piece, np.uint8))


def digest_of(pieces: Iterable[memoryview]) -> int:
    """The XXH3-64 of bytes that may have to come from the disk."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        if 0 < len(piece) <= _HASHED_WITH_GIL:
            np.frombuffer(piece, np.uint8).max()  # reads it with the GIL released
        digest.update(piece)
    return digest.intdigest()
