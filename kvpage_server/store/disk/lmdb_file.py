"""The LMDB file: its lock, its checks, and its settings.

LMDB does not validate its file: one wrong bit in a branch page can crash the process that maps it. So the structure is
checked before the file is opened. The check is omitted if the file has not changed since it was closed cleanly, or if
only the server was killed and the machine still runs: then the system's page cache has all writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import lmdb
from lmdb.verify import VerifyError, verify

from kvpage_server.system.durable import flush_directory, open_private, restrict_permissions

# Format 1 had a record for each page. A file has format 2 until the first coded body is written, then format 3.
FORMAT = 2
CODED_FORMAT = 3
RESERVE = 1 << 20  # bytes of the reserve file
_LARGEST_MAP = 1 << 40  # bytes of address space without `maxdisk`
_SMALLEST_MAP = 1 << 30
_MARKER_SIZE = 100  # bytes of the clean marker
_MODE = 0o600
_SUFFIXES = ("-lock", ".clean", ".reserve")  # suffixes of files that belong to the database
_READERS = 512  # read transactions at a time: borrowed reads, and reader threads
_OWN_FILES = Path("/proc/self/fd")  # has a link to each open file of the process
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DiskError(Exception):
    """Error: the store on disk cannot be used; the message has the file and the reason."""


class DiskFull(Exception):
    """Error: the disk has no space for a write, of which nothing was committed."""


class MaxDisk(DiskFull):
    """Error: a write exceeds `maxdisk`."""


class CleanMarker:
    """File next to the database, with the size and mtime that the database had when it was last intact.

    While the database is open, the marker has the machine's boot id, too. A crash of the machine may lose writes. The
    boot id differs afterwards, so the marker is invalid.

    `database` is the open file. A record of another file that has its absolute name meanwhile raises OSError: the next
    start would use that one, without the commits since then. A relative name would follow a directory that is moved.
    """

    def __init__(self, path: Path, database: IO[bytes]) -> None:
        self._path = path.absolute()
        self._opened = os.fstat(database.fileno())
        self._file = open_private(_with_suffix(path, ".clean"), os.O_RDWR | os.O_CREAT)
        self._boot = _BOOT_ID.read_text(encoding="utf-8").strip() if _BOOT_ID.exists() else ""

    def is_valid(self) -> bool:
        """Return whether the database is unchanged since it was closed, or since the last commit in this boot."""
        recorded, current = os.pread(self._file, 200, 0).decode("ascii", "replace").strip(), self._size_and_mtime()
        return recorded == current or bool(self._boot and recorded == f"{current} {self._boot}")

    def opened(self) -> None:
        """Record that the database is intact and open, and synchronise the record."""
        self.committed()
        os.fsync(self._file)

    def committed(self) -> None:
        """Record that the database is intact unless the machine crashes."""
        self._write(f"{self._size_and_mtime()} {self._boot}" if self._boot else "")

    def closed(self) -> None:
        """Record that the database is intact and synchronised."""
        self._write(self._size_and_mtime())

    def close(self) -> None:
        os.close(self._file)

    def check(self) -> os.stat_result:
        """Return the attributes of the database. Raises OSError if no file or another file has its name."""
        found = self._path.stat()
        if not os.path.samestat(found, self._opened):
            raise OSError(errno.ESTALE, "another file has replaced the open one", str(self._path))
        return found

    def _size_and_mtime(self) -> str:
        found = self.check()
        return f"{found.st_size} {found.st_mtime_ns}"

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the old marker has another size or mtime, so it is invalid
            os.pwrite(self._file, text.encode().ljust(_MARKER_SIZE), 0)


def check_structure(path: Path, marker: CleanMarker) -> None:
    """Check the structure of the database, unless its marker is valid. Raises DiskError.

    Values are not checked here, but by their checksums when they are read.
    """
    with path.open("rb") as file:
        if file.read(20)[16:] != (0xBEEFC0DE).to_bytes(4, "little"):
            raise DiskError(f"{path.absolute()} is not a store of kvpage-server")
    if marker.is_valid():
        return
    problems = _verify(path)
    if problems:
        raise DiskError(
            f"{path.absolute()} is damaged: {problems[0]}. Restore it from a backup, or move it away to start empty"
        )


def lock(path: Path) -> IO[bytes]:
    """Lock the directory while the file is open. Raises DiskError if another process has the lock."""
    lock = open(path, "a+b", opener=open_private)  # noqa: SIM115 - it stays open as long as the store
    if not _try_lock(lock):
        lock.seek(0)
        owner = lock.read(20).decode("ascii", "replace").strip()
        lock.close()
        raise DiskError(_in_use(path, f", pid {owner}" if owner else ""))  # empty before the other has written it
    restrict_permissions(lock.fileno(), name=path)
    lock.truncate(0)
    lock.write(b"%d\n" % os.getpid())
    lock.flush()
    return lock


def claim(path: Path) -> IO[bytes]:
    """Lock the database file itself, because the lock file in its directory may have been deleted.

    Also remove the rights of other users to its files. Raises DiskError if another process has the lock.
    """
    for part in (path, *(_with_suffix(path, end) for end in _SUFFIXES)):
        if part.exists():
            restrict_permissions(part)
    file = path.open("r+b")
    if not _try_lock(file):
        file.close()
        raise DiskError(_in_use(path, ""))
    return file


def _try_lock(file: IO[bytes]) -> bool:
    """Lock a file. Return False if another process has locked it. LMDB locks another file, so it is not affected."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(path: Path, owner: str) -> str:
    return f"{path.parent.absolute()} is in use by another kvpage-server{owner}: each needs a `dir` of its own"


