"""The log: lines for people, or an object a line for machines."""

from __future__ import annotations

import json
import logging
import sys
import time

from kvpage_server.config import Config

LEVELS = {"debug": logging.DEBUG, "verbose": logging.DEBUG, "notice": logging.INFO, "warning": logging.WARNING}


def start(config: Config) -> None:
    """Log as the configuration says. Raises OSError when the file cannot be written."""
    handler = logging.FileHandler(config.logfile) if config.logfile else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if config.log_format == "json" else _for_people())
    logging.basicConfig(level=LEVELS[config.loglevel], handlers=[handler])


def set_level(name: str) -> None:
    """Log from a loglevel on."""
    logging.getLogger().setLevel(LEVELS[name])


def _for_people() -> logging.Formatter:
    return logging.Formatter("%(asctime)s.%(msecs)03d %(levelname).1s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


class JSONLines(logging.Formatter):
    """One object a line: time, level, message, and what a record carries as `extra={"facts": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        told: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)
