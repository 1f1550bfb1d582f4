"""`kvpage-engine`, a module a group of commands: each declares its arguments and does its work.

What goes wrong in a way that a user can mend is a `Failure`, which `engine.cli` says in one line.
"""

from __future__ import annotations


class Failure(Exception):
    """A command can't do what it was asked to; the message says why."""
