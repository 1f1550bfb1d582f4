"""The clients: sockets that send a program's commands, split anywhere, and read when the program does."""

from __future__ import annotations

import re
import selectors
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any

import hiredis

from kvpage_server.lossless import decode_body
from kvpage_server.page import PageError, checksum
from tests.simulation.model.model import Conversation, Words
from tests.simulation.programs.step import PEERS

READ = 1 << 16
_CODED = re.compile(rb"[0-9a-f]{16}\x04\x01\x03\x00")  # a digest, and the beginning of a coded block


@dataclass(eq=False)
class Asked:
    """A command that a peer has sent, or begun to."""

    step: int
    words: Words
    sent: int = 0  # nanoseconds: when the last of it arrives
    expected: Any = None
    at: int = 0  # in the model's log, when it was run
    ran: int = 0  # unix milliseconds, when that was
    elapsed: int = 0  # the same, of a clock that nobody sets
    end: int = 0  # and after it
    changes: int = 0  # how many changes of the log are its own
    queued: list[Words] = field(default_factory=list)  # the commands that it ran, as EXEC
    streamed: bool = False  # its reply, and its effect, are made in steps
    audit: Any = None  # receives the reply, instead of the judge
    doubt: Any = None  # its uncertain effects
    abandoned: Any = None  # these effects, if the client has disconnected
    done: set[bytes] = field(default_factory=set)  # keys that it has deleted or stored so far, in steps
    parts: deque[list[bytes]] = field(default_factory=deque)  # keys that it stores in later steps, each part in one
    also_stored: int = 0  # pages that were stored during its deletions, and that it may have deleted, too
    heard: Callable[[Asked, Any], None] | None = None  # receives a correct reply, in addition
    unclear: set[bytes] = field(default_factory=set)  # keys that it changes, whose value before is unknown
    unsure: set[bytes] = field(default_factory=set)  # keys of unknown kind when it was run
    leases: dict[tuple[bytes, int], int] | None = None  # the ends of leases when it was run, of blocks that it names
    leasing: int = 0  # number of commands so far that may have leased blocks
    unpins: int = 0  # `Model.unpins` when it was run


@dataclass(eq=False)
class Peer:
    """One connection at a time. `unrun` was sent and not run yet, `unanswered` was run."""

    number: int
    received: Callable[[Peer, Any], None]
    lost: Callable[[Peer, bool], None]  # called with the peer, and whether the server has closed it
    sock: socket.socket | None = None
    talk: Conversation = field(default_factory=lambda: Conversation(""))
    unrun: deque[Asked] = field(default_factory=deque)
    unanswered: deque[Asked] = field(default_factory=deque)
    pushes: deque[Any] = field(default_factory=deque)  # expected pushes
    may_come: list[Any] = field(default_factory=list)  # pushes, and may not
    stalled: bool = False  # it does not read
    has_stalled: bool = False  # or has not read for a while: who quits and does not read is not waited for
    half: bool = False  # it has sent the beginning of a command that it will not end
    sending: int = 0  # pieces that are on their way
    busy_until: int = 0  # nanoseconds: when the last of them arrives
    blocked: list[bytes] = field(default_factory=list)  # bytes that the kernel has not taken
    lives: int = 0
    speaks: int = 2  # the protocol of the next reply; 0 if it is unknown
    moved: int = 0  # nanoseconds: when the server last did something for it

    def connect(self, path: str) -> None:
        """Begin anew."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.sock.connect(path)
        self.lives += 1
        self.talk = Conversation(f"{self.number}.{self.lives}")
        self.stalled = self.has_stalled = self.half = False
        self.sending = self.busy_until = 0
        self.blocked = []
        self.speaks = 2
        self._reader = hiredis.Reader()

    @property
    def name(self) -> bytes:
        """Return its name in this life."""
        return self.talk.name.encode()

    @property
    def quiet(self) -> bool:
        """Return whether no reply is expected."""
        return not (self.unrun or self.unanswered or self.sending)

    def push(self, data: bytes, life: int) -> None:
        """Deliver a piece to the server, unless its connection was closed."""
        if life != self.lives or self.sock is None:
            return
        self.sending -= 1
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            if not self.stalled:  # or it finds out when it reads again
                self.read()  # bytes before the end
                self.drop(by_server=True)
            return
        if sent < len(data):
            raise BlockedError(self, data[sent:], life)

    def read(self) -> None:
        """Read all there is."""
        while self.sock is not None and not self.stalled:
            try:
                data = self.sock.recv(READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.drop(by_server=True)
                return
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self.received(self, _decoded(reply))

    def drop(self, *, by_server: bool = False) -> None:
        """The connection is over."""
        if self.sock is not None:
            self.lost(self, by_server)
            self.sock.close()
            self.sock = None


def _decoded(reply: Any) -> Any:
    """Return a reply with raw blocks in place of those in the lossless code, if these are intact."""
    if type(reply) is not list:  # a push is a list of another type
        return reply
    if len(reply) == 2 and all(isinstance(part, bytes) for part in reply) and _CODED.fullmatch(reply[0] + reply[1][:4]):
        digest, code = reply
        body = bytearray(int.from_bytes(code[4:8], "little"))
        try:
            decode_body(code, memoryview(body))
        except PageError:
            return reply
        return bytes(body) if checksum(body) == int(digest, 16) else reply
    return list(map(_decoded, reply))


class BlockedError(Exception):
    """The server does not read, and the kernel's memory is full: the rest is to be sent later."""

    def __init__(self, peer: Peer, rest: bytes, life: int) -> None:
        super().__init__("the server does not read")
        self.peer, self.rest, self.life = peer, rest, life


class Watchers:
    """Peers with readable sockets, and waiters for descriptors outside of the server."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._numbers = count(PEERS + 1)

    def look(self) -> None:
        """Have them read it, in their order."""
        for _, read in sorted((key.data for key, _ in self._selector.select(0)), key=itemgetter(0)):
            read()

    def watch(self, descriptor: int, read: Callable[[], None]) -> None:
        """Call that when something can be read."""
        self._register(descriptor, next(self._numbers), read)

    def _register(self, descriptor: int, number: int, read: Callable[[], None]) -> None:
        if descriptor in self._selector.get_map():  # of a closed socket: the system reuses the number
            self._selector.unregister(descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, (number, read))

    def attend(self, peer: Peer) -> None:
        """It reads."""
        assert peer.sock is not None
        self._register(peer.sock.fileno(), peer.number, peer.read)

    def ignore(self, peer: Peer) -> None:
        """It does not."""
        assert peer.sock is not None
        self._selector.unregister(peer.sock)


def encode(words: Words) -> bytes:
    """Encode a command in RESP."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def shown(words: Words) -> str:
    """A command as redis-cli reads it."""
    return " ".join(_word(word) for word in words)


def _word(word: bytes) -> str:
    plain = all(32 < byte < 127 and byte not in b"\"'\\" for byte in word)
    if plain and 0 < len(word) <= 60:
        return word.decode()
    text = "".join(chr(byte) if 31 < byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word[:60])
    return f'"{text}"' + (f"...({len(word)} bytes)" if len(word) > 60 else "")
