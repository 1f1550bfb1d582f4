"""Freed memory, kept for what needs as much next.

The first touch of memory that the system has just handed out is a page fault for every 4 KiB, on a virtual machine up
to a second a gigabyte: more than receiving a context into it takes, or copying it. MLX's CPU backend keeps 32 MiB of
what it frees and leaves the rest to malloc, and glibc's gives the blocks of a context back to the system, to ask for
them again with the next one. So it is told to keep them. What a process keeps is no more than it once had in use, which
the block pool bounds.
"""

from __future__ import annotations

import ctypes

_KEPT = 512 << 20  # bytes that may be free at the heap's end; some contexts of some thousand tokens
_LARGEST = 32 << 20  # bytes, the most that glibc allows: what is larger is mapped by itself, and unmapped when freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)

_libc = ctypes.CDLL(None)


def keep_freed() -> bool:
    """Have glibc keep what is freed; True when it does, False where the C library is another one.

    All threads then share one heap, or each would keep a share of its own: blocks are received on one, and used on
    another. To be called before those threads start.
    """
    if not hasattr(_libc, "gnu_get_libc_version"):
        return False
    settings = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: _KEPT}
    return all(_libc.mallopt(setting, value) for setting, value in settings.items())


def give_back() -> None:
    """Give the system what is free, where it is kept."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
