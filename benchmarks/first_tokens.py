"""The table of docs/performance.md with the time to the first token from each tier."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.findings import RESULTS, Finding

DOCUMENT = RESULTS.parent.parent / "docs" / "performance.md"
_CONTEXTS = ("256", "1,024", "2,048", "4,000")  # tokens
_SERVER = "page server"
_TURNS = (
    ("", "hot"),
    ("", _SERVER),
    ("", f"mapped memory of the {_SERVER}"),
    ("", "cold file"),
    (" and a question", _SERVER),
)


def rewrite_tiers(findings: list[Finding]) -> None:
    """Write the measurements into the table. Raises KeyError if some are missing."""
    DOCUMENT.write_text(with_first_tokens(DOCUMENT.read_text(encoding="utf-8"), findings), encoding="utf-8")


def with_first_tokens(text: str, findings: list[Finding]) -> str:
    """Return the text with new figures in the rows of the contexts: seconds, and the ratio to full prefill."""
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
    """Return the text with `cells` after the first cell of the row that starts with `beginning`."""
    row = re.compile(rf"^(\| {re.escape(beginning)}[^|]*)\|.*$", re.MULTILINE)
    text, count = row.subn(rf"\1| {' | '.join(cells)} |", text)
    if count != 1:
        raise KeyError(f"{DOCUMENT.name} has {count} rows that begin with {beginning!r}")
    return text
