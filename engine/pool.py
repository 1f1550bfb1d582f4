"""The block budget: how many blocks may live in memory at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class PoolExhaustedError(RuntimeError):
    """More blocks were asked for than are free. Nothing was allocated."""


class BlockPool:
    """Hands out block ids, never more than `total_blocks` at once. Thread-safe.

    An id stands for the memory of one :class:`engine.blocks.KVBlock`. Whoever holds a block holds one reference on
    its id and frees it once; agents with a common prefix hold the same block by sharing its id. The id is free
    again when its last holder has freed it.
    """

    def __init__(self, total_blocks: int) -> None:
        if total_blocks < 1:
            raise ValueError(f"a pool has at least 1 block, got {total_blocks}")
        self.total_blocks = total_blocks
        self._free = list(range(total_blocks - 1, -1, -1))
        self._holders: Counter[int] = Counter()  # id -> references; free ids are absent
        self._lock = threading.Lock()

    @property
    def available_blocks(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` ids, each with one reference; all of them or none.

        Raises PoolExhaustedError when fewer are free.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        with self._lock:
            if count > len(self._free):
                raise PoolExhaustedError(
                    f"{count} blocks needed, {len(self._free)} of {self.total_blocks} are free: "
                    "free blocks of idle agents, or make the pool larger"
                )
            ids = [self._free.pop() for _ in range(count)]
            self._holders.update(ids)
        return ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference on each id. Raises ValueError, and takes none, if one of them is not allocated."""
        ids = list(block_ids)
        with self._lock:
            if dead := [i for i in ids if i not in self._holders]:
                raise ValueError(f"blocks {dead} are not allocated")
            self._holders.update(ids)

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference on each id. Raises ValueError, and drops none, if one has too few: a double free."""
        drops = Counter(block_ids)
        with self._lock:
            if dead := [i for i, n in drops.items() if n > self._holders[i]]:
                raise ValueError(f"blocks {dead} are freed more often than they are held")
            self._holders.subtract(drops)
            for i in drops:
                if not self._holders[i]:
                    del self._holders[i]
                    self._free.append(i)
