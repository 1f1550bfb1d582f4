"""Where runs are made: a directory, in memory where there is one. If it cannot be used, the server is not to blame."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path

ROOM = 64 << 20  # bytes that must be free: several times the space of a run
FULL = (errno.ENOSPC, errno.EDQUOT)


class Unusable(Exception):
    """No run can be made there."""


def parent() -> str | None:
    """Where the directories of runs are made; None for where temporary files are."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def check(parent: str | None) -> None:
    """Create and remove the files of a run. Raises Unusable. `parent`: None for the directory of temporary files."""
    try:
        directory = Path(parent or tempfile.gettempdir(), f"kvpage-world-{os.urandom(4).hex()}")
        life = directory / "life-1000"
        life.mkdir(parents=True)
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(life / "socket"))
            (life / "file").write_bytes(bytes(1 << 16))
            room = os.statvfs(life)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise Unusable(unusable(parent, str(error))) from None
    if room.f_blocks and room.f_bavail * room.f_frsize < ROOM:  # some have no limit
        raise Unusable(unusable(parent, f"{room.f_bavail * room.f_frsize >> 20} MiB are free"))


def unusable(parent: str | None, why: str) -> str:
    """Return the reason why no run can be made there, with the requirements."""
    which = parent or "the directory of temporary files, TMPDIR"
    return (
        f"no run can be made in {which}: {why}. It is to be a directory that may be written to, with {ROOM >> 20} MiB "
        "free and a path that is short enough for a unix socket: /dev/shm, or TMPDIR where there is no /dev/shm"
    )
