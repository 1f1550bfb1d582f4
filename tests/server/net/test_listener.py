"""Connections whose peer disconnects before the greeting."""

from __future__ import annotations

import asyncio
import socket

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.context import Server
from kvpage_server.configuration.config import from_arguments
from kvpage_server.net.listener import _VIEWERS, Listener
from kvpage_server.store.keyspace import Keyspace


def test_a_peer_closed_before_its_refusal_harms_no_other() -> None:
    async def refuse() -> None:
        server = Server(from_arguments(["--maxclients", "1"]), Keyspace())
        listener = Listener(server, asyncio.get_running_loop())
        pairs = [socket.socketpair() for _ in range(1 + _VIEWERS)]
        for ours, _theirs in pairs:
            listener.take(ours, "127.0.0.1:1", None, needs_password=False)
        gone, end = socket.socketpair()
        end.close()
        listener.take(gone, "127.0.0.1:2", None, needs_password=False)
        assert gone.fileno() < 0, "closed"
        assert server.stats.rejected == 1
        for _ours, theirs in pairs:
            theirs.sendall(b"PING\r\n")
            await asyncio.sleep(0.01)
            assert await asyncio.to_thread(theirs.recv, 100) == b"+PONG\r\n"
        for client in [*server.clients.values()]:
            client.connection.abort()
        for _ours, theirs in pairs:
            theirs.close()

    asyncio.run(refuse())
