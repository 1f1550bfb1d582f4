"""The digest of the compiled core's Cython sources.

`setup.py` compiles it into the core, and `choice` compares it with the digest of the files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """Return the hexadecimal digest of the names and contents of all Cython sources, and C headers, in a folder.

    Return "" if there are none, as in a wheel.
    """
    seen = hashlib.blake2b(digest_size=8)
    sources = sorted([*folder.glob("*.p[xy][xd]"), *folder.glob("*.h")])
    for source in sources:
        content = source.read_bytes()
        seen.update(b"%b %d\n%b" % (source.name.encode(), len(content), content))
    return seen.hexdigest() if sources else ""
