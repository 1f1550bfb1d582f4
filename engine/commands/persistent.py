"""`kvpage-engine run`: steps of a graph with persistent memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Its arguments."""
    parser = commands.add_parser("run", help="steps of a graph with persistent memory, from where they were left")
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


def run_graph(args: argparse.Namespace) -> int:
    """Do steps of a graph; 1 when that was not possible."""
    from engine.persistent.run import run  # imports MLX

    return run(args)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a number of steps is 1 or more, got {text!r}")
    return int(text)


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdecimal():
        raise argparse.ArgumentTypeError(f"a size is NAME=NUMBER, such as D=64, got {text!r}")
    return name, int(value)
