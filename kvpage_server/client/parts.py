"""A batch cut into parts, one for each connection that it may use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

_LEAST_BYTES = 1024 * 1024  # bytes that are worth a connection of their own


def cut(sizes: Sequence[int], connections: int) -> list[slice]:
    """Parts of neighbours with about the same number of bytes. `sizes` has the bytes of each item."""
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    parts = max(1, min(connections, total // _LEAST_BYTES))
    bounds = [0, *(bisect_right(ends, total * i // parts) for i in range(1, parts)), len(ends)]
    return [slice(start, stop) for start, stop in pairwise(bounds) if start < stop]
