"""`kvpage-engine demo`: a conversation that moves between engines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from . import Failure


def add_to(commands: Any) -> None:
    demo = commands.add_parser("demo", help="a conversation that moves from one engine to another, in about a minute")
    demo.add_argument("--model", default="models/smollm2", metavar="DIR", help="default: %(default)s")
    demo.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> int:
    """Run the demonstration. Return the exit code: 1 if a result does not reach its promised value, else 0."""
    from ..demo import story  # imports MLX

    if not Path(args.model).is_dir():
        raise Failure(f"no model in {args.model}; `kvpage-engine fetch-model smollm2` gets one")
    console = Console()
    try:
        outcome = story.run(args.model, console)
    except story.ProcessError as error:
        raise Failure(str(error)) from error
    story.show(outcome, console)
    return 0 if all(outcome.promises().values()) else 1
