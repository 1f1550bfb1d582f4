"""Checks of `kvpage connectors verify`: a process of an engine must find the data of another process, unchanged.

A check runs two processes, one after the other. An engine either answers a prompt, which is new because of its salt, or
moves objects with bytes that follow from their number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TOKENS = 1025  # of the prompt
ANSWER = 16  # tokens
WITHIN = 60.0  # seconds for each call
NOT_LEASED = "the others are missing, or cannot be leased: leases take at most half of the server's maxmemory"
_NOISE = 0.25  # of a log probability: kernels round differently for prompts of other lengths
_RESULT = "kvpage-result "

Job = dict[str, Any]


def _report(number: int, work: str) -> None:
    """Print on stderr that a process starts, which may take minutes."""
    print(f"process {number} of 2: {work}", file=sys.stderr, flush=True)


def in_process(module: str, job: Job, environment: Mapping[str, str] = {}) -> tuple[Job | None, str]:
    """Run `answer_job` of a module in a process. Return its result, or the last lines of its output.

    A pipe carries the job, because it has a password.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job),
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not lines:
        return None, "\n".join((done.stdout + done.stderr).splitlines()[-20:])
    result: Job = json.loads(lines[-1].removeprefix(_RESULT))
    return result, ""


def answer_job(run: Callable[[Job], Job]) -> None:
    """Run the job on standard input, and print the result for `in_process`."""
    print(_RESULT + json.dumps(run(json.load(sys.stdin))), flush=True)


# -- engines that answer a prompt --------------------------------------------------------------------------------------


@dataclass
class Run:
    """Result of a process that answered the prompt."""

    versions: str = ""
    prompt: int = 0  # tokens
    restored: int = 0  # tokens
    first_token: float = 0.0  # seconds
    answer: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # log probability of each token of the answer
    messages: list[str] = field(default_factory=list)  # of the connector


def verify_answers(engine: str, module: str, job: Job, environment: Mapping[str, str] = {}) -> list[str]:
    """Print the comparison of two runs, and return the failures. The job gets a ``salt``."""
    job = {**job, "salt": uuid.uuid4().hex}
    runs: list[Run] = []
    for number, work in ((1, f"{engine} computes a new prompt"), (2, f"{engine} restores the prompt")):
        _report(number, work)
        result, error = in_process(module, job, environment)
        if result is None:
            return [f"process {number} of {engine} failed:\n{error}"]
        run = Run(**result)
        if not runs:
            print(run.versions, flush=True)
        for message in run.messages:
            if message not in (runs[0].messages if runs else []):
                print(message)
        runs.append(run)
    computed, restored = runs
    ratio = restored.first_token / computed.first_token
    print(f"prompt of {computed.prompt} tokens: {restored.restored} restored by another process")
    print(
        f"first token: {computed.first_token:.3f} s computed, {restored.first_token:.3f} s restored, ratio {ratio:.3f}"
    )
    return list(failures(computed, restored))


def failures(computed: Run, restored: Run) -> list[str]:
    """Compare the two runs, and print the comparison. Return a line for each failure."""
    found = []
    if computed.restored:
        found.append(f"a new prompt had {computed.restored} restored tokens")
    if not restored.restored:
        found.append("nothing was restored")
    difference = max(
        (abs(one - other) for one, other in zip(computed.chances, restored.chances, strict=False)), default=0
    )
    if computed.answer != restored.answer:
        found.append(f"the answers differ: {computed.answer} and {restored.answer}")
    elif difference > _NOISE:
        found.append(f"the log probabilities differ by {difference:.3f}")
    else:
        print(f"answers of {len(computed.answer)} tokens are equal, log probabilities within {difference:.6f}")
    return found


# -- engines that move objects -----------------------------------------------------------------------------------------


def verify_objects(what: str, module: str, url: str) -> list[str]:
    """Print the times of two processes, of which one stores `what` and the other loads it. Return the failures.

    A job has ``url``, ``model``, which is a new name, and ``step``: store or load. A result has ``versions``,
    ``failures`` and the ``seconds`` of store, lookup and load.
    """
    model, seconds = f"verify-{uuid.uuid4().hex}", dict[str, float]()
    for number, step in ((1, "store"), (2, "load")):
        _report(number, f"{step} {what}")
        result, error = in_process(module, {"url": url, "model": model, "step": step})
        if result is None:
            return [f"the process that should {step} failed:\n{error}"]
        if result["failures"]:
            return list(result["failures"])
        seconds |= result["seconds"]
        if step == "store":
            print(result["versions"], flush=True)
    print(
        f"{what}: stored in {seconds['store']:.3f} s, found in {seconds['lookup']:.3f} s, loaded in "
        f"{seconds['load']:.3f} s by another process, bytes equal"
    )
    return []


def body_of(number: int, size: int) -> bytes:
    """Return the bytes of an object."""
    return bytes([number % 256]) * size
