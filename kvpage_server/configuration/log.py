"""The log: lines of text, or a JSON object in each line."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from kvpage_server.configuration.config import Config
from kvpage_server.system.durable import open_private, restrict_permissions
from kvpage_server.system.text import LogLines, milliseconds_of

log = logging.getLogger("kvpage")

LEVELS = {"debug": logging.DEBUG, "verbose": logging.DEBUG, "notice": logging.INFO, "warning": logging.WARNING}
_CLOSED = (errno.EIO, errno.EPIPE)  # errors of a closed terminal, and of a closed pipe


def start(config: Config) -> None:
    """Start to log as configured: level, file and format. Raises OSError if the log file cannot be opened."""
    handler = _handler(config)
    logging.basicConfig(level=LEVELS[config.loglevel], handlers=[handler])
    _restrict(handler)


def reopen(config: Config) -> None:
    """Open the log file again, because it may have been renamed, and write a first line to it.

    Raises OSError if the file cannot be opened, or if the line cannot be written. Then the log stays in the old file.
    """
    handler, root = _handler(config), logging.getLogger()
    handler.handle(_line(logging.INFO, "SIGHUP: the log goes on here"))
    if handler.failure is not None:
        with suppress(OSError):  # the same error, for the same line
            handler.close()
        raise handler.failure
    old = list(root.handlers)
    root.handlers[:] = [handler]
    _restrict(handler)
    for one in old:
        try:
            one.close()
        except OSError as error:
            log.warning("SIGHUP: the last lines of the old log file are lost: %s", error.strerror)


def set_level(name: str) -> None:
    logging.getLogger().setLevel(LEVELS[name])


def _handler(config: Config) -> _Lines:
    handler: _Lines = _File(config.logfile) if config.logfile else _StandardError(sys.stderr)
    handler.setFormatter(JSONLines() if config.log_format == "json" else _for_people())
    return handler


def _line(level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord("kvpage", level, __file__, 0, message, None, None)


class _Lines(logging.Handler):
    """Log handler for a file or stream on which writes may fail, for example because the disk is full.

    Lines that cannot be written stay in the stream's buffer of some kilobytes, and are written later. When the buffer
    is full, further lines are lost. A warning follows when writes succeed again.
    """

    failure: OSError | None = None  # the error of the last line

    def emit(self, record: logging.LogRecord) -> None:
        before, self.failure = self.failure, None
        super().emit(record)
        if before is not None and self.failure is None:
            super().emit(
                _line(logging.WARNING, f"the log could not be written: {before.strerror}; lines may be missing")
            )

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            self.failure = error
        else:
            super().handleError(record)


class _File(_Lines, logging.FileHandler):
    """A log file that only its owner and its group may access."""

    def _open(self) -> TextIOWrapper:
        def opened(path: str, flags: int) -> int:
            return open_private(path, flags | os.O_NONBLOCK)  # a pipe would wait for its reader

        file = open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=opened)  # noqa: SIM115
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            file.close()
            raise OSError(errno.EINVAL, "it is not a regular file", self.baseFilename)
        os.set_blocking(file.fileno(), True)
        return file


def _restrict(handler: _Lines) -> None:
    """Restrict the rights of a log file. It is open as the log, because a warning may follow."""
    if isinstance(handler, _File) and handler.stream:
        restrict_permissions(handler.stream.fileno(), leave=0o660, name=Path(handler.baseFilename))


class _StandardError(_Lines, logging.StreamHandler[TextIO]):
    """Log handler for standard error. A closed terminal or pipe does not stop the server."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Redirect the stream to /dev/null if its terminal or pipe is closed. Treat other errors as `_Lines` does.

        The descriptor stays open, because otherwise the system would assign it to another file.
        """
        error = sys.exception()
        if not isinstance(error, OSError) or error.errno not in _CLOSED:
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
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{milliseconds_of(record):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)
