"""A server that is killed at any moment keeps what it promised, and starts again without help."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash import crash


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_nothing_that_was_promised_is_lost_however_often_it_is_killed(tmp_path: Path, kills: int) -> None:
    harness = crash(tmp_path, kills, seed=kills)
    print(f"{harness.kills} kills, {harness.writes} acknowledged writes, nothing lost")
    assert harness.kills == kills
    assert harness.hangups == kills // 10
    assert harness.writes > 10 * kills
