"""The command line: which seeds are run, for how long, and what is said of those that fail."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.simulation.programs import Program
from tests.simulation.run import Outcome, run
from tests.simulation.shrink import fewest, like, spelt
from tests.simulation.world.clock import Clock, real_monotonic

STEPS = 600
LONGEST = 60  # seconds of a core, and some for each step: the code that is stuck then is told
_ASLEEP = 10  # times as many seconds of the real clock, since the machine may be busy
KNOWN = Path(__file__).parent / "seeds.txt"

Play = Callable[[int, int, Sequence[int] | None], Outcome]  # a seed, how many steps, and which of these


def main(clock: Clock, arguments: list[str]) -> int:
    """0 when all runs were right."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one run")
    which.add_argument("--seeds", help="many: 1000..2000")
    which.add_argument("--known", action="store_true", help="those of seeds.txt, which have failed once")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each, {STEPS} if nothing is said")
    parser.add_argument("--seconds", type=float, default=0, help="begin no more runs after so much of a core")
    parser.add_argument("--twice", action="store_true", help="run each again in another memory, and compare every byte")
    parser.add_argument("--defect", help="with a mistake of defects/ in the server: it is to be found")
    parser.add_argument("--whole", action="store_true", help="do not shorten what fails")
    asked = parser.parse_args(arguments)
    began, used, commands, runs, failed = real_monotonic(), _used(), 0, 0, 0

    def play(seed: int, steps: int, only: Sequence[int] | None) -> Outcome:
        return apart(clock, seed, steps, only)

    def play_again(seed: int, steps: int) -> Outcome:
        return apart(clock, seed, steps, elsewhere=True)

    gc.collect()
    gc.freeze()  # a server that starts looks through all that is not
    for seed, steps in _wanted(asked):
        if asked.seconds and _used() - used > asked.seconds:
            break
        outcome = play(seed, steps, None)
        runs, commands = runs + 1, commands + outcome.commands
        if asked.twice and play_again(seed, steps) != outcome:
            outcome.fault = outcome.fault or "it is another run the second time"
        if outcome.fault:
            failed += 1
            _tell(outcome, steps, asked, play)
            if asked.defect:
                break
        elif asked.seed is not None:
            print(f"seed {seed}: {outcome.commands} commands, digest {outcome.digest}")
    seconds = real_monotonic() - began
    cost = _used() - used
    told = f"{runs} runs, {commands} commands in {seconds:.1f} s, {commands / cost:.0f} a second of a core"
    print(f"{told}; {failed} failed")
    return 1 if failed else 0


def _used() -> float:
    """Seconds that a core has worked for this process and its children."""
    return sum(os.times()[:4])


def _wanted(asked: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Seeds, and how many steps of each."""
    if asked.known:
        lines = [line.split("#")[0].split() for line in KNOWN.read_text().splitlines()]
        yield from ((int(line[0]), int(line[1])) for line in lines if line)
    elif asked.seed is not None:
        yield asked.seed, asked.steps
    else:
        first, _, last = asked.seeds.partition("..")
        yield from ((seed, asked.steps) for seed in range(int(first), int(last or first) + 1))


def _tell(outcome: Outcome, steps: int, asked: argparse.Namespace, play: Play) -> None:
    defect = f" --defect {asked.defect}" if asked.defect else ""
    print(f"seed {outcome.seed} fails: {outcome.fault}")
    print(f"  again: python -m tests.simulation --seed {outcome.seed} --steps {steps}{defect}", flush=True)
    if asked.whole or asked.defect or asked.twice:
        return
    program = Program(outcome.seed)
    chosen = program.steps(steps)
    left = fewest(chosen, lambda some: like(play(outcome.seed, steps, [step.number for step in some]), outcome))
    print(f"  {len(left)} of {len(chosen)} steps are enough, of a server with {program.options}:")
    print("\n".join(f"    {spelt(step)}" for step in left), flush=True)


def apart(
    clock: Clock, seed: int, steps: int, only: Sequence[int] | None = None, *, elsewhere: bool = False
) -> Outcome:
    """A run in a process of its own, so that it finds everything as every other does.

    `only`: the steps to do. `elsewhere`: have its objects lie elsewhere in memory than usual.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(reading)
        between = _spread(seed) if elsewhere else []
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(_played(clock, seed, steps, only), pipe)
        between.clear()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not data:
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
        return Outcome(seed, 0, "", f"the process died: {how}")
    outcome: Outcome = pickle.loads(data)
    return outcome


def _spread(seed: int) -> list[bytes]:
    """Lie between what others store, who also find their garbage collected at other moments.

    A set of objects is in the order of their addresses, and what a collection ends ends at its moment. A run that
    depends on either is another run in another process.
    """
    rng = random.Random(seed)
    taken = [bytes(rng.randrange(1, 500)) for _ in range(50_000)]
    rng.shuffle(taken)
    gc.set_threshold(rng.randrange(50, 500))
    return taken[::2]


def _played(clock: Clock, seed: int, steps: int, only: Sequence[int] | None) -> Outcome:
    longest = LONGEST + steps // 20
    faulthandler.register(signal.SIGPROF, chain=True)  # and be ended by it
    signal.setitimer(signal.ITIMER_PROF, longest)
    faulthandler.dump_traceback_later(_ASLEEP * longest, exit=True)
    try:
        program = Program(seed)
        chosen = program.steps(steps)
        if only is not None:
            wanted = set(only)
            chosen = [step for step in chosen if step.number in wanted]
        return run(clock, program, chosen)
    except BaseException:  # noqa: BLE001 - whatever it is, it is what became of the run
        return Outcome(seed, 0, "", traceback.format_exc())
