"""The limit of file descriptors of the process."""

from __future__ import annotations

import resource


def room_for(connections: int, others: int) -> int:
    """Raise the limit of file descriptors for `connections` and `others`, as far as the system allows.

    Return the number of connections that fit into the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + others
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(max(allowed - others, 1), connections)
