"""Segments of a prompt. A segment is a few neighbouring blocks that are kept by the same server. So a long context is
spread over all servers.

The first block of a prompt is a segment by itself. Very many prompts begin with the same block, and otherwise the
blocks after it would be on one server for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

SEGMENT = 4  # blocks, after the first


def first_of(index: int, together: int) -> int:
    """The first block of the segment that has block `index`."""
    return index - (index - 1) % together if index else 0


def tag_of(names: Sequence[str], index: int, together: int) -> str:
    """The tag before the name of block `index` in keys: the name of the first block of its segment, in braces. A
    segment has `together` blocks; 0 means that there is only one server, and no tag."""
    return f"{{{names[first_of(index, together)]}}}" if together else ""
