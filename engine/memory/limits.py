"""Limits of the process's memory: weights, contexts, and the buffers that MLX keeps for reuse.

MLX's own limits depend on its device: on Metal it may use 1.5 times the memory that the device recommends, and keep as
much of freed buffers. These limits follow from the machine's memory, or from a smaller one of a control group.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from kvpage_server.system.memory import usable_memory

MOST = 3 / 4  # of the machine's memory: MLX's limit, where the device recommends none
CACHE_SHARE = 16  # MLX keeps up to this part of the memory in freed buffers
CONTEXTS_SHARE = 4  # contexts have up to this part of the memory by default


class MemoryLimits(NamedTuple):
    """Limits in bytes."""

    machine: int
    mlx: int  # all arrays; MLX waits for running steps before it takes more
    cache: int  # freed buffers
    wired: int  # memory of the GPU that the system never pages out; 0 without a GPU

    def contexts(self, weights: int, wanted: int | None) -> int:
        """Return the limit of the contexts: `wanted`, or a share of the machine's memory, or less if the weights leave
        less room.
        """
        return wanted or max(1, min(self.machine // CONTEXTS_SHARE, self.mlx - self.cache - weights))

    def described(self, weights: int, contexts: int) -> str:
        """Return a line about all limits."""
        line = f"memory: weights {_gb(weights)}, contexts up to {_gb(contexts)}, freed buffers up to {_gb(self.cache)}"
        line += f"; MLX's limit is {_gb(self.mlx)} of {_gb(self.machine)}"
        if self.wired:
            line += f", {_gb(self.wired)} are wired"
        if (total := weights + contexts + self.cache) > self.mlx:
            line += f". These may take {_gb(total)}, more than the limit: set a smaller --memory"
        return line


def set_limits() -> MemoryLimits:
    """Set MLX's limits for this machine, and return them."""
    machine = usable_memory()
    recommended = int(mx.device_info().get("max_recommended_working_set_size", 0))
    limits = MemoryLimits(machine, recommended or int(machine * MOST), machine // CACHE_SHARE, recommended)
    mx.set_memory_limit(limits.mlx)
    mx.set_cache_limit(limits.cache)
    maybe_set_recommended_wired_limit()
    return limits


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
