"""Connections to the store over socket pairs, which only this process can open.

This process makes a pair of sockets, and passes one end to the server over the channel that the server has created,
with a text that states the purpose. For MONITOR, the server logs the connection in as the user of metrics. Other
connections have to authenticate, and the server records the viewer's address as theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError

from kvpage_server.system.process import send_socket

CLIENT_NAME = "kvpage-monitor"
MONITOR = "monitor"  # the text with a socket for metrics
WITH_TOKEN = "token "  # before the address, if the viewer has logged in with the token
ANSWER_SECONDS = 10.0  # timeout of a reply of the store


class StoreConnector:
    """Opens connections to the store. `channel` is the socket over which the server receives their other ends."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def open(self, words: str) -> socket.socket:
        """Return a new connection to the store, a non-blocking socket. `words` is as for `store`. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            send_socket(self._channel, theirs, words)
            ours.setblocking(False)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def store(self, words: str, user: str = "", password: str = "") -> redis.asyncio.Redis:
        """Return a client of the store with one connection, which is opened for the first command.

        `words` is MONITOR, or the address of the viewer, with WITH_TOKEN before it if the viewer has used the token.
        """
        options: dict[str, Any] = {"username": user, "password": password} if user or password else {}
        pool = redis.asyncio.BlockingConnectionPool(
            connection_class=SocketPairConnection,
            max_connections=1,
            timeout=ANSWER_SECONDS,
            connector=self,
            words=words,
            protocol=3,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 1),
            **options,
        )
        return redis.asyncio.Redis(connection_pool=pool)


class SocketPairConnection(AbstractConnection):
    """A connection of redis-py over a socket pair. The server has the other end."""

    def __init__(self, *, connector: StoreConnector, words: str, **options: Any) -> None:
        super().__init__(**options)
        self._connector = connector
        self._words = words

    def repr_pieces(self) -> list[tuple[str, Any]]:
        return [("words", self._words)]

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and set the connection's name if the user may call CLIENT SETNAME.

        With redis-py's option `client_name`, users without that right could not connect.
        """
        await super().on_connect_check_health(check_health)
        with contextlib.suppress(NoPermissionError):
            await self.send_command("CLIENT", "SETNAME", CLIENT_NAME)
            await self.read_response()

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connector.open(self._words))

    def _host_error(self) -> str:
        return "the server"
