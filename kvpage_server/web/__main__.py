"""The HTTP process. Only `kvpage-server` starts it, since it needs the server's sockets. It ends with the server."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import redis

from kvpage_server.http import ConnectionLimiter, HttpServer
from kvpage_server.monitor.app import HEALTH, make_app
from kvpage_server.monitor.logins import CONFIGURED, MONITOR, Logins, StoreConnector
from kvpage_server.observe.engines import ALL_CHANNELS, Engines
from kvpage_server.system.process import end_with_parent
from kvpage_server.system.text import log_to_standard_error
from kvpage_server.web.routes import ROUTES

# -- Subscription to the engines' statistics, for the life of the process ----------------------------------------------

RECONNECT_SECONDS = 5.0  # before a new connection, because a server at its limit of clients counts each refused one
TURN_SECONDS = 5.0


async def listen(connector: StoreConnector, engines: Engines) -> None:
    """Pass the statistics that engines publish to `engines`, until cancelled. Reconnect after a lost connection."""
    while True:
        store = connector.store(MONITOR)
        with suppress(redis.RedisError, OSError):  # the server is ending, or has closed the connection
            async with store.pubsub(ignore_subscribe_messages=True) as channel:
                await channel.psubscribe(ALL_CHANNELS)
                while True:
                    message = await channel.get_message(timeout=TURN_SECONDS)
                    if message is not None:
                        engines.receive(message["channel"], message["data"])
        await store.aclose()
        await asyncio.sleep(RECONNECT_SECONDS)


CONNECTIONS, PER_ADDRESS = 256, 64  # limits of HTTP connections: in total, and from one address
GRACE_SECONDS = 1.0
LONGEST_MESSAGE = 1 << 16  # bytes


def main() -> None:
    """Run the HTTP process until the server has ended.

    `sys.argv` has the descriptors of the channel to the server and of the listening sockets. The first message on the
    channel has, separated by spaces, CONFIGURED or nothing, the token, and the sites under which proxies serve the
    page. SIGINT, SIGTERM and SIGHUP are ignored: a terminal sends them to the server as well, and this process ends
    with the server.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()  # if it hangs, it keeps no port from the next server
    log_to_standard_error("%(message)s")
    channel, *listening = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    # Not uvloop: with io_uring, libuv 1.52 aborts if a socket pair is closed in the turn in which it was opened.
    with asyncio.Runner() as runner:
        words = channel.recv(LONGEST_MESSAGE).decode().split(" ")
        channel.setblocking(False)  # a server that hangs receives no sockets
        runner.run(_serve(channel, words, listening))


async def _serve(channel: socket.socket, words: Sequence[str], listening: list[socket.socket]) -> None:
    source, token, *origins = words
    closed: Counter[str] = Counter()
    limiter = ConnectionLimiter(
        CONNECTIONS, PER_ADDRESS, closed=lambda reason: closed.update([reason]), always=[HEALTH]
    )
    connector = StoreConnector(channel)
    logins = Logins(connector, token, configured=source == CONFIGURED)
    server = HttpServer(make_app(logins, closed, ROUTES, origins), limiter, grace=GRACE_SECONDS)
    listening_to_engines = asyncio.create_task(listen(connector, logins.engines))
    server_ended = asyncio.Event()
    # the server sends nothing more on the channel, so it becomes readable when the server has ended
    asyncio.get_running_loop().add_reader(channel, server_ended.set)
    serving = asyncio.create_task(server.serve(listening))
    ended = asyncio.create_task(server_ended.wait())
    await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    listening_to_engines.cancel()
    await serving


if __name__ == "__main__":
    main()
