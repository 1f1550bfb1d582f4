"""`kvpage-engine run`: steps of a graph with persistent memory."""

from __future__ import annotations

import argparse
import re
from typing import Any

from kvpage_server.system.program import interrupts_deferred

from .options import count, given_path, store_url


def add_to(commands: Any) -> None:
    parser = commands.add_parser("run", help="run steps of a graph with persistent memory")
    add = parser.add_argument
    add("graph", type=given_path, metavar="GRAPH", help="file in the graph language, such as x.oinf.txt")
    add("--instance", required=True, metavar="NAME", help="instance to resume; a new one if nothing is saved")
    add("--steps", type=count, default=1, metavar="N", help="steps to run (default: %(default)s)")
    add("--model", type=given_path, metavar="FILE", help="safetensors file with constants; sizes in its metadata")
    add("--size", action="append", default=[], type=_size, metavar="NAME=N", help="value of a size in the graph")
    add("--inputs", type=given_path, metavar="FILE", help="safetensors file: x[i] is inserted as x before step i")
    add("--autosave", type=count, default=1, metavar="N", help="save after every N steps (default: %(default)s)")
    add(
        "--url",
        type=store_url,
        default="redis://127.0.0.1:9221",
        help="page server, or several, as for --store of `serve` (default: %(default)s)",
    )
    parser.set_defaults(run=run_graph)


def run_graph(args: argparse.Namespace) -> int:
    """Run steps of a graph. Return the exit code: 0, or 1 after an error."""
    with interrupts_deferred():
        from ..persistent.run import run  # imports MLX

    return run(args)


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not re.fullmatch("[0-9]{1,18}", value):
        raise argparse.ArgumentTypeError(f"a size is NAME=NUMBER, such as D=64, got {text!r}")
    return name, int(value)
