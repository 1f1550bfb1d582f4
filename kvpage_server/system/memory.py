"""The memory that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # files of cgroups: two of version 2, one of version 1


def usable_memory(own: Path = _OWN_CGROUPS, groups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that this process may use: the machine's, or a smaller limit of a control group.

    `own` is the file that lists the control groups of the process, `groups` the directory of all control groups.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(own, groups)])


def _limits(own: Path, groups: Path) -> Iterator[int]:
    """Yield the limits of the process's control groups and of their parents, in bytes."""
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # macOS has no control groups
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
            content = (group / name).read_text(encoding="utf-8").strip()
        except OSError:  # a file of another version, or a group outside of the container
            continue
        if content.isdecimal():  # "max" means no limit
            yield int(content)
