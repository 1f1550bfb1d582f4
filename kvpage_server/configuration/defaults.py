"""What a server chooses by itself that was started without a configuration file.

Memory: a quarter of the machine's, or of what its control group may have. Disk: the directory that the platform has for
the data of a user's programs. With a configuration file none of this happens, and a word on the command line wins.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_data_path

from kvpage_server.configuration.config import Config, ConfigError
from kvpage_server.store.disk.file.database import FILE
from kvpage_server.system.durable import private_directory

log = logging.getLogger("kvpage")

SHARE = 4  # of the memory: one part in so many
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # of version 2, and of version 1
_MIB = 1 << 20


def choose(config: Config) -> None:
    """Choose what was not given; `config.chosen` says what that is.

    A file's name that was given means the file where the server was started, as it did when that was its directory.
    """
    if config.file is not None:
        return
    if "maxmemory" not in config.given:
        config.maxmemory = max(memory() // SHARE // _MIB, 1) * _MIB
        config.chosen.add("maxmemory")
    if "dir" not in config.given and config.store == "tiered":
        for name in config.paths():
            if value := getattr(config, name):
                setattr(config, name, os.path.abspath(value))
        config.dir = str(data_directory())
        config.chosen.add("dir")


def enter(config: Config) -> None:
    """Work in the directory that was chosen, if one was; it is made. Raises ConfigError.

    A store that lies where the server was started was its own, when that was its directory: it must not seem lost.
    """
    if "dir" not in config.chosen:
        return
    before = Path.cwd()
    try:
        private_directory(Path(config.dir))
        os.chdir(config.dir)
    except OSError as error:
        raise ConfigError(
            f"the store belongs into {config.dir}, but {error.filename}: {error.strerror}. "
            "Name another directory with --dir, or do without a disk: --store memory"
        ) from None
    if (before / FILE).exists() and not before.samefile(config.dir):
        use = f"kvpage-server --dir {shlex.quote(str(before))}"
        log.warning("%s is NOT used; this store lies in %s. To use the other: %s", before / FILE, config.dir, use)


def data_directory() -> Path:
    """Where the data of this user's programs belong: XDG_DATA_HOME on Linux, Application Support on macOS."""
    return user_data_path("kvpage", appauthor=False).absolute()


def memory(own: Path = _OWN_CGROUPS, groups: Path = _CGROUPS) -> int:
    """Bytes that this process may have: the machine's, or less where a control group around it has a limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(own, groups)])


def _limits(own: Path, groups: Path) -> Iterator[int]:
    """The limits of the control groups that the process is in, and of those around them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # there are none on macOS
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        roots = (groups / "memory",) if controllers else (groups, groups / "unified")
        if controllers in ("", "memory"):
            for root in roots:
                inner = root / path.lstrip("/")
                for group in (inner, *inner.parents):
                    if group.is_relative_to(root):
                        yield from _limits_of(group)


def _limits_of(group: Path) -> Iterator[int]:
    for name in _LIMITS:
        try:
            said = (group / name).read_text().strip()
        except OSError:  # another version's, or in a container, which sees its own groups alone
            continue
        if said.isdecimal():  # and not "max"
            yield int(said)
