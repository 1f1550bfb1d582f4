"""Values on disk in one LMDB file, and the removal of lost pieces: pieces of bodies that belong to no record.

The pieces of a damaged record are unknown, so they are lost when it is removed. The transaction that removes it sets a
flag in `about`. When the disk is full and the flag is set, all records are read once, and the lost pieces are deleted.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias, TypeVar

import lmdb
import numpy as np
import xxhash

from kvpage_server.lossless import HASHED_FROM, decode_body, seal_of
from kvpage_server.page import HEADER_SIZE, PageError, checksum, unix_ms
from kvpage_server.store import records
from kvpage_server.store.disk.encoding import (
    LIFETIME,
    Change,
    Clear,
    Delete,
    Lifetime,
    SetExpiry,
    Sheets,
    Write,
    code_for_disk,
)
from kvpage_server.store.disk.lmdb_file import (
    CODED_FORMAT,
    FORMAT,
    RESERVE,
    CleanMarker,
    DiskError,
    check_structure,
    claim,
    create,
    lmdb_errors,
    lock,
    open_map,
)
from kvpage_server.store.records import INLINE, PIECE, SHORT_PIECE, Body, Damaged, Record, Spot, database_key, first_of
from kvpage_server.system.durable import open_private
from kvpage_server.system.text import plural

# -- Reads of bodies from LMDB's map -----------------------------------------------------------------------------------
# The GIL is released where a read may wait for the disk.

NUMBER = struct.Struct(">Q")  # database key of a piece
_WRONG_BODY = "its body does not match the checksum it was stored with"
_HASHED_WITH_GIL = 64 * 1024  # bytes; xxhash releases the GIL only for more

Outcome = bool | Exception  # result of a read: True, False for an absent value, or the error Damaged or DiskError
Found = list[memoryview] | Outcome  # the pieces of an intact body, or the outcome of a read without success
ReadTxn: TypeAlias = "lmdb.Transaction[memoryview]"


class StoredBodies:
    """The bodies of values in one read transaction.

    `known` is a cache: the `Body` of pages by their names. With `whole_sheets`, a lookup of one page adds all pages of
    its sheet to the cache.
    """

    def __init__(
        self,
        txn: ReadTxn,
        records: lmdb._Database,
        pieces: lmdb._Database,
        known: dict[bytes, Body],
        *,
        whole_sheets: bool,
    ) -> None:
        self._txn = txn
        self._records = records
        self._pieces = pieces
        self._known = known
        self._whole_sheets = whole_sheets

    def read(self, name: bytes, into: memoryview) -> Outcome:
        """Copy a body into memory and check it. Return the outcome; a body of another size counts as absent."""
        try:
            body = self._body(name)
            if body is None or body.size != len(into):
                return False
            if body.coded:
                digest = self._decode(body, into)
            elif len(body.pieces) == 1:
                _copy(self._piece(body.pieces.start, body.size), into)
                digest = checksum(into)
            else:
                digest = self._gather(body, into)
        except Damaged as damage:
            return Damaged(*damage.args)  # without tracebacks, whose frames refer to memory
        return True if digest == body.digest else Damaged(_WRONG_BODY)

    def find(self, name: bytes, size: int) -> Found:
        """Return the pieces of a body after a check, or another outcome; a body of another size counts as absent.

        A coded body is decoded into memory of its own.
        """
        try:
            body = self._body(name)
            if body is None or body.size != size:
                return False
            if body.coded:
                pieces = [np.empty(size, np.uint8).data]
                digest = self._decode(body, pieces[0])
            else:
                pieces = list(self._pieces_of(body))
                digest = _digest_of(pieces)
        except Damaged as damage:
            return Damaged(*damage.args)  # without tracebacks, whose frames refer to memory
        return pieces if digest == body.digest else Damaged(_WRONG_BODY)

    def check(self, name: bytes) -> int:
        """Read a body and check it. Returns the bytes that were read; 0 if there is none. Raises Damaged.

        A coded body is checked by the hash of its code, without decoding.
        """
        body = self._body(name)
        if body is None:
            return 0
        pieces, seed, digest = list(self._pieces_of(body)), 0, body.digest
        if body.coded:
            try:
                seed, digest = seal_of(pieces[0])
            except PageError as error:
                raise Damaged(f"its code is damaged: {error}") from None
            pieces[0] = pieces[0][HASHED_FROM:]
        if _digest_of(pieces, seed) != digest:
            raise Damaged(_WRONG_BODY)
        return body.stored

    def _body(self, name: bytes) -> Body | None:
        """Return the `Body` of a value from the cache, a sheet or a record; None if there is none. Raises Damaged."""
        if known := self._known.get(name):
            return known
        place = records.place_of(name)
        data = None if place is None else self._txn.get(place[0], db=self._records)
        if place is not None and data is not None:
            key, spot = place
            rows = records.unpack(key, data)[1]
            if self._whole_sheets:
                self._known.update(records.bodies(key, rows))
                found = self._known.get(name)
            else:
                found = records.body_of(rows, spot)
            if found is not None:
                return found
        key = database_key(name)
        data = self._txn.get(key, db=self._records)
        return None if data is None else Record.parse(key, data).body

    def _gather(self, body: Body, into: memoryview) -> int:
        """Copy a body into memory, and return its XXH3-64.

        Each piece is hashed while it is in the processor's cache.
        """
        digest = xxhash.xxh3_64()
        start = 0
        for piece in self._pieces_of(body):
            part = into[start : start + len(piece)]
            _copy(piece, part)
            digest.update(part)
            start += len(piece)
        return digest.intdigest()

    def _decode(self, body: Body, into: memoryview) -> int:
        """Decode a coded body into memory, and return its XXH3-64. Raises Damaged."""
        try:
            decode_body(joined([*self._pieces_of(body)]), into)
        except PageError as error:
            raise Damaged(f"its code is damaged: {error}") from None
        return checksum(into)

    def _pieces_of(self, body: Body) -> Iterator[memoryview]:
        if not body.first:
            if len(body.inline) != body.size:
                raise Damaged("its body has another length than its record says")
            yield memoryview(body.inline)
            return
        left = body.stored
        for number in body.pieces:
            piece = self._piece(number, min(left, body.piece))
            left -= len(piece)
            yield piece

    def _piece(self, number: int, size: int) -> memoryview:
        piece = self._txn.get(NUMBER.pack(number), db=self._pieces)
        if piece is None or len(piece) != size:
            raise Damaged("a piece of its body is missing or has another length than its record says")
        return piece


def joined(parts: Sequence[memoryview]) -> memoryview:
    """Return a copy of parts as one. Releases the GIL while the parts, which may be of the map, are read."""
    whole = np.empty(sum(map(len, parts)), np.uint8).data
    start = 0
    for part in parts:
        _copy(part, whole[start : start + len(part)])
        start += len(part)
    return whole


def _copy(piece: memoryview, into: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(piece, np.uint8))


def _digest_of(pieces: Iterable[memoryview], seed: int = 0) -> int:
    """Return the XXH3-64 of the pieces together, which are views of the map. Release the GIL while the disk is read."""
    digest = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        if 0 < len(piece) <= _HASHED_WITH_GIL:
            np.frombuffer(piece, np.uint8).max()  # reads every byte with the GIL released, so the disk is read here
        digest.update(piece)
    return digest.intdigest()


_LOST_FLAG = b"lost"  # key of the flag in `about`
_CODED_KEY = b"coded"  # key of `Coded` in `about`
_CODED = struct.Struct("<QQ")

_Txn: TypeAlias = "lmdb.Transaction[bytes]"


class Coded(NamedTuple):
    """Bytes of all coded bodies on disk, without the quarantine: of the bodies, and of their codes.

    Bodies of damaged records count until the lost pieces are deleted.
    """

    raw: int = 0
    stored: int = 0

    def plus(self, body: Body, sign: int = 1) -> Coded:
        """Return the sizes with a body that was added (1) or deleted (-1)."""
        if not body.coded:
            return self
        return Coded(max(self.raw + sign * body.size, 0), max(self.stored + sign * body.coded, 0))


class Decoded(NamedTuple):
    """Coded bodies that were stored again without the code, see `Disk.decode_some`."""

    last: bytes  # database key of the last entry that was read, empty at the end
    sizes: dict[bytes, int]  # bytes of the bodies, by name
    damaged: list[bytes]  # names of values whose code cannot be decoded


# -- Lost pieces -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LostPieces:
    """The lost pieces in a file with these databases."""

    about: lmdb._Database
    records: lmdb._Database
    quarantine: lmdb._Database
    pieces: lmdb._Database

    def note(self, txn: _Txn) -> None:
        """Set the flag that there may be lost pieces, in a write transaction."""
        txn.put(_LOST_FLAG, b"", db=self.about)

    def remove(self, txn: _Txn) -> int:
        """Delete the lost pieces if the flag is set, and clear it.

        Return their number. Reads all records: O(records).
        """
        if not txn.delete(_LOST_FLAG, db=self.about):
            return 0
        lost = list(self._lost(txn))
        for key in lost:
            txn.delete(key, db=self.pieces)
        return len(lost)

    def coded(self, txn: _Txn) -> Coded:
        """Return the sizes of all coded bodies together, without the quarantine. Reads all records: O(records)."""
        found = Coded()
        for body in self._stored(txn):
            found = found.plus(body)
        return found

    def _lost(self, txn: _Txn) -> Iterator[bytes]:
        """Yield the keys of lost pieces: merge the sorted ranges of the records' pieces with the sorted keys of all
        pieces.
        """
        ranges = iter(sorted((body.pieces.start, body.pieces.stop) for body in self._bodies(txn) if body.first))
        start, stop = next(ranges, (0, 0))
        for key in txn.cursor(self.pieces).iternext(keys=True, values=False):
            (number,) = NUMBER.unpack(key)
            while stop <= number and (following := next(ranges, None)) is not None:
                start, stop = following
            if not start <= number < stop:
                yield key

    def _bodies(self, txn: _Txn) -> Iterator[Body]:
        yield from self._stored(txn)
        for key, data in txn.cursor(self.quarantine):
            yield from _bodies_of(key[NUMBER.size :], data)

    def _stored(self, txn: _Txn) -> Iterator[Body]:
        for key, data in txn.cursor(self.records):
            yield from _bodies_of(key, data)


def _bodies_of(key: bytes, data: bytes) -> Iterator[Body]:
    try:
        if key.startswith(records.PREFIX):
            yield from records.bodies(key, records.unpack(key, data)[1]).values()
        else:
            yield Record.parse(key, data).body
    except Damaged:
        return  # the pieces of this record are unknown, so they count as lost


# -- The LMDB file -----------------------------------------------------------------------------------------------------
#
# The file has five databases:
#
#     about       the format, the store's id, flags, and the sizes of coded bodies together
#     records     a record for each string and each extent; sheets for the single pages of other blocks.
#                 `store/records.py` describes both
#     pieces      the bodies or their codes, in numbered pieces of up to 64 pages of LMDB, or of one page each if not
#                 enough free pages are contiguous
#     quarantine  the last few damaged records. Pieces of their bodies stay in `pieces`
#     kept        the end of each unit's lifetime, its length, and its tenant
#
# A value that is overwritten gets new pieces. Numbers of pieces are not reused while the process runs, so the pieces
# that a transaction reads belong to the record that it has read. `Clear` empties the quarantine, too, because the next
# process may reuse the numbers of the quarantine's pieces.
#
# A commit of LMDB is atomic, and durable when it returns: it writes data first, then the page that refers to the data.
# A crash of the machine loses only changes that were not committed. With `appendfsync no`, a commit is not flushed, and
# a crash of the machine may damage the file. The next start checks the structure, and each value has a checksum.
#
# If the write of that page fails, LMDB refuses everything from then on, also reads. Then the thread that writes opens
# the file again at once, when all reads have ended. It has the last commit that succeeded.
#
# Any thread may read, and one thread at a time may write. Every call may wait for the disk.

FILE = "kvpage.lmdb"
_LOCK = "kvpage.lock"
STORE_FILES = FILE, _LOCK  # beginnings of the names of all files of a store
NECESSARY_FILES = _LOCK, FILE, f"{FILE}.clean"  # without which a store cannot be opened
_QUARANTINED = 16  # records in the quarantine, before the oldest is deleted
_LONGEST_QUARANTINED = 500  # bytes of a database key in the quarantine; with 8 bytes of time it fits into LMDB's 511
_MANY = 8  # values of one read, from which on a lookup decodes all pages of a sheet
_MOST_FREE = 16 << 20  # bytes by which a file that is larger than `maxdisk` may grow
_MOST_KNOWN = 1 << 14  # pages whose `Body` is cached
_DECODED = 4  # entries of the database whose bodies are decoded in one commit; a sheet has up to 6,144 pages
_READS_END_WITHIN = 5.0  # seconds; borrowed reads end after `borrowed_reads.LONGEST`
_RECOVERY_BEGINS_WITHIN = 1.0  # seconds after a failed write
_RETRY = 0.01  # seconds

log = logging.getLogger("kvpage")

_T = TypeVar("_T")
_Place = tuple[bytes, Spot] | None  # database key of a sheet, and the row in it; None for other values


def _has_reads(env: lmdb.Environment) -> bool:
    """Return whether a transaction reads. LMDB's table of readers has its number, or - for a transaction that ended."""
    return any(line.split()[-1].isdigit() for line in env.readers().splitlines())


