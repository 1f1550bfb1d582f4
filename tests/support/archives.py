"""Archives, on every Python 3.11: `extractall` has a filter since 3.11.4, and Debian 12 has 3.11.2."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any


def unpack(archive: Path, directory: Path) -> None:
    """Write the files of a tar file of ours, or of PyPI, into a directory."""
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(directory, **options)
