"""Options shared by the commands that run an engine."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvpage_server.address import URL, shown, with_credentials
from kvpage_server.client import PageClient
from kvpage_server.system.program import interrupts_deferred, not_empty, report_line

from ..chains import RULE, is_agent_id
from . import Failure

if TYPE_CHECKING:
    from ..startup import Engine, Options

STORES = ("redis://", "rediss://", "unix://", "valkey-cluster://", "redis-cluster://", "rediss-cluster://")
MODEL = "models/smollm2"  # the default
UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options for a model and its tiers."""
    add = parser.add_argument
    add(
        "--model",
        type=not_empty,
        default=MODEL,
        metavar="DIR_OR_ID",
        help="directory of the model, or its id in the local Hugging Face cache (default: %(default)s)",
    )
    add("--adapter", type=given_path, metavar="DIR", help="adapter of mlx-lm (LoRA, DoRA, full) for the model")
    add_tiers(parser)


def add_tiers(parser: argparse.ArgumentParser) -> None:
    """Add the options for the contexts of models, and their tiers."""
    add = parser.add_argument
    add(
        "--store",
        metavar="URL",
        type=store_url,
        default=os.environ.get(URL),
        help=f"page server, such as redis://127.0.0.1:9221 (default: {URL} of the environment, or none); several with "
        "commas between them, or valkey-cluster://HOST:PORT,... (docs/scaling.md). The password can come from "
        "KVPAGE_PASSWORD",
    )
    add("--cold", type=given_path, metavar="DIR", help="also store contexts as files in this directory")
    add("--cold-code", action="store_true", help="write files of --cold in the lossless code (docs/page-code.md)")
    add(
        "--page-code",
        choices=("auto", "always", "never"),
        default="auto",
        help="send and receive blocks in the lossless code: `auto` if that is faster by measured rates, and the page "
        "server is a single one on another machine (default: %(default)s)",
    )
    add("--kv-bits", type=int, choices=[4, 8], help="quantise keys and values to N bits")
    add(
        "--kv-quantised-from",
        type=count,
        default=0,
        metavar="N",
        help="with --kv-bits: compute the first N tokens of a prompt before its cache is quantised (default: 0)",
    )
    add(
        "--in-turns",
        action="store_true",
        help="compute one prompt at a time, in turns: an answer is then the same to the bit whatever else is computed",
    )
    add("--memory", type=size, metavar="SIZE", help="memory for contexts, such as 4gb (a quarter of the machine's)")
    add(
        "--restore-within",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds to load a context; parts that arrive later are computed (default: %(default)g)",
    )
    add(
        "--keep",
        choices=("all", "worth", "named"),
        default="worth",
        help="which contexts to store: `worth` those of named agents, and others that take over 0.1 s to compute or "
        "are used again; `all`; or `named` only (default: %(default)s)",
    )
    add(
        "--share",
        choices=("none", "system", "all"),
        default="all",
        help="what clients of a tenant reuse from each other: `none`, the `system` message, or `all` (default: "
        "%(default)s). A client is a named agent, or all prompts without a name of a bearer token",
    )


def options(args: argparse.Namespace, model: str, adapter: Path | None) -> Options:
    """Return the options of an engine, from the arguments of the command line."""
    import_engine()
    from ..startup import Options

    return Options(
        model,
        args.store,
        args.cold,
        args.cold_code,
        args.page_code,
        args.kv_bits,
        args.memory,
        args.restore_within,
        args.kv_quantised_from,
        args.keep,
        args.share,
        args.in_turns,
        adapter,
    )


def open_engine(args: argparse.Namespace) -> Engine:
    """Open the engine, and report progress on stderr. Raises Failure."""
    chosen = options(args, args.model, args.adapter)
    from ..startup import CANNOT_OPEN, Engine

    try:
        return Engine.open(chosen, report)
    except CANNOT_OPEN as error:
        raise Failure(str(error)) from error


def import_engine() -> None:
    """Import MLX and mlx-lm, which takes seconds."""
    if "mlx_lm" not in sys.modules:
        report("importing MLX and mlx-lm")
    from ..platform import import_mlx_lm

    with interrupts_deferred():
        import_mlx_lm()


def store_url(text: str) -> str:
    """Parse the URL of one page server or of several, and add a missing password from the environment. Raises
    ArgumentTypeError.
    """
    if not text.startswith(STORES):
        beginnings = f"{', '.join(STORES[:-1])} or {STORES[-1]}"
        raise argparse.ArgumentTypeError(f"a store's URL begins with {beginnings}, got {shown(text)!r}")
    try:
        url = with_credentials(text)
        PageClient(url).close()  # raises for an invalid URL; connects only at the first request
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return url


def report(what: str) -> None:
    """Report progress on stderr; answers go to stdout."""
    report_line(f"kvpage-engine: {what}")


def given_path(text: str) -> Path:
    return Path(not_empty(text))


def size(text: str, least: int = 1) -> int:
    found = re.fullmatch(r"([0-9]{1,18})(|kb|mb|gb)", text.lower())
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"a size is a number of bytes, or one with kb, mb or gb, got {text!r}")
    if (nbytes := int(found[1]) * UNITS[found[2]]) < least:
        raise argparse.ArgumentTypeError(f"expected at least {least} bytes, got {text!r}")
    return nbytes


def count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number, 1 or more, got {text!r}")
    return int(text)


def port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, got {text!r}")
    return int(text)


def utf8(text: str) -> str:
    """Decode an argument of the command line as UTF-8, because Python decodes it as ASCII in an ASCII locale. Raises
    ArgumentTypeError.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a text in UTF-8: {error}") from None


def agent(text: str) -> str:
    if not is_agent_id(text):
        raise argparse.ArgumentTypeError(f"{RULE}, got {text!r:.200}")
    return text


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type: it parses a float from `least` to `most`, and raises ArgumentTypeError for any other
    text.
    """
    allowed = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number, {allowed}, got {text!r}")
        return value

    return read


def seconds(text: str) -> float:
    try:
        value = float(text) if text.isascii() else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, more than 0, got {text!r}")
    return value
