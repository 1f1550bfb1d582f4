"""glibc's malloc: what it keeps of what is freed. With another C library nothing of this does anything."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of mallopt(3)

_libc = ctypes.CDLL(None)
IS_THERE = hasattr(_libc, "gnu_get_libc_version")


def tune(settings: Mapping[int, int]) -> bool:
    """Set parameters of mallopt(3) for this process; whether all of them are set."""
    return IS_THERE and all(_libc.mallopt(setting, value) for setting, value in settings.items())


def trim() -> None:
    """Give the system what is free, in between too."""
    if IS_THERE:
        _libc.malloc_trim(0)
