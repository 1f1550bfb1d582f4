"""The ceiling: a process that keeps batches in memory and moves them over raw sockets, with no protocol to speak of.

`python -m kvpage_server.bench.raw ADDRESS` is that process. It serves until its standard input ends.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

import numpy as np

from kvpage_server.bench.work import Array, Work

_QUESTION = struct.Struct("<cIIII")  # W or R, generation, the connection's number, items, bytes of each
_DONE = b"."
_SENT_AT_ONCE, _RECEIVED_AT_ONCE = 1024 * 1024, 256 * 1024  # bytes: what is soonest
_GATHER = 512

Generation = tuple[int, int, int, int]


def _move(buffers: list[memoryview], step: Callable[[list[memoryview]], int], most: int) -> None:
    """Give all buffers to `sendmsg` or `recvmsg_into`, at most so many bytes at a time."""
    ends = list(accumulate(map(len, buffers)))
    moved = at = 0
    while at < len(buffers):
        some = buffers[at : min(bisect_left(ends, moved + most, at) + 1, at + _GATHER)]
        begun, beyond = moved - ends[at] + len(some[0]), ends[at + len(some) - 1] - moved - most
        if beyond > 0:
            some[-1] = some[-1][:-beyond]
        some[0] = some[0][begun:]
        count = step(some)
        if not count:
            raise EOFError("the other end is gone")
        moved += count
        at = bisect_right(ends, moved)


def _rows(items: Array) -> list[memoryview]:
    return [memoryview(item) for item in items]


def _receive(sock: socket.socket, buffers: list[memoryview]) -> None:
    _move(buffers, lambda some: sock.recvmsg_into(some)[0], _RECEIVED_AT_ONCE)


def _receive_bytes(sock: socket.socket, count: int) -> bytes:
    text = bytearray(count)
    _receive(sock, [memoryview(text)])
    return bytes(text)


def _serve(sock: socket.socket, kept: dict[Generation, list[memoryview]]) -> None:
    with sock, suppress(EOFError, ConnectionError):
        while True:
            op, *generation, nbytes = _QUESTION.unpack(_receive_bytes(sock, _QUESTION.size))
            key = (*generation, nbytes)
            if op == b"W":
                if key not in kept:
                    kept[key] = _rows(np.zeros((generation[-1], nbytes), np.uint8))
                _receive(sock, kept[key])
                sock.sendall(_DONE)
            else:
                _move(kept[key], sock.sendmsg, _SENT_AT_ONCE)


def _listen(address: str) -> socket.socket:
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(address)
        sock.listen()
        return sock
    return socket.create_server(("127.0.0.1", int(address)))


def _main(address: str) -> None:
    listening = _listen(address)
    print(address if address.startswith("/") else listening.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            sock, _ = listening.accept()
            threading.Thread(target=_serve, args=(sock, {}), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # whatever the threads are at


class RawClient:
    """The client's end: writes and reads as a store does, on one or more connections."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, connections: int) -> None:
        self.pid = process.pid
        self._sockets = [_connect(address) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)

    def write(self, work: Work, generation: int) -> None:
        """Send a batch and wait until it is there."""

        def part(sock: socket.socket, number: int, items: Array) -> None:
            sock.sendall(_QUESTION.pack(b"W", generation, number, *items.shape))
            _move(_rows(items), sock.sendmsg, _SENT_AT_ONCE)
            _receive_bytes(sock, len(_DONE))

        self._each(work.batches[generation].written, part)

    def read(self, work: Work, generation: int) -> None:
        """Receive a batch."""

        def part(sock: socket.socket, number: int, items: Array) -> None:
            sock.sendall(_QUESTION.pack(b"R", generation, number, *items.shape))
            _receive(sock, _rows(items))

        self._each(work.batches[generation].read, part)

    def _each(self, items: Array, part: Callable[[socket.socket, int, Array], None]) -> None:
        parts = np.array_split(items, len(self._sockets))
        numbers = range(len(parts))
        if len(parts) == 1:
            part(self._sockets[0], 0, items)
        else:
            for _ in self._threads.map(part, self._sockets, numbers, parts):
                pass

    def close(self) -> None:
        """Close the connections, and with them what is kept for them."""
        for sock in self._sockets:
            sock.close()
        self._threads.shutdown()


def _connect(address: str) -> socket.socket:
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return sock
    sock = socket.create_connection(("127.0.0.1", int(address)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


@contextmanager
def start_raw(*, unix: bool = False) -> Iterator[Callable[[int], RawClient]]:
    """Start the process; what connects to it."""
    with tempfile.TemporaryDirectory() as directory:
        address = str(Path(directory, "raw")) if unix else "0"
        command = [sys.executable, "-m", "kvpage_server.bench.raw", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin
            assert process.stdout
            try:
                found = process.stdout.readline().decode().strip()
                yield lambda connections: RawClient(process, found, connections)
            finally:
                process.stdin.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    with suppress(BrokenPipeError):  # and may have ended itself
        _main(sys.argv[1])
