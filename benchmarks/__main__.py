"""`python -m benchmarks`: all of them, or those that are named."""

from __future__ import annotations

import argparse
import importlib

ALL = (
    "pages",
    "tiered",
    "small_commands",
    "stalls",
    "parser",
    "persistent",
    "engine_reconstruct",
    "engine_batch",
    "engine_tiers",
    "perplexity",
    "http_api",
)


def main() -> None:
    """Run them in turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs benchmarks, all if none is named.")
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(ALL)}")
    parser.add_argument("--quick", action="store_true", help="less of everything, and nothing is written")
    args = parser.parse_args()
    if unknown := set(args.names) - set(ALL):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}, only {', '.join(ALL)}")
    for name in args.names or ALL:
        importlib.import_module(f"benchmarks.{name}").main(["--quick"] if args.quick else [])


if __name__ == "__main__":
    main()
