"""Wrapper that runs a Python module, and ends the process when its standard input ends, so that it never outlives its
parent: ``python exit_with_parent.py MODULE ARGUMENTS``.

The parent runs this file by its path, because an import from `engine` would load OpenBLAS and tune malloc for MLX,
which a page server does not need.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.argv.pop(0)
    threading.Thread(target=_end_with_input, daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
