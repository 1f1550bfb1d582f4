"""How what was found is shown to programs: with `--json` an object a line, whose keys docs/operations.md lists."""

from __future__ import annotations

import json
from typing import Any

import redis

from kvpage_server.observe.asking import text


class LookError(Exception):
    """What was asked for can't be shown; the message says why."""


def print_json(found: Any) -> None:
    """An object on one line. Bytes that are no text are shown as `\\xNN`."""
    print(json.dumps(found, default=text, ensure_ascii=False), flush=True)


def leave_no_trace(store: redis.Redis) -> None:
    """Have what is looked at not count as used, if the user may say so."""
    try:
        store.execute_command("CLIENT", "NO-TOUCH", "ON")  # type: ignore[no-untyped-call]
    except redis.ResponseError:
        return
