"""Parsers of replies, as values or into memory of the caller: RESP2, and the part of RESP3 that the client needs.

A *receiver* receives bytes until its replies are complete (`done`). Then `result` returns them. More bytes are an
error, because a connection has one request at a time.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvpage_server.client.errors import Refused, WrongReply
from kvpage_server.core.pieces import MAX_BULK, MAX_FRAME, MAX_LINE

MAX_DEPTH = 8
_DIRECT_BYTES = 4096  # a bulk string of this size or more is received into its own memory
_SCRATCH_BYTES = 16 * 1024
_AHEAD_BYTES = 256 * 1024  # size of the scratch memory after the first long string, because more may follow
_DROPPED_BYTES = 1 << 20  # a string whose `Place` has another size is received and dropped in pieces of this size
_SHORT_LINE = 1024  # mean length of the lines of `Lines`, at most


class Receiver(Protocol):
    """A receiver of one or more replies."""

    @property
    def done(self) -> bool:
        """Whether all replies have arrived."""

    def receive(self, fd: int) -> int:
        """Receive available bytes in one system call.

        Return their number, 0 at the end of the stream, -1 if none are available. Raises WrongReply for bytes that are
        not RESP.
        """

    def feed(self, data: bytes) -> None:
        """Parse bytes that the caller has received. Raises WrongReply for bytes that are not RESP."""

    def result(self) -> Any:
        """Return the reply, or the list of replies. Raises Refused for an error reply."""


def refusal(line: bytes) -> Refused:
    """Return the error for an error line without its '-'."""
    return Refused(line.decode("utf-8", "replace"))


def only(values: list[Any]) -> Any:
    return values[0]


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that a string is received into: `head` for its first bytes, and `body` for the rest."""

    head: memoryview
    body: memoryview

    @property
    def nbytes(self) -> int:
        """Length of the string that fits."""
        return len(self.head) + len(self.body)


class Arrived:
    """The value of a string that was received into the memory of its `Place`."""


class OtherSize:
    """The value of a string whose length differs from its `Place`. Its bytes were dropped."""


Answer = Any  # bytes, memoryview, int, None, Refused; for a string with a place ARRIVED or OTHER_SIZE
ARRIVED, OTHER_SIZE = Arrived(), OtherSize()


