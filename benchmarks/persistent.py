"""Persistent memory compared with plain MLX: the cost of a slice of a table, an append to it, and a step of decoding.

Everything is measured in pairs, one right after the other, so that a disturbance affects both; a ratio is the median of
the pairs'. The wall clock is a user's waiting time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import engine  # noqa: F401  # it chooses the BLAS, before MLX is imported

# isort: split
import mlx.core as mx

from benchmarks.decoder import Plain, decoder
from benchmarks.findings import Finding, show, write
from engine.persistent import Simulator, parse_file
from engine.persistent.graph import DTYPES
from engine.persistent.state import Journal, Layout, Table

ENTRIES = 4096
SHAPE = (8, 128)  # shape of an entry, 4 KiB in float32
INTRO = "time of ours / of the same in plain MLX; ratios are medians of the ratios of each pair"
DECODERS = {  # a small one, and layers with the sizes of SmolLM2-135M and of a model with 1B parameters
    "2 layers of 64": {"L": 2, "D": 64, "H": 4, "Dh": 16, "KV": 2, "F": 128, "Words": 97},
    "6 layers of 576": {"L": 6, "D": 576, "H": 9, "Dh": 64, "KV": 3, "F": 1536, "Words": 4096},
    "2 layers of 2048": {"L": 2, "D": 2048, "H": 32, "Dh": 64, "KV": 8, "F": 8192, "Words": 4096},
}
Pair = tuple[float, float]  # seconds of ours, and of plain MLX


def pairs(ours: Callable[[], None], plain: Callable[[], None], count: int) -> list[Pair]:
    """Time both functions `count` times in turn, after a tenth of that as warm-up."""
    found = []
    for turn in range(-max(1, count // 10), count):
        seconds = []
        for run in (ours, plain) if turn % 2 else (plain, ours):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        if turn >= 0:
            found.append((seconds[0], seconds[1]) if turn % 2 else (seconds[1], seconds[0]))
    return found


def slice_of_a_table(count: int) -> list[Pair]:
    """Time a sum over the first half of a table, and of an array with the same bytes."""
    rows = mx.random.normal((ENTRIES, *SHAPE))
    table = Table(Layout("K", DTYPES["f32"], SHAPE, indices=("t",)), journal := Journal())
    for t in range(ENTRIES):
        table.write((t,), rows[t])
    mx.eval(journal.arrays(), rows)
    assert mx.array_equal(table.read(()), rows)
    half = slice(0, ENTRIES // 2)
    return pairs(lambda: mx.eval(table.read((half,)).sum()), lambda: mx.eval(rows[half].sum()), count)


def append_to_a_table(count: int) -> list[Pair]:
    """Time the append of an entry to a table of 4,096 entries, and a write to an array that is large enough."""
    entry = mx.random.normal(SHAPE)
    journal = Journal()
    table = Table(Layout("K", DTYPES["f32"], SHAPE, indices=("t",)), journal)
    table.write((ENTRIES - 1,), entry)
    room = mx.zeros((ENTRIES + 2 * count + 2, *SHAPE))
    mx.eval(journal.arrays(), room, entry)
    at = [ENTRIES, ENTRIES]

    def ours() -> None:
        journal.begin()
        table.write((at[0],), entry)
        mx.eval(journal.arrays())
        at[0] += 1

    def plain() -> None:
        room[at[1]] = entry
        mx.eval(room)
        at[1] += 1

    return pairs(ours, plain, count)


def decode_step(sizes: dict[str, int], graph: Path, count: int) -> list[Pair]:
    """A step of the decoder in the graph language, and of the same in plain MLX. Raises AssertionError when they
    differ in a bit."""
    model = decoder(sizes)
    run, plain = Simulator(model, parse_file(graph)).make_executor(), Plain(model)
    found = pairs(run.step, plain.step, count)
    assert mx.array_equal(run.fetch("logits"), plain.logits)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; with `--quick`, of fewer pairs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks persistent")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(argv).quick
    count = 20 if quick else 100
    graph = Path(__file__).parent.parent / "examples" / "attention.oinf.txt"
    measured: dict[str, tuple[float | None, list[Pair]]] = {
        f"read [0..{ENTRIES // 2}] of {ENTRIES:,} entries of 4 KiB": (1.5, slice_of_a_table(count)),
        f"append to {ENTRIES:,} entries of 4 KiB": (None, append_to_a_table(4 * count)),
        **{f"a step of decoding, {name}": (1.3, decode_step(sizes, graph, count)) for name, sizes in DECODERS.items()},
    }
    findings = [_finding(work, target, found) for work, (target, found) in measured.items()]
    show(findings, "persistent memory, " + INTRO)
    if not quick:
        write(findings, "persistent", {"pairs": count}, intro=INTRO)


def _finding(work: str, target: float | None, found: list[Pair]) -> Finding:
    ours, plain = (1000 * median(side) for side in zip(*found, strict=True))
    ratio = median(mine / theirs for mine, theirs in found)
    return Finding(work, "plain MLX", "ms", f"{ours:.3f} / {plain:.3f}", ratio, at_most=target)


if __name__ == "__main__":
    main()
