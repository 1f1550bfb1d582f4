"""The surroundings of a test run that differ between machines, and that tests and their processes should not notice."""

from __future__ import annotations

import os
import signal
import sys

UMASK = 0o022


def make_usual() -> None:
    """Reset settings that the parent process may have changed. Before MLX is imported: OpenBLAS reads its threads then.

    Tests of one of these settings set it themselves, for a process of their own.
    """
    # Several threads of OpenBLAS wait for each other at every step of a decode while anything else runs.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # Each of the servers that are started would compile all modules anew, which takes longer than to run them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # The locale decides how Python's standard streams are encoded, and tests read them as UTF-8.
    os.environ["PYTHONUTF8"] = "1"
    os.environ.pop("PYTHONIOENCODING", None)
    os.umask(UMASK)
    # A process inherits that a signal is ignored (nohup, a script's background job), but not that it is handled.
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
