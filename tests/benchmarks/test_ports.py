"""Ports for servers that are about to start."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from benchmarks.ports import END, free_port


def test_a_port_is_given_once_and_never_by_the_system() -> None:
    """Else somebody else may have it by the time its server is there."""
    with ExitStack() as stack:
        others = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(20)]
        assert all(other.getsockname()[1] > END for other in others)
        ports = [free_port() for _ in range(2000)]
    assert len(set(ports)) == 2000
    assert max(ports) < END
