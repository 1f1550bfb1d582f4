"""Files that survive a crash or a power failure: they appear complete or not at all, and their names stay.

A file is written under a temporary name, flushed to the disk, and renamed; then its directory is flushed. Before the
rename the file is not there, after it all of it is. A half-written file of a crash has a special name, and is not
locked.

Only the owner can read these files, whatever the umask, since they may have confidential text of tenants.
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
    """An opener for `open`. A file that it creates can be used by its owner only."""
    return os.open(path, flags, _PRIVATE_FILE)


def private_directory(path: Path) -> None:
    """Make a directory and its missing parents, for the owner only. Raises OSError."""
    try:
        path.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)
    except FileNotFoundError:
        if path.parent == path:
            raise
        private_directory(path.parent)
        path.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)


def tighten(file: int | Path, leave: int = _PRIVATE_FILE) -> None:
    """Remove all other rights from an existing file. If that fails, the log says so.

    Something that is not a file, such as /dev/null, is left alone.
    """
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) & ~leave:
        try:
            os.chmod(file, stat.S_IMODE(mode) & leave)
        except OSError as error:
            log.warning("others may read %s, which cannot be changed: %s", file, error.strerror)


def flush(descriptor: int) -> None:
    """Flush to the disk itself, which fsync does not guarantee on macOS."""
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
    """Yield a new file, which replaces `path` on success; otherwise `path` is unchanged.

    Only its owner may read it. With `keep_group` the group keeps its rights. Raises OSError.
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
    """Remove a file durably. Returns whether it existed. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    flush_directory(path.parent)
    return True


def remove_unfinished(directory: Path) -> int:
    """Remove files that crashes left half-written, but none that are being written now. Returns how many."""
    removed = 0
    for path in directory.glob(f".*{_UNFINISHED}"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed += 1
    return removed


def _create(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file in the same directory as `path`, locked for as long as it is open."""
    while True:
        descriptor, name = mkstemp(_UNFINISHED, f".{path.stem}-", path.parent)
        file, unfinished = os.fdopen(descriptor, "r+b"), Path(name)
        fcntl.flock(file, fcntl.LOCK_EX)
        if unfinished.exists():  # it may have been tidied up before it was locked
            return file, unfinished
        file.close()
