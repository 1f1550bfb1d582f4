"""Imported first by tests that also run as ``python3 -m unittest NAME.py`` from this directory, whatever python3 is.

Puts the project on the path. Where its dependencies are missing, the same command runs again under ../.venv's Python.
(Borrowing the other's packages would not do: which ones there are depends on the Python that they were installed for.)
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

try:
    import redis  # noqa: F401
    import uvloop  # noqa: F401

    import kvpage_server.page  # noqa: F401
except ImportError:
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix) == ROOT / ".venv" or not python.exists():
        raise
    command = getattr(sys, "orig_argv", ["python3", "-m", "unittest", *sys.argv[1:]])  # Python 3.9 doesn't keep it
    os.execv(python, [str(python), *command[1:]])
