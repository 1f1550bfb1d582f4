"""The commands of `kvpage-engine`. Each module declares the arguments of some commands and runs them.

An error that the user can fix is a `Failure`; `engine.cli` prints its message in one line.

May lie here: commands, and what their command lines have in common. May not come in: work that a program could want.
"""

from __future__ import annotations


class Failure(Exception):
    """A command failed; the message says why."""
