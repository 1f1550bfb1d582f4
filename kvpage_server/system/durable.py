"""What outlives a crash and a power failure: files that appear whole or not at all, and names that stay.

A file is written beside its place, flushed to the disk, renamed, and its directory flushed: before the rename it is not
there, after it all of it is. What a crash leaves half-written is known by its name and by nobody's having locked it.

What is written here is its owner's alone, whatever the umask: it may hold what tenants said in confidence.

Imports nothing of ours, as `page` does; whoever writes files may use it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

_UNFINISHED = ".tmp"
_PRIVATE_FILE = 0o600
_PRIVATE_DIRECTORY = 0o700

log = logging.getLogger("kvpage")


def private(path: str | Path, flags: int) -> int:
    """Open a file; if it is made now, it is its owner's alone. To be given to `open` as its opener."""
    return os.open(path, flags, _PRIVATE_FILE)


def private_directory(path: Path) -> None:
    """Make a directory, and those above it, where there are none: its owner's alone. Raises OSError."""
    try:
        path.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)
    except FileNotFoundError:
        if path.parent == path:
            raise
        private_directory(path.parent)
        path.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)


def tighten(file: int | Path, leave: int = _PRIVATE_FILE) -> None:
    """Take from a file that was there before all rights but these. Where the system will not, the log says so.

    What is no file, as /dev/null, is not ours to change.
    """
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) & ~leave:
        try:
            os.chmod(file, stat.S_IMODE(mode) & leave)
        except OSError as error:
            log.warning("others may read %s, which cannot be changed: %s", file, error.strerror)


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
def replacing(path: Path, *, keep_group: bool = False) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` when all went well; else `path` is as it was.

    Its owner alone may read it. With `keep_group` the group has the rights that it had. Raises OSError.
    """
    file, unfinished = _create(path)
    with file:
        try:
            if keep_group:
                with suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), path.stat().st_mode & 0o770)
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
