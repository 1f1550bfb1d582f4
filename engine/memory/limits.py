"""Limits of the process's memory: weights, contexts, and the buffers that MLX keeps for reuse.

MLX's own limits depend on its device: on Metal it may use 1.5 times the memory that the device recommends, and keep as
much of freed buffers. These limits follow from the machine's memory, or from a smaller one of a control group.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from kvpage_server.system.process import usable_memory

MOST = 3 / 4  # of the machine's memory: MLX's limit, where the device recommends none
CACHE_SHARE = 16  # MLX keeps up to this part of the memory in freed buffers
CONTEXTS_SHARE = 4  # contexts have up to this part of the memory by default


class MemoryLimits(NamedTuple):
    """Limits in bytes."""

    machine: int
    mlx: int  # all arrays; MLX waits for running steps before it takes more
    cache: int  # freed buffers
    wired: int  # memory of the GPU that the system never pages out; 0 without a GPU

    def contexts(self, weights: int, limit: int | None, models: int = 1) -> int:
        """Return the limit of a model's contexts: an equal part of `limit`, or of a share of the machine's memory, or
        less if the weights leave less room. The parts are those of `models` models.
        """
        if limit:
            return max(1, limit // models)
        return max(1, min(self.machine // CONTEXTS_SHARE // models, self.mlx - self.cache - weights))

    def described(self, weights: int, contexts: int) -> str:
        """Return a line about all limits."""
        line = f"memory: weights {as_gb(weights)}, contexts up to {as_gb(contexts)}"
        line += f", freed buffers up to {as_gb(self.cache)}; MLX's limit is {as_gb(self.mlx)} of {as_gb(self.machine)}"
        if self.wired:
            line += f", {as_gb(self.wired)} are wired"
        if (total := weights + contexts + self.cache) > self.mlx:
            line += f". These may take {as_gb(total)}, more than the limit: set a smaller --memory"
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


def as_gb(nbytes: int) -> str:
    """Return bytes in GB, or in MB below one."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
