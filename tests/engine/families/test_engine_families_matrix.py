"""The table of families in docs/engine.md matches the results of the tests before this one, which cover every cell."""

from __future__ import annotations

import os

import family_matrix
import pytest


def test_every_cell_is_tested_and_matches_the_table() -> None:
    if not family_matrix.passed:
        pytest.skip("is about the tests of the families, which this run has left out")
    assert family_matrix.untested() == []
    if os.environ.get("WRITE_DOCS"):
        family_matrix.write()
    how = "run: WRITE_DOCS=1 python -m pytest tests/engine/families"
    assert family_matrix.documented() == family_matrix.table(), how
