"""The commands of `kvpage-engine`. Each module declares the arguments of some commands and runs them.

An error that the user can fix is a `Failure`; `engine.cli` prints its message in one line.

Contains: commands, and the shared parts of their command lines. Excludes: functions for programs.
"""

from __future__ import annotations


class Failure(Exception):
    """Failure of a command, with the reason as its message."""
