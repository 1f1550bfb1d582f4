"""Free ports of the loopback interface for servers."""

from __future__ import annotations

import random
import socket
from collections import deque
from contextlib import suppress
from itertools import cycle

FIRST, END = 10_000, 32_000  # below the ephemeral ports of Linux and macOS
_begin = random.SystemRandom().randrange(FIRST, END)
_next = cycle([*range(_begin, END), *range(FIRST, _begin)])
_KEPT = 64  # number of recent ports that are reserved, because their server may start or restart
_marks: deque[socket.socket] = (
    deque()
)  # UDP sockets with the same numbers, which reserve the ports against other processes


def free_port() -> int:
    """Return a port on which no process listens, another one at each call.

    A port that the system chooses may be given to somebody else before the server is there: to a server of another
    process, or to a client. One of these is not, and each process begins somewhere else. If two processes try the same
    port, the first one has it: otherwise the other's clients would connect to its server.
    """
    for _ in range(END - FIRST):
        port = next(_next)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                mark.bind(("127.0.0.1", port))
            except OSError:
                mark.close()
                continue
            _marks.append(mark)
            if len(_marks) > _KEPT:
                _marks.popleft().close()
            return port
    raise OSError(f"no port from {FIRST} to {END} is free")
