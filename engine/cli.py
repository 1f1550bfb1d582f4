"""`kvpage-engine`: what one does with the engine from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine.commands import Failure, agents, demo, measure, models, persistent, serve, talk

GROUPS = (serve, talk, agents, measure, models, demo, persistent)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser = argparse.ArgumentParser(prog="kvpage-engine", description="An engine on MLX that remembers its agents.")
    commands = parser.add_subparsers(title="commands", required=True)
    for group in GROUPS:
        group.add_to(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except Failure as failure:
        print(f"kvpage-engine: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
