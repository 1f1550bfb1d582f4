"""File systems of their own, small enough to be filled, where they may be mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """A file system at that place; skips the test where none can be mounted."""
    with _mounted(place, ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]):
        yield place


@contextmanager
def disk_to_freeze(place: Path) -> Iterator[Path]:
    """A file system at that place that `frozen` can freeze; skips the test where none can be mounted."""
    if not shutil.which("fsfreeze"):
        pytest.skip("no file system can be frozen here")
    image = place.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    with _mounted(place, ["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        yield place


@contextmanager
def _mounted(place: Path, *commands: list[str]) -> Iterator[None]:
    """A new directory on which the last command mounts a file system; skips the test where one of them fails."""
    place.mkdir()
    tools = all(shutil.which(program) for program, *_ in commands)
    if os.geteuid() != 0 or not tools or any(subprocess.run(each, capture_output=True).returncode for each in commands):
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Freeze a file system, as for a snapshot: writes to it wait."""
    subprocess.run(["fsfreeze", "-f", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(place)], check=True)
