"""The least that a server in Python does: what KVPAGEMGET and KVPAGEMSET cannot do without, on a blocking socket.

It believes what it is sent, checks and hashes nothing, and knows no expiry, eviction, rights, limits or statistics.
What it does not reach where pages are small, nothing written in Python reaches on this machine.

`python -m benchmarks.bare --port PORT`; other options are not looked at.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

_CRLF = b"\r\n"
_NAME = 5  # words that name a page
_PAGE = 10  # arguments of one that is written
_AT_ONCE = 1024 * 1024  # bytes in one sendmsg
_PIECE = 256 * 1024  # bytes received with one call
_HEAD, _OPENING = 256, 512  # bytes that hold what stands before a body, and before the first of a batch


class Connection:
    """One client's."""

    def __init__(self, sock: socket.socket, pages: dict[bytes, memoryview]) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._pages = pages  # bulk strings as they go over the wire

    def serve(self) -> None:
        """Answer until the client is gone."""
        data = b""
        with self._sock, suppress(EOFError, ConnectionError):
            while more := self._sock.recv(256 * 1024):
                data += more
                while data:
                    count = int(data[1 : data.index(_CRLF)])
                    if data.find(b"KVPAGEMSET", 0, 40) > 0:
                        data = self._write(data, count // _PAGE)
                        continue
                    lines = data.split(_CRLF)
                    if len(lines) <= 2 * count + 1:
                        break
                    self._answer(lines[2 : 2 * count + 1 : 2])
                    data = _CRLF.join(lines[2 * count + 1 :])

    def _answer(self, words: list[bytes]) -> None:
        name = words[0].upper()
        if name == b"KVPAGEMGET":
            columns = [words[2 + first :: _NAME] for first in range(_NAME)]
            found = map(self._pages.__getitem__, map(b":".join, zip(*columns, strict=True)))
            self._send([b"*%s\r\n" % words[1], *found])
        elif name == b"INFO":
            times = os.times()
            text = b"bare_version:1\r\nused_cpu_user:%f\r\nused_cpu_sys:%f\r\n" % (times.user, times.system)
            self._sock.sendall(b"$%d\r\n%b\r\n" % (len(text), text))
        elif name == b"HELLO":
            self._sock.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n")
        else:
            if name == b"FLUSHALL":
                self._pages.clear()
            self._sock.sendall(b"+OK\r\n")

    def _send(self, buffers: Sequence[bytes | memoryview]) -> None:
        each = len(buffers[-1])
        some = max(_AT_ONCE // each, 1)
        for start in range(0, len(buffers), some):
            left = list(buffers[start : start + some])
            while left:
                sent = self._sock.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = memoryview(left[0])[sent:]

    def _write(self, data: bytes, count: int) -> bytes:
        """Receive a batch of pages that all have one size; `data` has come of it. What came behind it."""
        while len(data) < _OPENING:
            data += self._sock.recv(_OPENING)
        lines = data[:_OPENING].split(_CRLF, 5 + 2 * _PAGE)
        frame = _CRLF + lines[5 + 2 * _PAGE - 2] + _CRLF  # that of a body
        rest = len(frame) + int(frame[3:-2])
        memory = memoryview(np.empty(len(data) + count * (rest + _HEAD), np.uint8))
        memory[: len(data)] = data
        filled, pos = len(data), sum(map(len, lines[:5])) + 5 * len(_CRLF)
        for _ in range(count):
            while (at := (head := bytes(memory[pos : min(pos + _HEAD, filled)])).find(frame)) < 0:
                filled += self._receive(memory[filled:])
            start, stop = pos + at + len(_CRLF), pos + at + rest + len(_CRLF)
            while filled < stop:
                filled += self._receive(memory[filled:])
            self._pages[b":".join(head[:at].split(_CRLF)[1 : 2 * _NAME : 2])] = memory[start:stop]
            pos = stop
        self._sock.sendall(b"+OK\r\n")
        return bytes(memory[pos:filled])

    def _receive(self, memory: memoryview) -> int:
        count = self._sock.recv_into(memory, min(len(memory), _PIECE))
        if not count:
            raise EOFError
        return count


def main(arguments: Sequence[str]) -> None:
    """Serve for ever."""
    pages: dict[bytes, memoryview] = {}
    with socket.create_server(("127.0.0.1", int(arguments[arguments.index("--port") + 1]))) as listening:
        while True:
            sock, _ = listening.accept()
            threading.Thread(target=Connection(sock, pages).serve, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv)
