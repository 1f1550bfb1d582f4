"""Logs repeated failures rarely, so that a client that can cause a failure can't fill the log."""

from __future__ import annotations

import logging
import time

EVERY_SECONDS = 60.0
MOST_KINDS = 256  # further kinds count as one


class Seldom(logging.Filter):
    """Logs an exception once a minute for each place that raises it. Records without an exception always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._again: dict[tuple[object, ...], float] = {}  # when the next of a kind may pass, in monotonic seconds

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        kind: tuple[object, ...] = (type(error), *_place(error))
        now = time.monotonic()
        if kind not in self._again and len(self._again) >= MOST_KINDS:
            kind = ()
        if now < self._again.get(kind, now):
            return False
        self._again[kind] = now + EVERY_SECONDS
        return True


def _place(error: BaseException) -> tuple[str, int]:
    """The file and line that raised it."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ("", 0)


SELDOM = Seldom()
