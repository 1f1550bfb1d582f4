"""Values on disk, in one LMDB file of a directory.

Three databases lie in the file: `about` (the format, and who the store is), `records` (what describes each value, see
`record`) and `pieces` (the bodies, in pieces, by number). A body that is overwritten gets new pieces: numbers are never
reused while the process lives, and a record that is read together with its pieces in one transaction fits them.
`quarantine` has the last few records that were found damaged, with what is left of their bodies.

LMDB's commit is atomic, and durable when it returns: data first, then the page that refers to it. It is never opened
in its unsafe modes, so a crash of the machine costs what was not committed and nothing else. A file that was not closed
properly, or was touched since, is looked through before LMDB maps it: a torn file could crash the process.

Any thread may read, one at a time may write. Every call here may wait for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import lmdb
import numpy as np
import xxhash
from lmdb.verify import VerifyError, verify

from kvpage_server.durable import flush_directory
from kvpage_server.page import checksum, unix_ms
from kvpage_server.store.record import INLINE, PIECE, Damaged, Record, database_key

FORMAT = 1
FILE = "kvpage.lmdb"
_LOCK = "kvpage.lock"
_LARGEST_MAP = 1 << 40  # bytes of address space, where maxdisk sets no limit
_SMALLEST_MAP = 1 << 30
_RESERVE = 1 << 20  # bytes
_QUARANTINED = 16  # records that are kept to be looked at
_LONGEST_ASIDE = 500  # bytes of a key; with its time it is one again
_NUMBER = struct.Struct(">Q")


class DiskError(Exception):
    """The store on disk cannot be used; the message says which file it is and why."""


class DiskFull(Exception):
    """The disk, or `maxdisk`, has no room for what was to be written. Nothing of it was."""


@dataclass(slots=True)
class Put:
    """A value that is to be stored. `digest`: the body's XXH3-64, 0 to have it computed."""

    name: bytes
    meta: bytes
    body: memoryview | bytes
    expires: int = 0
    used: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """A value that is to go."""

    name: bytes


