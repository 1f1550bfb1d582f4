"""Reads of values' bodies from LMDB's map. The GIL is released where a read may wait for the disk."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import lmdb
import numpy as np
import xxhash

from kvpage_server.page import checksum
from kvpage_server.store import records
from kvpage_server.store.records import Body, Damaged, Record, database_key

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
            if len(body.pieces) == 1:
                _copy(self._piece(body.pieces.start, body.size), into)
                digest = checksum(into)
            else:
                digest = self._gather(body, into)
        except Damaged as damage:
            return damage.with_traceback(None)
        return True if digest == body.digest else Damaged(_WRONG_BODY)

    def find(self, name: bytes, size: int) -> Found:
        """Return the pieces of a body after a check, or another outcome; a body of another size counts as absent."""
        try:
            body = self._body(name)
            if body is None or body.size != size:
                return False
            pieces = list(self._pieces_of(body))
        except Damaged as damage:
            return damage.with_traceback(None)
        return pieces if _digest_of(pieces) == body.digest else Damaged(_WRONG_BODY)

    def check(self, name: bytes) -> int:
        """Read a body and check it. Returns its size; 0 if there is none. Raises Damaged."""
        body = self._body(name)
        if body is None:
            return 0
        if _digest_of(self._pieces_of(body)) != body.digest:
            raise Damaged(_WRONG_BODY)
        return body.size

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

    def _pieces_of(self, body: Body) -> Iterator[memoryview]:
        if not body.first:
            if len(body.inline) != body.size:
                raise Damaged("its body has another length than its record says")
            yield memoryview(body.inline)
            return
        left = body.size
        for number in body.pieces:
            piece = self._piece(number, min(left, body.piece))
            left -= len(piece)
            yield piece

    def _piece(self, number: int, size: int) -> memoryview:
        piece = self._txn.get(NUMBER.pack(number), db=self._pieces)
        if piece is None or len(piece) != size:
            raise Damaged("a piece of its body is missing or has another length than its record says")
        return piece


def _copy(piece: memoryview, into: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(piece, np.uint8))


def _digest_of(pieces: Iterable[memoryview]) -> int:
    """Return the XXH3-64 of the pieces together, which are views of the map. Release the GIL while the disk is read."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        if 0 < len(piece) <= _HASHED_WITH_GIL:
            np.frombuffer(piece, np.uint8).max()  # reads every byte with the GIL released, so the disk is read here
        digest.update(piece)
    return digest.intdigest()
