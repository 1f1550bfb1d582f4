"""What can be wrong with a dump."""

from __future__ import annotations

NOT_WRITTEN = "its bytes are not those that were written"


class DumpError(ValueError):
    """A directory can't be dumped into or restored from; the message says why, and what to do."""


class BadFile(DumpError):
    """A file is incomplete, corrupt, or not from `kvpage dump`; the message says which, without the file's name."""
