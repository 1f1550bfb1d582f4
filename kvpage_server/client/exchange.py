"""A question and its answer over a non-blocking socket, without waiting: whoever drives it waits as it says.

Plain sockets gather with `sendmsg` and scatter with `recvmsg_into`. TLS sockets have neither: there small pieces are
joined to one TLS record and buffers are filled one by one, since every byte is copied by the cipher anyway.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvpage_server.client.errors import Disconnected
from kvpage_server.client.reply import Receiver

T = TypeVar("T")

Piece = bytes | memoryview
READ, WRITE = select.POLLIN, select.POLLOUT
_TURN = 2 * 1024 * 1024  # bytes moved before whoever drives it has a turn
_AT_ONCE = 1024 * 1024
_GATHER = 512  # pieces in one sendmsg; IOV_MAX is 1024
_RECORD = 16 * 1024  # bytes in a TLS record


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """What is asked of a server. It can be asked again: pieces and receiver are made anew each time."""

    pieces: Callable[[], Iterator[Piece]]
    receiver: Callable[[], Receiver]
    read: Callable[[Any], T]  # what the receiver's result means


class Outgoing:
    """Pieces of memory on their way out. They are taken from the iterator as they are needed."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._queue: deque[Piece] = deque()
        self._queued = 0  # bytes
        self._top_up()

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""
        return not self._queue

    def _top_up(self) -> None:
        queue, queued = self._queue, self._queued
        while queued < _AT_ONCE and len(queue) < _GATHER:
            piece = next(self._pieces, None)
            if piece is None:
                break
            queue.append(piece)
            queued += len(piece)
        self._queued = queued

    def send(self, sock: socket.socket) -> int:
        """Send what the kernel takes; how many bytes."""
        if isinstance(sock, ssl.SSLSocket):
            self._join()
            sent = sock.send(self._queue[0])
        else:
            sent = sock.sendmsg(self._queue)
        self._advance(sent)
        return sent

    def _advance(self, sent: int) -> None:
        queue = self._queue
        self._queued -= sent
        while queue and sent >= len(queue[0]):
            sent -= len(queue.popleft())
        if sent:
            queue[0] = memoryview(queue[0])[sent:]
        self._top_up()

    def _join(self) -> None:
        """Make the first pieces one, up to the size of a TLS record."""
        first, size = [self._queue.popleft()], 0
        while self._queue and (size := size + len(first[-1])) + len(self._queue[0]) <= _RECORD:
            first.append(self._queue.popleft())
        self._queue.appendleft(b"".join(first) if len(first) > 1 else first[0])


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

    def steps(self) -> Generator[int, int, None]:
        """Send and receive, as far as possible without waiting. Raises Disconnected and WrongReply.

        Yields the poll events to wait for and wants to be sent those that came, or yields 0 when others may have
        their turn. Answers are taken while there is still something to send: a server may refuse early, and one that
        can't get rid of its answers may stop reading.
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
                ready = yield READ if outgoing.done or self._broken else READ | WRITE
            except OSError as error:
                raise Disconnected(f"the connection broke: {error}") from error
            else:
                moved += count
                if moved >= _TURN:
                    yield 0
                    moved = 0

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
        """What was answered. Raises Refused."""
        return self._read(self._receiver.result())
