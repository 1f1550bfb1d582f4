"""The decoder of examples/attention.oinf.txt, and a process that runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import engine  # noqa: F401  # it chooses the BLAS, before MLX is imported

# isort: split
import mlx.core as mx
import numpy as np
import xxhash

from benchmarks.decoder import decoder
from engine.persistent import Graph, PersistentStore, Simulator, parse_file
from engine.persistent.errors import NoInstanceError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def attention() -> Graph:
    return parse_file(EXAMPLES / "attention.oinf.txt")


def report(step: int, word: mx.array, logits: mx.array) -> str:
    """Return a line with the exact result of a step."""
    return f"{step} {word.item()} {xxhash.xxh3_64_hexdigest(np.asarray(logits).tobytes())}"


def main() -> None:
    """Run a step of an instance for each line of the input, save it, and print its result."""
    url, instance = sys.argv[1:]
    simulator = Simulator(decoder(), attention(), store=PersistentStore(url))
    try:
        run = simulator.resume(instance, autosave=1)
    except NoInstanceError:
        run = simulator.make_executor(instance, autosave=1)
    for _ in sys.stdin:
        run.step()
        print(report(run.steps, run.fetch("word"), run.fetch("logits")), flush=True)


if __name__ == "__main__":
    main()