class Values:
    """Receiver of `count` replies of any kind. Strings become bytes, or memoryviews of their own memory.

    `result` raises the first error reply, or, with `with_errors`, returns it like other replies.

    `places` has a `Place` or None for each reply; then no reply may be an array. A string is received into its `Place`.
    The same system call receives at most the line and the head of the next string, so that only the kernel copies
    bodies. Strings without a `Place` are memoryviews, which distinguishes them from simple strings.
    """

    def __init__(
        self, count: int = 1, *, with_errors: bool = False, places: Sequence[Place | None] | None = None
    ) -> None:
        self.done = False
        self._with_errors = with_errors
        self._places = places
        self._values: list[Any] = []
        self._data = b""  # received bytes; those from _pos on are not parsed yet
        self._pos = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._into: list[memoryview] = []  # the memory of a long string that is not filled yet
        self._steps = self._parse(count)
        next(self._steps)

    def receive(self, fd: int) -> int:
        """Receive available bytes, as in `Receiver`."""
        try:
            count = os.readv(fd, self._buffers())
        except BlockingIOError:
            return -1
        if count:
            self._received(count)
        return count

    def feed(self, data: bytes) -> None:
        """Parse bytes, as in `Receiver`."""
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

    def result(self) -> list[Any]:
        """Return the replies. Raises Refused, unless `with_errors`."""
        for value in self._values:
            if isinstance(value, Refused) and not self._with_errors:
                raise value.again()
        return self._values

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _buffers(self) -> list[memoryview]:
        return [*self._into, self._scratch[: self._bytes_behind()]] if self._into else [self._scratch]

    def _bytes_behind(self) -> int:
        """Return the number of bytes that one receive call reads after the end of a long string.

        If the next string has a `Place`, these bytes end where its body begins, so that the body is received directly
        into its array. Otherwise they fill the scratch memory.
        """
        after = len(self._values) + 1
        place = self._places[after] if self._places and after < len(self._places) else None
        return 2 + MAX_FRAME + len(place.head) if place else len(self._scratch)

    def _received(self, count: int) -> None:
        """Parse as far as possible after `count` bytes were received into the memory of `_buffers`."""
        count = self._fill(count)
        if count:
            self._data = b"".join((memoryview(self._data)[self._pos :], self._scratch[:count]))
            self._pos = 0
        try:
            next(self._steps)
        except StopIteration:
            if self._pos < len(self._data):
                raise WrongReply("there are bytes after the reply") from None
            self.done = True

    def _fill(self, count: int) -> int:
        """Remove the memory from `_into` that `count` received bytes have filled. Return the number of bytes
        after it.
        """
        while self._into and count >= len(self._into[0]):
            count -= len(self._into.pop(0))
        if self._into:
            self._into[0] = self._into[0][count:]
            return 0
        return count

    # -- parsing -------------------------------------------------------------------------------------------------------

    def _parse(self, count: int) -> Generator[None, None, None]:
        yield
        for place in [None] * count if self._places is None else self._places:
            self._values.append((yield from self._value(0, place)))

    def _several(self, count: int, depth: int) -> Generator[None, None, list[Any]]:
        values: list[Any] = []
        while len(values) < count:
            start = self._pos
            if self._data[start : start + 1] == b":" and (end := self._data.find(b"\r\n", start)) > 0:
                values.append(number(self._data[start + 1 : end]))  # without a generator, because there are many
                self._pos = end + 2
            else:
                values.append((yield from self._value(depth)))
        return values

    def _value(self, depth: int, place: Place | None = None) -> Generator[None, None, Any]:
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
            return None if rest == b"-1" else (yield from self._bulk(bulk_size(rest), place))
        if kind in b"*~%" and self._places is None:
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

    def _bulk(self, size: int, place: Place | None) -> Generator[None, None, Any]:
        while size < _DIRECT_BYTES and len(self._data) - self._pos < size + 2:
            yield
        end = self._pos + size
        if place is None and len(self._data) >= end + 2:
            text = self._data[self._pos : end]
            if self._data[end : end + 2] != b"\r\n":
                raise WrongReply("a bulk string is not terminated by CRLF")
            self._pos = end + 2
            return text if self._places is None else memoryview(text)
        if place is None:
            if len(self._scratch) < _AHEAD_BYTES:
                self._scratch = np.empty(_AHEAD_BYTES, np.uint8).data
            room = _memory(size)
            yield from self._long([room])
            return room
        if place.nbytes == size:
            yield from self._long([place.head, place.body])
            return ARRIVED
        while size > _DROPPED_BYTES:
            yield from self._long([_memory(_DROPPED_BYTES)], crlf=False)
            size -= _DROPPED_BYTES
        yield from self._long([_memory(size)])
        return OTHER_SIZE

    def _long(self, memory: list[memoryview], *, crlf: bool = True) -> Generator[None, None, None]:
        """Copy the buffered part of a long string into `memory`, and wait until the rest was received there.

        With `crlf`, the CRLF that ends the string is parsed, too.
        """
        self._into = [part for part in memory if len(part)]
        while self._into and self._pos < len(self._data):
            there = memoryview(self._data)[self._pos :][: len(self._into[0])]
            self._into[0][: len(there)] = there
            self._pos += len(there)
            self._fill(len(there))
        while self._into or (crlf and len(self._data) - self._pos < 2):
            yield
        if crlf:
            if self._data[self._pos : self._pos + 2] != b"\r\n":
                raise WrongReply("a bulk string is not terminated by CRLF")
            self._pos += 2


class Lines:
    """Receiver of `count` replies that are single lines."""

    def __init__(self, count: int) -> None:
        self.done = False
        self._left, self._most = count, count * _SHORT_LINE
        self._received = bytearray()

    def receive(self, fd: int) -> int:
        """Receive available bytes, as in `Receiver`."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return -1
        if data:
            self.feed(data)
        return len(data)

    def feed(self, data: bytes) -> None:
        """Parse bytes, as in `Receiver`."""
        self._received += data
        self._left -= data.count(b"\n")
        self.done = not self._left and self._received.endswith(b"\r\n")
        if self._left < 0 or (not self._left and not self.done) or len(self._received) > self._most:
            raise WrongReply(f"instead of lines came {bytes(self._received[-40:])!r}")

    def result(self) -> list[bytes]:
        """Return the lines without their ends."""
        return bytes(self._received).split(b"\r\n")[:-1]


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
    """Return the number in a line. Raises WrongReply."""
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise WrongReply(f"{digits[:40]!r} is no number")
    return int(digits)


def bulk_size(digits: bytes) -> int:
    """Return the length of a bulk string. Raises WrongReply for a length above MAX_BULK."""
    size = number(digits)
    if not 0 <= size <= MAX_BULK:
        raise WrongReply(f"a bulk string is said to have {size} bytes")
    return size
