"""The surroundings of a test run that differ between machines, and that tests and their processes should not notice."""

from __future__ import annotations

import os
import resource
import signal
import ssl
import sys
from pathlib import Path
from typing import Any

import httpx
from httpx._transports import default

ROOT = Path(__file__).parents[2]
UMASK = 0o022
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
_OF_MLX_LM = resource.RLIMIT_NOFILE, (2048, 4096)  # which `mlx_lm.utils` sets when it is imported


def make_usual() -> None:
    """Reset settings that the parent process may have changed. Before MLX is imported: OpenBLAS reads its threads then.

    Tests of one of these settings set it themselves, for a process of their own.
    """
    # Processes that tests start import this checkout, also its `kvpage`, whichever one the environment has.
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'connectors'}"
    # Several threads of OpenBLAS wait for each other at every step of a decode while anything else runs.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # Each of the servers that are started would compile all modules anew, which takes longer than to run them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Commands use the server and the password that a user's environment names.
    for name in ("KVPAGE_URL", "KVPAGE_PASSWORD", "REDISCLI_AUTH"):
        os.environ.pop(name, None)
    # The locale decides how Python's standard streams are encoded, and tests read them as UTF-8.
    os.environ["PYTHONUTF8"] = "1"
    os.environ.pop("PYTHONIOENCODING", None)
    os.umask(UMASK)
    # A process inherits that a signal is ignored (nohup, a script's background job), but not that it is handled.
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def share_certificates() -> None:
    """Let HTTP clients without options for TLS share a context. Each would read all certificates of the system, which
    takes longer than most requests.
    """
    create = httpx.create_ssl_context
    shared = create()

    def context(verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return shared if verify is True and cert is None else create(verify, cert, trust_env)

    default.create_ssl_context = context  # type: ignore[attr-defined]


def keep_limit_of_open_files() -> None:
    """Let imports of mlx_lm leave the limit of open files as it is. Otherwise the hard limit of the tests' process
    would be lower for all later tests and their servers.
    """
    set_limit = resource.setrlimit

    def set_other_limit(which: int, limits: tuple[int, int]) -> None:
        if (which, limits) != _OF_MLX_LM:
            set_limit(which, limits)

    resource.setrlimit = set_other_limit
