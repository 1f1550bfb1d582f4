"""Counts and sizes in words, for people."""

from __future__ import annotations


def how_many(count: int, noun: str) -> str:
    """A count and what is counted: "1 block", "12,000 blocks". `noun` takes an s when there are several."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def as_size(nbytes: int) -> str:
    """Bytes in units of 1,024, as a configuration means them, too: "1 byte", "1.5 KiB", "12 GiB"."""
    size, unit = float(nbytes), ""
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return how_many(nbytes, "byte") if not unit else f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"
