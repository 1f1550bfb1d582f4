"""Replies as values, without I/O: bytes in, Python values out. RESP2, and the part of RESP3 that our questions need.

A *receiver* takes bytes until the reply is complete (`done`). Then `result` is the answer. More bytes are an error,
since a connection has one question at a time.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np

from kvpage_server.client.errors import Refused, WrongReply
from kvpage_server.core.answers import MAX_BULK, MAX_LINE

MAX_DEPTH = 8
_DIRECT_BYTES = 4096  # a bulk of at least this size is received into its own memory
_SCRATCH_BYTES = 16 * 1024
_AHEAD_BYTES = 256 * 1024  # bytes that are received behind a long string, where there may be more of them


class Receiver(Protocol):
    """One or more replies that are being received."""

    @property
    def done(self) -> bool:
        """Whether all replies have arrived."""

    def receive(self, fd: int) -> int:
        """Receive what is there, in one call. Returns the number of bytes, 0 at the end of the stream, -1 if nothing is
        there now. Raises WrongReply."""

    def feed(self, data: bytes) -> None:
        """Take bytes that were received by other means. Raises WrongReply."""

    def result(self) -> Any:
        """The answer. Raises Refused if it is an error."""


def refusal(line: bytes) -> Refused:
    """The error for an error line without its '-'."""
    return Refused(line.decode("utf-8", "replace"))


def only(values: list[Any]) -> Any:
    return values[0]


class Values:
    """`count` replies of any kind. Strings are bytes, or memoryviews of their own memory.

    An error among them is raised when all have arrived, or, with `with_errors`, returned among them.
    """

    def __init__(self, count: int = 1, *, with_errors: bool = False) -> None:
        self.done = False
        self._with_errors = with_errors
        self._values: list[Any] = []
        self._data = b""  # received, not yet parsed, from _pos on
        self._pos = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._room = memoryview(b"")  # of the long string that is being received, `_filled` bytes so far
        self._filled = 0
        self._steps = self._parse(count)
        next(self._steps)

    def receive(self, fd: int) -> int:
        """As every receiver."""
        try:
            count = os.readv(fd, self._buffers())
        except BlockingIOError:
            return -1
        if count:
            self._received(count)
        return count

    def feed(self, data: bytes) -> None:
        """As every receiver."""
        rest = memoryview(data)
        while rest:
            if self.done:
                raise WrongReply("there are bytes after the reply")
            count = 0
            for buffer in self._buffers():
                some = rest[: len(buffer)]
                buffer[: len(some)] = some
                rest = rest[len(some) :]
                count += len(some)
            self._received(count)

    def _buffers(self) -> list[memoryview]:
        if self._filled < len(self._room):
            return [self._room[self._filled :], self._scratch]
        return [self._scratch]

    def _received(self, count: int) -> None:
        """Parse as far as possible."""
        direct = min(count, len(self._room) - self._filled)
        self._filled += direct
        if count > direct:
            self._data = b"".join((memoryview(self._data)[self._pos :], self._scratch[: count - direct]))
            self._pos = 0
        try:
            next(self._steps)
        except StopIteration:
            if self._pos < len(self._data):
                raise WrongReply("there are bytes after the reply") from None
            self.done = True

    def result(self) -> list[Any]:
        """The replies. Raises Refused."""
        for value in self._values:
            if isinstance(value, Refused) and not self._with_errors:
                raise value.again()
        return self._values

    def _parse(self, count: int) -> Generator[None, None, None]:
        yield
        self._values = yield from self._several(count, 0)

    def _several(self, count: int, depth: int) -> Generator[None, None, list[Any]]:
        values: list[Any] = []
        while len(values) < count:
            values.append((yield from self._value(depth)))
        return values

    def _value(self, depth: int) -> Generator[None, None, Any]:
        if depth > MAX_DEPTH:
            raise WrongReply(f"a reply is nested deeper than {MAX_DEPTH}")
        line = yield from self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return refusal(rest)
        if kind == b":":
            return number(rest)
        if kind == b"_":
            return None
        if kind in b"$=":
            return None if rest == b"-1" else (yield from self._bulk(bulk_size(rest)))
        if kind in b"*~%":
            size = number(rest)
            if size == -1:
                return None
            items = yield from self._several(2 * size if kind == b"%" else size, depth + 1)
            return _mapping(items) if kind == b"%" else items
        raise WrongReply(f"a reply begins with {line[:40]!r}")

    def _line(self) -> Generator[None, None, bytes]:
        while (end := self._data.find(b"\r\n", self._pos)) < 0:
            if len(self._data) - self._pos > MAX_LINE:
                raise WrongReply(f"a line is longer than {MAX_LINE} bytes")
            yield
        line = self._data[self._pos : end]
        self._pos = end + 2
        if not line:
            raise WrongReply("a reply is an empty line")
        return line

    def _bulk(self, size: int) -> Generator[None, None, bytes | memoryview]:
        while size < _DIRECT_BYTES and len(self._data) - self._pos < size + 2:
            yield
        end = self._pos + size
        if len(self._data) >= end + 2:
            text = self._data[self._pos : end]
            if self._data[end : end + 2] != b"\r\n":
                raise WrongReply("a bulk string is not terminated by CRLF")
            self._pos = end + 2
            return text
        taken = len(self._data) - self._pos
        room = _memory(size + 2)
        room[:taken] = memoryview(self._data)[self._pos :]
        self._pos += taken
        self._room, self._filled = room, taken
        if len(self._scratch) < _AHEAD_BYTES:
            self._scratch = np.empty(_AHEAD_BYTES, np.uint8).data
        while self._filled < size + 2:
            yield
        self._room, self._filled = memoryview(b""), 0
        if bytes(room[-2:]) != b"\r\n":
            raise WrongReply("a bulk string is not terminated by CRLF")
        return room[:-2]


def _memory(nbytes: int) -> memoryview:
    try:
        return np.empty(nbytes, np.uint8).data
    except MemoryError as error:
        raise WrongReply(f"there is no memory for a bulk string of {nbytes} bytes") from error


def _mapping(items: list[Any]) -> dict[Any, Any]:
    try:
        return dict(zip(items[::2], items[1::2], strict=True))
    except TypeError as error:
        raise WrongReply(f"a map's key is no string: {error}") from error


def number(digits: bytes) -> int:
    """The number in a line. Raises WrongReply."""
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise WrongReply(f"{digits[:40]!r} is no number")
    return int(digits)


def bulk_size(digits: bytes) -> int:
    """The length of a bulk string. Raises WrongReply for one that no value of ours has."""
    size = number(digits)
    if not 0 <= size <= MAX_BULK:
        raise WrongReply(f"a bulk string is said to have {size} bytes")
    return size
