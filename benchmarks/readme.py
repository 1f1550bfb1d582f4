"""The README's table of what was found of pages: its figures, written anew."""

from __future__ import annotations

import re

from benchmarks.findings import RESULTS, Finding

README = RESULTS.parent.parent / "README.md"
SINGLE = "8 blocks, there 4096 pages of 4 KiB"
_ROWS = {  # what a row begins with: whom it speaks of, and the works
    "redis-server 7.0, pages of": ("redis-server", [f"256 pages of {size} KiB" for size in (32, 64, 256)]),
    "Valkey 9.1, pages of": ("Valkey", [f"256 pages of {size} KiB" for size in (32, 64, 256)]),
    "Valkey 9.1, blocks of 512 pages": ("Valkey", [SINGLE]),
    "Valkey 9.1, blocks of 2 / 5.6 MiB": ("Valkey", ["8 blocks of 2 MiB", "8 blocks of 5.6 MiB"]),
}


def rewrite(findings: list[Finding]) -> None:
    """Put what was found in the place of what was found before. Raises KeyError when it does not have it all."""
    README.write_text(with_figures(README.read_text(), findings))


def with_figures(text: str, findings: list[Finding]) -> str:
    """A text with the rows' figures."""
    ratios = {(found.against, found.work): found.value for found in findings if found.what == "GB/s"}
    for beginning, (against, works) in _ROWS.items():
        figures = (" / ".join(f"{ratios[against, f'{op} {work}']:.1f}" for work in works) for op in ("read", "write"))
        row = re.compile(rf"^(\| {re.escape(beginning)}[^|]*)\|.*$", re.MULTILINE)
        text, count = row.subn(rf"\1| {' | '.join(figures)} |", text)
        if count != 1:
            raise KeyError(f"{README.name} has {count} rows that begin with {beginning!r}")
    return text
