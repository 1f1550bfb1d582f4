"""`python -m benchmarks`: all of them, or those that are named."""

from __future__ import annotations

import argparse
import importlib

ALL = ("pages",)


def main() -> None:
    """Run them in turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs benchmarks, all if none is named.")
    parser.add_argument("names", metavar="NAME", nargs="*", choices=[*ALL, []], help=" ".join(ALL))
    parser.add_argument("--quick", action="store_true", help="less of everything: seconds instead of minutes")
    args = parser.parse_args()
    for name in args.names or ALL:
        importlib.import_module(f"benchmarks.{name}").main(["--quick"] if args.quick else [])


if __name__ == "__main__":
    main()
