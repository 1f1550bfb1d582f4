"""Pieces whose record was damaged: no one can say whose they are, and they would take space for ever.

A record that cannot be read does not tell where its pieces lie. That this has happened is noted in `about`, in the
transaction in which the record goes. When the disk has no room, all records are read once, and the pieces that none of
them has are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import lmdb

from kvpage_server.store.disk.file.bodies import NUMBER
from kvpage_server.store.records import sheet
from kvpage_server.store.records.record import Body, Damaged, Record

_NOTE = b"lost"

_Txn: TypeAlias = "lmdb.Transaction[bytes]"


@dataclass(frozen=True, slots=True)
class LostPieces:
    """Of a file with these databases."""

    about: lmdb._Database
    records: lmdb._Database
    quarantine: lmdb._Database
    pieces: lmdb._Database

    def note(self, txn: _Txn) -> None:
        """There are some from now on."""
        txn.put(_NOTE, b"", db=self.about)

    def remove(self, txn: _Txn) -> int:
        """Remove them, if there are any, and return how many there were. Reads all records."""
        if not txn.delete(_NOTE, db=self.about):
            return 0
        lost = list(self._lost(txn))
        for key in lost:
            txn.delete(key, db=self.pieces)
        return len(lost)

    def _lost(self, txn: _Txn) -> Iterator[bytes]:
        """The keys of pieces that no record has."""
        ranges = iter(sorted((body.pieces.start, body.pieces.stop) for body in self._bodies(txn) if body.first))
        start, stop = next(ranges, (0, 0))
        for key in txn.cursor(self.pieces).iternext(keys=True, values=False):
            (number,) = NUMBER.unpack(key)
            while stop <= number and (following := next(ranges, None)) is not None:
                start, stop = following
            if not start <= number < stop:
                yield key

    def _bodies(self, txn: _Txn) -> Iterator[Body]:
        for key, data in txn.cursor(self.records):
            yield from _bodies_of(key, data)
        for key, data in txn.cursor(self.quarantine):
            yield from _bodies_of(key[NUMBER.size :], data)


def _bodies_of(key: bytes, data: bytes) -> Iterator[Body]:
    try:
        if key.startswith(sheet.PREFIX):
            yield from sheet.bodies(key, sheet.unpack(key, data)[1]).values()
        else:
            yield Record.parse(key, data).body
    except Damaged:
        return  # what it had is lost
