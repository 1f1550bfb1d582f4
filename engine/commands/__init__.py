"""`kvpage-engine`, a module a group of commands: each declares its arguments and does its work.

What goes wrong in a way that a user can mend is a `Failure`, which `engine.cli` says in one line.

May lie here: commands, and what their command lines have in common. May not come in: work that a program could want.
"""

from __future__ import annotations


class Failure(Exception):
    """A command can't do what it was asked to; the message says why."""
