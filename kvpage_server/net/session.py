"""One client: bytes from its transport become commands, and their replies go back in order."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.dispatch import execute
from kvpage_server.net.transport import SocketTransport
from kvpage_server.resp.parser import Command, Limits, Parser, ProtocolError
from kvpage_server.resp.reply import Piece, Reply, Stream, encode

TURN = 256  # commands, or items of a streamed reply, before other clients have their turn


class Session:
    """The conversation with one connected socket."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._server = server
        self._loop = loop
        self._parser = Parser(server.keyspace.arena.allocate, limits=Limits(max_bulk=server.config.proto_max_bulk_len))
        self._out: list[Piece] = []
        self._stream: Iterator[Reply] | None = None  # the rest of a reply that is made while it is sent
        self._ending = False
        self._scheduled = False
        self.client = Client(
            server,
            id=next(server.client_ids),
            address=_spell(sock, sock.getpeername()),
            local_address=_spell(sock, sock.getsockname()),
            push=self._push,
            close=self._end,
        )
        server.clients[self.client.id] = self.client
        server.stats.connections += 1
        self._transport = SocketTransport(loop, sock, self)

    # -- the transport's side --------------------------------------------------------------------------------------

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong."""
        return self._parser.buffers()

    def received(self, count: int) -> None:
        """Bytes are there: run what they complete."""
        self._server.stats.bytes_in += count
        try:
            self._parser.received(count)
        except ProtocolError as error:
            self._refuse(error)
            return
        self._run()

    def drained(self) -> None:
        """There is room for replies again."""
        self._run()

    def lost(self) -> None:
        """The connection is gone."""
        self._ending = True
        self._stream = None
        self._server.clients.pop(self.client.id, None)
        self._server.stats.bytes_out += self._transport.bytes_out

    # -- commands --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Answer what has arrived, a turn's worth at the most; then send, and take up the rest later."""
        left = TURN
        try:
            while left and not self._ending and not self._transport.crowded:
                left -= 1
                if self._stream is not None:
                    self._continue_stream()
                    continue
                command = self._parser.next()
                if command is None:
                    break
                self._answer(command)
                if self._stream is not None:
                    self._flush()
        except ProtocolError as error:
            self._refuse(error)
            return
        self._flush()
        if self._ending:
            self._transport.close()
        elif self._transport.crowded:
            self._transport.pause_reading()  # until drained() is called
        elif not left:
            self._transport.pause_reading()
            self._schedule()
        else:
            self._transport.resume_reading()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._scheduled = False
        if not self._ending:
            self._run()

    def _answer(self, command: Command) -> None:
        self.client.active = time.monotonic()
        reply = execute(self.client, command)
        if type(reply) is Stream:
            self._out.append(b"*%d\r\n" % reply.length)
            self._stream = reply.items
        else:
            encode(reply, self.client.protocol, self._out)

    def _continue_stream(self) -> None:
        assert self._stream is not None
        for _ in range(16):
            try:
                encode(next(self._stream), self.client.protocol, self._out)
            except StopIteration:
                self._stream = None
                break
        self._flush()

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._transport.write(out)

    def _push(self, message: Reply) -> None:
        encode(message, self.client.protocol, self._out)
        self._flush()

    def _refuse(self, error: ProtocolError) -> None:
        self._out.append(b"-ERR Protocol error: %b\r\n" % str(error).encode("utf-8", "replace"))
        self._flush()
        self._ending = True
        self._transport.close()

    def _end(self) -> None:
        self._ending = True
        self._loop.call_soon(self._transport.close)


def _spell(sock: socket.socket, address: object) -> str:
    """An address as CLIENT LIST shows it."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}"
    return f"{address or 'unix'}:0"
