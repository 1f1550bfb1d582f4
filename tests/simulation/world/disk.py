"""The disk: the server's real database, in a file in memory, with the faults of disks.

Faults are injected between the server and LMDB. A commit can fail because the disk is full, or refuses to write; a read
can fail, or find other bytes than were written; and everything can take long. The file has exactly the committed data,
so a killed process leaves a copy of it to the next one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lmdb


class Usage(NamedTuple):
    """Result of shutil.disk_usage."""

    total: int
    used: int
    free: int


PLENTY = 1 << 40
_INTERRUPTED = 0.15  # of all calls
_UNIQUE = 24  # bytes: no other value has the same
_RESERVE = 1 << 20  # bytes that are free once the server gives up the file that keeps them


@dataclass
class Faults:
    """Current faults of the disk."""

    full: bool = False
    room: int = 0  # bytes that a full disk still takes: space freed in the file, and its reserve
    refuses: bool = False  # to write
    unreadable: bool = False
    slow: int = 0  # nanoseconds for each call, at most
    counts: dict[str, int] = field(default_factory=dict)

    def strike(self, name: str) -> None:
        """Count one that was felt."""
        self.counts[name] = self.counts.get(name, 0) + 1


class SimulatedDisk:
    """`pause` lets the thread that calls wait."""

    def __init__(self, pause: Callable[[int], None], rng: random.Random) -> None:
        self.faults = Faults()
        self._pause = pause
        self._rng = rng
        self.commits = 0
        self.map_size = 0  # limit in bytes for the values of a database, and for values that replace them; 0 for none
        self.databases: dict[bytes, Any] = {}  # of the environment that was opened last
        self._live: lmdb.Environment | None = None

    def environment(self, env: lmdb.Environment) -> Environment:
        """A database as the server sees it."""
        self._live = env
        return Environment(env, self)

    def rot(self, rng: random.Random, database: bytes, bits: int) -> bool:
        """Flip bits in a value of a database, wherever it stands in the file; whether there is one. No notification is
        sent.
        """
        env = self._live
        if env is None:
            return False
        with env.begin(db=self.databases[database]) as txn:
            values = [value for _, value in txn.cursor() if len(value) >= _UNIQUE]
        if not values:
            return False
        path, piece = env.path(), rng.choice(values)
        wrong = bytearray(piece)
        for _ in range(bits):
            wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        stat = os.stat(path)
        with open(path, "r+b") as file:
            data, at = file.read(), -1
            while (at := data.find(piece, at + 1)) >= 0:
                os.pwrite(file.fileno(), wrong, at)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return bytes(wrong) != piece

    def usage(self, path: Any) -> Usage:
        """Return `shutil.disk_usage`."""
        return Usage(PLENTY, PLENTY if self.faults.full else 0, 0 if self.faults.full else PLENTY)

    def wait(self) -> None:
        """A call of the disk takes its time, now and then so much that others run meanwhile."""
        if self.faults.slow or self._rng.random() < _INTERRUPTED:
            self._pause(self._rng.randrange(1_000, max(self.faults.slow, 200_000)))

    def check_write(self, growth: int, freed: int, there: int) -> None:
        """Raise LMDB's error if the disk takes nothing, or not so much in addition to `there` bytes."""
        if 0 < self.map_size < there + growth:
            self.faults.strike("map full")
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")
        if self.faults.full and growth > self.faults.room:
            self.faults.strike("full")
            raise lmdb.Error(os.strerror(errno.ENOSPC))
        self.faults.room += freed - growth
        if self.faults.refuses:
            self.faults.strike("refused")
            raise lmdb.Error(os.strerror(errno.EIO))

    def check_read(self) -> None:
        """Raises what LMDB does when the disk gives nothing."""
        if self.faults.unreadable:
            self.faults.strike("unreadable")
            raise lmdb.Error(os.strerror(errno.EIO))


class Environment:
    """LMDB's environment with faults; all other methods are LMDB's own."""

    def __init__(self, env: lmdb.Environment, disk: SimulatedDisk) -> None:
        self._env = env
        self._disk = disk
        self._reserve = Path(env.path() + ".reserve")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def open_db(self, name: bytes, **options: Any) -> Any:
        """A database of it."""
        found = self._disk.databases[name] = self._env.open_db(name, **options)
        return found

    def begin(self, **options: Any) -> Any:
        """A transaction. One with `parent` only asks whether LMDB still works."""
        if "parent" in options:
            return self._env.begin(**options)
        self._disk.wait()
        if options.get("write"):
            return Writing(self._env.begin(**options), self._disk, self._reserve)
        self._disk.check_read()
        txn = self._env.begin(**options)
        return Reading(txn, self._disk) if options.get("buffers") else txn


class Reading:
    """A transaction that reads values."""

    def __init__(self, txn: Any, disk: SimulatedDisk) -> None:
        self._txn = txn
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def __enter__(self) -> Reading:
        self._txn.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._txn.__exit__(*error)

    def get(self, *args: Any, **options: Any) -> Any:
        """A value. Others run while the disk is asked."""
        self._disk.wait()
        self._disk.check_read()
        return self._txn.get(*args, **options)


class Writing:
    """A transaction that writes. It fails at its end, as most do."""

    def __init__(self, txn: Any, disk: SimulatedDisk, reserve: Path) -> None:
        self._txn = txn
        self._disk = disk
        self._reserve = reserve
        self._had_reserve = reserve.exists()
        self._put = self._deleted = 0
        self._there = sum(map(self._size_of, (b"records", b"pieces"))) if disk.map_size else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def __enter__(self) -> Writing:
        self._txn.__enter__()
        return self

    def _size_of(self, database: bytes) -> int:
        cursor = self._txn.cursor(db=self._disk.databases[database])
        return sum(len(key) + len(value) for key, value in cursor)

    def put(self, key: Any, value: Any, **options: Any) -> Any:
        """Write a value."""
        self._put += len(key) + len(value)
        return self._txn.put(key, value, **options)

    def delete(self, key: Any, **options: Any) -> Any:
        """Remove one."""
        self._deleted += len(self._txn.get(key, b"", db=options["db"]))
        return self._txn.delete(key, **options)

    def __exit__(self, *error: Any) -> Any:
        if error[0] is None:
            try:
                self._disk.wait()
                if not self._had_reserve and self._disk.faults.full and not self._disk.faults.room:
                    self._disk.faults.room = _RESERVE
                self._disk.check_write(self._put, self._deleted, self._there)
            except BaseException as failure:
                self._txn.__exit__(type(failure), failure, None)
                raise
            self._disk.commits += 1
        return self._txn.__exit__(*error)


def copy_of(directory: Path, to: Path) -> None:
    """Copy the files that a killed process leaves to the next one."""
    to.mkdir()
    for file in sorted(directory.iterdir()):
        if not file.name.endswith(("-lock", ".lock")) and file.is_file():
            shutil.copyfile(file, to / file.name)
            stat = file.stat()
            os.utime(to / file.name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
