"""The README's tables of what was found: their figures, written anew."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.findings import RESULTS, Finding

README = RESULTS.parent.parent / "README.md"
SINGLE = "8 blocks, there 4096 pages of 4 KiB"
_ROWS = {  # what a row begins with: whom it speaks of, and the works
    "redis-server 7.0, pages of": ("redis-server", [f"256 pages of {size} KiB" for size in (32, 64, 256)]),
    "Valkey 9.1, pages of": ("Valkey", [f"256 pages of {size} KiB" for size in (32, 64, 256)]),
    "Valkey 9.1, blocks of 512 pages": ("Valkey", [SINGLE]),
    "Valkey 9.1, blocks of 2 / 5.6 MiB": ("Valkey", ["8 blocks of 2 MiB", "8 blocks of 5.6 MiB"]),
}
_CONTEXTS = ("256", "1,024", "2,048", "4,000")  # tokens
_TURNS = (("", "hot"), ("", "page server"), ("", "cold file"), (" and a question", "page server"))


def rewrite(findings: list[Finding]) -> None:
    """Put what was found of pages in the place of what was found before. Raises KeyError when that is not all."""
    README.write_text(with_figures(README.read_text(), findings))


def rewrite_tiers(findings: list[Finding]) -> None:
    """The same of first tokens from each tier."""
    README.write_text(with_first_tokens(README.read_text(), findings))


def with_figures(text: str, findings: list[Finding]) -> str:
    """A text with the rows' figures."""
    ratios = {(found.against, found.work): found.value for found in findings if found.what == "GB/s"}
    for beginning, (against, works) in _ROWS.items():
        figures = (" / ".join(f"{ratios[against, f'{op} {work}']:.1f}" for work in works) for op in ("read", "write"))
        text = _with_row(text, beginning, figures)
    return text


def with_first_tokens(text: str, findings: list[Finding]) -> str:
    """A text with the figures of the rows that begin with a context: seconds, and how many times sooner that is."""
    by_work = {found.work: found for found in findings if found.what == "times sooner"}
    for tokens in _CONTEXTS:
        tiers = [by_work[f"{tokens} tokens{turn} from {tier}"] for turn, tier in _TURNS]
        took = [found.measured.split(" / ") for found in tiers]
        cells = [
            took[0][1],
            *(f"{seconds} ({found.value:.1f})" for (seconds, _), found in zip(took, tiers, strict=True)),
        ]
        text = _with_row(text, f"{tokens} tokens", cells)
    return text


def _with_row(text: str, beginning: str, cells: Iterable[str]) -> str:
    """A text with these cells behind the first one of the row that begins like that."""
    row = re.compile(rf"^(\| {re.escape(beginning)}[^|]*)\|.*$", re.MULTILINE)
    text, count = row.subn(rf"\1| {' | '.join(cells)} |", text)
    if count != 1:
        raise KeyError(f"{README.name} has {count} rows that begin with {beginning!r}")
    return text
