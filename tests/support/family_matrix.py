"""The table of docs/engine.md: tested features by family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_families import KINDS, WITH_STATE, WITHOUT_OFFSET, family

# isort: split
from mlx_lm.models.cache import CacheList

from engine.spec import ModelCacheSpec

DOCUMENT = Path(__file__).parents[2] / "docs" / "engine.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"

RESTORED = "restored at a cut"
GROWN = "restored as it grew"
ROUNDS = "ten rounds, same bytes"
ALONE = "alone, to the bit"
RAGGED = "four ragged"
SECOND_TURN = "second turn"
IDENTITY = "other weights: a miss"
OFFSET = "offset ± 1"
SWAPPED = "pages swapped"
LAYER = "layer missing"
STALE = "stale state"
FOREIGN = "another's pages"
COLUMNS = [RESTORED, GROWN, ROUNDS, ALONE, RAGGED, SECOND_TURN, IDENTITY, OFFSET, SWAPPED, LAYER, STALE, FOREIGN]
NOT_APPLICABLE = {
    **{(kind, STALE): "keeps a row a token and no state" for kind in KINDS if kind not in WITH_STATE},
    **{(kind, OFFSET): "has no offset" for kind in WITHOUT_OFFSET},
}

passed: Counter[tuple[str, str]] = Counter()  # (kind, column) -> passed checks


@contextmanager
def covers(kind: str, column: str) -> Iterator[None]:
    """Count the body as a check in that cell of the table, if it passes."""
    assert kind in KINDS
    assert column in COLUMNS
    assert (kind, column) not in NOT_APPLICABLE
    yield
    passed[kind, column] += 1


def untested() -> list[tuple[str, str]]:
    cells = [(kind, column) for kind in KINDS for column in COLUMNS]
    return [cell for cell in cells if cell not in NOT_APPLICABLE and not passed[cell]]


def table() -> str:
    """Return the table as Markdown, a row per kind, with the number of passed checks in a cell."""
    head = ["family", "its layers keep", "prompts run", *COLUMNS]
    rows = [head, ["---"] * 3 + ["---:"] * len(COLUMNS)]
    for kind in KINDS:
        cells = [str(passed[kind, column] or "-") for column in COLUMNS]
        rows.append([f"`{kind}`", kept(family(kind).empty()), _batched(family(kind).spec), *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def kept(caches: Iterable[Any]) -> str:
    return ", ".join(
        dict.fromkeys(
            f"`CacheList` of {kept(cache.caches)}" if isinstance(cache, CacheList) else f"`{type(cache).__name__}`"
            for cache in caches
        )
    )


def _batched(spec: ModelCacheSpec) -> str:
    return "in one batch" if spec.batches else "in turns"


def documented() -> str:
    return DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write() -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
