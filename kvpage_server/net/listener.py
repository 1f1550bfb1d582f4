"""The listener: it accepts TCP, TLS and unix connections, refuses some of them, and begins sessions on the others."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvpage_server.commands.access.user import User
from kvpage_server.commands.context import Server
from kvpage_server.core import Scratch
from kvpage_server.net.run_queue import RunQueue
from kvpage_server.net.session import Session
from kvpage_server.net.tls import HANDSHAKE_BYTES, Encryption, Handshake
from kvpage_server.net.transport import Ends, SocketTransport, Transport
from kvpage_server.system.program import cannot_listen

log = logging.getLogger("kvpage")

_ACCEPT_TURN = 128  # connections accepted before clients have their turn
_HANDSHAKES_SHARE = 4  # TLS handshakes may hold 1/4 of maxmemory-clients
_HANDSHAKE_LEAST = 0.5  # seconds that a TLS handshake gets, even if other connections wait for its place
_HANDSHAKE_PAUSE = 0.05  # seconds without accepting while no place for a TLS handshake is free
_COMPLETED_WITHIN = 10.0  # seconds that all-or-none writes get when the server stops
_VIEWERS = 16  # connections from the HTTP process above maxclients, so that a full server can be monitored
_DESCRIPTORS_PAUSE = 0.1  # seconds without accepting while no file descriptor is free

_FULL = b"-ERR max number of clients reached\r\n"
_PROTECTED = (
    b"-DENIED kvpage-server is running in protected mode: the default user has no password, so only connections "
    b"from this machine are accepted. To accept others, give the default user a password (requirepass), turn it off "
    b"(user default off), or in a private network set protected-mode no.\r\n"
)

_TCP_KEEPIDLE: int = getattr(socket, "TCP_KEEPIDLE", 0) or getattr(socket, "TCP_KEEPALIVE", 0)  # the latter on macOS

Accept = Callable[[socket.socket], object]


class ListenError(OSError):
    """Error: the server cannot listen on an address of the configuration."""


class Listener:
    """All listening sockets of a server. The HTTP process has its own."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._sockets: dict[socket.socket, Accept] = {}
        self._run_queue = RunQueue(loop)
        self._tls_queue = RunQueue(loop)  # TLS connections with bytes for OpenSSL
        self._scratch = Scratch()
        self._unix_file: os.stat_result | None = None  # the file of the unix socket
        # A spare file descriptor. If none is free, it is closed, so that a connection can be accepted and refused.
        self._spare: int | None = _open_spare()

    def start(self) -> list[str]:
        """Listen on the addresses of the configuration. Return the open addresses as text, for the log.

        Raises ListenError if a required address cannot be opened, or if none can.
        """
        config = self._server.config
        try:
            if config.port or not (config.tls_port or config.unixsocket):
                self._server.port = self._listen(config.port, self._begin)
            if config.tls_port:
                self._listen(config.tls_port, self._begin_tls)
            named = [
                ("tls " if begin == self._begin_tls else "") + name_of(sock) for sock, begin in self._sockets.items()
            ]
            if config.unixsocket:
                self._sockets[_open_unix(config.unixsocket, config.unixsocketperm, config.tcp_backlog)] = self._begin
                self._unix_file = os.stat(config.unixsocket)
                named.append(f"unix {config.unixsocket}")
        except OSError:
            self.stop()
            raise
        self._watch_sockets()
        return named

    def _listen(self, port: int, begin: Accept) -> int:
        """Listen on a port of every configured address, and return the port. Port 0 chooses a free one.

        `begin` is called with the sockets of accepted connections.
        """
        config = self._server.config
        opened = open_all(config.bind, port, config.tcp_backlog)
        self._sockets |= dict.fromkeys(opened, begin)
        return int(opened[0].getsockname()[1])

    def stop(self) -> None:
        """Close the listening sockets, and give sessions no more turns. All-or-none writes go on, see `complete`."""
        self._run_queue.stop()
        self._tls_queue.stop()
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            if sock.family == socket.AF_UNIX:
                with suppress(OSError):  # the file or its directory may have been removed already
                    path = sock.getsockname()
                    if self._unix_file is None or os.path.samestat(os.lstat(path), self._unix_file):
                        os.unlink(path)  # another server's socket at this path stays
            sock.close()
        self._sockets.clear()
        for handshake in list(self._server.handshakes):
            handshake.end("the server stops")
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def complete(self) -> None:
        """Wait until all-or-none writes, such as a batch of pages, are complete, but at most _COMPLETED_WITHIN.

        The caller has disconnected all clients before.
        """
        await self._run_queue.completed(_COMPLETED_WITHIN)

    # -- accepting -------------------------------------------------------------------------------------------------

    def _watch_sockets(self) -> None:
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def _pause_accepting(self, sockets: Iterable[socket.socket], seconds: float) -> None:
        """Pause accepting on some sockets: their connections wait in the kernel."""
        for sock in sockets:
            self._loop.remove_reader(sock)
        self._loop.call_later(seconds, self._watch_sockets)

    def _accept(self, listening: socket.socket) -> None:
        begin = self._sockets[listening]
        for _ in range(_ACCEPT_TURN):
            if begin == self._begin_tls and not self._has_room_for_a_handshake():
                self._pause_accepting([listening], _HANDSHAKE_PAUSE)
                return
            try:
                sock, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._refuse_without_descriptor(listening, error):
                    continue
                self._pause_accepting(self._sockets, _DESCRIPTORS_PAUSE)
                return
            with _closed_on_disconnect(sock):
                if not self._refuse_if_necessary(sock, _is_local(sock)):
                    self._tune(sock)
                    begin(sock)

    def _refuse_without_descriptor(self, listening: socket.socket, error: OSError) -> bool:
        """Refuse a connection with the help of the spare descriptor, after `accept` has failed.

        Return False if that fails.
        """
        self._server.seldom.log(
            logging.WARNING,
            "no connection can be accepted, with %d clients: %s; see ulimit -n and maxclients",
            len(self._server.clients),
            error.strerror,
        )
        if self._spare is None:
            self._spare = _open_spare()
            return False
        os.close(self._spare)
        try:
            sock, _address = listening.accept()
        except OSError:
            return False
        else:
            with sock, _closed_on_disconnect(sock):
                self._refuse(sock, _FULL)
            return True
        finally:
            self._spare = _open_spare()

    def take(self, sock: socket.socket, address: str, user: User | None, *, needs_password: bool) -> None:
        """Begin a session on a socket from the HTTP process: as `user`, or, if that is None, for a viewer at `address`.

        With `needs_password`, the viewer has to log in as a user with a password. There may be _VIEWERS connections
        more than maxclients.
        """
        with _closed_on_disconnect(sock):
            if not self._refuse_if_necessary(sock, user is not None or _is_loopback(address), _VIEWERS):
                session = self._begin_session(sock, address, lambda session: SocketTransport(self._loop, sock, session))
                session.client.touches = False  # reads of a viewer are no uses of a key
                session.client.needs_password, session.client.over_http = needs_password, True
                session.client.become(user or (None if needs_password else session.client.user))

    def _refuse_if_necessary(self, sock: socket.socket, local: bool, above: int = 0) -> bool:
        """Refuse a connection `above` maxclients, or in protected mode unless it is `local`.

        The client gets an error, and its socket is closed. Return whether the connection was refused.
        """
        server = self._server
        if server.config.protected_mode and server.users.default.no_password and not local:
            self._refuse(sock, _PROTECTED)
            return True
        while len(server.clients) + len(server.handshakes) >= server.config.maxclients + above:
            if not server.handshakes:
                self._refuse(sock, _FULL)
                return True
            self._end_oldest_handshake()
        return False

    def _refuse(self, sock: socket.socket, reason: bytes) -> None:
        self._server.stats.rejected += 1
        log.debug("a connection was refused: %s", reason[1:40].decode())
        sock.send(reason)
        sock.close()

    def _tune(self, sock: socket.socket) -> None:
        if sock.family == socket.AF_UNIX:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = self._server.config.tcp_keepalive
        if seconds:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_KEEPIDLE, seconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(seconds // 3, 1))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def _begin(self, sock: socket.socket) -> None:
        self._begin_session(sock, name_of(sock, peer=True), lambda session: SocketTransport(self._loop, sock, session))

    # -- TLS handshakes: anyone can begin one, so they share a part of the memory, and clients may take their places

    def _has_room_for_a_handshake(self) -> bool:
        """Return whether one more handshake may begin. At the limit, end the oldest one if it had _HANDSHAKE_LEAST."""
        server = self._server
        most = server.config.maxclients - len(server.clients)
        if memory := server.config.client_memory:
            most = min(most, max(memory // _HANDSHAKES_SHARE // HANDSHAKE_BYTES, 1))
        if len(server.handshakes) < most or not server.handshakes:
            return True
        if self._loop.time() - next(iter(server.handshakes)).began < _HANDSHAKE_LEAST:
            return False
        self._end_oldest_handshake()
        return True

    def _end_oldest_handshake(self) -> None:
        self._server.stats.rejected += 1
        next(iter(self._server.handshakes)).end("another connection takes its place")

    def _begin_tls(self, sock: socket.socket) -> None:
        context = self._server.tls
        assert context is not None
        encryption = Encryption(sock, context, self._tls_queue)
        handshake = Handshake(self._loop, encryption, name_of(sock, peer=True), self._end_handshake)
        self._server.handshakes[handshake] = None
        self._server.in_flight += HANDSHAKE_BYTES

    def _end_handshake(self, handshake: Handshake, error: str) -> None:
        """Begin the session of a connection after its handshake. With an error, log it and close the connection."""
        server, encryption = self._server, handshake.encryption
        del server.handshakes[handshake]
        server.in_flight -= HANDSHAKE_BYTES
        if error:
            server.seldom.log(logging.INFO, "no TLS with %s: %s", handshake.address, error, kind=error)
            encryption.sock.close()
            return
        with _closed_on_disconnect(encryption.sock):
            self._begin_session(
                encryption.sock,
                handshake.address,
                lambda session: SocketTransport(self._loop, encryption.sock, session, encryption),
            )

    def _begin_session(
        self, sock: socket.socket, address: str, open_transport: Callable[[Session], Transport]
    ) -> Session:
        """Begin a session on a connection from `address`. `open_transport` creates its transport.

        The caller passes the address, because a socket has no peer address after the peer has disconnected.
        """
        ends = Ends(address, name_of(sock), sock.fileno())
        return Session(self._server, self._loop, self._run_queue, self._scratch, ends, open_transport)


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


@contextmanager
def _closed_on_disconnect(sock: socket.socket) -> Iterator[None]:
    """Make a socket non-blocking for the caller's ``with`` block, and close it if the block raises OSError.

    The peer has disconnected then: such a socket has no peer address, and nothing can be sent to it.
    """
    sock.setblocking(False)
    try:
        yield
    except OSError:
        sock.close()


def open_all(addresses: Sequence[str], port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen on a port of all `addresses`; port 0 chooses a free one.

    An address that begins with '-' is left out if it cannot be opened. Raises ListenError if another one cannot be
    opened, or if none can.
    """
    opened: list[socket.socket] = []
    for entry in addresses:
        address = entry.removeprefix("-")
        try:
            sock = _open(address, port, backlog)
        except OSError as error:
            if entry.startswith("-"):
                continue
            for other in opened:
                other.close()
            if opened and error.errno == errno.EADDRINUSE and _is_free(address, port):
                both = " ".join(addresses)
                raise ListenError(f"two of the addresses {both} are the same, or one contains the other") from error
            where = f"{address}:{port}" if port else address
            raise ListenError(cannot_listen(where, error)) from error
        port = sock.getsockname()[1]  # port 0 chooses a free one: all addresses get the same
        opened.append(sock)
    if not opened:
        raise ListenError(f"none of the addresses {' '.join(addresses)} exists on this machine")
    return opened


def _is_free(address: str, port: int) -> bool:
    """Return whether a port of an address can be opened."""
    with suppress(OSError):
        _open(address, port, 1).close()
        return True
    return False


def _open(address: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wildcard = {"*": "", "::*": "::"}.get(address, address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((wildcard, port))
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _open_unix(path: str, permissions: int, backlog: int) -> socket.socket:
    """Return a listening unix socket whose file has `permissions` before any client can connect.

    Raises ListenError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o777)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, permissions)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on the unix socket {path}: {error.strerror or error}") from error
    return sock


def _remove_stale(path: str) -> None:
    """Remove the file of a unix socket on which no process listens. Files of other kinds stay."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _is_local(sock: socket.socket) -> bool:
    if sock.family == socket.AF_UNIX:
        return True
    return _is_loopback(name_of(sock, peer=True))


def _is_loopback(address: str) -> bool:
    return address.startswith(("[::1]:", "127."))


def name_of(sock: socket.socket, *, peer: bool = False) -> str:
    """Return the address of a socket, or of its peer, as CLIENT LIST shows it."""
    if sock.family == socket.AF_UNIX:
        return f"{os.fsdecode(sock.getsockname())}:0"
    host, port = (sock.getpeername() if peer else sock.getsockname())[:2]
    return f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}"
