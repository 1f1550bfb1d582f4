"""Control of glibc's malloc over freed memory. With another C library, these functions have no effect."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)

_libc = ctypes.CDLL(None)
IS_THERE = hasattr(_libc, "gnu_get_libc_version")


def tune(settings: Mapping[int, int]) -> bool:
    """Set parameters of mallopt(3) for this process, by their numbers. Return whether all were set."""
    return IS_THERE and all(_libc.mallopt(setting, value) for setting, value in settings.items())


def trim() -> None:
    """Return free memory to the system, including memory in the middle of the heap."""
    if IS_THERE:
        _libc.malloc_trim(0)
