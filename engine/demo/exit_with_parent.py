"""Runs a module that ends with its input: ``python tethered.py MODULE ARGUMENTS``. It never outlives its starter.

Run by its path, not as a part of `engine`, so that a server does not load what MLX needs.
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
