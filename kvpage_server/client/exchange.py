"""A question and its answer over a non-blocking socket, without waiting: whoever drives it waits as it says.

Plain sockets gather with `sendmsg` and scatter with `recvmsg_into`. TLS sockets have neither: there small pieces are
joined to one TLS record and buffers are filled one by one; every byte is copied by the cipher anyway.
"""

from __future__ import annotations

import select
import socket
import ssl
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Generic, TypeVar

from kvpage_server.client.errors import Disconnected
from kvpage_server.client.reply import Receiver
from kvpage_server.lowat import PATIENCE, LowWater

T = TypeVar("T")

Piece = bytes | memoryview
READ, WRITE = select.POLLIN, select.POLLOUT
_TURN = 2 * 1024 * 1024  # bytes moved before whoever drives it has a turn
_AT_ONCE = 1024 * 1024
_FIRST = 64  # pieces that are sent while the next ones are made
_GATHER = 512  # pieces in one sendmsg; IOV_MAX is 1024
_RECORD = 16 * 1024  # bytes in a TLS record


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """What is asked of a server. It can be asked again: pieces and receiver are made anew each time."""

    pieces: Callable[[], Iterator[Piece]]
    receiver: Callable[[], Receiver]
    read: Callable[[Any], T]  # what the receiver's result means


class Outgoing:
    """Pieces of memory on their way out, taken from an iterator some at a time."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._take(_FIRST)

    def _take(self, count: int) -> None:
        """The next pieces that have bytes."""
        self._some: list[Piece] = list(islice(filter(None, self._pieces), count))
        self._ends = list(accumulate(map(len, self._some)))
        self._sent = 0  # bytes of them

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""
        return not self._some

    def send(self, sock: socket.socket) -> int:
        """Send what the kernel takes; how many bytes."""
        at = bisect_right(self._ends, self._sent)
        if isinstance(sock, ssl.SSLSocket):
            pieces = self._rest(at, max(at + 1, bisect_right(self._ends, self._sent + _RECORD)))
            sent = sock.send(b"".join(pieces) if len(pieces) > 1 else pieces[0])
        else:
            sent = sock.sendmsg(self._rest(at, bisect_left(self._ends, self._sent + _AT_ONCE) + 1))
        self._sent += sent
        if self._sent == self._ends[-1]:
            self._take(_GATHER)
        return sent

    def _rest(self, at: int, stop: int) -> list[Piece]:
        """The pieces from `at` on, without what has been sent of the first."""
        pieces: list[Piece] = self._some[at:stop]
        gone = len(pieces[0]) - self._ends[at] + self._sent
        if gone:
            pieces[0] = memoryview(pieces[0])[gone:]
        return pieces


def receive(sock: socket.socket, buffers: list[memoryview]) -> int:
    """Receive into the buffers what is there; how many bytes. Raises Disconnected at the end of the stream."""
    if len(buffers) == 1 or isinstance(sock, ssl.SSLSocket):
        count = sock.recv_into(next(filter(None, buffers)))
    else:
        count = sock.recvmsg_into(buffers)[0]
    if not count:
        raise Disconnected("the server closed the connection before its answer was whole")
    return count


class Conversation(Generic[T]):
    """One request on a socket."""

    def __init__(self, sock: socket.socket, request: Request[T]) -> None:
        self.sock = sock
        self._read = request.read
        self._outgoing = Outgoing(request.pieces())
        self._receiver = request.receiver()
        self._broken = False
        self._mark = LowWater(sock)

    def steps(self) -> Generator[int, int, None]:
        """Send and receive, as far as possible without waiting. Raises Disconnected and WrongReply.

        Yields the poll events to wait for and wants to be sent those that came, 0 when `patience` ended before; or
        yields 0 when others may have their turn. Answers are taken while there is still something to send: a server may
        refuse early, and one that can't get rid of its answers may stop reading.
        """
        outgoing, receiver = self._outgoing, self._receiver
        ready, moved = WRITE, 0
        while not receiver.done:
            try:
                if outgoing.done or self._broken or ready & ~WRITE:
                    count = receive(self.sock, receiver.buffers())
                    receiver.received(count)
                    ready = WRITE
                else:
                    count = self._send()
            except ssl.SSLWantWriteError:
                ready = yield WRITE
            except (BlockingIOError, ssl.SSLWantReadError):
                sent = outgoing.done or self._broken
                self._mark.expect(receiver.expected if sent and ready else 0)
                ready = yield READ if sent else READ | WRITE
            except OSError as error:
                raise Disconnected(f"the connection broke: {error}") from error
            else:
                moved += count
                if moved >= _TURN:
                    yield 0
                    moved = 0
        self._mark.expect(0)

    @property
    def patience(self) -> float | None:
        """How many seconds to wait for events before going on without them; None for as long as it takes."""
        return PATIENCE if self._mark.at > 1 else None

    def _send(self) -> int:
        try:
            return self._outgoing.send(self.sock)
        except (BrokenPipeError, ConnectionResetError):
            self._broken = True  # what the server said before it closed may still be there to be read
            return 0

    @property
    def over(self) -> bool:
        """Whether the connection is as it was before: everything was sent, and the whole answer received."""
        return self._outgoing.done and self._receiver.done and not self._broken

    def result(self) -> T:
        """What was answered. Raises Refused; and WrongReply for what is no answer, after which it is not `over`."""
        answer = self._receiver.result()
        try:
            return self._read(answer)
        except BaseException:
            self._broken = True
            raise
