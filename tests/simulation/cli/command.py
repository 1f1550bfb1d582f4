"""The command line: output about seeds that are run, and that fail."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep

from kvpage_server.core import NAME
from tests.simulation.acting.run import Outcome, run
from tests.simulation.cli.arguments import Request
from tests.simulation.cli.shrink import as_text, fewest, like
from tests.simulation.programs.program import Program
from tests.simulation.world import place
from tests.simulation.world.clock import Clock, real_monotonic

LONGEST = 60  # seconds of a core, plus some per step: the stack is printed then
_ASLEEP = 10  # times as many seconds of the real clock, since the machine may be busy
_TIDIES = 5  # seconds that a run has to remove its files when it is given up

Play = Callable[[int, int, Sequence[int] | None], Outcome]  # a seed, how many steps, and which of these


@dataclass
class Count:
    """Counters of runs."""

    runs: int = 0
    commands: int = 0
    failed: int = 0


def main(clock: Clock, request: Request) -> int:
    """0 when all runs were right, 1 when some were not, 2 when none can be made, 130 when somebody interrupts them."""
    count, began, used = Count(), real_monotonic(), _used()
    try:
        place.check(place.parent())
        _run_all(clock, request, count)
        seconds, cost = real_monotonic() - began, _used() - used
        received = f"{count.runs} runs, {count.commands} commands in {seconds:.1f} s"
        print(f"{received}, {count.commands / cost:.0f} a second of a core, {NAME} page core; {count.failed} failed")
        sys.stdout.flush()
    except place.Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {count.runs - count.failed} runs passed so far, {count.failed} failed", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 1 if count.failed else 0


def _run_all(clock: Clock, request: Request, count: Count) -> None:
    used = _used()

    def play(seed: int, steps: int, only: Sequence[int] | None) -> Outcome:
        return apart(clock, seed, steps, only)

    gc.collect()
    gc.freeze()  # a server that starts looks through all that is not
    for seed, steps in request.runs:
        if count.runs and _used() - used > request.seconds:
            break
        outcome = play(seed, steps, None)
        if request.twice and apart(clock, seed, steps, elsewhere=True) != outcome:
            outcome.fault = outcome.fault or "it is another run the second time"
        count.runs, count.commands = count.runs + 1, count.commands + outcome.commands
        if outcome.fault:
            place.check(place.parent())  # a server that is given no room has done nothing wrong
            count.failed += 1
            _notify(outcome, steps, request, play)
            if request.defect:
                break
        elif request.tells_each:
            print(f"seed {seed}: {outcome.commands} commands, digest {outcome.digest}, {NAME} page core")


def _used() -> float:
    """Seconds that a core has worked for this process and its children."""
    return sum(os.times()[:4])


def _notify(outcome: Outcome, steps: int, request: Request, play: Play) -> None:
    core = f"KVPAGE_CORE={asked} " if (asked := os.environ.get("KVPAGE_CORE")) else ""
    how = (f" --defect {request.defect}" if request.defect else "") + (" --twice" if request.twice else "")
    print(f"seed {outcome.seed} fails: {outcome.fault}")
    print(f"  again: {core}.venv/bin/python -m tests.simulation --seed {outcome.seed} --steps {steps}{how}", flush=True)
    if request.whole or request.defect or request.twice:
        return
    program = Program(outcome.seed)
    chosen = program.steps(steps)
    left = fewest(chosen, lambda some: like(play(outcome.seed, steps, [step.number for step in some]), outcome))
    print(f"  {len(left)} of {len(chosen)} steps are enough, of a server with {program.seed.options}:")
    print("\n".join(f"    {as_text(step)}" for step in left), flush=True)


def apart(
    clock: Clock, seed: int, steps: int, only: Sequence[int] | None = None, *, elsewhere: bool = False
) -> Outcome:
    """A run in a process of its own, so that it finds everything as every other does.

    `only`: the steps to do. `elsewhere`: have its objects lie elsewhere in memory than usual. Raises Unusable if there
    is no space for its files.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the parent
        signal.signal(signal.SIGTERM, _give_up)
        os.close(reading)
        try:
            between = _spread(seed) if elsewhere else []
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(_played(clock, seed, steps, only), pipe)
            between.clear()
        except (_GivenUp, BrokenPipeError):  # just before the run, or after it
            pass
        os._exit(0)
    os.close(writing)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(child, 0)
    except KeyboardInterrupt:
        _end(child)
        raise
    if status or not data:
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
        return Outcome(seed, 0, "", f"the process died: {how}")
    outcome: Outcome | OSError = pickle.loads(data)
    if isinstance(outcome, OSError):
        raise place.Unusable(place.unusable(place.parent(), str(outcome)))
    return outcome


class _GivenUp(BaseException):
    """The result of the run is not needed any more."""


def _give_up(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _GivenUp


def _end(child: int) -> None:
    """Have a run remove its files and end, whatever it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
    os.kill(child, signal.SIGTERM)
    end = real_monotonic() + _TIDIES
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if real_monotonic() > end:
            os.kill(child, signal.SIGKILL)
        sleep(0.02)


def _spread(seed: int) -> list[bytes]:
    """Allocate objects between those of others, which changes the times of garbage collections.

    A set of objects has the order of their addresses, and a collection has its effect at its time. A run that depends
    on either differs in another process.
    """
    rng = random.Random(seed)
    taken = [bytes(rng.randrange(1, 500)) for _ in range(50_000)]
    rng.shuffle(taken)
    gc.set_threshold(rng.randrange(50, 500))
    return taken[::2]


def _played(clock: Clock, seed: int, steps: int, only: Sequence[int] | None) -> Outcome | OSError:
    """Return the outcome of a run, or the error of a world without space."""
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
        return run(clock, program.seed, chosen)
    except _GivenUp:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - any error is the outcome of the run
        if isinstance(error, OSError) and error.errno in place.FULL:
            return error
        return Outcome(seed, 0, "", traceback.format_exc())
