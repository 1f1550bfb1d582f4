"""Freed memory, kept for what needs as much next.

The first touch of memory that the system has just handed out is a page fault for every 4 KiB, on a virtual machine up
to a second a gigabyte: more than receiving a context into it takes, or copying it. MLX's CPU backend keeps 32 MiB of
what it frees and leaves the rest to malloc, and glibc's gives the blocks of a context back to the system, to ask for
them again with the next one. So it is told to keep them. What a process keeps is no more than it once had in use, which
the block pool bounds.
"""

from __future__ import annotations

from kvpage_server.system import malloc

_KEPT_BYTES = 512 << 20  # that may be free at the heap's end; some contexts of some thousand tokens
_LARGEST_BYTES = 32 << 20  # the most that glibc allows; what is larger is mapped by itself, and unmapped when freed


def keep_freed() -> bool:
    """Have glibc keep what is freed; True when it does, False where the C library is another one.

    All threads then share one heap, or each would keep a share of its own: blocks are received on one, and used on
    another. To be called before those threads start.
    """
    return malloc.tune({malloc.ARENA_MAX: 1, malloc.MMAP_THRESHOLD: _LARGEST_BYTES, malloc.TRIM_THRESHOLD: _KEPT_BYTES})
