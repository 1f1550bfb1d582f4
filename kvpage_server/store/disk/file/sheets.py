"""The sheets that a transaction changes."""

from __future__ import annotations

import lmdb

from kvpage_server.store.records import sheet
from kvpage_server.store.records.record import Damaged
from kvpage_server.store.records.sheet import Spot


class Sheets:
    """They are read when needed, and written once, when the transaction has made all changes."""

    def __init__(self, txn: lmdb.Transaction[bytes], records: lmdb._Database) -> None:
        self._txn = txn
        self._records = records
        self._rows: dict[bytes, dict[Spot, bytes]] = {}
        self.damaged = False  # one of them was, so it is not known where its pages' pieces lie

    def of(self, key: bytes) -> dict[Spot, bytes]:
        """The rows of a sheet. A damaged one has none, since it is not known where its pages lie."""
        rows = self._rows.get(key)
        if rows is None:
            data = self._txn.get(key, db=self._records)
            try:
                rows = {} if data is None else sheet.by_spot(sheet.unpack(key, data)[1])
            except Damaged:
                rows, self.damaged = {}, True
            self._rows[key] = rows
        return rows

    def clear(self) -> None:
        self._rows.clear()

    def flush(self) -> None:
        """Write the sheets."""
        for key, rows in self._rows.items():
            if rows:
                self._txn.put(key, sheet.pack(key, rows), db=self._records)
            else:
                self._txn.delete(key, db=self._records)
