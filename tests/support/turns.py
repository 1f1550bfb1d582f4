"""A real server on an event loop of this process that measures its turns: how much processor time each took."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvpage_server.commands.families  # noqa: F401  fills the table
from benchmarks.ports import free_port
from benchmarks.turns import MeasuredLoop
from kvpage_server.app import _limit_garbage_collection
from kvpage_server.commands.context import Server
from kvpage_server.commands.families.server.config import apply
from kvpage_server.configuration.config import from_arguments
from kvpage_server.net.connection_memory import Watch
from kvpage_server.net.listener import Listener
from kvpage_server.net.session import Session
from kvpage_server.page import unix_ms
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.keyspace import Keyspace

_MARK = b"$4\r\nmark\r\n"
_AREA = b"*3\r\n$5\r\nKVMAP\r\n$4\r\nAREA\r\n$8\r\n33554432\r\n"
_END = b"*2\r\n$4\r\nPING\r\n" + _MARK


@dataclass
class Cost:
    """Cost of a command: processor seconds of the longest turn and of all, and the number of turns."""

    longest: float
    total: float
    turns: int


@dataclass
class Turns:
    """A server that runs."""

    loop: MeasuredLoop
    server: Server

    def cost(self, before: bytes, command: bytes, *, local: bool = False) -> Cost:
        """Return the cost of a command on a connection of its own, with its background work; `before` was sent first.

        Both are spelt already. With `local`, the connection is one to the unix socket, and has memory of KVMAP AREA.
        """
        with self._connect(local=local) as sock:
            if local:
                self._converse(sock, _AREA)
            self._converse(sock, before)
            self.on_loop(self.loop.forget)
            self._converse(sock, command)
        return self.on_loop(lambda: Cost(self.loop.longest, self.loop.total, self.loop.turns))

    def _connect(self, *, local: bool) -> socket.socket:
        if not local:
            return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(60)
        sock.connect(self.server.config.unixsocket)
        return sock

    def takes_short_turns(self, before: bytes, command: bytes, limit: float, tries: int = 5) -> bool:
        """Return whether each turn of a command takes less than `limit` seconds of the processor in one of some tries.

        A long turn is long each time, unless this machine did something else.
        """
        return any(self.cost(before, command).longest < limit for _ in range(tries))

    def join(self, stack: ExitStack, data: bytes) -> None:
        """Another connection that has said something, for as long as the stack is open."""
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", self.server.port), timeout=60))
        self._converse(sock, data)

    def sessions(self) -> list[weakref.ref[Session]]:
        """The server's connections."""
        return self.on_loop(lambda: [weakref.ref(client.connection) for client in self.server.clients.values()])

    def _converse(self, sock: socket.socket, data: bytes) -> None:
        """Send something, and read until all of it is answered."""
        sending = threading.Thread(target=sock.sendall, args=(data + _END,))
        sending.start()
        tail = b""
        while not tail.endswith(_MARK):
            received = sock.recv(1 << 18)
            assert received, f"the connection ended after {tail!r}"
            tail = (tail + received)[-100:]
        sending.join()

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Call a function in the loop's thread after its pending callbacks; return the result."""

        async def call() -> Any:
            await asyncio.sleep(0)
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(60)


@contextmanager
def measured(*options: str, directory: Path | None = None) -> Iterator[Turns]:
    """A server in memory, or tiered in a directory, with `options` as on its command line."""
    config = from_arguments(["--port", str(free_port()), *options])
    loop = MeasuredLoop()
    disk = Disk(directory, codes=config.page_code != "off") if directory is not None else None
    shared = bool(config.unixsocket)
    keyspace = Keyspace(maxmemory=config.maxmemory, policy=config.maxmemory_policy, disk=disk, shared=shared)
    if keyspace.tier is not None:
        keyspace.tier.load()
    server = Server(config, keyspace)
    apply(server, (name for name in config.parameters() if name != "requirepass"))
    listener = Listener(server, loop)
    ready = threading.Event()
    sweeping: asyncio.Task[None] | None = None

    async def serve() -> None:
        _limit_garbage_collection()
        if keyspace.tier is not None:
            keyspace.tier.connect(
                mode=config.appendfsync,
                limit=config.write_behind_limit,
                scrub_rate=config.scrub_rate,
                moved=lambda: None,
                page_code=config.page_code,
            )
        listener.start()
        ready.set()

    async def sweep() -> None:
        watch, last = Watch(server), 0.0
        while True:
            keyspace.sweep(unix_ms(), 2000)
            if time.monotonic() - last > 1:
                for _ in watch.look(last := time.monotonic()):
                    await asyncio.sleep(0)
            await asyncio.sleep(0.1)

    def run() -> None:
        nonlocal sweeping
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        sweeping = loop.create_task(sweep())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield Turns(loop, server)
    finally:

        async def close() -> None:
            listener.stop()
            if sweeping is not None:
                sweeping.cancel()
            if keyspace.tier is not None:
                await keyspace.tier.close()

        asyncio.run_coroutine_threadsafe(close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
