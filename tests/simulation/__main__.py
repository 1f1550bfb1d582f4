"""`python -m tests.simulation`: runs seeds; see README.md."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # or the order of sets would be another one each time
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

for _closed in [name for name in ("stdout", "stderr") if getattr(sys, name) is None]:
    setattr(sys, _closed, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends

from tests.simulation.cli.arguments import requested  # noqa: E402 - after the log handler is set
from tests.simulation.defects import DoesNotApply, plant  # noqa: E402
from tests.simulation.world.clock import Clock  # noqa: E402
from tests.simulation.world.machine import install  # noqa: E402

request = requested(sys.argv[1:])
clock = Clock()
install(clock)
try:
    if request.defect is not None:
        plant(request.defect)
    from tests.simulation.cli.command import main  # its imports must run within that world, with that mistake
except DoesNotApply as error:
    print(f"the mistake cannot be made: {error}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

sys.exit(main(clock, request))
