"""The server in a simulated world: no run breaks a promise, each is the same every time, and mistakes are seen.

The world replaces time and threads for its whole process, so it has processes of its own. See tests/simulation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def simulate(*arguments: str, within: float) -> subprocess.CompletedProcess[str]:
    """What the command line says of some seeds."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=within)


def check(result: subprocess.CompletedProcess[str]) -> None:
    """That all was right."""
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]


def test_what_failed_once_does_not_fail_again() -> None:
    check(simulate("--known", within=100))


def test_a_seed_gives_the_same_run_to_the_byte() -> None:
    check(simulate("--seeds", "4..6", "--twice", within=100))


@pytest.mark.timeout(200)
def test_no_promise_is_broken_in_some_seconds_of_any_fault() -> None:
    check(simulate("--seeds", "1..12", "--seconds", "20", within=190))


def test_a_mistake_in_the_server_is_found_and_its_seed_is_told() -> None:
    result = simulate("--seeds", "1..20", "--defect", "keepttl-forgotten", "--seconds", "80", within=115)
    assert result.returncode == 1
    assert "again: python -m tests.simulation --seed" in result.stdout
