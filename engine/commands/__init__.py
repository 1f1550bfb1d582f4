"""The commands of `kvpage-engine`. Each module declares the arguments of some commands and runs them.

An error that the user can fix is a `Failure`; `engine.cli` prints its message in one line.
"""

from __future__ import annotations


class Failure(Exception):
    """Error: a command has failed for a reason that the user can fix. The message has the reason."""
