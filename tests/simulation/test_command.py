"""The command line of the simulation: invalid arguments are errors, which the server is not blamed for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_disks import small_disk
from waiting import eventually

from tests.simulation.cli.arguments import KNOWN, known_seeds, requested
from tests.simulation.world import place

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.simulation"]
QUICK = ("--seed", "2", "--steps", "20")
ENVIRONMENT = os.environ | {"PYTHONHASHSEED": "0"}
HANGS = 300  # seconds
FORM = "seeds are FIRST..LAST, "
STEPS = "the number of steps is a whole number from 1"
SECONDS = "a time is a number of seconds above 0"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT | environment, capture_output=True, encoding="utf-8", timeout=HANGS
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "one of the arguments --seed --seeds --known is required"),
        *((f"--seeds={seeds}", FORM) for seeds in ("5..1", "abc", "..5", "1..2..3", "1..", "7", "-1..3", "1...3")),
        ("--seed x", "a seed is a whole number from 0"),
        ("--seed -1", "a seed is a whole number from 0"),
        ("--seed 1 --steps 0", STEPS),
        ("--seed 1 --steps -3", STEPS),
        ("--seed 1 --steps 1.5", STEPS),
        *((f"--seeds 1..2 --seconds={seconds}", SECONDS) for seconds in ("0", "-1", "nan", "inf", "soon")),
        ("--known --steps 5", "seeds.txt says how many steps"),
        ("--seed 1 --def evicted-is-still-listed", "unrecognized arguments: --def"),
        ("--seed 1 --defect unheard-of", "no mistake is named unheard-of; there are "),
        ("--seed 1 --defect=unheard-of", "no mistake is named unheard-of; there are "),
    ],
)
def test_invalid_arguments_are_errors_with_the_allowed_values(
    capsys: pytest.CaptureFixture[str], words: str, error: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        requested(words.split())
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_valid_arguments_are_parsed() -> None:
    assert list(requested(["--seed", "7"]).runs) == [(7, 600)]
    assert list(requested(["--seeds", "7..9", "--steps", "5"]).runs) == [(7, 5), (8, 5), (9, 5)]
    assert requested(["--known"]).runs == known_seeds(KNOWN)
    assert [requested(["--seeds", seeds]).tells_each for seeds in ("1..40", "1..41")] == [True, False]


@pytest.mark.parametrize("line", ["15", "15 x", "15 0", "-1 600", "15 600 what it was", "600, 5"])
def test_an_invalid_line_of_the_known_seeds_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "seeds.txt"
    file.write_text(f"# of these\n\n15 600  # one\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"seeds\.txt, line 4: '{line}' is not a seed, at least one step and what"):
        known_seeds(file)


def test_no_known_seeds_are_no_success(tmp_path: Path) -> None:
    file = tmp_path / "seeds.txt"
    file.write_text("# none\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no seeds"):
        known_seeds(file)


def test_a_bad_command_line_ends_with_2_and_no_traceback() -> None:
    result = run(*PROGRAM, "--seeds", "5..1")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("core", ["", "python"])
def test_each_digest_is_printed_with_its_core(core: str) -> None:
    result = run(*PROGRAM, "--seeds", "2..3", "--steps", "20", **({"KVPAGE_CORE": core} if core else {}))
    lines = result.stdout.splitlines()
    name = core or lines[0].split()[-3]
    assert [line.split()[:2] for line in lines[:2]] == [["seed", "2:"], ["seed", "3:"]]
    assert all(line.endswith(f", {name} page core") for line in lines[:2])
    assert f", {name} page core; 0 failed" in lines[2]


def test_a_mistake_is_planted_for_every_spelling_of_the_option() -> None:
    result = run(*PROGRAM, "--seed", "2", "--defect=evicted-is-still-listed")
    assert result.returncode == 1
    assert "--seed 2 --steps 600 --defect evicted-is-still-listed" in result.stdout


def test_a_time_that_is_over_at_once_is_time_for_one_run() -> None:
    assert "\n1 runs, " in run(*PROGRAM, *QUICK, "--seconds", "0.000001").stdout


def test_a_run_is_the_same_one_while_python_looks_for_mistakes() -> None:
    plain = run(*PROGRAM, *QUICK)
    careful = run(*PROGRAM, *QUICK, PYTHONASYNCIODEBUG="1", PYTHONDEVMODE="1")
    assert careful.returncode == 0, careful.stdout
    assert careful.stdout.splitlines()[0] == plain.stdout.splitlines()[0]


def test_an_interrupt_prints_the_passed_runs_and_leaves_no_files() -> None:
    before = set(Path("/dev/shm").glob("kvpage-world-*"))
    command = [*PROGRAM, "--seeds", "1..40", "--steps", "100"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout
        assert process.stderr
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=HANGS)
    passed = len(lines) + len(rest.splitlines())
    assert process.returncode == 130
    assert f"interrupted: {passed} runs passed so far, 0 failed\n" in error
    assert "Traceback" not in error
    left = set(Path("/dev/shm").glob("kvpage-world-*")) - before
    assert eventually(lambda: not any(map(Path.exists, left))), "those of other processes go, too"


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-", "| head -1", "| true"])
def test_closed_standard_streams_are_no_error(closed: str) -> None:
    result = run("bash", "-c", f"'{sys.executable}' -m tests.simulation --seeds 2..4 --steps 20 {closed}")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("lacking", ["room", "right", "short path"])
def test_an_unusable_directory_is_reported(tmp_path: Path, lacking: str) -> None:
    if lacking == "room":
        with small_disk(tmp_path / "small", 4) as directory, pytest.raises(place.Unusable, match="64 MiB free"):
            place.check(str(directory))
        return
    directory = tmp_path / ("d" * 100)
    if lacking == "short path":
        directory.mkdir()
    else:
        directory.write_text("", encoding="utf-8")
    with pytest.raises(place.Unusable, match=rf"no run can be made in {directory}: "):
        place.check(str(directory))
    assert not directory.is_dir() or not list(directory.iterdir())


@pytest.mark.parametrize("options", ["ro", "size=4m"])
def test_the_server_is_not_run_where_it_has_no_room(options: str) -> None:
    alone = ["unshare", "--mount", "--propagation", "private"]
    if not shutil.which("unshare") or run(*alone, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm").returncode:
        pytest.skip("nothing can be mounted here")
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    result = run(*alone, "bash", "-c", f"{mount}; '{sys.executable}' -m tests.simulation --seed 2 --steps 20")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("no run can be made in /dev/shm: ")


def test_a_world_without_space_is_reported_and_not_shortened() -> None:
    full = """if True:
        import errno, sys
        from tests.simulation.cli import command
        from tests.simulation.cli.arguments import requested
        from tests.simulation.world.clock import Clock
        def fails(*_):
            raise OSError(errno.ENOSPC, "No space left on device", "/life-2/data")
        command.run = fails
        sys.exit(command.main(Clock(), requested(["--seed", "2"])))
    """
    result = run(sys.executable, "-c", full)
    assert (result.returncode, result.stdout) == (2, "")
    assert "No space left on device: '/life-2/data'" in result.stderr
