"""A request and its reply over a non-blocking socket. The exchange never waits: it yields the poll events for which its
caller has to wait.

A plain socket sends several buffers, and receives into several buffers, with one system call. A TLS socket cannot, so
pieces are joined to records; encryption copies every byte anyway.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvpage_server.client.errors import Disconnected, WrongReply
from kvpage_server.client.wire.reply import Receiver, refusal
from kvpage_server.core import Chunk, Outgoing
from kvpage_server.core.pieces import ErrorAnswer, WrongAnswer

# -- Commands as RESP --------------------------------------------------------------------------------------------------


def word(text: bytes | int) -> bytes:
    text = text if isinstance(text, bytes) else b"%d" % text
    return b"$%d\r\n%b\r\n" % (len(text), text)


def command(*words: bytes | int) -> bytes:
    return b"*%d\r\n%b" % (len(words), b"".join(map(word, words)))


def around_set(ttl: int) -> tuple[bytes, bytes]:
    """Return the bytes before the key and after the value of a SET; `ttl` in seconds, 0 for none."""
    if ttl:
        return b"*5\r\n" + word(b"SET"), b"\r\n" + word(b"EX") + word(ttl)
    return b"*3\r\n" + word(b"SET"), b"\r\n"


T = TypeVar("T")

Piece = bytes | memoryview
READ, WRITE = select.POLLIN, select.POLLOUT
_CALLS_A_TURN = 8  # system calls, each of about a millisecond at most, before other tasks have a turn
_RECORD_BYTES = 64 * 1024  # of one recv of a TLS socket, at most


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A request to a server, with the receiver and the decoder of its reply.

    It can be sent again, because each conversation makes new pieces and a new receiver. `prepare` and `finish` are long
    work, which the async client does in a thread. Without a call of `prepare`, `pieces` does its work while it is sent.
    """

    pieces: Callable[[], Iterator[Piece | Chunk]]
    receiver: Callable[[], Receiver]
    read: Callable[[Any], T]  # converts the receiver's result
    prepare: Callable[[], None] | None = None
    finish: Callable[[T], T] | None = None  # converts the result of `read`, after the connection was released


class Conversation(Generic[T]):
    """One request and its reply on a socket."""

    def __init__(self, sock: socket.socket, request: Request[T]) -> None:
        self.sock = sock
        self._read = request.read
        self._outgoing = Outgoing(request.pieces())
        self._receiver = request.receiver()
        self._broken = False

    def steps(self) -> Generator[int, int | None, None]:
        """Send and receive as far as possible without waiting, until the reply is complete. Raises Disconnected and
        WrongReply.

        Yields the poll events to wait for, and receives the events that occurred. Yields 0 to give other tasks a turn.
        Replies are received even while bytes are left to send: a server may refuse early, and it may stop reading when
        its replies are not read.
        """
        ready, calls = WRITE, 0
        while not self._receiver.done:
            sending = not (self._outgoing.done or self._broken)
            try:
                if sending and not ready & ~WRITE:
                    moved = self._send()
                else:
                    moved = self._receive()
                    ready = WRITE
            except ssl.SSLWantWriteError:
                ready = (yield WRITE) or 0
                continue
            except ssl.SSLWantReadError:
                moved = -1
            except OSError as error:
                raise Disconnected(f"the connection broke: {error}") from error
            except WrongAnswer as error:
                raise WrongReply(str(error)) from None
            if moved < 0:
                ready = (yield READ | WRITE if sending else READ) or 0
                calls = 0
            elif calls == _CALLS_A_TURN:
                yield 0
                calls = 0
            calls += 1

    def _send(self) -> int:
        """Send as many bytes as the socket accepts. Return their number, -1 if its buffer is full."""
        try:
            if not isinstance(self.sock, ssl.SSLSocket):
                return self._outgoing.send(self.sock.fileno())
            sent = self.sock.send(self._outgoing.record())
            self._outgoing.sent(sent)
            return sent
        except (BrokenPipeError, ConnectionResetError):
            self._broken = True  # no error yet: a reply that the server sent before it closed may be readable
            return 0

    def _receive(self) -> int:
        """Receive available bytes. Return their number, -1 if none are available. Raises Disconnected at the end of the
        stream.
        """
        if isinstance(self.sock, ssl.SSLSocket):
            data = self.sock.recv(_RECORD_BYTES)
            self._receiver.feed(data)
            count = len(data)
        else:
            count = self._receiver.receive(self.sock.fileno())
        if not count:
            raise Disconnected("the server closed the connection before its answer was whole")
        return count

    @property
    def over(self) -> bool:
        """Whether the whole request was sent and the whole reply received, so that the connection can be used again."""
        return self._outgoing.done and self._receiver.done and not self._broken

    def result(self) -> T:
        """Return the decoded reply. Must be called after `steps` has ended.

        Raises Refused for an error reply; WrongReply for a reply that does not fit the request, after which `over` is
        False.
        """
        try:
            answer = self._receiver.result()
        except ErrorAnswer as error:
            raise refusal(error.with_traceback(None).line) from None
        try:
            return self._read(answer)
        except BaseException:
            self._broken = True
            raise
