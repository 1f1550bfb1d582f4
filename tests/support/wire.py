"""RESP on the wire: hand-encoded commands, replies as received bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any


def encode_command(words: Iterable[bytes]) -> bytes:
    """Return a command as RESP: an array of bulk strings."""
    words = list(words)
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Wire:
    """A connection that returns replies as bytes, without parsing them."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reply(self) -> bytes:
        """Return the bytes of the next reply or push. Raises EOFError if the connection ends before."""
        line = self._incoming.readline()
        if not line.endswith(b"\r\n"):
            raise EOFError(f"the connection ended after {line!r}")
        kind, size = line[:1], line[1:-2]
        if kind in b"$=!" and size != b"-1":
            return line + self._incoming.read(int(size) + 2)
        if kind in b"*~>%" and size != b"-1":
            return line + b"".join(self.reply() for _ in range(int(size) * (2 if kind == b"%" else 1)))
        return line

    def ask(self, *words: bytes) -> bytes:
        """Send a command, and return the bytes of the next reply."""
        self.send(encode_command(words))
        return self.reply()

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Error(str):
    """An error reply, parsed."""


def parse(frame: bytes) -> Any:
    """Parse a reply: int, bytes, str for a simple string, Error, None, list; a map is a list of its items."""
    value, end = _parse(frame, 0)
    assert end == len(frame), frame[end:]
    return value


def items(frame: bytes) -> list[bytes]:
    """Return the bytes of each element of an array, or of each key and value of a map."""
    line, at = _line(frame, 0)
    found = []
    for _ in range(int(line[1:]) * (2 if line[:1] == b"%" else 1)):
        end = _parse(frame, at)[1]
        found.append(frame[at:end])
        at = end
    return found


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the line at an offset, without its end, and the offset of the next line."""
    end = data.index(b"\r\n", at)
    return data[at:end], end + 2


def _parse(data: bytes, at: int) -> tuple[Any, int]:
    """Return the parsed reply at an offset, and the offset of its end."""
    line, at = _line(data, at)
    kind, body = line[:1], line[1:]
    if kind == b"+":
        return body.decode(), at
    if kind == b"-":
        return Error(body.decode("utf-8", "surrogateescape")), at
    if kind in b":(":
        return int(body), at
    if kind == b",":
        return float(body), at
    if kind == b"#":
        return body == b"t", at
    if kind == b"_" or body == b"-1":
        return None, at
    if kind in b"$=!":
        size = int(body)
        return data[at : at + size], at + size + 2
    found = []
    for _ in range(int(body) * (2 if kind == b"%" else 1)):
        value, at = _parse(data, at)
        found.append(value)
    return found, at
