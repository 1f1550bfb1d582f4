"""Which sources a compiled core was made of: setup.py writes it into the core, and whoever loads the core asks it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """Of the names and contents of a folder's Cython sources; empty where there are none, as in an installed wheel."""
    seen = hashlib.blake2b(digest_size=8)
    sources = sorted(folder.glob("*.p[xy][xd]"))
    for source in sources:
        content = source.read_bytes()
        seen.update(b"%b %d\n%b" % (source.name.encode(), len(content), content))
    return seen.hexdigest() if sources else ""
