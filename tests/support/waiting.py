"""Waiting for a condition on a machine that may be slow and busy, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds: far more than anything takes that is going to happen


def eventually(holds: Callable[[], object], within: float = PATIENCE) -> bool:
    """Return whether the condition becomes true within the given seconds."""
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def until(condition: Callable[[], object], what: str = "it", within: float = PATIENCE) -> None:
    assert eventually(condition, within), f"{what} never came to be"
