"""The log: lines of text, or a JSON object in each line."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from io import TextIOWrapper
from typing import TextIO

from kvpage_server.configuration.config import Config
from kvpage_server.system.durable import private, tighten
from kvpage_server.system.text import LogLines

LEVELS = {"debug": logging.DEBUG, "verbose": logging.DEBUG, "notice": logging.INFO, "warning": logging.WARNING}
_NOBODY_READS = (errno.EIO, errno.EPIPE)  # errors of a closed terminal, and of a closed pipe


def start(config: Config) -> None:
    """Start to log as configured: level, file and format. Raises OSError if the log file cannot be opened."""
    logging.basicConfig(level=LEVELS[config.loglevel], handlers=[_handler(config)])


def reopen(config: Config) -> None:
    """Open the log file again, because it may have been renamed. Raises OSError if this fails, and keeps the open
    file.
    """
    handler, root = _handler(config), logging.getLogger()
    old = list(root.handlers)
    root.handlers[:] = [handler]
    for one in old:
        one.close()


def set_level(name: str) -> None:
    logging.getLogger().setLevel(LEVELS[name])


def _handler(config: Config) -> logging.Handler:
    handler = _File(config.logfile) if config.logfile else _StandardError(sys.stderr)
    handler.setFormatter(JSONLines() if config.log_format == "json" else _for_people())
    return handler


class _File(logging.FileHandler):
    """A log file that only its owner and its group may access."""

    def _open(self) -> TextIOWrapper:
        file = open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=private)  # noqa: SIM115
        tighten(file.fileno(), leave=0o660)
        return file


class _StandardError(logging.StreamHandler[TextIO]):
    """Log handler for standard error. A closed terminal or pipe does not stop the server."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Discard this record and all later ones if the terminal or pipe is closed. Report other errors as `logging`
        does.
        """
        error = sys.exception()
        if not isinstance(error, OSError) or error.errno not in _NOBODY_READS:
            super().handleError(record)
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)


def _for_people() -> LogLines:
    return LogLines("%(asctime)s.%(msecs)03d %(levelname).1s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


class JSONLines(logging.Formatter):
    """Formatter that writes JSON objects: time, level, message, and the fields of `extra={"facts": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)
