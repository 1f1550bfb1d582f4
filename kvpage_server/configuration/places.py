"""Checks that the files and directories which the configuration names can be written, without touching them.

So `--check-config` finds them, and a start finds them before the server is ready.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

from kvpage_server.configuration.config import Config, ConfigError

_LONGEST_SOCKET = 107 if sys.platform == "linux" else 103  # bytes of a unix socket's path


def check(config: Config) -> None:
    """Raises ConfigError, which names the parameter, the path and the reason."""
    for name, value in (("pidfile", config.pidfile), ("logfile", config.logfile)):
        if value:
            _check_file(name, Path(value).absolute())
    if config.unixsocket:
        _check_socket(Path(config.unixsocket))
    if config.store == "tiered" and "dir" not in config.chosen:
        _check_directory("dir", Path.cwd())


def _check_file(name: str, path: Path) -> None:
    if not path.exists():
        _check_directory(name, path.parent)
    elif path.is_dir():
        raise ConfigError(f"{name}: {path} is a directory")
    elif not path.is_file() and not path.is_char_device():  # such as /dev/null; a pipe would wait for its reader
        raise ConfigError(f"{name}: {path} is not a regular file")
    elif not os.access(path, os.W_OK):
        raise ConfigError(f"{name}: {path} cannot be written")


def _check_socket(path: Path) -> None:
    if len(os.fsencode(path)) > _LONGEST_SOCKET:
        raise ConfigError(f"unixsocket: {path} is longer than {_LONGEST_SOCKET} bytes")
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"unixsocket: {path} exists and is not a socket")
    _check_directory("unixsocket", path.absolute().parent)


def _check_directory(name: str, path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{name}: {path} {'is not a directory' if path.exists() else 'does not exist'}")
    if not os.access(path, os.W_OK | os.X_OK):
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        reason = os.strerror(errno.EROFS if read_only else errno.EACCES)
        raise ConfigError(f"{name}: no file can be created in {path}: {reason}")
