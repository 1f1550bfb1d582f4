"""Listening sockets: they accept connections and give each its session."""

from __future__ import annotations

import asyncio
import socket

from kvpage_server.commands.context import Server
from kvpage_server.net.session import Session

_BACKLOG = 511


class ListenError(OSError):
    """No address of the configuration can be listened on."""


def _open(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wildcard = {"*": "", "::*": "::"}.get(address, address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((wildcard, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Listener:
    """Every listening socket of a server."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._sockets: list[socket.socket] = []

    def start(self) -> list[str]:
        """Listen; the addresses that worked. Raises ListenError when one that must work does not, or none does."""
        port = self._server.config.port
        for entry in self._server.config.bind:
            address = entry.removeprefix("-")
            try:
                sock = _open(address, port)
            except OSError as error:
                if entry.startswith("-"):
                    continue
                self.stop()
                raise ListenError(f"cannot listen on {address}:{port}: {error.strerror}") from error
            port = sock.getsockname()[1]  # a free port is the same on every address
            self._sockets.append(sock)
        if not self._sockets:
            raise ListenError(f"none of the addresses {' '.join(self._server.config.bind)} exists on this machine")
        self._server.port = port
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)
        return [f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in (s.getsockname()[0] for s in self._sockets)]

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                Session(self._server, self._loop, sock)
            except OSError:  # gone before it was greeted: its peer has no name any more
                sock.close()

    def stop(self) -> None:
        """Accept no more."""
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()
