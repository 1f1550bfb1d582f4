"""`make demo-cluster`: its promises, and its detection of a broken promise."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from documents import ROOT

from benchmarks.demo_cluster import Outcome
from engine.demo.story import Turn

TURNS = (
    Turn("one", 100, 0, "none", 1.0, "absent"),
    Turn("two", 110, 64, "page", 1.0, "gone"),
    Turn("three", 120, 0, "none", 1.0, "gone"),
)


def kept(*turns: Turn) -> list[bool]:
    return [*Outcome(turns, TURNS).promises().values()]


def test_a_report_names_changed_text_and_unexplained_losses() -> None:
    first, second, third = TURNS
    assert kept(*TURNS) == [True, True, True]
    assert kept(first, replace(second, text="other"), third) == [False, True, True]
    assert kept(first, replace(second, tokens_reused=109), replace(third, tokens_reused=119)) == [True, False, True]
    assert kept(first, replace(second, why=None), third) == [True, True, False]


@pytest.mark.soak
def test_the_demonstration_keeps_its_promises() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo_cluster"], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kept ") == 3
