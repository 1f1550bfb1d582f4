"""`python -m tests.simulation`: runs seeds; see README.md."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # or the order of sets would be another one each time
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation.defects import plant
from tests.simulation.world.clock import Clock
from tests.simulation.world.machine import install

clock = Clock()
install(clock)
if "--defect" in sys.argv[:-1]:
    plant(sys.argv[sys.argv.index("--defect") + 1])

from tests.simulation.command import main  # noqa: E402 - what it imports is to live in that world

sys.exit(main(clock, sys.argv[1:]))
