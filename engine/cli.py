"""`kvpage-engine`: the command line of the engine."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version

from kvpage_server import __version__
from kvpage_server.system.completion import SHELLS, completion_of
from kvpage_server.system.program import ProgramParser, ends_quietly, interrupts_deferred, missing_extra, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of the process if `argv` is None. Return its exit code: 1 for a failure,
    which is printed on stderr in one line.
    """
    with ends_quietly("kvpage-engine"):
        try:
            return _run(argv)
        except ModuleNotFoundError as missing:
            return say("kvpage-engine", missing_extra(missing, "engine"), 1)


def _run(argv: Sequence[str] | None) -> int:
    with interrupts_deferred():
        from .commands import Failure  # imported here, because dependencies may be missing, which `main` reports

        program = parser()  # imports the commands
    args = program.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # the default action would end the process without a cleanup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return int(args.run(args))
    except Failure as failure:
        return say("kvpage-engine", str(failure), 1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from .commands import agents, measure, models, persistent, serve, talk

    program = ProgramParser(prog="kvpage-engine", description="An engine on MLX that remembers its agents.")
    program.add_argument("--version", action="version", version=_version())
    commands = program.add_subparsers(title="commands", required=True)
    connectors = [found.load() for found in entry_points(group="kvpage_engine.commands")]
    for group in (serve, talk, agents, measure, models, persistent, *connectors):
        group.add_to(commands)
    completed = commands.add_parser("completion", help="print the completion of kvpage-engine")
    completed.add_argument("shell", choices=SHELLS)
    completed.set_defaults(run=_complete, parser=program)
    return program


def _complete(args: argparse.Namespace) -> int:
    print(completion_of(args.shell, args.parser), end="")
    return 0


def _version() -> str:
    return f"kvpage-engine {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"


if __name__ == "__main__":
    sys.exit(main())
