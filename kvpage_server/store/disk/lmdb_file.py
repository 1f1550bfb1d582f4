"""The LMDB file: its lock, its checks, and its settings.

LMDB trusts its file: one wrong bit in a branch page can crash the process that maps it. So the structure is checked
before the file is opened. The check is omitted if the file has not changed since it was closed in order, or if only the
server was killed and the machine still runs: then the system's page cache has all writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO

import lmdb
from lmdb.verify import VerifyError, verify

from kvpage_server.system.durable import flush_directory, private, tighten

FORMAT = 2  # format 1 had a record for each page
RESERVE = 1 << 20  # bytes of the reserve file
_LARGEST_MAP = 1 << 40  # bytes of address space without `maxdisk`
_SMALLEST_MAP = 1 << 30
_NOTE = 100  # bytes of a note
_MODE = 0o600
_BESIDE = ("-lock", ".clean", ".reserve")  # suffixes of files that belong to the database
_READERS = 512  # read transactions at a time: borrowed reads, and reader threads
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DiskError(Exception):
    """Error: the store on disk cannot be used; the message has the file and the reason."""


class DiskFull(Exception):
    """Error: the disk has no space for a write, of which nothing was committed."""


class MaxDisk(DiskFull):
    """Error: a write exceeds `maxdisk`."""


class Witness:
    """Note in a file next to the database: its size and mtime when it was last sound and, while open, the boot id.

    After a crash of the machine, writes may be lost. The boot id differs then, so the note is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._note = private(_beside(path, ".clean"), os.O_RDWR | os.O_CREAT)
        self._boot = _BOOT_ID.read_text(encoding="utf-8").strip() if _BOOT_ID.exists() else ""

    def vouches(self) -> bool:
        """Return whether the file is unchanged since it was closed, or since the last commit in this boot."""
        noted, seen = os.pread(self._note, 200, 0).decode("ascii", "replace").strip(), self._seen()
        return noted == seen or bool(self._boot and noted == f"{seen} {self._boot}")

    def opened(self) -> None:
        """Note that the file is sound and open."""
        self.committed()
        os.fsync(self._note)

    def committed(self) -> None:
        """Note that the file is sound unless the machine crashes."""
        self._say(f"{self._seen()} {self._boot}" if self._boot else "")

    def closed(self) -> None:
        """Note that the file is sound and flushed."""
        self._say(self._seen())

    def close(self) -> None:
        os.close(self._note)

    def _seen(self) -> str:
        found = self._path.stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the old note describes another state, so it is invalid
            os.pwrite(self._note, text.encode().ljust(_NOTE), 0)


def look_through(path: Path, witness: Witness) -> None:
    """Check the file's structure, unless the witness vouches for it. Raises DiskError. Reads check values."""
    with path.open("rb") as file:
        if file.read(20)[16:] != (0xBEEFC0DE).to_bytes(4, "little"):
            raise DiskError(f"{path} is not a store of kvpage-server")
    if witness.vouches():
        return
    problems = _verify(path)
    if problems:
        raise DiskError(f"{path} is damaged: {problems[0]}. Restore it from a backup, or move it away to start empty")


def lock(path: Path) -> IO[bytes]:
    """Lock the directory while the file is open. Raises DiskError if another process has the lock."""
    lock = open(path, "a+b", opener=private)  # noqa: SIM115 - held for as long as the store is
    if not _taken(lock):
        lock.seek(0)
        owner = lock.read(20).decode("ascii", "replace").strip()
        lock.close()
        raise DiskError(_in_use(path, f", pid {owner}"))
    tighten(lock.fileno())
    lock.truncate(0)
    lock.write(b"%d\n" % os.getpid())
    lock.flush()
    return lock


def claim(path: Path) -> IO[bytes]:
    """Lock the database, too, because the lock file next to it may have been deleted.

    Also remove the rights of other users to its files. Raises DiskError if another process has the lock.
    """
    for part in (path, *(_beside(path, end) for end in _BESIDE)):
        if part.exists():
            tighten(part)
    file = path.open("r+b")
    if not _taken(file):
        file.close()
        raise DiskError(_in_use(path, ""))
    return file


def _taken(file: IO[bytes]) -> bool:
    """Lock a file. Returns whether this succeeded. LMDB locks another file, so it is not affected."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(path: Path, owner: str) -> str:
    return f"{path.parent.absolute()} is in use by another kvpage-server{owner}: each needs a `dir` of its own"


def _beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def create(path: Path) -> None:
    """Create a store. It appears complete or not at all."""
    new = _beside(path, ".new")
    for left in (new, _beside(new, "-lock")):
        left.unlink(missing_ok=True)
    env = lmdb.open(str(new), subdir=False, mode=_MODE, max_dbs=4, map_size=_SMALLEST_MAP)
    about = env.open_db(b"about")
    with env.begin(write=True, db=about) as txn:
        txn.put(b"format", b"%d" % FORMAT)
        txn.put(b"id", uuid.uuid4().hex.encode())
    env.close()
    _beside(new, "-lock").unlink(missing_ok=True)
    new.rename(path)
    flush_directory(path.parent)


def open_map(path: Path, maxdisk: int, *, flushes: bool) -> lmdb.Environment:
    """Map the file. Address space is used immediately, disk space as it is needed.

    With `flushes`, commits are durable. Otherwise the operating system writes them later, in any order, and a crash of
    the machine may damage the file. Without `maxdisk`, the map is halved until the system has address space for it.
    """
    size = max(maxdisk or _LARGEST_MAP, path.stat().st_size)
    while True:
        try:
            return lmdb.open(
                str(path),
                subdir=False,
                mode=_MODE,
                max_dbs=4,
                map_size=size,
                max_spare_txns=4,
                max_readers=_READERS,
                sync=flushes,
            )
        except (lmdb.MemoryError, MemoryError, lmdb.Error) as error:
            if maxdisk or size <= _SMALLEST_MAP or not _has_errno(error, errno.ENOMEM):
                raise
            size //= 2


def _verify(path: Path) -> list[str]:
    """Return the errors in the structure of a database file."""
    try:
        return list(verify(str(path), subdir=False))  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]


def _has_errno(error: Exception, number: int) -> bool:
    return os.strerror(number) in str(error)


class lmdb_errors:
    """Context that raises errors of LMDB and the system as DiskError, or as DiskFull if a write had no space.

    It is not a generator because, since Python 3.12, a generator's frames refer to the exception that passed through
    it, and the exception to the frames. The arguments of a failed write would stay in memory until the next garbage
    collection.
    """

    def __init__(self, path: Path, *, writing: bool = False) -> None:
        self._path = path
        self._writing = writing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if isinstance(error, lmdb.MapFullError):
            raise MaxDisk("maxdisk is used up") from None
        if isinstance(error, lmdb.Error):
            raise self._lmdb_message(error) from None
        if isinstance(error, OSError):
            if self._writing and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(error.strerror) from None
            raise DiskError(f"{error.filename or self._path}: {error.strerror}") from None

    def _lmdb_message(self, error: lmdb.Error) -> DiskError | DiskFull:
        if self._writing and (_has_errno(error, errno.ENOSPC) or _has_errno(error, errno.EDQUOT)):
            return DiskFull(str(error))
        little = self._writing and _has_errno(error, errno.EIO) and shutil.disk_usage(self._path.parent).free < RESERVE
        if little:  # LMDB reports a partial write as EIO
            return DiskFull(os.strerror(errno.ENOSPC))
        return DiskError(f"{self._path}: {error}")
