"""LMDB's file: its lock, its checks, and its settings.

LMDB trusts its file: one wrong bit in a branch page can crash the process that maps it. So the structure is checked
before the file is opened. This is left out if the file was closed in order and not touched since, or if its server was
killed but the machine has run on: then the system still writes all that it was given.
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

FORMAT = 2  # 1 had a record for each page
RESERVE = 1 << 20  # bytes
_LARGEST_MAP = 1 << 40  # bytes of address space, where maxdisk sets no limit
_SMALLEST_MAP = 1 << 30
_NOTE = 100  # bytes
_MODE = 0o600
_BESIDE = ("-lock", ".clean", ".reserve")  # files that belong to the database, and are named so
_READERS = 512  # transactions at a time: loans, and the few threads that read
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DiskError(Exception):
    """The store on disk cannot be used; the message names the file and the reason."""


class DiskFull(Exception):
    """The disk has no room for a write. Nothing of it was written."""


class MaxDisk(DiskFull):
    """Error: a write exceeds `maxdisk`."""


class Witness:
    """A note next to the file: its state when it was last sound, and, while it is open, the boot id of the machine.

    If the machine crashed since, some writes may be lost, and the note does not hold any more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._note = private(_beside(path, ".clean"), os.O_RDWR | os.O_CREAT)
        self._boot = _BOOT_ID.read_text(encoding="utf-8").strip() if _BOOT_ID.exists() else ""

    def vouches(self) -> bool:
        """Return whether the file is as it was when it was closed, or at the last commit in this boot."""
        said, seen = os.pread(self._note, 200, 0).decode("ascii", "replace").strip(), self._seen()
        return said == seen or bool(self._boot and said == f"{seen} {self._boot}")

    def opened(self) -> None:
        """Note that the file is sound and open."""
        self.committed()
        os.fsync(self._note)

    def committed(self) -> None:
        """Note that the file is sound unless the machine crashes."""
        self._say(f"{self._seen()} {self._boot}" if self._boot else "")

    def closed(self) -> None:
        """Note that the file is sound and on the disk."""
        self._say(self._seen())

    def go(self) -> None:
        os.close(self._note)

    def _seen(self) -> str:
        found = self._path.stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the old note is about another state of the file
            os.pwrite(self._note, text.encode().ljust(_NOTE), 0)


def look_through(path: Path, witness: Witness) -> None:
    """Check that LMDB can trust the file's structure. Values are checked when they are read."""
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
    """Lock the database too, because the lock file next to it may have been removed.

    Others can't read it from now on. Raises DiskError if another process has the lock.
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
    """Return whether the lock is ours now. LMDB locks other parts of a file of its own, so it is not affected."""
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
    """Create a store: either as a whole or not at all."""
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
    """Map the file. This takes its address space at once, and disk space as it is needed.

    Each commit is on the disk when it is done if it `flushes`. If not, the operating system writes it later, in any
    order: a crash of the machine may then damage the file.
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
    """Return the faults in the structure of a database file."""
    try:
        return list(verify(str(path), subdir=False))  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]


def _has_errno(error: Exception, number: int) -> bool:
    return os.strerror(number) in str(error)


class lmdb_errors:
    """Raise what LMDB and the system say as DiskError; as DiskFull if a write had no room.

    Not a generator: since Python 3.12 the frames of one refer to the exception that has passed through it, and the
    exception to them. So the arguments of a failed write would stay in memory until the next garbage collection.
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
        if little:  # it could write a part
            return DiskFull(os.strerror(errno.ENOSPC))
        return DiskError(f"{self._path}: {error}")
