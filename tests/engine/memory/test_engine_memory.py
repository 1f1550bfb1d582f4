"""Memory that an engine frees: it is reused, and does not accumulate."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.platform import keep_freed

MIB = 1 << 20
CONTEXT = """
import resource
from pathlib import Path
import mlx.core as mx

def hold(mebibytes):
    blocks = [mx.zeros((12 << 18,)) for _ in range(mebibytes // 12)]
    mx.eval(blocks)
    return blocks

def touched():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
"""
AGAIN = """
hold(96)
before = touched()
hold(96)
print(touched() - before)
"""
BACK = """
from kvpage_server.system.process import trim_malloc
before = resident()
hold(96)
print(resident() - before)
trim_malloc()
print(resident() - before)
"""

pytestmark = pytest.mark.skipif(not keep_freed(), reason="another C library than glibc")


def printed(code: str) -> list[int]:
    """Return the output of a new Python that runs `code`: the allocator is configured once per process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60)
    assert not done.returncode, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_the_next_context_takes_the_memory_of_the_last_one() -> None:
    """Without the engine that is neither MLX's nor malloc's way: most of it is asked of the system again."""
    assert printed("import engine" + CONTEXT + AGAIN)[0] < 24 * MIB
    assert printed(CONTEXT + AGAIN)[0] > 48 * MIB


def test_kept_memory_can_be_released() -> None:
    kept, left = printed("import engine" + CONTEXT + BACK)
    assert kept > 90 * MIB
    assert left < 48 * MIB  # MLX keeps 32
