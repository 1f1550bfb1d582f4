"""The budget of blocks and bytes in memory, and the holders of blocks."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

UNLIMITED = sys.maxsize


class PoolExhaustedError(RuntimeError):
    """Error: too few blocks or bytes are free. Nothing was allocated."""


class LeakError(RuntimeError):
    """Error: blocks were not freed. The message has their holders, number, bytes and age."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference of a holder on a block."""

    block_id: int
    agent_id: str  # "" for a holder that gave no name
    since: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks and bytes of one holder. A shared block counts in full for each holder."""

    blocks: int
    nbytes: int
    since: float  # time.monotonic() of its oldest reference


@dataclass(slots=True)
class _Block:
    nbytes: int
    references: list[Reference] = field(default_factory=list)  # oldest first, never empty


class BlockPool:
    """Allocator of block ids, within limits of blocks and bytes. Thread-safe. It holds no data: an id stands for one
    :class:`engine.memory.blocks.KVBlock`.

    Each holder, usually an agent, has one reference on the id and frees it once. Agents with a common prefix share ids.
    An id is free again when its last reference is freed.

    A block counts with its reserved bytes until `settle` sets its actual size.
    """

    def __init__(self, total_blocks: int = UNLIMITED, *, total_bytes: int = UNLIMITED) -> None:
        _check_limits(total_blocks, total_bytes)
        self.total_blocks = total_blocks
        self.total_bytes = total_bytes
        self._blocks: dict[int, _Block] = {}  # held blocks by id
        self._bytes = 0  # sum of their sizes, actual or reserved
        self._returned: list[int] = []  # freed ids, which are allocated again before new ones
        self._lock = threading.Lock()

    @property
    def used_blocks(self) -> int:
        return len(self._blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes that the held blocks use, or that are reserved for them."""
        return self._bytes

    @property
    def available_blocks(self) -> int:
        """Number of blocks that `allocate` can still return."""
        return max(0, self.total_blocks - len(self._blocks))

    @property
    def available_bytes(self) -> int:
        """Bytes that `allocate` can still reserve."""
        return max(0, self.total_bytes - self._bytes)

    def allocate(self, count: int, agent_id: str = "", nbytes: int = 0) -> list[int]:
        """Allocate `count` ids, each with one reference of `agent_id`, and reserve `nbytes` in total for them. Return
        the ids.

        Raises PoolExhaustedError, and allocates none, if fewer blocks or bytes are free; ValueError for a negative
        number.
        """
        if count < 0 or nbytes < 0:
            raise ValueError(f"count and nbytes must be at least 0, got {count} and {nbytes}")
        if not count:
            return []
        with self._lock:
            _check_space(count, len(self._blocks), self.total_blocks, "blocks")
            _check_space(nbytes, self._bytes, self.total_bytes, "bytes")
            ids = [self._returned.pop() if self._returned else len(self._blocks) + i for i in range(count)]
            now = time.monotonic()
            for i, block_id in enumerate(ids):
                share = (nbytes * (i + 1)) // count - (nbytes * i) // count
                self._blocks[block_id] = _Block(share, [Reference(block_id, agent_id, now)])
            self._bytes += nbytes
        return ids

    def settle(self, nbytes: Mapping[int, int]) -> None:
        """Set the actual sizes of blocks, by id, in place of the bytes reserved for them.

        Raises ValueError for an id that is not allocated or a negative size, and PoolExhaustedError if the blocks need
        more bytes than are reserved and free. After an exception nothing is changed.
        """
        if wrong := [block_id for block_id, size in nbytes.items() if size < 0]:
            raise ValueError(f"blocks {wrong} cannot take less than 0 bytes")
        with self._lock:
            self._check_held(nbytes)
            more = sum(nbytes.values()) - sum(self._blocks[block_id].nbytes for block_id in nbytes)
            if more > 0:
                _check_space(more, self._bytes, self.total_bytes, "bytes")
            for block_id, size in nbytes.items():
                self._blocks[block_id].nbytes = size
            self._bytes += more

    def share(self, block_ids: Iterable[int], agent_id: str = "") -> None:
        """Add a reference of `agent_id` on each id. Raises ValueError, and adds none, if an id is not allocated."""
        ids = list(block_ids)
        with self._lock:
            self._check_held(ids)
            now = time.monotonic()
            for block_id in ids:
                self._blocks[block_id].references.append(Reference(block_id, agent_id, now))

    def free(self, block_ids: Iterable[int], agent_id: str | None = None) -> None:
        """Drop one reference of `agent_id` on each id; if `agent_id` is None, the oldest reference of any holder.

        Raises ValueError, and drops none, if a holder has fewer references on an id than are to be dropped.
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
        """Change the limits of blocks and bytes; None leaves a limit as it is.

        If more is allocated than the new limits allow, holders keep their blocks, and nothing is allocated until enough
        is freed. Raises ValueError, and changes nothing, for a limit below 1.
        """
        with self._lock:
            blocks = self.total_blocks if total_blocks is None else total_blocks
            nbytes = self.total_bytes if total_bytes is None else total_bytes
            _check_limits(blocks, nbytes)
            self.total_blocks, self.total_bytes = blocks, nbytes

    def references(self, older_than: float = 0.0) -> list[Reference]:
        """Return all references that are older than `older_than` seconds, the oldest first. Serves to find leaks."""
        before = time.monotonic() - older_than
        with self._lock:
            held = [reference for block in self._blocks.values() for reference in block.references]
        return sorted((r for r in held if r.since <= before), key=lambda r: r.since)

    def holdings(self) -> dict[str, Holding]:
        """Return each holder's blocks and bytes, by name."""
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
        """Raise LeakError unless all blocks are free."""
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


def _check_space(needed: int, used: int, total: int, what: str) -> None:
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