@dataclass(frozen=True, slots=True)
class Retime:
    """A value that is to expire at another time."""

    name: bytes
    expires: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A value that is to be set aside: it is not found any more, and can be looked at."""

    name: bytes


class Clear:
    """Everything is to go."""


Change = Put | Delete | Retime | Quarantine | Clear


class Disk:
    """The store of a directory. Raises DiskError when it is not ours, damaged, of a newer format, or in use."""

    def __init__(self, directory: Path, *, maxdisk: int = 0) -> None:
        self.path = directory / FILE
        self._clean = directory / f"{FILE}.clean"
        self._reserve = directory / f"{FILE}.reserve"
        with _told(self.path):
            self._lock = _lock(directory / _LOCK)
        try:
            with _told(self.path):
                self._open(maxdisk)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, maxdisk: int) -> None:
        if not self.path.exists():
            _create(self.path)
        self._look_through()
        self._env = _map(self.path, maxdisk)
        try:
            self._attach()
            self._keep_reserve()
        except BaseException:
            self._env.close()
            raise

    def _look_through(self) -> None:
        """Make sure that LMDB can trust the file's structure. Whether values are intact is seen when they are read."""
        was = self._clean.read_text() if self._clean.exists() else ""
        self._clean.unlink(missing_ok=True)
        with self.path.open("rb") as file:
            if file.read(20)[16:] != (0xBEEFC0DE).to_bytes(4, "little"):
                raise DiskError(f"{self.path} is not a store of kvpage-server")
        if was == self._touched():
            return
        problems = _verify(self.path)
        if problems:
            raise DiskError(
                f"{self.path} is damaged: {problems[0]}. Restore it from a backup, or move it away to start empty"
            )

    def _touched(self) -> str:
        found = self.path.stat()
        return f"{found.st_size} {found.st_mtime_ns}\n"

    def _attach(self) -> None:
        env = self._env
        try:
            about = env.open_db(b"about", create=False)
        except lmdb.NotFoundError:
            raise DiskError(f"{self.path} is a database, but not a store of kvpage-server") from None
        with env.begin(db=about) as txn:
            found = txn.get(b"format", b"")
            self.id = str(txn.get(b"id", b""), "ascii", "replace")
        if not found.isdigit():
            raise DiskError(f"{self.path} is a database, but not a store of kvpage-server")
        if int(found) != FORMAT:
            older = int(found) < FORMAT
            raise DiskError(
                f"{self.path} has format {int(found)}, {'older' if older else 'newer'} than {FORMAT}, "
                "the one that this version reads and writes"
            )
        self._records = env.open_db(b"records")
        self._pieces = env.open_db(b"pieces")
        self._quarantine = env.open_db(b"quarantine")
        with env.begin() as txn:
            self.quarantined = txn.stat(self._quarantine)["entries"]
            last = txn.cursor(self._pieces)
            self._next = _NUMBER.unpack(last.key())[0] + 1 if last.last() else 1

    def close(self) -> None:
        """Let go of the file; it was closed properly."""
        self._env.close()
        try:
            self._clean.write_text(self._touched())
        except OSError:  # then the next start looks through the file
            self._clean.unlink(missing_ok=True)
        self._lock.close()

    @property
    def size(self) -> int:
        """Bytes of the file, those that are free for new values too."""
        return self.path.stat().st_size

    @property
    def free(self) -> int:
        """Bytes of the map that were never used."""
        info, stat = self._env.info(), self._env.stat()
        return info["map_size"] - (info["last_pgno"] + 1) * stat["psize"]

    def __len__(self) -> int:
        with self._env.begin() as txn:
            return txn.stat(self._records)["entries"]

    # -- writing ---------------------------------------------------------------------------------------------------

    def make_room(self, names: Sequence[bytes]) -> None:
        """Remove values where there is no room for anything else. Raises DiskFull, DiskError.

        To remove something, LMDB needs room, too: that is what the reserve is for. It uses again what was freed two
        commits ago.
        """
        self._reserve.unlink(missing_ok=True)
        for some in (names[::2], names[1::2]):
            self.write(map(Delete, some))
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Take a little of the disk while there is some."""
        if self._reserve.exists() or shutil.disk_usage(self.path.parent).free < 2 * _RESERVE:
            return
        try:
            self._reserve.write_bytes(bytes(_RESERVE))
        except OSError:
            self._reserve.unlink(missing_ok=True)

    def write(self, changes: Iterable[Change]) -> None:
        """Make changes, in their order: all or none. They are durable when it returns. Raises DiskFull, DiskError."""
        before = self._next
        try:
            with _told(self.path), self._env.begin(write=True) as txn:
                for change in changes:
                    if isinstance(change, Put):
                        self._put(txn, change)
                    elif isinstance(change, Delete):
                        self._delete(txn, database_key(change.name))
                    elif isinstance(change, Retime):
                        self._retime(txn, database_key(change.name), change.expires)
                    elif isinstance(change, Quarantine):
                        self._set_aside(txn, database_key(change.name))
                    else:
                        txn.drop(self._records, delete=False)
                        txn.drop(self._pieces, delete=False)
        except BaseException:
            self._next = before
            raise

    def _put(self, txn: lmdb.Transaction[bytes], put: Put) -> None:
        key = database_key(put.name)
        old = txn.get(key, db=self._records)
        if old is not None:
            self._delete_pieces(txn, key, old)
        body = memoryview(put.body)
        record = Record(put.name, put.meta, put.expires, put.used, len(body), put.digest or checksum(body))
        if len(body) <= INLINE:
            record.inline = bytes(body)
        else:
            record.first = self._next
            for start in range(0, len(body), PIECE):
                number = _NUMBER.pack(self._next)
                txn.put(number, body[start : start + PIECE], append=True, db=self._pieces)
                self._next += 1
        txn.put(key, bytes(record), db=self._records)

    def _delete(self, txn: lmdb.Transaction[bytes], key: bytes) -> None:
        old = txn.pop(key, db=self._records)
        if old is not None:
            self._delete_pieces(txn, key, old)

    def _delete_pieces(self, txn: lmdb.Transaction[bytes], key: bytes, data: bytes) -> None:
        try:
            record = Record.parse(key, data)
        except Damaged:
            return  # where its pieces lie is not known: they stay
        for number in record.pieces:
            txn.delete(_NUMBER.pack(number), db=self._pieces)

    def _retime(self, txn: lmdb.Transaction[bytes], key: bytes, expires: int) -> None:
        data = txn.get(key, db=self._records)
        if data is None:
            return
        try:
            record = Record.parse(key, data)
        except Damaged:
            return  # who reads it will find out
        record.expires = expires
        txn.put(key, bytes(record), db=self._records)

    def _set_aside(self, txn: lmdb.Transaction[bytes], key: bytes) -> None:
        data = txn.pop(key, db=self._records)
        if data is None:
            return
        txn.put(_NUMBER.pack(unix_ms()) + key[:_LONGEST_ASIDE], data, db=self._quarantine)
        while txn.stat(self._quarantine)["entries"] > _QUARANTINED:
            oldest = txn.cursor(self._quarantine)
            oldest.first()
            self._delete_pieces(txn, oldest.key()[_NUMBER.size :], oldest.value())
            oldest.delete()
        self.quarantined = txn.stat(self._quarantine)["entries"]

    # -- reading ---------------------------------------------------------------------------------------------------

    def records(self, after: bytes = b"", most: int = 1 << 62) -> Iterator[tuple[bytes, Record | Damaged]]:
        """The records in the order of their database keys, which come with them. One transaction."""
        with self._env.begin() as txn:
            cursor = txn.cursor(self._records)
            if not (cursor.set_range(after + b"\0") if after else cursor.first()):
                return
            for _, (key, data) in zip(range(most), cursor, strict=False):
                try:
                    yield key, Record.parse(key, data)
                except Damaged as damage:
                    yield key, damage

    def read(self, name: bytes, into: memoryview) -> bool:
        """Fill `into` with the body of a value, False when there is none of that size. Raises Damaged, DiskError.

        The copy is made with the GIL released, and so is the wait for the disk.
        """
        with _told(self.path), self._env.begin(buffers=True) as txn:
            record = self._record(txn, name)
            if record is None or record.size != len(into):
                return False
            start = 0
            for piece in self._body(txn, record):
                np.copyto(np.frombuffer(into[start : start + len(piece)], np.uint8), np.frombuffer(piece, np.uint8))
                start += len(piece)
        if checksum(into) != record.digest:
            raise Damaged("its body does not match the checksum it was stored with")
        return True

    def check(self, name: bytes) -> int:
        """The bytes of a value that was read and found intact, 0 when there is none. Raises Damaged, DiskError."""
        with _told(self.path), self._env.begin(buffers=True) as txn:
            record = self._record(txn, name)
            if record is None:
                return 0
            digest = xxhash.xxh3_64()
            for piece in self._body(txn, record):
                digest.update(piece)
        if digest.intdigest() != record.digest:
            raise Damaged("its body does not match the checksum it was stored with")
        return record.size

    def _record(self, txn: lmdb.Transaction[memoryview], name: bytes) -> Record | None:
        key = database_key(name)
        data = txn.get(key, db=self._records)
        return None if data is None else Record.parse(key, data)

    def _body(self, txn: lmdb.Transaction[memoryview], record: Record) -> Iterator[memoryview]:
        left = record.size
        if not record.first:
            if len(record.inline) != left:
                raise Damaged("its body has another length than its record says")
            yield memoryview(record.inline)
            return
        for number in record.pieces:
            piece = txn.get(_NUMBER.pack(number), db=self._pieces)
            if piece is None or len(piece) != min(left, PIECE):
                raise Damaged("a piece of its body is missing or has another length than its record says")
            left -= len(piece)
            yield piece


def _lock(path: Path) -> IO[bytes]:
    """Hold the directory, as long as the file is open. Raises DiskError when another process does."""
    lock = path.open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read(20).decode("ascii", "replace").strip()
        lock.close()
        raise DiskError(f"{path.parent.absolute()} is in use by another kvpage-server, pid {owner}") from None
    lock.truncate(0)
    lock.write(b"%d\n" % os.getpid())
    lock.flush()
    return lock


def _create(path: Path) -> None:
    """A new store: there as a whole, or not at all."""
    new = path.with_name(f"{path.name}.new")
    for left in (new, new.with_name(f"{new.name}-lock")):
        left.unlink(missing_ok=True)
    env = lmdb.open(str(new), subdir=False, max_dbs=4, map_size=_SMALLEST_MAP)
    about = env.open_db(b"about")
    with env.begin(write=True, db=about) as txn:
        txn.put(b"format", b"%d" % FORMAT)
        txn.put(b"id", uuid.uuid4().hex.encode())
    env.close()
    new.with_name(f"{new.name}-lock").unlink(missing_ok=True)
    new.rename(path)
    flush_directory(path.parent)


def _map(path: Path, maxdisk: int) -> lmdb.Environment:
    """The file in memory: its address space is taken at once, its disk space as it is needed."""
    size = max(maxdisk or _LARGEST_MAP, path.stat().st_size)
    while True:
        try:
            return lmdb.open(str(path), subdir=False, max_dbs=4, map_size=size, max_spare_txns=4)
        except (lmdb.MemoryError, MemoryError, lmdb.Error) as error:
            if maxdisk or size <= _SMALLEST_MAP or not _says(error, errno.ENOMEM):
                raise
            size //= 2


def _verify(path: Path) -> list[str]:
    """What is wrong with the structure of a database file."""
    try:
        return list(verify(str(path), subdir=False))  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]


def _says(error: Exception, number: int) -> bool:
    return os.strerror(number) in str(error)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What LMDB and the system say, as DiskError or DiskFull."""
    try:
        yield
    except lmdb.MapFullError:
        raise DiskFull("maxdisk is used up") from None
    except lmdb.Error as error:
        if _says(error, errno.ENOSPC) or _says(error, errno.EDQUOT):
            raise DiskFull(str(error)) from None
        if _says(error, errno.EIO) and shutil.disk_usage(path.parent).free < _RESERVE:  # it could write a part
            raise DiskFull(os.strerror(errno.ENOSPC)) from None
        raise DiskError(f"{path}: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(error.strerror) from None
        raise DiskError(f"{error.filename or path}: {error.strerror}") from None
