"""Arguments of the command line, and their errors. It does not import the server, which may get a mistake."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.defects.mistakes import MISTAKES

STEPS = 600
KNOWN = Path(__file__).parents[1] / "seeds.txt"

_NUMBER = r"[0-9]{1,18}"
_FEW = 40  # seeds whose digest is printed


@dataclass(frozen=True)
class Request:
    """Seeds to run, and options."""

    runs: Iterable[tuple[int, int]]  # seeds, and how many steps of each
    seconds: float  # of a core, after which no run begins
    twice: bool
    defect: str | None
    whole: bool  # not to be shortened where it fails
    tells_each: bool


def requested(arguments: list[str]) -> Request:
    """Parse the arguments. Print an error and exit with 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Runs seeds, and says which of them fail. Ends with 1 if some do. See tests/simulation/README.md.",
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=_seed, help="one run")
    which.add_argument("--seeds", type=_seeds, metavar="FIRST..LAST", help="many: 1000..2000")
    which.add_argument("--known", action="store_true", help="those of seeds.txt, which have failed once")
    parser.add_argument("--steps", type=_steps, help=f"steps of each, {STEPS} if nothing is said")
    parser.add_argument("--seconds", type=_seconds, default=math.inf, help="begin no more runs after so much of a core")
    parser.add_argument("--twice", action="store_true", help="run each again in another memory, and compare every byte")
    parser.add_argument("--defect", metavar="NAME", help="with a mistake of defects/ in the server: it is to be found")
    parser.add_argument("--whole", action="store_true", help="do not shorten what fails")
    asked = parser.parse_args(arguments)
    names = [mistake.name for mistake in MISTAKES]
    if asked.defect is not None and asked.defect not in names:
        parser.error(f"no mistake is named {asked.defect}; there are {', '.join(names)}")
    seeds: Iterable[int] = [asked.seed] if asked.seed is not None else asked.seeds or ()
    steps = asked.steps or STEPS
    runs: Iterable[tuple[int, int]] = ((seed, steps) for seed in seeds)
    if asked.known:
        if asked.steps is not None:
            parser.error(
                "--steps goes with --seed or --seeds: with --known, seeds.txt says how many steps each seed has"
            )
        try:
            runs = known_seeds(KNOWN)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    few = asked.seed is not None or (asked.seeds is not None and len(asked.seeds) <= _FEW)
    return Request(runs, asked.seconds, asked.twice, asked.defect, asked.whole, few)


def known_seeds(path: Path) -> list[tuple[int, int]]:
    """The seeds of a file, with their steps. Raises ValueError where it says anything else, or nothing."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line_text = line.split("#")[0].strip()
        parts = re.fullmatch(rf"({_NUMBER})\s+({_NUMBER})", line_text)
        if parts and int(parts[2]):
            found.append((int(parts[1]), int(parts[2])))
        elif line_text:
            form = "a seed, at least one step and what it was: 4711 600  # what it was"
            raise ValueError(f"{path}, line {number}: {line_text!r} is not {form}")
    if not found:
        raise ValueError(f"{path} has no seeds")
    return found


def _seed(text: str) -> int:
    return _whole(text, 0, "a seed is a whole number from 0")


def _steps(text: str) -> int:
    return _whole(text, 1, "the number of steps is a whole number from 1")


def _whole(text: str, least: int, form: str) -> int:
    if not re.fullmatch(_NUMBER, text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{form}, of 18 digits at most, not {text!r}")
    return int(text)


def _seeds(text: str) -> range:
    parts = re.fullmatch(rf"({_NUMBER})\.\.({_NUMBER})", text)
    if not parts:
        form = "seeds are FIRST..LAST, two whole numbers from 0 such as 1000..2000"
        raise argparse.ArgumentTypeError(f"{form}, not {text!r}; --seed N is one run")
    first, last = int(parts[1]), int(parts[2])
    if last < first:
        raise argparse.ArgumentTypeError(f"seeds are FIRST..LAST, and LAST is not below FIRST, as it is in {text!r}")
    return range(first, last + 1)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"a time is a number of seconds above 0, not {text!r}")
    return seconds
