"""Every family of models of the installed mlx-lm gives the same answers in the engine as in mlx-lm itself.

The families are found by looking, so one that comes with another mlx-lm is tried, too. docs/engine.md has a row for
each, which `python tests/support/family_figures.py` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from every_family import modules
from family_figures import ROUNDING, Figures, NotBuilt, applies, documented, measure, store

HOW = "run: python tests/support/family_figures.py"
FIGURE = re.compile(r"\b\d[\d.]*(e-\d+)?\b")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with store() as url:
        yield url


def measured(name: str, url: str) -> Figures | NotBuilt:
    try:
        return measure(name, url)
    except NotBuilt as why:
        return why


def test_the_table_has_a_row_for_every_family_that_there_is() -> None:
    if not applies():
        pytest.skip("the table is of another mlx-lm, or of another system")
    assert list(documented()) == modules(), HOW


def one_of_a_kind() -> list[Any]:
    """Return all families; `make soak` measures those whose row differs from another one's only in figures."""
    seen, found, rows = set[tuple[str, ...]](), list[Any](), documented() if applies() else {}
    for name in modules():
        row = tuple(FIGURE.sub("#", cell) for cell in rows.get(name, [name])[1:])
        found.append(pytest.param(name, marks=pytest.mark.soak) if row in seen else name)
        if row:
            seen.add(row)
    return found


@pytest.mark.parametrize("name", one_of_a_kind())
def test_a_family_answers_alike_alone_in_a_batch_and_restored(name: str, url: str) -> None:
    """Its prompts are in one batch exactly if mlx-lm's batch is right: where they are not, it is tried all the same,
    and has to be wrong. A figure of the table may be another on another machine, but not a rounding where one stands.
    """
    found = measured(name, url)
    if isinstance(found, NotBuilt):
        assert not applies() or documented()[name][1] == f"not built: {found}", HOW
        return
    assert found.together <= ROUNDING
    assert found.forced is None or (found.forced <= ROUNDING) == found.batches
    assert found.at_once is None or found.at_once > ROUNDING
    assert found.restored <= ROUNDING if found.restored is not None else found.refusal
    if applies():
        written = [FIGURE.sub("#", cell) for cell in documented()[name][1:]]
        assert written == [FIGURE.sub("#", cell) for cell in found.row], HOW
