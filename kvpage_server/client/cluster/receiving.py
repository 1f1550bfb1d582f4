"""Receives the replies to commands that were sent together. Long strings are received into their places.

Bytes are received into scratch memory, except for the rest of a string with a place. Behind such a string, at most the
line and the head of the next one are received, so that only the kernel copies bodies.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpage_server.client.errors import WrongReply
from kvpage_server.client.wire.reply import bulk_size, number, refusal
from kvpage_server.core.answers import MAX_FRAME

_SCRATCH = 64 * 1024
_LINE = 1024  # bytes of an error at most
_DROPPED = 1 << 20  # bytes that are dropped at once


@dataclass(frozen=True, slots=True)
class Place:
    """Memory for a string: `head` for its first bytes, and `body` for the rest."""

    head: memoryview
    body: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of the string that fits."""
        return len(self.head) + len(self.body)


class Arrived:
    """A string that was received into its place."""


class OtherSize:
    """A string of another size than its place, which was dropped."""


Answer = Any  # bytes, memoryview, int, None, Refused; of a string with a place ARRIVED or OTHER_SIZE
ARRIVED, OTHER_SIZE = Arrived(), OtherSize()


class Answers:
    """A reply for each place. A place that is None takes any reply."""

    def __init__(self, places: Sequence[Place | None]) -> None:
        self.done = False
        self._places = places
        self._answers: list[Answer] = []
        self._scratch = np.empty(_SCRATCH, np.uint8).data
        self._start = self._end = 0  # of what is in there and not taken yet
        self._into: list[memoryview] = []  # what is still to be filled of a string
        self._steps = self._take_all()
        next(self._steps)

    def result(self) -> list[Answer]:
        """The replies, with refusals among them."""
        return self._answers

    def receive(self, fd: int) -> int:
        """Receive what is there, in one call; how many bytes, 0 at the end of the stream, -1 if nothing is there now.
        Raises WrongReply."""
        self._make_room()
        ahead = self._scratch[self._end :]
        if self._into:
            ahead = ahead[: self._wanted_behind()]
        try:
            count = os.readv(fd, [*self._into, ahead])
        except BlockingIOError:
            return -1
        if count:
            self._end += self._fill(count)
            self._go_on()
        return count

    def feed(self, data: bytes) -> None:
        """Take bytes that were received by other means. Raises WrongReply."""
        rest = memoryview(data)
        while rest:
            self._make_room()
            some = rest[: _SCRATCH - self._end]
            self._scratch[self._end : self._end + len(some)] = some
            self._end += len(some)
            rest = rest[len(some) :]
            self._go_on()

    # -- where the next bytes belong ---------------------------------------------------------------------------------

    def _make_room(self) -> None:
        left = bytes(self._scratch[self._start : self._end])
        self._scratch[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _wanted_behind(self) -> int:
        """The number of bytes up to the body of the next string that has a place."""
        after = len(self._answers) + 1
        place = self._places[after] if after < len(self._places) else None
        return 2 + MAX_FRAME + len(place.head) if place else _SCRATCH

    def _fill(self, count: int) -> int:
        """Count received bytes as filled. Returns how many of them are behind the places to fill."""
        while self._into and count >= len(self._into[0]):
            count -= len(self._into.pop(0))
        if self._into:
            self._into[0] = self._into[0][count:]
            return 0
        return count

    # -- taking what came --------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            if self._start < self._end:
                raise WrongReply("there are bytes after the replies") from None
            self.done = True

    def _take_all(self) -> Generator[None, None, None]:
        yield
        for place in self._places:
            self._answers.append((yield from self._answer(place)))

    def _answer(self, place: Place | None) -> Generator[None, None, Answer]:
        line = yield from self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$" and rest != b"-1":
            return (yield from self._string(bulk_size(rest), place))
        if line in (b"$-1", b"_"):
            return None
        if kind == b"-":
            return refusal(rest)
        if kind == b"+":
            return rest
        if kind == b":":
            return number(rest)
        raise WrongReply(f"a reply begins with {line[:40]!r}")

    def _line(self) -> Generator[None, None, bytes]:
        while True:
            there = bytes(self._scratch[self._start : min(self._end, self._start + _LINE)])
            end = there.find(b"\r\n")
            if end >= 0:
                self._start += end + 2
                return there[:end]
            if len(there) == _LINE:
                raise WrongReply(f"a line is longer than {_LINE} bytes")
            yield

    def _string(self, size: int, place: Place | None) -> Generator[None, None, Answer]:
        if place is None:
            try:
                memory = np.empty(size, np.uint8).data
            except MemoryError as error:
                raise WrongReply(f"there is no memory for a string of {size} bytes") from error
            yield from self._into_memory([memory])
            return memory
        if place.nbytes == size:
            yield from self._into_memory([place.head, place.body])
            return ARRIVED
        while size > _DROPPED:
            yield from self._into_memory([np.empty(_DROPPED, np.uint8).data], crlf=False)
            size -= _DROPPED
        yield from self._into_memory([np.empty(size, np.uint8).data])
        return OTHER_SIZE

    def _into_memory(self, memory: list[memoryview], *, crlf: bool = True) -> Generator[None, None, None]:
        self._into = [part for part in memory if len(part)]
        while self._into:
            part, there = self._into[0], self._scratch[self._start : self._end]
            count = min(len(part), len(there))
            part[:count] = there[:count]
            self._start += count
            self._fill(count)
            if self._into and self._start == self._end:
                yield
        if crlf:
            while self._end - self._start < 2:
                yield
            if bytes(self._scratch[self._start : self._start + 2]) != b"\r\n":
                raise WrongReply("a bulk string is not terminated by CRLF")
            self._start += 2


class Lines:
    """So many replies, each of which is a line."""

    def __init__(self, count: int) -> None:
        self.done = False
        self._left, self._most = count, count * _LINE
        self._received = bytearray()

    def receive(self, fd: int) -> int:
        """As every receiver."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return -1
        if data:
            self.feed(data)
        return len(data)

    def feed(self, data: bytes) -> None:
        """As every receiver."""
        self._received += data
        self._left -= data.count(b"\n")
        self.done = not self._left and self._received.endswith(b"\r\n")
        if self._left < 0 or (not self._left and not self.done) or len(self._received) > self._most:
            raise WrongReply(f"instead of lines came {bytes(self._received[-40:])!r}")

    def result(self) -> list[bytes]:
        """The lines."""
        return bytes(self._received).split(b"\r\n")[:-1]