def _with_suffix(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def create(path: Path) -> None:
    """Create an empty store under a temporary name, and rename it, so that an incomplete one is never visible.

    Raises DiskError if `path` is a link to a file that does not exist: the rename would replace the link to a store
    whose disk is not mounted.
    """
    if path.is_symlink():
        raise DiskError(f"{path} is a link to {os.readlink(path)}, which does not exist: is its disk mounted?")
    new = _with_suffix(path, ".new")
    new.unlink(missing_ok=True)
    with _locks_in_memory(new):
        env = lmdb.open(str(new), subdir=False, mode=_MODE, max_dbs=4, map_size=_SMALLEST_MAP)
    about = env.open_db(b"about")
    with env.begin(write=True, db=about) as txn:
        txn.put(b"format", b"%d" % FORMAT)
        txn.put(b"id", uuid.uuid4().hex.encode())
    env.close()
    _with_suffix(new, "-lock").unlink(missing_ok=True)
    new.rename(path)
    flush_directory(path.parent)


def open_map(path: Path, maxdisk: int, *, flushes: bool) -> lmdb.Environment:
    """Map the file. The map takes address space immediately, and disk space as values are written.

    With `flushes`, commits are durable. Otherwise the operating system writes them later, in any order, and a crash of
    the machine may damage the file. Without `maxdisk`, the map is halved until the system has address space for it.

    A file that was cut within a value is filled with zeros. Otherwise a read beyond its end would kill the process; so
    the checksum of the value differs.
    """
    size = max(maxdisk or _LARGEST_MAP, path.stat().st_size)
    while True:
        try:
            with _locks_in_memory(path):
                env = lmdb.open(
                    str(path),
                    subdir=False,
                    mode=_MODE,
                    max_dbs=5,
                    map_size=size,
                    max_spare_txns=4,
                    max_readers=_READERS,
                    sync=flushes,
                )
            break
        except (lmdb.MemoryError, MemoryError, lmdb.Error) as error:
            if maxdisk or size <= _SMALLEST_MAP or not _has_errno(error, errno.ENOMEM):
                raise
            size //= 2
    used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if path.stat().st_size < used:
        os.truncate(path, used)
    return env


@contextmanager
def _locks_in_memory(path: Path) -> Iterator[None]:
    """Let LMDB, which opens a database within, map memory in place of the file of its locks and readers.

    LMDB writes to this file when it begins and ends a read, and py-lmdb holds the interpreter's lock then. So all
    threads would wait while the file system is frozen, as for a snapshot of the machine, and a write to a hole would
    kill the process while the file system is full. Other processes do not need the file: see `claim`.
    """
    link = _with_suffix(path, "-lock")
    link.unlink(missing_ok=True)
    if not _OWN_FILES.is_dir():  # macOS
        yield
        return
    memory = os.memfd_create(link.name)
    try:
        try:
            link.symlink_to(_OWN_FILES / str(memory))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):  # of FAT, and some network disks
                raise
        yield
    finally:
        os.close(memory)
        link.unlink(missing_ok=True)


def _verify(path: Path) -> list[str]:
    """Check the structure of a database file. Return the errors, none for an intact file. O(bytes)."""
    try:
        return list(verify(str(path), subdir=False))  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]


def _has_errno(error: Exception, number: int) -> bool:
    return os.strerror(number) in str(error)


class lmdb_errors:
    """Context that raises errors of LMDB and the system as DiskError, or as DiskFull if a write had no space. It calls
    `recover` before, if LMDB has failed for another reason than a full map.

    It is not a generator function because, since Python 3.12, a generator's frames refer to the exception that passed
    through it, and the exception to the frames. Such a cycle would keep the arguments of a failed write in memory until
    the next garbage collection.
    """

    def __init__(self, path: Path, *, writing: bool = False, recover: Callable[[], object] | None = None) -> None:
        self._path = path
        self._writing = writing
        self._recover = recover

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if isinstance(error, lmdb.MapFullError):
            raise MaxDisk("maxdisk is used up") from None
        if isinstance(error, lmdb.Error):
            if self._recover is not None:
                self._recover()
            raise self._lmdb_message(error) from None
        if isinstance(error, OSError):
            if self._writing and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(error.strerror) from None
            raise DiskError(f"{error.filename or self._path}: {error.strerror or error}") from None

    def _lmdb_message(self, error: lmdb.Error) -> DiskError | DiskFull:
        if self._writing and (_has_errno(error, errno.ENOSPC) or _has_errno(error, errno.EDQUOT)):
            return DiskFull(str(error))
        little = self._writing and _has_errno(error, errno.EIO) and shutil.disk_usage(self._path.parent).free < RESERVE
        if little:  # LMDB reports a partial write as EIO
            return DiskFull(os.strerror(errno.ENOSPC))
        return DiskError(f"{self._path}: {error}")
