"""Counts in words, for people."""

from __future__ import annotations


def how_many(count: int, noun: str) -> str:
    """A count and what is counted: "1 block", "12,000 blocks". `noun` takes an s when there are several."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
