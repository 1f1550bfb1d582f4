"""TLS work that a stranger can request runs in turns: handshakes, and records of one byte."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from servers import free_port, start_server
from test_tls import needs_openssl, run_openssl

from kvpage_server.net.run_queue import RunQueue
from kvpage_server.net.tls import Encryption, Handshake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificate of a server."""
    at = tmp_path_factory.mktemp("certificate")
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    run_openssl(*made, "-keyout", "server.key", "-out", "server.crt", at=at)
    return at


class Peer:
    """A TLS client over a socket, which decides when it sends the bytes of OpenSSL."""

    def __init__(self, sock: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing)

    def shake_hands(self) -> bool:
        """Continue the handshake, and send the client's part. Return whether it is complete."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self.sock.sendall(self.outgoing.read())
        return True

    def connect(self) -> None:
        while not self.shake_hands():
            self.incoming.write(self.sock.recv(65536))

    def read(self) -> bytes:
        """Return the next bytes from the server, b"" at the end."""
        while True:
            try:
                return self.tls.read(65536)
            except ssl.SSLWantReadError:
                received = self.sock.recv(65536)
                assert received, "the stream has ended without TLS's end"
                self.incoming.write(received)

    def send_bytewise(self, data: bytes) -> None:
        """Send each byte in a record of its own."""
        for place in range(len(data)):
            self.tls.write(data[place : place + 1])
        self.sock.sendall(self.outgoing.read())


def context_of(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    return context


@needs_openssl
def test_many_handshakes_take_many_rounds_of_the_loop(folder: Path) -> None:
    """Other clients are served between them."""

    async def run(stack: ExitStack) -> int:
        loop, most = asyncio.get_running_loop(), 100
        queue, context = RunQueue(loop), context_of(folder)
        ended: list[str] = []
        for _ in range(most):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            ours.setblocking(False)
            Peer(theirs).shake_hands()
            theirs.shutdown(socket.SHUT_WR)
            Handshake(loop, Encryption(ours, context, queue), "peer", lambda _, error: ended.append(error))
        rounds = 0
        while len(ended) < most:
            await asyncio.sleep(0)
            rounds += 1
        assert set(ended) == {"the peer has disconnected"}
        return rounds

    with ExitStack() as stack:
        assert asyncio.run(run(stack)) > 6


@needs_openssl
def test_records_of_one_byte_are_decrypted_in_turns(folder: Path) -> None:
    """The commands in them run in order, and the connection ends after them."""
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(folder / "server.crt"), "--tls-key-file", str(folder / "server.key")]
    commands = b"".join(b"ECHO %d\r\n" % number for number in range(1000)) + b"QUIT\r\n"
    with (
        start_server(*options),
        socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
    ):
        peer = Peer(sock)
        peer.connect()
        peer.send_bytewise(commands)
        assert (
            b"".join(iter(peer.read, b""))
            == b"".join(b"$%d\r\n%d\r\n" % (len(str(n)), n) for n in range(1000)) + b"+OK\r\n"
        )
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(asyncio.new_event_loop()) as loop:
        encryption, peer = Encryption(ours, context_of(folder), RunQueue(loop)), Peer(theirs)
        while not peer.shake_hands():
            encryption.receive()
            encryption.shake_hands()
            encryption.send()
            peer.incoming.write(theirs.recv(65536))
        encryption.receive()
        assert encryption.shake_hands()
        peer.send_bytewise(bytes(1000))
        encryption.receive()
        turns = [encryption.decrypt()]
        while encryption.has_input:
            turns.append(encryption.decrypt())
        assert sum(len(data) for data, _ in turns) == 1000
        assert len(turns) == 16
        peer.tls.write(b"record")
        record = peer.outgoing.read()
        received = [b""]
        for place in range(len(record)):  # the header arrives in parts, too
            theirs.sendall(record[place : place + 1])
            encryption.receive()
            received.append(encryption.decrypt()[0])
        assert (received[-1], set(received[:-1])) == (b"record", {b""})
        encryption.add([bytes(50_000)])
        assert encryption.send() == 50_000
        assert not encryption.nbytes
        assert encryption._encrypted.obj == b"", "sent bytes stay in memory"
