"""What the commands that run an engine have in common on their command lines."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import Failure
from kvpage_server.address import URL, shown, with_credentials

if TYPE_CHECKING:
    from engine.startup import Engine, Options

UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def add_engine(parser: argparse.ArgumentParser) -> None:
    """A model, and where its contexts are kept."""
    add = parser.add_argument
    add(
        "--model",
        default="models/smollm2",
        metavar="DIR_OR_ID",
        help="a model's directory, or its id in this machine's Hugging Face cache (default: %(default)s)",
    )
    add(
        "--store",
        metavar="URL",
        type=store_url,
        default=os.environ.get(URL),
        help=f"the page server, such as redis://127.0.0.1:9221; {URL} of the environment, or none, if not given. "
        "The password may be KVPAGE_PASSWORD's of the environment",
    )
    add("--cold", type=Path, metavar="DIR", help="keep contexts in files there, too")
    add("--kv-bits", type=int, choices=[4, 8], help="keep keys and values in so many bits; prompts then run in turns")
    add(
        "--kv-quantised-from",
        type=count,
        default=0,
        metavar="N",
        help="with --kv-bits, quantise a prompt's cache when its first N tokens are computed (default: 0; mlx-lm's "
        "chunk is 2048)",
    )
    add("--memory", type=size, metavar="SIZE", help="for contexts, such as 4gb (default: a quarter of the machine's)")
    add(
        "--restore-within",
        type=seconds,
        default=10.0,
        metavar="S",
        help="how long a prompt waits for its context; what has not come then is computed (default: %(default)g)",
    )


def options(args: argparse.Namespace) -> Options:
    """Of the command line."""
    import_engine()
    from engine.startup import Options

    return Options(
        args.model, args.store, args.cold, args.kv_bits, args.memory, args.restore_within, args.kv_quantised_from
    )


def open_engine(args: argparse.Namespace) -> Engine:
    """In this thread, saying what takes long. Raises Failure."""
    wanted = options(args)
    from engine.startup import CANNOT_OPEN, Engine

    try:
        return Engine.open(wanted, tell)
    except CANNOT_OPEN as error:
        raise Failure(str(error)) from error


def import_engine() -> None:
    """MLX and what comes with it, which takes seconds."""
    if "mlx_lm" not in sys.modules:
        tell("importing MLX and mlx-lm")
    from engine.platform.open_files import import_mlx_lm

    import_mlx_lm()


def store_url(text: str) -> str:
    """A page server's address, with the password of the environment where it has none."""
    if not text.startswith(("redis://", "rediss://", "unix://")):
        raise argparse.ArgumentTypeError(
            f"a store's URL begins with redis://, rediss:// or unix://, got {shown(text)!r}"
        )
    try:
        return with_credentials(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tell(what: str) -> None:
    """Say on the standard error what is done; answers go to the standard output."""
    print(f"kvpage-engine: {what}", file=sys.stderr, flush=True)


def size(text: str) -> int:
    """Bytes, from such as 512mb."""
    found = re.fullmatch(r"(\d+)(|kb|mb|gb)", text.lower())
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"a size is a number of bytes, or one with kb, mb or gb, got {text!r}")
    return int(found[1]) * UNITS[found[2]]


def count(text: str) -> int:
    """A number that is 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number, 1 or more, got {text!r}")
    return int(text)


def port(text: str) -> int:
    """Of a listener; 0 for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A time that is more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, more than 0, got {text!r}")
    return value
