"""Segments of a prompt: neighbouring blocks that one of several servers has, so that long contexts are on all of them.

A prompt's first block is a segment of its own, as very many prompts begin with the same one: what follows it would
otherwise be on one server for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

SEGMENT = 4  # blocks, after the first


def first_of(index: int, together: int) -> int:
    """The first block of the segment that a block is in."""
    return index - (index - 1) % together if index else 0


def tag_of(names: Sequence[str], index: int, together: int) -> str:
    """What stands before the name of a block of this chain in keys: in braces the first of its segment, which has
    `together` blocks; nothing for 0, when there is only one server."""
    return f"{{{names[first_of(index, together)]}}}" if together else ""
