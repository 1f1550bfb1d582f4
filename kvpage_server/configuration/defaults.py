"""Defaults of a server that was started without a configuration file.

Memory: a quarter of the machine's, or of the control group's limit. Disk: the platform's directory for a user's data.
The command line overrides both, and with a configuration file they are not used.

`maxdisk auto` is the default with a file, too: other programs need the disk as well.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_data_path

from kvpage_server.configuration.config import Config, ConfigError
from kvpage_server.store.disk.file.database import FILE
from kvpage_server.system.durable import private_directory

log = logging.getLogger("kvpage")

SHARE = 4  # of the memory: one part in so many
SMALLEST_DISK = 16 << 20  # bytes of a store
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # of version 2, and of version 1
_MIB = 1 << 20


def choose(config: Config) -> None:
    """Choose the parameters that were not given, and list them in `config.chosen`.

    Relative file names on the command line refer to the directory in which the server was started.
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
    """Create the chosen directory, if there is one, and change to it. Raises ConfigError.

    A store in the directory where the server was started may be an older version's, and must not seem lost.
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
    """The user's directory for data of programs: XDG_DATA_HOME on Linux, Application Support on macOS."""
    return user_data_path("kvpage", appauthor=False).absolute()


def disk(directory: Path) -> int:
    """The bytes that a store in this directory may take with `maxdisk auto`: half of its file and of the free space
    together, and no less than its file."""
    file = directory / FILE
    holds = file.stat().st_size if file.exists() else 0
    return max((shutil.disk_usage(directory).free + holds) // 2, holds, SMALLEST_DISK)


def memory(own: Path = _OWN_CGROUPS, groups: Path = _CGROUPS) -> int:
    """The memory that this process may use: the machine's, or the limit of a control group if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(own, groups)])


def _limits(own: Path, groups: Path) -> Iterator[int]:
    """The limits of the process's control groups and their parents."""
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
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
            said = (group / name).read_text(encoding="utf-8").strip()
        except OSError:  # another version's, or in a container, which sees its own groups alone
            continue
        if said.isdecimal():  # and not "max"
            yield int(said)
