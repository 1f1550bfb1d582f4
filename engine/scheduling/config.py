"""The settings of the batch engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How prompts are run."""

    prefill_chunk: int = 512  # tokens of a prompt in one step
    state_budget: int = 64 << 20  # bytes of a prompt's states, without its last one and the answer's
    wait_for_blocks: bool = False  # a prompt waits while the pool is full, instead of an error

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")
