"""What outlives a crash and a power failure: files that appear whole or not at all, and names that stay.

A file is written beside its place, flushed to the disk, renamed, and its directory flushed: before the rename it is not
there, after it all of it is. What a crash leaves half-written is known by its name and by nobody's having locked it.

Imports nothing of ours, as `page` does; whoever writes files may use it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

_UNFINISHED = ".tmp"


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


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` when all went well; else `path` is as it was.

    Who may read it is left as it was; where there was none, its owner alone may. Raises OSError.
    """
    file, unfinished = _create(path)
    with file:
        try:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            yield file
            file.flush()
            flush(file.fileno())
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    flush_directory(path.parent)


def remove(path: Path) -> bool:
    """Remove a file, for good; whether there was one. Raises OSError when it cannot be removed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    flush_directory(path.parent)
    return True


def remove_unfinished(directory: Path) -> int:
    """Remove what crashes have left half-written, not what somebody is writing now; how many files."""
    removed = 0
    for path in directory.glob(f".*{_UNFINISHED}"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed += 1
    return removed


def _create(path: Path) -> tuple[BinaryIO, Path]:
    """A file beside `path`, locked for as long as it is open."""
    while True:
        descriptor, name = mkstemp(_UNFINISHED, f".{path.stem}-", path.parent)
        file, unfinished = os.fdopen(descriptor, "r+b"), Path(name)
        fcntl.flock(file, fcntl.LOCK_EX)
        if unfinished.exists():  # it may have been tidied up before it was locked
            return file, unfinished
        file.close()
