"""The entry points of the three programs. Ctrl-C ends them with one line even during their imports, which take half a
second. So this module imports little. `python -m kvpage_server` is `kvpage-server`.
"""

from __future__ import annotations

from kvpage_server.system.program import ends_quietly


def kvpage() -> None:
    """Run `kvpage`, see `cli.main`."""
    with ends_quietly("kvpage"):
        from kvpage_server.cli import main  # imported here, so that Ctrl-C ends it quietly

        main()


def kvpage_server() -> None:
    """Run `kvpage-server`, see `app.main`."""
    with ends_quietly("kvpage-server"):
        from kvpage_server.app import main  # imported here, so that Ctrl-C ends it quietly

        main()


def kvpage_engine() -> int:
    """Run `kvpage-engine`, see `kvpage.engine.cli.main`. Return its exit code."""
    with ends_quietly("kvpage-engine"):
        from kvpage.engine.cli import main  # imported here, so that Ctrl-C ends it quietly

        return main()


if __name__ == "__main__":
    kvpage_server()
