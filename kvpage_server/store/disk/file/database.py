"""Values on disk, in one LMDB file.

It has three databases: `about` (the format and the store's id), `records` (one for each value, see `record` and
`sheet`) and `pieces` (the bodies, in numbered pieces). A body that is overwritten gets new pieces. Numbers are not
reused while the process lives, so a record and the pieces read in the same transaction belong together. `quarantine`
keeps the last few damaged records, with what is left of their bodies.

LMDB's commit is atomic, and durable when it returns: it writes data first, then the page that refers to it. Its unsafe
modes are never used, so a crash of the machine loses only what was not committed.

Any thread may read, one at a time may write. Every call may wait for the disk.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import lmdb
import xxhash

from kvpage_server.page import HEADER_SIZE, checksum, unix_ms
from kvpage_server.store.disk.file.change import Change, Clear, Delete, Retime, Write
from kvpage_server.store.disk.file.hashing import copy, digest_of
from kvpage_server.store.disk.file.lmdb_file import (
    FORMAT,
    RESERVE,
    DiskError,
    Witness,
    claim,
    create,
    lock,
    look_through,
    open_map,
    told,
)
from kvpage_server.store.disk.file.sheets import Sheets
from kvpage_server.store.records import sheet
from kvpage_server.store.records.record import INLINE, PIECE, Body, Damaged, Record, database_key
from kvpage_server.store.records.sheet import Spot
from kvpage_server.system.durable import private

FILE = "kvpage.lmdb"
_LOCK = "kvpage.lock"
_QUARANTINED = 16  # records that are kept to be looked at
_LONGEST_ASIDE = 500  # bytes of a key; with its time it is one again
_MANY = 8  # values that are read together, from which on all of a sheet is looked up
_MOST_KNOWN = 1 << 14  # pages whose places are remembered
_NUMBER = struct.Struct(">Q")
_WRONG_BODY = "its body does not match the checksum it was stored with"

Outcome = bool | Exception  # of a read. True: done; False: not there; Damaged or DiskError: that
Found = list[memoryview] | Outcome  # the pieces of a body, or why there are none


_Txn: TypeAlias = "lmdb.Transaction[bytes]"
_ReadTxn: TypeAlias = "lmdb.Transaction[memoryview]"
_Place = tuple[bytes, Spot] | None


class Disk:
    """The store of a directory. Raises DiskError when it is not ours, damaged, of a newer format, or in use."""

    def __init__(self, directory: Path, *, maxdisk: int = 0) -> None:
        self.path = directory / FILE
        self._reserve = directory / f"{FILE}.reserve"
        self._lately: tuple[int, dict[bytes, Body]] = 0, {}
        self._locks = ExitStack()
        with told(self.path, writing=True):
            self._locks.enter_context(lock(directory / _LOCK))
        try:
            with told(self.path, writing=True):
                self._open(maxdisk)
        except BaseException:
            self._locks.close()
            raise

    def _open(self, maxdisk: int) -> None:
        if not self.path.exists():
            create(self.path)
        self._locks.enter_context(claim(self.path))
        self._witness = Witness(self.path)
        try:
            look_through(self.path, self._witness)
            self._env = open_map(self.path, maxdisk)
        except BaseException:
            self._witness.go()
            raise
        try:
            self._witness.opened()
            self._attach()
            self._keep_reserve()
        except BaseException:
            self._env.close()
            self._witness.go()
            raise

    def _attach(self) -> None:
        env = self._env
        try:
            about = env.open_db(b"about", create=False)
        except lmdb.NotFoundError:
            raise DiskError(f"{self.path} is a database, but not a store of kvpage-server") from None
        self._about = about
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
        """Close the file in order."""
        self._env.close()
        self._witness.closed()
        self._witness.go()
        self._locks.close()

    @property
    def size(self) -> int:
        """The size of the file in bytes, including space that is free for new values."""
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

    def make_room(self, changes: Iterable[Change]) -> None:
        """Remove values when the disk has no room for anything else; best in the order of their names.

        To remove something, LMDB needs room too, which the reserve provides. If `maxdisk` has no room for all removals
        at once, they go in several commits. LMDB can use what a commit freed only after the next one, so an empty
        change follows. Raises DiskFull or DiskError; some values may be gone then.
        """
        with told(self.path, writing=True):
            self._has_reserve = False
            self._reserve.unlink(missing_ok=True)
            self._commit_in_parts(list(changes))
            with self._env.begin(write=True, db=self._about) as txn:
                txn.put(b"turn", _NUMBER.pack(txn.id()))
            self._witness.committed()
            self._keep_reserve(least=0)  # so that what comes next can use what was freed

    def _commit_in_parts(self, changes: list[Change]) -> None:
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
        """Take a little of the disk for the reserve, if at least `least` bytes are free."""
        has = self._reserve.stat().st_size if self._reserve.exists() else 0
        free = shutil.disk_usage(self.path.parent).free
        if has < RESERVE and free >= least:
            has = min(RESERVE, free)
            try:
                with open(self._reserve, "wb", opener=private) as reserve:
                    reserve.write(bytes(has))
            except OSError:
                self._reserve.unlink(missing_ok=True)
                has = 0
        self._has_reserve = has == RESERVE

    def write(self, changes: Iterable[Change]) -> None:
        """Make changes in order, all or none. They are durable when it returns. Raises DiskFull, DiskError."""
        with told(self.path, writing=True):
            self._commit(changes)
            if not self._has_reserve:
                self._keep_reserve()

    def _commit(self, changes: Iterable[Change]) -> None:
        before = self._next
        try:
            with self._env.begin(write=True) as txn:
                sheets = Sheets(txn, self._records)
                for change in changes:
                    self._change(txn, sheets, change)
                sheets.flush()
        except BaseException:
            self._next = before
            raise
        self._witness.committed()

    def _change(self, txn: _Txn, sheets: Sheets, change: Change) -> None:
        if isinstance(change, Clear):
            sheets.clear()
            txn.drop(self._records, delete=False)
            txn.drop(self._pieces, delete=False)
            return
        place = sheet.place_of(change.name)
        if isinstance(change, Write):
            self._delete(txn, sheets, change.name, place)
            self._put(txn, sheets, change, place)
        elif isinstance(change, Delete):
            self._delete(txn, sheets, change.name, place)
        elif isinstance(change, Retime):
            self._retime(txn, sheets, change, place)
        else:
            self._set_aside(txn, sheets, change.name, place)

    def _put(self, txn: _Txn, sheets: Sheets, write: Write, place: _Place) -> None:
        body = memoryview(write.body)
        has_row = place is not None and len(write.meta) == HEADER_SIZE
        first, inline = 0, b""
        if len(body) <= INLINE and not has_row:
            inline = bytes(body)
        elif len(body):
            first = self._next
            for start in range(0, len(body), PIECE):
                number = _NUMBER.pack(self._next)
                txn.put(number, body[start : start + PIECE], append=True, db=self._pieces)
                self._next += 1
        lies = Body(len(body), write.digest or checksum(body), first, inline)
        record = Record(write.name, write.meta, write.expires, write.used, lies)
        if place is not None and has_row:
            key, spot = place
            sheets.of(key)[spot] = sheet.row_of(record)
        else:
            txn.put(database_key(write.name), bytes(record), db=self._records)

    def _delete(self, txn: _Txn, sheets: Sheets, name: bytes, place: _Place) -> None:
        if place is not None and (row := sheets.of(place[0]).pop(place[1], None)):
            self._delete_pieces(txn, sheet.record_of(name, row))
            return
        key = database_key(name)
        old = txn.pop(key, db=self._records)
        if old is not None:
            self._delete_pieces_of(txn, key, old)

    def _delete_pieces_of(self, txn: _Txn, key: bytes, data: bytes) -> None:
        try:
            record = Record.parse(key, data)
        except Damaged:
            return  # it is not known where its pieces lie, so they stay
        self._delete_pieces(txn, record)

    def _delete_pieces(self, txn: _Txn, record: Record) -> None:
        for number in record.body.pieces:
            txn.delete(_NUMBER.pack(number), db=self._pieces)

    def _retime(self, txn: _Txn, sheets: Sheets, change: Retime, place: _Place) -> None:
        if place is not None and (row := sheets.of(place[0]).get(place[1])):
            record = sheet.record_of(change.name, row)
            record.expires = change.expires
            sheets.of(place[0])[place[1]] = sheet.row_of(record)
            return
        key = database_key(change.name)
        data = txn.get(key, db=self._records)
        if data is None:
            return
        try:
            record = Record.parse(key, data)
        except Damaged:
            return  # its reader will find out
        record.expires = change.expires
        txn.put(key, bytes(record), db=self._records)

    def _set_aside(self, txn: _Txn, sheets: Sheets, name: bytes, place: _Place) -> None:
        key = database_key(name)
        if place is not None and (row := sheets.of(place[0]).pop(place[1], None)):
            data: bytes | None = bytes(sheet.record_of(name, row))
        else:
            data = txn.pop(key, db=self._records)
        if data is None:
            return
        txn.put(_NUMBER.pack(unix_ms()) + key[:_LONGEST_ASIDE], data, db=self._quarantine)
        while txn.stat(self._quarantine)["entries"] > _QUARANTINED:
            oldest = txn.cursor(self._quarantine)
            oldest.first()
            self._delete_pieces_of(txn, oldest.key()[_NUMBER.size :], oldest.value())
            oldest.delete()
        self.quarantined = txn.stat(self._quarantine)["entries"]

    # -- reading ---------------------------------------------------------------------------------------------------

    def sheets(self) -> Iterator[tuple[bytes, tuple[int, bytes] | Damaged]]:
        """The sheets in the order of their database keys, see `sheet.unpack`. One transaction."""
        with told(self.path), self._env.begin() as txn:
            cursor = txn.cursor(self._records)
            if not cursor.set_range(sheet.PREFIX):
                return
            for key, data in cursor:
                if not key.startswith(sheet.PREFIX):
                    return
                try:
                    yield key, sheet.unpack(key, data)
                except Damaged as damage:
                    yield key, damage

    def records(self, after: bytes = b"", most: int = 1 << 62) -> Iterator[tuple[bytes, Record | Damaged]]:
        """The records that follow a database key, each with its database key. One transaction.

        Without `after`, only records outside of sheets. At most `most` database records are read; a sheet is one of
        them.
        """
        for key, data in self._all(after + b"\0" if after else b"", most):
            try:
                if key.startswith(sheet.PREFIX):
                    yield from ((key, record) for record in sheet.records(key, sheet.unpack(key, data)[1]))
                else:
                    yield key, Record.parse(key, data)
            except Damaged as damage:
                yield key, damage

    def _all(self, start: bytes, most: int) -> Iterator[tuple[bytes, bytes]]:
        with told(self.path), self._env.begin() as txn:
            cursor = txn.cursor(self._records)
            if cursor.set_range(start) if start else cursor.first():
                yield from (found for _, found in zip(range(most), cursor, strict=False))

    def read(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        """Fill memory with the bodies of values; a value of another size counts as absent. Raises DiskError.

        The GIL is released while bodies are copied or come from the disk.
        """
        with told(self.path), self._env.begin(buffers=True) as txn:
            lately = self._known_since(txn.id())
            return [self._outcome(txn, lately, name, into, len(wanted)) for name, into in wanted]

    def find(self, wanted: Sequence[tuple[bytes, int]]) -> tuple[object, list[Found]]:
        """Find the bodies of values with these names and sizes. They are valid as long as the first result is kept.

        Bodies were read and checked with the GIL released, so they are in the system's cache. Raises DiskError.
        """
        with told(self.path):
            txn = self._env.begin(buffers=True)
            lately = self._known_since(txn.id())
            return txn, [self._intact(txn, lately, name, size, len(wanted)) for name, size in wanted]

    def _intact(self, txn: _ReadTxn, lately: dict[bytes, Body], name: bytes, size: int, others: int) -> Found:
        try:
            found = lately.get(name) or self._find(txn, lately, name, others)
            if found is None or found.size != size:
                return False
            pieces = list(self._pieces_of(txn, found))
        except Damaged as damage:
            return damage.with_traceback(None)
        return pieces if digest_of(pieces) == found.digest else Damaged(_WRONG_BODY)

    def _known_since(self, commit: int) -> dict[bytes, Body]:
        """The places of pages that were looked up since a commit."""
        since, known = self._lately
        if since != commit or len(known) > _MOST_KNOWN:
            known = {}
            self._lately = commit, known  # another thread may have set it too; either is right
        return known

    def _outcome(self, txn: _ReadTxn, lately: dict[bytes, Body], name: bytes, into: memoryview, others: int) -> Outcome:
        try:
            found = lately.get(name) or self._find(txn, lately, name, others)
            if found is None or found.size != len(into):
                return False
            if found.first and found.size <= PIECE:
                copy(self._piece(txn, found.first, found.size), into)
                digest = checksum(into)
            else:
                digest = self._gather(txn, found, into)
        except Damaged as damage:
            return damage.with_traceback(None)
        return True if digest == found.digest else Damaged(_WRONG_BODY)

    def _gather(self, txn: _ReadTxn, found: Body, into: memoryview) -> int:
        """Fill memory with a body, and return its digest. Each piece is hashed while it is in the processor's cache."""
        digest = xxhash.xxh3_64()
        start = 0
        for piece in self._pieces_of(txn, found):
            part = into[start : start + len(piece)]
            copy(piece, part)
            digest.update(part)
            start += len(piece)
        return digest.intdigest()

    def check(self, name: bytes) -> int:
        """The size of a value that was read and found intact; 0 if there is none. Raises Damaged, DiskError."""
        with told(self.path), self._env.begin(buffers=True) as txn:
            lately = self._known_since(txn.id())
            found = lately.get(name) or self._find(txn, lately, name, _MANY)
            if found is None:
                return 0
            digest = digest_of(self._pieces_of(txn, found))
        if digest != found.digest:
            raise Damaged(_WRONG_BODY)
        return found.size

    def _find(self, txn: _ReadTxn, lately: dict[bytes, Body], name: bytes, others: int) -> Body | None:
        """Where a value's body lies. With many `others`, all pages of its sheet are looked up. Raises Damaged."""
        place = sheet.place_of(name)
        data = None if place is None else txn.get(place[0], db=self._records)
        if place is not None and data is not None:
            key, spot = place
            rows = sheet.unpack(key, data)[1]
            if others < _MANY:
                found = sheet.body_of(rows, spot)
            else:
                lately.update(sheet.bodies(key, rows))
                found = lately.get(name)
            if found is not None:
                return found
        key = database_key(name)
        data = txn.get(key, db=self._records)
        return None if data is None else Record.parse(key, data).body

    def _pieces_of(self, txn: _ReadTxn, body: Body) -> Iterator[memoryview]:
        if not body.first:
            if len(body.inline) != body.size:
                raise Damaged("its body has another length than its record says")
            yield memoryview(body.inline)
            return
        left = body.size
        for number in body.pieces:
            piece = self._piece(txn, number, min(left, PIECE))
            left -= len(piece)
            yield piece

    def _piece(self, txn: _ReadTxn, number: int, size: int) -> memoryview:
        piece = txn.get(_NUMBER.pack(number), db=self._pieces)
        if piece is None or len(piece) != size:
            raise Damaged("a piece of its body is missing or has another length than its record says")
        return piece
