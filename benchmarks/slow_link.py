"""Proxy on the loopback that passes on at most so many bytes per second, in each direction of all connections together.

`python -m benchmarks.slow_link PORT BYTES` forwards to a port of this machine, and prints the port on which it listens.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE = 1 << 17  # bytes of a read
_BURST = 0.002  # seconds of unused time that later bytes may use
_LEAST_SLEEP = 0.0005  # seconds; the system does not sleep for less


class Direction:
    """The bytes in one direction, at most `rate` per second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._due = time.perf_counter()

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` more bytes may pass."""
        with self._lock:
            self._due = max(self._due, time.perf_counter() - _BURST) + nbytes / self._rate
            left = self._due - time.perf_counter()
        if left > _LEAST_SLEEP:
            time.sleep(left)


def _pass_on(source: socket.socket, sink: socket.socket, direction: Direction) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE):
            direction.wait(len(data))
            sink.sendall(data)
    for sock in (source, sink):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Forward connections until the process is ended."""
    target, rate = int(sys.argv[1]), float(sys.argv[2])
    there, back = Direction(rate), Direction(rate)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client, _ = listening.accept()
            server = socket.create_connection(("127.0.0.1", target))
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pass_on, args=(client, server, there), daemon=True).start()
            threading.Thread(target=_pass_on, args=(server, client, back), daemon=True).start()


@contextmanager
def slow_link(port: int, rate: float) -> Iterator[str]:
    """Yield the URL of a proxy in front of the server at `port`, in a process of its own. `rate` is in bytes/s."""
    words = [sys.executable, "-m", "benchmarks.slow_link", str(port), str(rate)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8") as proxy:
        try:
            assert proxy.stdout
            yield f"redis://127.0.0.1:{int(proxy.stdout.readline())}"
        finally:
            proxy.kill()


if __name__ == "__main__":
    main()
