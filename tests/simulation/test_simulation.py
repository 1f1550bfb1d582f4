"""The server in a simulated world: no run breaks a promise, each is the same every time, and mistakes are seen.

The world replaces time and threads for its whole process, so it has processes of its own. See tests/simulation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvpage_server.commands.families  # noqa: F401 - it fills the table
from kvpage_server.commands.specs import TABLE
from tests.simulation.cli.arguments import KNOWN, known_seeds
from tests.simulation.defects import DoesNotApply, Mistake, apply
from tests.simulation.defects.mistakes import MISTAKES
from tests.simulation.programs.program import Program

ROOT = Path(__file__).parents[2]
CHEAP = {"evicted-is-still-listed": 2, "last-part-first": 3}  # mistakes, and the seeds of runs that find them
ORDERED_BY = 3  # the seed of a run that depends on the order of a set of objects, where there is one
HANGS = 900  # seconds; so many seeds take some, and on a machine that is busy they may take many

KVMAP = "area", "attach", "blockmget", "copy", "help", "mget", "release", "socket"
NOT_BY_PROGRAMS = {
    "auth": "every tenant says it when it comes",
    "config|resetstat": "the judge looks at what is counted",
    **dict.fromkeys(
        ("kvmap", *(f"kvmap|{name}" for name in KVMAP)),
        "a client needs shared memory: tests/server/commands/pages/test_mapped.py",
    ),
    "kvlost": "tests/server/commands/test_lost_strings.py and the model of test_cold_commands.py have its replies",
}
PARTS = 3  # of the known seeds, which take about equally long
WITH_KNOWN = """
import runpy, sys
from pathlib import Path
from tests.simulation.cli import arguments
arguments.KNOWN = Path(sys.argv.pop(1))
runpy.run_module("tests.simulation", run_name="__main__")
"""
DIGEST = re.compile(r"^seed (\d+): .* digest (\w+)", re.MULTILINE)
AGAIN = re.compile(r"again: \.venv/bin/python -m tests\.simulation --seed (\d+)")


def simulate(*arguments: str, core: str = "", known: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run some seeds on the command line. With `known`, `--known` runs those of this file."""
    command = [sys.executable, *(("-c", WITH_KNOWN, known) if known else ("-m", "tests.simulation")), *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0"} | ({"KVPAGE_CORE": core} if core else {})
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=HANGS)


def check(result: subprocess.CompletedProcess[str]) -> None:
    """That all was right."""
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    assert "Task was destroyed" not in result.stderr


def found(result: subprocess.CompletedProcess[str]) -> int:
    """The seed with which a mistake in the server was found."""
    received = AGAIN.search(result.stdout)
    assert result.returncode == 1, result.stdout + result.stderr
    assert received, result.stdout + result.stderr
    return int(received[1])


def test_a_killed_engine_leaves_no_message_of_its_tasks() -> None:
    check(simulate("--seed", "64"))


def test_every_command_is_in_some_program() -> None:
    names, drawn = set[tuple[bytes, ...]](), set[str]()
    for seed in range(400):
        names |= {tuple(word.lower() for word in step.words[:2]) for step in Program(seed).steps(400)}
        drawn = {b"|".join(words[:count]).decode("latin1") for words in names for count in (1, 2)}
        if TABLE.keys() - drawn == NOT_BY_PROGRAMS.keys():
            break
    assert TABLE.keys() - drawn == NOT_BY_PROGRAMS.keys()
    assert {name.decode("latin1") for name, *_ in filter(None, names)} - TABLE.keys() == {"nosuch"}


@pytest.mark.parametrize("part", range(PARTS))
def test_known_failing_seeds_pass(part: int, tmp_path: Path) -> None:
    file, runs = tmp_path / "seeds.txt", known_seeds(KNOWN)[part::PARTS]
    file.write_text("".join(f"{seed} {steps}\n" for seed, steps in runs), encoding="utf-8")
    result = simulate("--known", known=file)
    check(result)
    assert f"{len(runs)} runs, " in result.stdout


def test_runs_with_faults_are_deterministic_on_both_cores() -> None:
    compiled, plain = simulate("--seeds", "13..18", "--twice"), simulate("--seeds", "13..15", core="python")
    check(compiled)
    check(plain)
    digests = DIGEST.findall(compiled.stdout)
    assert DIGEST.findall(plain.stdout) == digests[:3]
    assert len(digests) == 6


@pytest.mark.parametrize(("mistake", "seed"), CHEAP.items())
def test_a_mistake_in_the_server_is_found_with_its_seed(mistake: str, seed: int) -> None:
    assert found(simulate("--seed", f"{seed}", "--defect", mistake)) == seed


def test_a_run_that_depends_on_addresses_differs_the_second_time() -> None:
    result = simulate("--seed", f"{ORDERED_BY}", "--twice", "--defect", "woken-in-any-order")
    assert found(result) == ORDERED_BY
    assert "another run the second time" in result.stdout


@pytest.mark.soak
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_every_mistake_is_found_within_two_minutes_of_a_core(mistake: Mistake) -> None:
    seed = found(simulate("--seeds", "1..100000", "--seconds", "120", "--defect", mistake.name, *mistake.shown_by))
    check(simulate("--seed", f"{seed}"))  # otherwise the judge is wrong


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_every_mistake_that_is_written_down_can_still_be_made(mistake: Mistake) -> None:
    source = apply(mistake)
    if not mistake.is_compiled:  # Cython's sources are compiled by the soak test above
        compile(source, mistake.module, "exec")


def test_a_mistake_that_cannot_be_planted_is_an_error() -> None:
    with pytest.raises(DoesNotApply, match=r"renamed: kvpage_server\.app\.main contains 'no such line' 0 times"):
        apply(Mistake("renamed", "kvpage_server.app", "main", "no such line", "", ""))
    with pytest.raises(DoesNotApply, match=r"renamed: kvpage_server\.app has no gone"):
        apply(Mistake("renamed", "kvpage_server.app", "gone", "pass", "", ""))
    with pytest.raises(DoesNotApply, match=r"moved: there is no kvpage_server\.gone"):
        apply(Mistake("moved", "kvpage_server.gone", "", "", "", ""))
    result = simulate("--seed", "1", "--defect", "unheard-of")
    assert result.returncode == 2
    assert "no mistake is named unheard-of; there are reply-before-commit, " in result.stderr
    assert "Traceback" not in result.stderr
