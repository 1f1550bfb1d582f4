"""Makes glibc keep freed memory.

New memory from the system costs a page fault for every 4 KiB, on a virtual machine up to a second for a gigabyte. That
is more than receiving or copying a context takes. MLX's CPU backend keeps 32 MiB of what it frees; glibc returns the
rest to the system, and asks for it again with the next context. So glibc is told to keep it. A process then keeps no
more than it once used, which the block pool limits.
"""

from __future__ import annotations

from kvpage_server.system import malloc

_KEPT_BYTES = 512 << 20  # kept free at the heap's end: a few contexts of a few thousand tokens
_LARGEST_BYTES = 32 << 20  # glibc's maximum; larger blocks are mapped, and unmapped when freed


def keep_freed() -> bool:
    """Make glibc keep freed memory; False with another C library. Call it before threads start.

    All threads then share one heap, because blocks are received on one thread and used on another.
    """
    return malloc.tune({malloc.ARENA_MAX: 1, malloc.MMAP_THRESHOLD: _LARGEST_BYTES, malloc.TRIM_THRESHOLD: _KEPT_BYTES})
