"""Connections to the store without a listener, which only this process can open.

A connection is a pair of sockets. The server gets the other end over the channel. A connection for metrics has its own
user. Other connections have to authenticate, and the server gets the viewer's address.
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

from kvpage_server.system.fd_passing import hand_over

CLIENT_NAME = "kvpage-monitor"
MONITOR = "monitor"  # the text that is sent with a socket for metrics
WITH_TOKEN = "token "  # the prefix of the address of a viewer with the token
ANSWER_SECONDS = 10.0  # for an answer of the store


class Entrance:
    """The channel over which this process passes sockets to the server."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def open(self, words: str) -> socket.socket:
        """Return a new connection to the store. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            hand_over(self._channel, theirs, words)
            ours.setblocking(False)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def store(self, words: str, user: str = "", password: str = "") -> redis.asyncio.Redis:
        """Return a client of the store, with one connection.

        `words` is MONITOR, the address of the viewer, or WITH_TOKEN and the address.
        """
        options: dict[str, Any] = {"username": user, "password": password} if user or password else {}
        pool = redis.asyncio.BlockingConnectionPool(
            connection_class=HandedConnection,
            max_connections=1,
            timeout=ANSWER_SECONDS,
            entrance=self,
            words=words,
            protocol=3,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 1),
            **options,
        )
        return redis.asyncio.Redis(connection_pool=pool)


class HandedConnection(AbstractConnection):
    """A connection of redis-py over a socket pair, of which the server has the other end."""

    def __init__(self, *, entrance: Entrance, words: str, **options: Any) -> None:
        super().__init__(**options)
        self._entrance = entrance
        self._words = words

    def repr_pieces(self) -> list[tuple[str, Any]]:
        return [("words", self._words)]

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Set the connection's name, if the user may do so. With redis-py's `client_name`, others could not connect."""
        await super().on_connect_check_health(check_health)
        with contextlib.suppress(NoPermissionError):
            await self.send_command("CLIENT", "SETNAME", CLIENT_NAME)
            await self.read_response()

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._entrance.open(self._words))

    def _host_error(self) -> str:
        return "the server"
