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
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def disk_to_freeze(place: Path) -> Iterator[Path]:
    """A file system at that place that `frozen` can freeze; skips the test where none can be mounted."""
    place.mkdir()
    image = place.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    tools = all(map(shutil.which, ("mount", "mkfs.ext4", "fsfreeze")))
    commands = ["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]
    if os.geteuid() != 0 or not tools or any(subprocess.run(each, capture_output=True).returncode for each in commands):
        pytest.skip("no file system can be mounted here")
    try:
        yield place
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
