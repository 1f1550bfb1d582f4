"""`python -m benchmarks`: run all benchmarks, or the named ones."""

from __future__ import annotations

import argparse
import importlib
import sys
from itertools import takewhile

ALL = (
    "pages",
    "mapped",
    "tiered",
    "cluster",
    "stalls",
    "persistent",
    "engine_reconstruct",
    "engine_batch",
    "engine_tiers",
    "perplexity",
    "http_api",
    "without_ids",
    "prompt_cache",
)
TOOLS = ("kv_events", "page_code", "profile", "states", "vllm_policies")  # benchmarks that run only if they are named


def main() -> None:
    """Run the benchmarks one after the other. Each gets the arguments after the names."""
    words = sys.argv[1:]
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(names) :]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", usage="%(prog)s [NAME ...] [--quick] [OPTIONS OF NAME]", description=__doc__
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join((*ALL, *TOOLS))}; all if none is")
    parser.add_argument("--quick", action="store_true", help="less of everything, and nothing is written")
    if not names:
        parser.parse_args(options)
    if unknown := set(names) - {*ALL, *TOOLS}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}, only {', '.join((*ALL, *TOOLS))}")
    for name in names or ALL:
        importlib.import_module(f"benchmarks.{name}").main(options)


if __name__ == "__main__":
    main()
