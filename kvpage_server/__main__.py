"""The entry points of the three programs. Ctrl-C ends them with one line even during their imports, which take half a
second. So this module imports little. `python -m kvpage_server` is `kvpage-server`.
"""

from __future__ import annotations

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a traceback, until `ends_quietly`

from kvpage_server.system.program import ends_quietly, interrupts_deferred


def kvpage() -> None:
    """Run `kvpage`, see `cli.main`."""
    with ends_quietly("kvpage"):
        with interrupts_deferred():
            from kvpage_server.cli import main

        main()


def kvpage_server() -> None:
    """Run `kvpage-server`, see `app.main`.

    A SIGHUP that renews log and certificates must not end a service that starts: it is blocked, until `handle_signals`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)  # as `ignore_signals` does later for more
    with ends_quietly("kvpage-server"):
        with interrupts_deferred():
            from kvpage_server.app import main

        main()


def kvpage_engine() -> int:
    """Run `kvpage-engine`, see `kvpage.engine.cli.main`. Return its exit code. `serve` starts with SIGHUP blocked, as
    `kvpage_server` does.
    """
    if sys.argv[1:2] == ["serve"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    with ends_quietly("kvpage-engine"):
        with interrupts_deferred():
            from kvpage.engine.cli import main

        return main()


if __name__ == "__main__":
    kvpage_server()
