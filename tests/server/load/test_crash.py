"""A server that is killed at any moment keeps durable values, and restarts without help."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash import crash, crash_on_a_full_disk
from small_disks import small_disk


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_durable_values_survive_any_number_of_kills(tmp_path: Path, kills: int) -> None:
    harness = crash(tmp_path, kills, seed=kills)
    print(f"{harness.kills} kills, {harness.writes} acknowledged writes, nothing lost")
    assert harness.kills == kills
    assert harness.hangups == kills // 10
    assert harness.writes > kills


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [8, pytest.param(60, marks=pytest.mark.soak)])
def test_acknowledged_values_survive_a_disk_filled_by_others(tmp_path: Path, kills: int) -> None:
    with small_disk(tmp_path / "small", megabytes=24) as disk:
        harness = crash_on_a_full_disk(tmp_path, disk, kills, seed=kills)
    print(f"{harness.kills} kills, {harness.writes} acknowledged writes, {harness.refused} refused, nothing lost")
    assert harness.kills == kills
    assert harness.writes > kills
    assert harness.refused > kills
