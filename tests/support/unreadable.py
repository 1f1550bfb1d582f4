"""A server whose disk cannot be read while there is a file `unreadable` in its directory. Started as the real one.

Reading takes as long as there is a file `slow`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

from kvpage_server import app
from kvpage_server.store.disk.database import Disk, Found, Outcome
from kvpage_server.store.disk.lmdb_file import DiskError

_read, _find = Disk.read, Disk.find


def _fail() -> None:
    while Path("slow").exists():
        sleep(0.01)
    if Path("unreadable").exists():
        raise DiskError("Input/output error")


def read(disk: Disk, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
    _fail()
    return _read(disk, wanted)


def find(disk: Disk, wanted: Sequence[tuple[bytes, int]]) -> tuple[Any, list[Found]]:
    _fail()
    return _find(disk, wanted)


if __name__ == "__main__":
    Disk.read, Disk.find = read, find  # type: ignore[method-assign]
    sys.exit(app.main())
