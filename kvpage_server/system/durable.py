"""Files that survive a crash or a power failure: after it, a file is complete or does not exist.

A file is written under a temporary name, flushed to disk and renamed; then its directory is flushed. A temporary name
ends with `.tmp`, and its file is locked while a process writes it. So a `.tmp` file without a lock was left by a crash.

Only the owner can read these files, whatever the umask, because they may contain confidential text of tenants.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

_UNFINISHED = ".tmp"
_PRIVATE_FILE = 0o600
_PRIVATE_DIRECTORY = 0o700

log = logging.getLogger("kvpage")


def open_private(path: str | Path, flags: int) -> int:
    """Open a file and return its descriptor, as the `opener` of `open`. Only the owner may access a created file."""
    return os.open(path, flags, _PRIVATE_FILE)


def private_directory(path: Path) -> None:
    """Create a directory and its missing parents, with rights for the owner only. Raises OSError."""
    try:
        path.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)
    except FileNotFoundError:
        if path.parent == path:
            raise
        private_directory(path.parent)
        path.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)


def restrict_permissions(file: int | Path, leave: int = _PRIVATE_FILE, *, name: Path | None = None) -> None:
    """Remove all permissions except `leave` from a regular file. Log a warning if that fails, with the `name` of a
    descriptor.

    Raises OSError if `file` does not exist.
    """
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) & ~leave:
        try:
            os.chmod(file, stat.S_IMODE(mode) & leave)
        except OSError as error:
            log.warning("others may read %s, which cannot be changed: %s", name or file, error.strerror)


def flush(descriptor: int) -> None:
    """Flush a file to disk, also through the disk's own cache, which fsync does not do on macOS. Raises OSError."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Flush the names of a directory to disk. Raises OSError."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def replacing(path: Path, *, keep_group: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces `path` when the caller's ``with`` block ends.

    After an exception in the block, `path` is unchanged. Only the owner may read the file. With `keep_group`, owner and
    group keep their permissions. Raises OSError, which names a file, also in place of replacing a device or a pipe.
    """
    with suppress(FileNotFoundError):
        if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    file, unfinished = _create(path)
    try:
        with file:  # its end repeats a failed write, and may raise another error
            if keep_group:
                with suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), path.stat().st_mode & 0o770)
            yield file
            file.flush()
            flush(file.fileno())
            unfinished.rename(path)
        flush_directory(path.parent)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(unfinished)):  # a write's error has none
            error.filename = str(path)
        raise


def remove(path: Path) -> bool:
    """Remove a file, and flush its directory to disk. Return whether the file existed. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    flush_directory(path.parent)
    return True


def remove_unfinished(directory: Path, stem: str = "") -> int:
    """Delete temporary files of crashed processes, which are not locked: those for files with this stem, or with any.

    Return the number of deleted files. Raises OSError.
    """
    removed = 0
    for path in directory.glob(f".{escape(stem) + '-' if stem else ''}*{_UNFINISHED}"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed += 1
    return removed


def _create(path: Path) -> tuple[BinaryIO, Path]:
    """Create a temporary file in the directory of `path`, locked as long as it is open. Return it and its path."""
    while True:
        descriptor, name = mkstemp(_UNFINISHED, f".{path.stem}-", path.parent)
        file, unfinished = os.fdopen(descriptor, "r+b"), Path(name)
        fcntl.flock(file, fcntl.LOCK_EX)
        if unfinished.exists():  # `remove_unfinished` may delete it before it is locked
            return file, unfinished
        file.close()
