"""The limits of what agents remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import RESTORE_SECONDS

Keep = Literal["all", "worth", "named"]
KEEP: tuple[Keep, ...] = get_args(Keep)

MAX_HOT_AGENTS = 8
MAX_QUEUE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Limits of the contexts in memory and of a load. None stands for a share of the pool."""

    max_hot_agents: int = MAX_HOT_AGENTS  # contexts in memory
    hot_bytes: int | None = None  # of their blocks; default: half of the pool
    queue_bytes: int | None = None  # evicted and not yet written; default: a quarter of the pool, a GiB at most
    prefix_bytes: int | None = None  # the tree of all contexts; default: half of the pool
    keep: Keep = "worth"  # which contexts without a name are given to the page server; see `AgentCacheStore.publish`
    restore_within: float = RESTORE_SECONDS  # seconds of a load; the engine computes what has not arrived

    def __post_init__(self) -> None:
        if self.keep not in KEEP:
            raise ValueError(f"keep is one of {', '.join(KEEP)}, got {self.keep!r}")
        if not self.restore_within > 0:
            raise ValueError(f"restore_within must be more than 0 seconds, got {self.restore_within}")
        for limit in (self.max_hot_agents, self.hot_bytes, self.queue_bytes, self.prefix_bytes):
            if limit is not None and limit < 0:
                raise ValueError(f"a limit is at least 0, got {limit}")

    def sizes(self, spec: ModelCacheSpec, pool: BlockPool) -> tuple[int, int, int]:
        """`hot_bytes`, `queue_bytes` and `prefix_bytes`, with the defaults of this pool."""
        block_nbytes = spec.block_tokens * spec.token_nbytes + spec.state_nbytes(spec.block_tokens)
        capacity = min(pool.total_bytes, pool.total_blocks * block_nbytes)
        return (
            capacity // 2 if self.hot_bytes is None else self.hot_bytes,
            min(capacity // 4, MAX_QUEUE_BYTES) if self.queue_bytes is None else self.queue_bytes,
            capacity // 2 if self.prefix_bytes is None else self.prefix_bytes,
        )
