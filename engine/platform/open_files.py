"""Keeps the limit of open files.

Importing mlx_lm sets it to 2048, and the hard limit to 4096, which only root could raise again. A server with many
clients needs more.
"""

from __future__ import annotations

import importlib
import resource

OTHERS = 256  # files and sockets besides those of clients


def room_for(connections: int) -> int:
    """Raise the limit for so many connections; returns how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHERS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - OTHERS)


def import_mlx_lm() -> None:
    """Import mlx_lm and leave the limit of open files as it is."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda which, limits: None
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = setrlimit
