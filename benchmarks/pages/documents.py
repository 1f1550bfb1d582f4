"""README.md, docs/performance.md and docs/scaling.md: the tables between their marks, written anew.

A mark is a comment that is not shown: `<!-- table: NAME -->` before the table, `<!-- end of table -->` behind it.
"""

from __future__ import annotations

import re

from benchmarks import shares
from benchmarks.cluster import tables as cluster
from benchmarks.findings import RESULTS
from benchmarks.pages.tables import TABLES, Found, found

ROOT = RESULTS.parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "scaling.md")
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def rewrite() -> None:
    """Replace the former measurements. Raises KeyError if some are missing."""
    known = found()
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(encoding="utf-8"), known), encoding="utf-8")


def with_tables(text: str, known: Found) -> str:
    """A text with its tables as they are now."""

    elsewhere = {"profile": shares.table, **cluster.TABLES}

    def table(mark: re.Match[str]) -> str:
        name = mark[2]
        made = elsewhere[name]() if name in elsewhere else TABLES[name](known)
        return f"{mark[1]}\n{made}\n{mark[3]}"

    return _TABLE.sub(table, text)
