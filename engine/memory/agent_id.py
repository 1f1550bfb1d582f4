"""What an agent may be called: its name stands in keys, and in the names of files."""

from __future__ import annotations

import re

RULE = "an agent id is 1 to 128 of A-Z a-z 0-9 . _ @ + = - and starts with no dot"
_AGENT_ID = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]{0,127}\Z")


def is_agent_id(name: str) -> bool:
    """Whether it can name pages and files: see `RULE`."""
    return bool(_AGENT_ID.match(name))
