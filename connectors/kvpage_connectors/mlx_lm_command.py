"""The command `kvpage-engine mlx-lm`, which runs commands of mlx-lm with a kvpage-server for their prompt caches."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

import redis

from kvpage_server.address import DEFAULT_URL, URL
from kvpage_server.system.program import interrupts_deferred

VERSIONS = ("0.32",)  # of mlx-lm, whose server has no interface for prompt caches of others


def add_to(commands: Any) -> None:
    """Add the command `mlx-lm` to those of kvpage-engine."""
    parser = commands.add_parser(
        "mlx-lm",
        help="a command of mlx-lm, with a page server for its prompt caches",
        usage="kvpage-engine mlx-lm [--store URL] {server,generate,cache_prompt} [mlx-lm's options]",
    )
    parser.add_argument(
        "--store", metavar="URL", default=os.environ.get(URL) or DEFAULT_URL, help="default: %(default)s"
    )
    parser.add_argument("command", choices=["server", "generate", "cache_prompt"])
    parser.add_argument("options", nargs=argparse.REMAINDER, help="those of the command, see --help after it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a command of mlx-lm. `generate` and `cache_prompt` take ``--prompt-cache-file redis://HOST:PORT#NAME``."""
    if not (found := version("mlx-lm")).startswith(VERSIONS):
        print(f"kvpage-engine: mlx-lm {found} was not tried, only {' and '.join(VERSIONS)}", file=sys.stderr)
        return 1
    with interrupts_deferred():
        from kvpage_connectors import mlx_lm  # imports MLX

    sys.argv = [f"kvpage-engine mlx-lm {args.command}", *args.options]
    if args.command == "server":
        mlx_lm.serve(args.store)
        sys.stderr.flush()
        os._exit(0)  # MLX's threads abort an ordinary exit, of mlx_lm.server itself, too
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--prompt-cache-file", default="")
    if "://" in (file_name := named.parse_known_args(args.options)[0].prompt_cache_file):
        try:  # before a long computation
            mlx_lm.check_named(file_name)
        except (redis.RedisError, ValueError) as error:
            print(f"kvpage-engine: {error}", file=sys.stderr)
            return 1
    module: Any = import_module(f"mlx_lm.{args.command}")
    module.load_prompt_cache, module.save_prompt_cache = mlx_lm.load_prompt_cache, mlx_lm.save_prompt_cache
    module.main()
    return 0
