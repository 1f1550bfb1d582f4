"""`python tests/fuzz/seeded.py SECONDS [SEED]`: inputs to both cores, until they differ or the time is over."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fuzz.both import differ
from fuzz.codes import Codes
from fuzz.streams import Inputs

CODES_FOR_EACH = 10  # as many codes and patterns as take about the time of an input


def main() -> None:
    """Says how many inputs there were; an input that the cores differ in is kept in build/fuzz."""
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 10**9
    print(f"seed {seed}", flush=True)
    inputs, codes, count, end = Inputs(seed), Codes(), 0, time.monotonic() + seconds
    last = Path("build/fuzz/last")
    last.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < end:
        data = inputs.next()
        last.write_bytes(data)  # should the process be ended by it
        differ(data)
        for _ in range(CODES_FOR_EACH):
            seed += 1
            last.write_text(f"{seed}\n", encoding="ascii")  # for Codes().check
            codes.check(seed)
        count += 1
    counted = ", ".join(f"{kind} {number}" for kind, number in codes.counts.items())
    print(f"{count} inputs, and both cores did the same with each; codes and patterns: {counted}")


if __name__ == "__main__":
    main()
