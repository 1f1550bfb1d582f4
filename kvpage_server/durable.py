"""What outlives a power failure: bytes flushed to the disk itself, and names flushed with their directory.

Imports nothing of ours, as `page` does; whoever writes files may use it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def flush(descriptor: int) -> None:
    """To the disk itself, which on macOS fsync does not promise."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Make sure that the names in a directory are on the disk, too."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