class Disk:
    """The values in the LMDB file of a directory. `maxdisk` is in bytes, 0 for no limit.

    With `flushes`, commits are durable. With `codes`, bodies of pages and extents are coded when they are written, if
    that saves space; coded bodies are read in any case. Raises DiskError if the file is foreign, damaged, of another
    format, or in use.
    """

    def __init__(self, directory: Path, *, maxdisk: int = 0, flushes: bool = True, codes: bool = False) -> None:
        self.path = directory / FILE
        self.coded = Coded()
        self._flushes = flushes
        self._codes = codes
        # The reserve file, which is deleted when the disk is full: LMDB needs free pages to remove values.
        self._reserve = directory / f"{FILE}.reserve"
        # Id of the last committed transaction, and a cache for it: the `Body` of pages by name.
        self._page_cache: tuple[int, dict[bytes, Body]] = 0, {}
        self._recovering = False  # whether the file is being opened again
        self._is_open = True  # False if that has failed
        self._map_size = 0  # of the closed map
        self._locks = ExitStack()
        with lmdb_errors(directory / _LOCK, writing=True):
            self._locks.enter_context(lock(directory / _LOCK))
        try:
            with lmdb_errors(self.path, writing=True):
                self._open(maxdisk, flushes=flushes)
        except BaseException:
            self._locks.close()
            raise

    def _open(self, maxdisk: int, *, flushes: bool) -> None:
        if not self.path.exists():
            create(self.path)
        self._file: IO[bytes] = self._locks.enter_context(claim(self.path))
        self._marker = CleanMarker(self.path, self._file)
        try:
            check_structure(self.path, self._marker)
            self._env = open_map(self.path, maxdisk, flushes=flushes)
        except BaseException:
            self._marker.close()
            raise
        try:
            self._marker.opened()
            self._attach(self._env)
            self._ensure_free_pages(maxdisk)
            self._lifetimes = self._env.open_db(b"kept")
            self._keep_reserve()
        except BaseException:
            self._env.close()
            self._marker.close()
            raise

    def _attach(self, env: lmdb.Environment) -> None:
        try:
            about = env.open_db(b"about", create=False)
        except lmdb.NotFoundError:
            raise DiskError(f"{self.path} is a database, but not a store of kvpage-server") from None
        self._about = about
        with env.begin(db=about) as txn:
            found = txn.get(b"format", b"")
            self.id = str(txn.get(b"id", b""), "ascii", "replace")
            if coded := txn.get(_CODED_KEY):
                self.coded = Coded(*_CODED.unpack(coded))
        if not found.isdigit():
            raise DiskError(f"{self.path} is a database, but not a store of kvpage-server")
        self.format = int(found)  # the number of the file's format, see `lmdb_file`
        if not FORMAT <= self.format <= CODED_FORMAT:
            older = self.format < FORMAT
            raise DiskError(
                f"{self.path} has format {self.format}, {'older' if older else 'newer'} than "
                f"{FORMAT if older else CODED_FORMAT}, the {'oldest' if older else 'newest'} that this version reads"
            )
        self._records = env.open_db(b"records")
        self._pieces = env.open_db(b"pieces")
        self._quarantine = env.open_db(b"quarantine")
        self._lost = LostPieces(about, self._records, self._quarantine, self._pieces)
        with env.begin() as txn:
            self.quarantined = txn.stat(self._quarantine)["entries"]
            last = txn.cursor(self._pieces)
            self._next = NUMBER.unpack(last.key())[0] + 1 if last.last() else 1

    def _recover(self) -> None:
        """Open the file again, as soon as all reads have ended, if LMDB refuses everything since a failed write. If
        this fails, the next failed write repeats it.
        """
        try:
            self._env.begin(parent=None).abort()
        except lmdb.PanicError:
            pass
        except lmdb.Error:
            if self._is_open:
                return
        else:
            return
        self._recovering = True
        try:
            self._open_again()
        except (lmdb.Error, OSError, DiskError) as error:
            log.error("%s cannot be opened again after a failed write: %s", self.path, error)
        else:
            log.warning("%s was opened again after a failed write", self.path)
        finally:
            self._recovering = False

    def _open_again(self) -> None:
        """Open the file again as soon as all reads have ended. Raises lmdb.Error, OSError, DiskError."""
        if self._is_open:
            until = time.monotonic() + _READS_END_WITHIN
            while _has_reads(self._env):
                if time.monotonic() > until:
                    raise DiskError("reads do not end")
                time.sleep(_RETRY)
            self._map_size = self._env.info()["map_size"]
            self._is_open = False
            self._env.close()
        env = open_map(self.path, self._map_size, flushes=self._flushes)
        try:
            self._attach(env)
            self._lifetimes = env.open_db(b"kept")
        except BaseException:
            env.close()
            raise
        self._env, self._is_open = env, True

    def _begin(self, begin: Callable[[lmdb.Environment], _T]) -> _T:
        """Return the transaction that `begin` begins. Wait until the file is open again after a failed write."""
        begun = time.monotonic()
        while True:
            env = self._env
            try:
                return begin(env)
            except lmdb.Error as error:
                waited = time.monotonic() - begun
                refused = isinstance(error, lmdb.PanicError) and waited < _RECOVERY_BEGINS_WITHIN
                if not (refused or env is not self._env or (self._recovering and waited < _READS_END_WITHIN)):
                    raise
            time.sleep(_RETRY)

    def resize(self, maxdisk: int) -> None:
        """Let the file grow to `maxdisk` bytes; it never shrinks. No thread may read or write during the call."""
        self._env.set_mapsize(max(maxdisk, self._env.info()["map_size"]))

    def _ensure_free_pages(self, maxdisk: int) -> None:
        """Let the file grow if it has reached `maxdisk`, or exceeds a `maxdisk` that was lowered, and is nearly full.

        LMDB needs free pages for every change, also for removals, and reuses the pages of removed values only after a
        later commit. With too few free pages nothing could be written or removed again.
        """
        least = min(maxdisk // 8, _MOST_FREE)
        if self.size <= maxdisk - least:
            return
        try:
            with self._env.begin(write=True, db=self._about) as txn:
                page = txn.stat(self._about)["psize"]
                for number in range(least // page):
                    txn.put(b"free %d" % number, bytes(page // 2))  # at least half a page each
                txn.abort()
        except lmdb.MapFullError:
            self.resize(self.size + least)

    def close(self) -> None:
        """Flush and close the file, and mark it as cleanly closed. Raises DiskFull, DiskError."""
        with lmdb_errors(self.path, writing=True):
            self._env.sync(True)
            self._env.close()
            self._marker.closed()
            self._marker.close()
            self._locks.close()

    def flush(self) -> None:
        """Make all commits durable, if they are not yet. Raises DiskFull, DiskError, also if the file has lost its
        name. It may run during a commit.
        """
        with lmdb_errors(self.path, writing=True):
            if not self._flushes:
                self._env.sync(True)
            self._marker.check()

    @property
    def size(self) -> int:
        """Size of the file in bytes, including free pages, also after somebody has removed its name."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def free(self) -> int:
        """Bytes of the map behind the last page that was ever used."""
        info, stat = self._env.info(), self._env.stat()
        return info["map_size"] - (info["last_pgno"] + 1) * stat["psize"]

    @property
    def space(self) -> int:
        """Bytes for new pages: of the file system, and of the file behind the last used page. A failed write leaves
        such pages.
        """
        free = shutil.disk_usage(self.path.parent).free
        try:
            used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        except lmdb.Error:  # it is being opened again
            return free
        return free + max(self.size - used, 0)

    def __len__(self) -> int:
        with self._begin(lambda env: env.begin()) as txn:
            return txn.stat(self._records)["entries"]

    # -- writing ---------------------------------------------------------------------------------------------------

    def commit_removals(self, changes: Iterable[Change]) -> None:
        """Commit removals when the disk is full. Removals in the order of names are the fastest.

        LMDB needs free pages for a removal, too, so the reserve file is deleted first. If `maxdisk` has no space for
        all removals in one commit, there are several commits. LMDB reuses the pages that a commit freed only after the
        next commit, so a small change follows. Raises DiskFull or DiskError; some values may have been removed then.
        """
        with lmdb_errors(self.path, writing=True, recover=self._recover):
            self._has_reserve = False
            self._reserve.unlink(missing_ok=True)
            self._commit_in_parts(list(changes))
            self._remove_lost()
            self._commit_small_change()  # now the next commit can use the freed pages
            self._keep_reserve(least=0)

    def _remove_lost(self) -> None:
        with self._env.begin(write=True) as txn:
            removed, coded = self._lost.remove(txn), self.coded
            if removed:
                coded = self._lost.coded(txn)
                self._note_coded(txn, coded)
        self.coded = coded
        if removed:
            self._marker.committed()
            log.warning("%s: removed %s of values whose records were damaged", self.path, plural(removed, "piece"))

    def _commit_small_change(self) -> None:
        """Commit a small change, after which LMDB can reuse the pages that the last commit freed."""
        with self._env.begin(write=True) as txn:
            txn.put(b"turn", NUMBER.pack(txn.id()), db=self._about)
        self._marker.committed()

    def _commit_in_parts(self, changes: list[Change]) -> None:
        """Commit changes; halve their number per commit after each MapFullError.

        Raises MapFullError if a single one fails.
        """
        at, many = 0, len(changes)
        while at < len(changes):
            try:
                self._commit(changes[at : at + many])
            except lmdb.MapFullError:
                if many == 1:
                    raise
                many //= 2
            else:
                at += many

    def _keep_reserve(self, least: int = 2 * RESERVE) -> None:
        """Create the reserve file if it is missing or short, and at least `least` bytes of the file system are free."""
        has = self._reserve.stat().st_size if self._reserve.exists() else 0
        free = shutil.disk_usage(self.path.parent).free
        if has < RESERVE and free >= least:
            has = min(RESERVE, free)
            try:
                with open(self._reserve, "wb", opener=open_private) as reserve:
                    reserve.write(bytes(has))
            except OSError:
                self._reserve.unlink(missing_ok=True)
                has = 0
        self._has_reserve = has == RESERVE

    def write(self, changes: Iterable[Change]) -> dict[bytes, int]:
        """Commit changes in order, all or none. They are durable on return if the store was opened with `flushes`.

        Return the bytes of the code of each value that was coded, by name. If the map is full, retry once: with the
        pages of lost pieces and of the last commit, and with bodies in pieces of one page each. A retry iterates over
        `changes` again, so those of an iterator are kept. Raises DiskFull, DiskError.
        """
        if isinstance(changes, Iterator):
            changes = list(changes)
        with lmdb_errors(self.path, writing=True, recover=self._recover):
            try:
                coded = self._commit(changes)
            except lmdb.MapFullError:
                with suppress(lmdb.MapFullError):
                    self._remove_lost()
                    self._commit_small_change()
                coded = self._commit(changes, piece=SHORT_PIECE)
            if not self._has_reserve:
                self._keep_reserve()
        return coded

    def _commit(self, changes: Iterable[Change], *, piece: int = PIECE) -> dict[bytes, int]:
        before = self._next, self.format, self.coded
        coded: dict[bytes, int] = {}
        try:
            with self._env.begin(write=True) as txn:
                sheets = Sheets(txn, self._records)
                for change in changes:
                    self._change(txn, sheets, change, piece, coded)
                sheets.flush()
                if sheets.damaged:
                    self._lost.note(txn)
                if self.coded != before[2]:
                    self._note_coded(txn, self.coded)
                quarantined = txn.stat(self._quarantine)["entries"]
        except BaseException:
            self._next, self.format, self.coded = before
            raise
        self.quarantined = quarantined
        self._marker.committed()
        return coded

    def _note_coded(self, txn: _Txn, coded: Coded) -> None:
        txn.put(_CODED_KEY, _CODED.pack(*coded), db=self._about)

    def _note_format(self, txn: _Txn, number: int) -> None:
        if self.format != number:
            txn.put(b"format", b"%d" % number, db=self._about)
            self.format = number

    def _change(self, txn: _Txn, sheets: Sheets, change: Change, piece: int, coded: dict[bytes, int]) -> None:
        """Make a change in a transaction. If it stores a coded body, add the bytes of its code to `coded`."""
        if isinstance(change, Clear):
            sheets.clear()
            # The quarantine refers to pieces.
            for database in (self._records, self._quarantine, self._pieces, self._lifetimes):
                txn.drop(database, delete=False)
            self.coded = Coded()
            self._note_format(txn, FORMAT)
            return
        if change.name[:1] == LIFETIME:
            if isinstance(change, Write):
                txn.put(database_key(change.name), bytes(change.body), db=self._lifetimes)
            else:
                txn.delete(database_key(change.name), db=self._lifetimes)
            return
        place = records.place_of(change.name)
        if isinstance(change, Write):
            self._delete(txn, sheets, change.name, place)
            if size := self._put(txn, sheets, change, place, piece):
                coded[change.name] = size
        elif isinstance(change, Delete):
            self._delete(txn, sheets, change.name, place)
        elif isinstance(change, SetExpiry):
            self._retime(txn, sheets, change, place)
        else:
            self._move_to_quarantine(txn, sheets, change.name, place)

    def _put(self, txn: _Txn, sheets: Sheets, write: Write, place: _Place, piece: int) -> int:
        """Store a value. Return the bytes of its code; 0 if it is not coded."""
        body = memoryview(write.body)
        has_row = place is not None and len(write.meta) == HEADER_SIZE
        first, inline, code = 0, b"", None
        if len(body) <= INLINE and not has_row:
            inline = bytes(body)
        elif len(body):
            code = code_for_disk(write) if self._codes else None
            content = body if code is None else memoryview(code)
            first = first_of(self._next, piece)
            for start in range(0, len(content), piece):
                number = NUMBER.pack(self._next)
                txn.put(number, content[start : start + piece], append=True, db=self._pieces)
                self._next += 1
        stored = Body(len(body), write.digest or checksum(body), first, inline, len(code or b""))
        if code is not None:
            self.coded = self.coded.plus(stored)
            self._note_format(txn, CODED_FORMAT)
        if place is not None and has_row:
            key, spot = place
            sheets.of(key)[spot] = records.row_of(write.meta, write.expires, write.used, stored)
        else:
            record = Record(write.name, write.meta, write.expires, write.used, stored)
            sheets.any_strays |= place is not None
            txn.put(database_key(write.name), bytes(record), db=self._records)
        return stored.coded

    def _delete(self, txn: _Txn, sheets: Sheets, name: bytes, place: _Place) -> None:
        if place is not None and (row := sheets.of(place[0]).pop(place[1], None)):
            body = records.body_in(row)
            self._delete_pieces(txn, body)
            self.coded = self.coded.plus(body, -1)
            return
        if place is not None and not sheets.any_strays:
            return
        key = database_key(name)
        old = txn.pop(key, db=self._records)
        if old is not None and (deleted := self._delete_pieces_of(txn, key, old)):
            self.coded = self.coded.plus(deleted, -1)

    def _delete_pieces_of(self, txn: _Txn, key: bytes, data: bytes) -> Body | None:
        """Delete the pieces of a record, and return its body; None if the record is damaged."""
        try:
            record = Record.parse(key, data)
        except Damaged:
            self._lost.note(txn)
            return None
        self._delete_pieces(txn, record.body)
        return record.body

    def _delete_pieces(self, txn: _Txn, body: Body) -> None:
        for number in body.pieces:
            txn.delete(NUMBER.pack(number), db=self._pieces)

    def _retime(self, txn: _Txn, sheets: Sheets, change: SetExpiry, place: _Place) -> None:
        if place is not None and (row := sheets.of(place[0]).get(place[1])):
            record = records.record_of(change.name, row)
            sheets.of(place[0])[place[1]] = records.row_of(record.meta, change.expires, record.used, record.body)
            return
        key = database_key(change.name)
        data = txn.get(key, db=self._records)
        if data is None:
            return
        try:
            record = Record.parse(key, data)
        except Damaged:
            return  # a read will report it
        record.expires = change.expires
        txn.put(key, bytes(record), db=self._records)

    def _move_to_quarantine(self, txn: _Txn, sheets: Sheets, name: bytes, place: _Place) -> None:
        key = database_key(name)
        if place is not None and (row := sheets.of(place[0]).pop(place[1], None)):
            data: bytes | None = bytes(records.record_of(name, row))
        else:
            data = txn.pop(key, db=self._records)
        if data is None:
            return
        with suppress(Damaged):  # the quarantine is not counted
            self.coded = self.coded.plus(Record.parse(key, data).body, -1)
        txn.put(NUMBER.pack(unix_ms()) + key[:_LONGEST_QUARANTINED], data, db=self._quarantine)
        self._lost.note(txn)  # the record may be damaged
        while txn.stat(self._quarantine)["entries"] > _QUARANTINED:
            oldest = txn.cursor(self._quarantine)
            oldest.first()
            self._delete_pieces_of(txn, oldest.key()[NUMBER.size :], oldest.value())
            oldest.delete()

    def decode_some(self, after: bytes) -> Decoded:
        """Store the coded bodies of a few entries behind the database key `after` without the code, in one commit.

        Raises DiskFull, DiskError.
        """
        found = [*self.records(after, _DECODED)]
        coded = [record for _, record in found if isinstance(record, Record) and record.body.coded]
        copies = [(record.name, np.empty(record.body.size, np.uint8).data) for record in coded]
        writes, damaged = list[Write](), list[bytes]()
        for record, (name, body), outcome in zip(coded, copies, self.read(copies), strict=True):
            if outcome is True:
                writes.append(Write(name, record.meta, body, record.expires, record.used, record.body.digest))
            else:
                damaged.append(name)
        if writes:
            self.write(writes)
        return Decoded(found[-1][0] if found else b"", {write.name: len(write.body) for write in writes}, damaged)

    def restore_format(self) -> bool:
        """Restore the format that older versions read, if no coded body is left. Return whether it is restored.

        Coded bodies in the quarantine are deleted. Reads all records: O(records). Raises DiskFull, DiskError.
        """
        before = self.format
        try:
            with lmdb_errors(self.path, writing=True, recover=self._recover), self._env.begin(write=True) as txn:
                for key, data in [*txn.cursor(self._quarantine)]:
                    if any(body.coded for body in _bodies_of(key[NUMBER.size :], data)):
                        self._delete_pieces_of(txn, key[NUMBER.size :], data)
                        txn.delete(key, db=self._quarantine)
                coded, quarantined = self._lost.coded(txn), txn.stat(self._quarantine)["entries"]
                self._note_coded(txn, coded)
                if not coded.raw:
                    self._note_format(txn, FORMAT)
        except BaseException:
            self.format = before
            raise
        self.coded, self.quarantined = coded, quarantined
        self._marker.committed()
        return self.format == FORMAT

    # -- reading ---------------------------------------------------------------------------------------------------

    def sheets(self) -> Iterator[tuple[bytes, tuple[int, bytes] | Damaged]]:
        """Yield each sheet's database key, and its soonest expiry and rows or the damage. Uses one transaction.

        The sheets are in the order of their database keys.
        """
        with lmdb_errors(self.path), self._begin(lambda env: env.begin()) as txn:
            cursor = txn.cursor(self._records)
            if not cursor.set_range(records.PREFIX):
                return
            for key, data in cursor:
                if not key.startswith(records.PREFIX):
                    return
                try:
                    yield key, records.unpack(key, data)
                except Damaged as damage:
                    yield key, damage

    def lifetimes(self) -> list[Lifetime]:
        """Return all lifetimes."""
        with lmdb_errors(self.path), self._begin(lambda env: env.begin(db=self._lifetimes)) as txn:
            return [Lifetime.unpack(data) for _, data in txn.cursor()]

    def records(self, after: bytes = b"", most: int = 1 << 62) -> Iterator[tuple[bytes, Record | Damaged]]:
        """Yield the records behind the database key `after`, each with its database key, in one transaction.

        At most `most` entries of the database are read. A sheet is one entry, and yields a record for each of its
        pages. Sheets follow after the other records.
        """
        for key, data in self._all(after + b"\0" if after else b"", most):
            try:
                if key.startswith(records.PREFIX):
                    yield from ((key, record) for record in records.records(key, records.unpack(key, data)[1]))
                else:
                    yield key, Record.parse(key, data)
            except Damaged as damage:
                yield key, damage

    def _all(self, start: bytes, most: int) -> Iterator[tuple[bytes, bytes]]:
        with lmdb_errors(self.path), self._begin(lambda env: env.begin()) as txn:
            cursor = txn.cursor(self._records)
            if cursor.set_range(start) if start else cursor.first():
                yield from (found for _, found in zip(range(most), cursor, strict=False))

    def read(self, values: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        """Copy the bodies of values into memory, and return the outcome of each, in order. Raises DiskError.

        `values` has names and memory. A value of another size than its memory counts as absent. The GIL is released
        while bodies are copied or read from disk.
        """
        with lmdb_errors(self.path), self._begin(lambda env: env.begin(buffers=True)) as txn:
            bodies = self._bodies(txn, len(values))
            return [bodies.read(name, into) for name, into in values]

    def find(self, values: Sequence[tuple[bytes, int]]) -> tuple[object, list[Found]]:
        """Return a transaction, and views of the bodies of values in the map, which are valid as long as it is open.

        `values` has names and sizes in bytes. All bytes were read and checked with the GIL released, so they are in the
        system's page cache. Raises DiskError.
        """
        with lmdb_errors(self.path):
            txn = self._begin(lambda env: env.begin(buffers=True))
            bodies = self._bodies(txn, len(values))
            return txn, [bodies.find(name, size) for name, size in values]

    def _bodies(self, txn: ReadTxn, count: int) -> StoredBodies:
        """Return `StoredBodies` for `count` lookups. It caches the `Body` of pages until the next commit."""
        commit, (since, known) = txn.id(), self._page_cache
        if since != commit or len(known) > _MOST_KNOWN:
            known = {}
            self._page_cache = commit, known  # another thread may have set it, too; either cache is valid
        return StoredBodies(txn, self._records, self._pieces, known, whole_sheets=count >= _MANY)

    def check(self, name: bytes) -> int:
        """Read a value's body and check it. Return its size in bytes; 0 if there is none. Raises Damaged, DiskError."""
        with lmdb_errors(self.path), self._begin(lambda env: env.begin(buffers=True)) as txn:
            return self._bodies(txn, _MANY).check(name)
