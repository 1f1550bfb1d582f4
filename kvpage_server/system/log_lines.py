"""Lines of a log for people, to which no client can add one."""

from __future__ import annotations

import logging

from kvpage_server.system.printable import printable

_CONTINUES = "    "


class LogLines(logging.Formatter):
    """Formatter that escapes whatever cannot be printed.

    A message may have names that clients chose. An end of line in a name would begin a line that looks like another
    record, and an escape sequence would be a command to the terminal that shows the log. A message takes one line, and
    the lines of a traceback are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        return "\n".join(_CONTINUES + printable(line) for line in super().formatException(ei).split("\n"))


def log_to_standard_error(layout: str) -> None:
    """Write warnings and errors to standard error in a layout of `logging.Formatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines(layout))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
