"""Health of a server: it answers immediately, holds nothing for disconnected clients, and has not grown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from servers import RunningServer
from waiting import until

PROMPT = 0.5  # seconds: a server that holds up its clients does so for longer; a busy machine does not
MIB = 1024 * 1024
EMPTY = 64 * MIB  # of a server without a value; the arena's reserve need not be in memory


def assert_prompt(server: RunningServer, **credentials: Any) -> None:
    """Another client is answered at once, 19 of 20 times: the test and the server share a machine."""
    with server.client(**credentials) as client:
        waited = []
        for _ in range(40):
            start = time.perf_counter()
            client.ping()
            waited.append(time.perf_counter() - start)
            time.sleep(0.002)
    assert sorted(waited)[-3] < PROMPT, f"the slowest of 40 waited {max(waited):.3f} s"


@contextmanager
def unharmed(server: RunningServer, *, slack: int = 16 * MIB, **credentials: Any) -> Iterator[None]:
    """Check that the body leaves a server that answers immediately, holds nothing for clients and has not grown."""
    with server.client(**credentials) as client:
        before = max(_size(server, client), EMPTY)
        yield
        assert_prompt(server, **credentials)
        until(lambda: int(client.info("memory")["mem_clients_normal"]) == 0, "the memory of clients being free")
        until(lambda: _size(server, client) < before + slack, f"a size below {(before + slack) >> 20} MiB")


def _size(server: RunningServer, client: redis.Redis) -> int:
    """Return the bytes of the process without the arena's reserve."""
    memory = client.info("memory")
    return server.rss() - (int(memory["arena_held"]) - int(memory["arena_used"]))
