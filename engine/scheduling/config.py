"""What can be set of how the batch engine runs prompts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How prompts are run."""

    prefill_chunk: int = 512  # tokens of a prompt computed between two tokens of an answer
    state_budget: int = 64 << 20  # bytes, for what the layers of a prompt carry at its checkpoints
    wait_for_blocks: bool = False  # a prompt for which the pool has no room now, but could have, waits its turn

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")
