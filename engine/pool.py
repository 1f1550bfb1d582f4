"""The block budget: how many blocks, and how many bytes of them, may live in memory at once, and who holds them."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

UNLIMITED = sys.maxsize


class PoolExhaustedError(RuntimeError):
    """More was asked for than is free. Nothing was allocated."""


class LeakError(RuntimeError):
    """Blocks are held that should not be; the message says which, by whom and for how long."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One holder's claim on one block."""

    block_id: int
    agent_id: str  # "" for a holder that gave no name
    since: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Holding:
    """What one holder has. What it shares with others counts in full for each of them."""

    blocks: int
    nbytes: int
    since: float  # time.monotonic() of its oldest reference


@dataclass(slots=True)
class _Block:
    nbytes: int
    references: list[Reference] = field(default_factory=list)  # oldest first, never empty


class BlockPool:
    """Hands out block ids, never more than `total_blocks`, nor more than `total_bytes` with them, at once. Thread-safe.

    An id stands for the memory of one :class:`engine.memory.blocks.KVBlock`. Whoever holds a block holds one reference
    on its id and frees it once; agents with a common prefix hold the same block by sharing its id. The id is free again
    when its last holder has freed it.

    A block's bytes are what was promised for it when it was allocated, until `settle` says what it really takes.
    """

    def __init__(self, total_blocks: int = UNLIMITED, *, total_bytes: int = UNLIMITED) -> None:
        _check_limits(total_blocks, total_bytes)
        self.total_blocks = total_blocks
        self.total_bytes = total_bytes
        self._blocks: dict[int, _Block] = {}  # those that are held
        self._bytes = 0  # their sum
        self._returned: list[int] = []  # ids that were held once; with those held, all below the sum of both counts
        self._lock = threading.Lock()

    @property
    def used_blocks(self) -> int:
        return len(self._blocks)

    @property
    def used_bytes(self) -> int:
        """What they take, or were promised."""
        return self._bytes

    @property
    def available_blocks(self) -> int:
        """Blocks that `allocate` can still hand out, if they aren't too large."""
        return max(0, self.total_blocks - len(self._blocks))

    @property
    def available_bytes(self) -> int:
        """Bytes that `allocate` can still promise."""
        return max(0, self.total_bytes - self._bytes)

    def allocate(self, count: int, agent_id: str = "", nbytes: int = 0) -> list[int]:
        """`count` ids, each with one reference of `agent_id`'s, for `nbytes` in all; all of them or none.

        Raises PoolExhaustedError when fewer blocks or bytes are free.
        """
        if count < 0 or nbytes < 0:
            raise ValueError(f"count and nbytes must be at least 0, got {count} and {nbytes}")
        if not count:
            return []
        with self._lock:
            _check_room(count, len(self._blocks), self.total_blocks, "blocks")
            _check_room(nbytes, self._bytes, self.total_bytes, "bytes")
            ids = [self._returned.pop() if self._returned else len(self._blocks) + i for i in range(count)]
            now = time.monotonic()
            for i, block_id in enumerate(ids):
                share = (nbytes * (i + 1)) // count - (nbytes * i) // count
                self._blocks[block_id] = _Block(share, [Reference(block_id, agent_id, now)])
            self._bytes += nbytes
        return ids

    def settle(self, nbytes: Mapping[int, int]) -> None:
        """Say what blocks really take, by id: what was promised for them together and isn't needed is free again.

        Raises ValueError for an id that is not allocated, and PoolExhaustedError when they take more than they were
        promised and as much is not free; nothing is then changed.
        """
        if wrong := [block_id for block_id, size in nbytes.items() if size < 0]:
            raise ValueError(f"blocks {wrong} cannot take less than 0 bytes")
        with self._lock:
            self._check_held(nbytes)
            more = sum(nbytes.values()) - sum(self._blocks[block_id].nbytes for block_id in nbytes)
            if more > 0:
                _check_room(more, self._bytes, self.total_bytes, "bytes")
            for block_id, size in nbytes.items():
                self._blocks[block_id].nbytes = size
            self._bytes += more

    def share(self, block_ids: Iterable[int], agent_id: str = "") -> None:
        """Take one more reference, `agent_id`'s, on each id. Raises ValueError, and takes none, if one of them is not
        allocated."""
        ids = list(block_ids)
        with self._lock:
            self._check_held(ids)
            now = time.monotonic()
            for block_id in ids:
                self._blocks[block_id].references.append(Reference(block_id, agent_id, now))

    def free(self, block_ids: Iterable[int], agent_id: str | None = None) -> None:
        """Drop one reference on each id: of `agent_id`'s, or without a name the oldest.

        Raises ValueError, and drops none, if one has too few: a double free.
        """
        drops = Counter(block_ids)
        with self._lock:
            if dead := [block_id for block_id, n in drops.items() if n > len(self._references(block_id, agent_id))]:
                whose = f" by {agent_id!r}" if agent_id is not None else ""
                raise ValueError(f"blocks {dead} are freed more often than they are held{whose}")
            for block_id, n in drops.items():
                for reference in self._references(block_id, agent_id)[:n]:
                    self._blocks[block_id].references.remove(reference)
                if not self._blocks[block_id].references:
                    self._bytes -= self._blocks.pop(block_id).nbytes
                    self._returned.append(block_id)

    def reconfigure(self, total_blocks: int | None = None, total_bytes: int | None = None) -> None:
        """Give the pool another size; None leaves a limit as it is.

        It grows at once. When more is held than it may now have, holders keep what they have, and nothing is handed
        out until enough was freed. Raises ValueError, and changes nothing, for a limit below 1.
        """
        with self._lock:
            blocks = self.total_blocks if total_blocks is None else total_blocks
            nbytes = self.total_bytes if total_bytes is None else total_bytes
            _check_limits(blocks, nbytes)
            self.total_blocks, self.total_bytes = blocks, nbytes

    def references(self, older_than: float = 0.0) -> list[Reference]:
        """Every reference that has been held for at least `older_than` seconds, the oldest first."""
        before = time.monotonic() - older_than
        with self._lock:
            held = [reference for block in self._blocks.values() for reference in block.references]
        return sorted((r for r in held if r.since <= before), key=lambda r: r.since)

    def holdings(self) -> dict[str, Holding]:
        """What each holder has, by its name."""
        with self._lock:
            sizes = {block_id: block.nbytes for block_id, block in self._blocks.items()}
            held = [reference for block in self._blocks.values() for reference in block.references]
        by_agent: defaultdict[str, list[Reference]] = defaultdict(list)
        for reference in held:
            by_agent[reference.agent_id].append(reference)
        holdings = {}
        for agent_id, own in by_agent.items():
            ids = {reference.block_id for reference in own}
            holdings[agent_id] = Holding(len(ids), sum(sizes[i] for i in ids), min(r.since for r in own))
        return holdings

    def check_empty(self) -> None:
        """Raise LeakError, which says who holds what and since when, unless all blocks are free."""
        if holdings := self.holdings():
            now = time.monotonic()
            held = "; ".join(
                f"{agent_id or 'somebody'} holds {found.blocks} blocks of {found.nbytes} bytes since "
                f"{now - found.since:.1f} s"
                for agent_id, found in sorted(holdings.items())
            )
            raise LeakError(f"{self.used_blocks} blocks are not free: {held}")

    def _references(self, block_id: int, agent_id: str | None) -> list[Reference]:
        held = self._blocks[block_id].references if block_id in self._blocks else []
        return [reference for reference in held if agent_id is None or reference.agent_id == agent_id]

    def _check_held(self, block_ids: Iterable[int]) -> None:
        if dead := [block_id for block_id in block_ids if block_id not in self._blocks]:
            raise ValueError(f"blocks {dead} are not allocated")


def _check_room(needed: int, used: int, total: int, what: str) -> None:
    if used + needed > total:
        raise PoolExhaustedError(
            f"{needed} {what} needed, {max(0, total - used)} of {total} are free: "
            "free blocks of idle agents, or make the pool larger"
        )


def _check_limits(total_blocks: int, total_bytes: int) -> None:
    if total_blocks < 1:
        raise ValueError(f"a pool has at least 1 block, got {total_blocks}")
    if total_bytes < 1:
        raise ValueError(f"a pool has at least 1 byte, got {total_bytes}")
