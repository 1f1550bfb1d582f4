"""Ports of the loopback for servers that are about to start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from itertools import cycle

FIRST, END = 10_000, 32_000  # below those that Linux and macOS give to whoever names none
_begin = random.SystemRandom().randrange(FIRST, END)
_next = cycle([*range(_begin, END), *range(FIRST, _begin)])


def free_port() -> int:
    """One that nobody listens on, and another each time.

    A port that the system chooses may be given to somebody else before the server is there: to a server of another
    process, or to a client. One of these is not, and each process begins somewhere else.
    """
    for _ in range(END - FIRST):
        port = next(_next)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no port from {FIRST} to {END} is free")
