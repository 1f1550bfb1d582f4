"""Digests of what lies in several pieces: of all of it, and of the pages in it."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from typing_extensions import Buffer

from kvpage_server.core.python.memory import Memory
from kvpage_server.page import FIELD_AT, HEADER_SIZE, checksum

BODY_SIZE = slice(FIELD_AT["body_size"], FIELD_AT["body_size"] + 4)
CHECKSUM = slice(FIELD_AT["checksum"], FIELD_AT["checksum"] + 8)


def digest(pieces: Sequence[Buffer]) -> int:
    """XXH3-64 of the pieces as one."""
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.intdigest()


def fill_digests(headers: Buffer, pieces: Sequence[Buffer]) -> None:
    """Write each page's digest into its header. The pages are in the pieces in the order of their headers, each in one.

    Raises ValueError if they are not."""
    (table,) = Memory([headers], writable=True).views()
    left = Memory(pieces).views()
    for start in range(0, len(table), HEADER_SIZE):
        header = table[start : start + HEADER_SIZE]
        size = int.from_bytes(header[BODY_SIZE], "little")
        while left and not left[0]:
            left = left[1:]
        if not left or len(left[0]) < size or len(header) < HEADER_SIZE:
            raise ValueError(MISFIT)
        header[CHECKSUM] = checksum(left[0][:size]).to_bytes(8, "little")
        left[0] = left[0][size:]
    if any(map(len, left)):
        raise ValueError(MISFIT)


MISFIT = "the pieces are not the pages of the headers"
