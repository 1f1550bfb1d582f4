"""What looking at a store begins with, and how it fails."""

from __future__ import annotations

import redis

from kvpage_server.observe.asking import AskedStore


class LookError(Exception):
    """What was asked for can't be shown; the message says why."""


def leave_no_trace(store: AskedStore) -> None:
    """Have what is looked at not count as used, if the user may say so."""
    try:
        store.execute_command("CLIENT", "NO-TOUCH", "ON")
    except redis.ResponseError:
        return
