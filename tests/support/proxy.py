"""Faulty proxy on the loopback: it cuts, delays, fragments or changes a server's replies; in bad weather at random, and
requests likewise.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Weather:
    """Faults of each piece that passes, and their frequency per thousand."""

    flips: int = 20  # a bit is turned over
    cuts: int = 5  # the connection is closed
    truncations: int = 5  # some bytes are left out, and the rest follows
    delays: int = 20  # it arrives late
    longest: float = 0.05  # seconds
    random: random.Random = field(default_factory=random.Random)
    happened: Counter[str] = field(default_factory=Counter)

    def pass_on(self, data: bytes, way: str) -> bytes:
        """Return the changed piece of the ``questions`` or ``answers``. Raises OSError for a cut."""
        draw = self.random.randrange(1000)
        for name, often in (("flip", self.flips), ("cut", self.cuts), ("gap", self.truncations), ("late", self.delays)):
            if 0 <= draw < often:
                self.happened[name] += 1
                return self._happen(name, data)
            draw -= often
        return data

    def _happen(self, name: str, data: bytes) -> bytes:
        at = min(len(data) - 1, int(self.random.paretovariate(0.5)) - 1)  # frames precede bodies
        if name == "flip":
            changed = bytearray(data)
            changed[at] ^= 1 << self.random.randrange(8)
            return bytes(changed)
        if name == "cut":
            raise OSError("cut")
        if name == "gap":
            return data[:at] + data[at + self.random.randint(1, 8) :]
        time.sleep(self.random.random() * self.longest)
        return data


@dataclass
class Proxy:
    """Proxy that forwards everything by default. Settings apply to the bytes that a server sends from then on, on each
    connection.
    """

    target: int  # port
    port: int = 0
    cut_after: int | None = None  # bytes, then the connection is closed
    mend_after: int | None = None  # so many cuts, then no more
    stall_after: int | None = None  # bytes, then nothing more
    die_after: int | None = None  # bytes on all connections together, then nobody is there
    flip_at: int | None = None  # the byte that comes with a bit turned over
    hold: float = 0  # seconds before every piece
    drip: float = 0  # seconds between single bytes
    weather: Weather | None = None
    connections: int = 0  # that have been made so far
    questions: int = 0  # pieces that clients have sent so far
    _open: list[socket.socket] = field(default_factory=list)
    _passed: int = 0  # bytes on all connections together

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            self.connections += 1
            if self._is_dead(0):
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # it is being restarted
                client.close()
                continue
            self._open += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.questions += 1
                sink.sendall(self.weather.pass_on(data, "questions") if self.weather else data)
        self._close(source, sink)

    def _answer(self, source: socket.socket, sink: socket.socket) -> None:
        passed, limit = 0, None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if limit != (limit := self.cut_after if self.stall_after is None else self.stall_after):
                    passed = 0
                if limit is not None and passed + len(data) > limit:
                    sink.sendall(data[: limit - passed])
                    if self.stall_after is not None:
                        return  # the sockets stay open until the proxy is closed
                    if self.mend_after is not None and (mended := self.mend_after - 1) <= 0:
                        self.cut_after, self.mend_after = None, mended
                    break
                if self.flip_at is not None and passed <= self.flip_at < passed + len(data):
                    changed = bytearray(data)
                    changed[self.flip_at - passed] ^= 1
                    data = bytes(changed)
                if self.weather:
                    data = self.weather.pass_on(data, "answers")
                passed += len(data)
                if self._is_dead(len(data)):
                    break
                time.sleep(self.hold)
                if self.drip:
                    for byte in data:
                        sink.sendall(bytes([byte]))
                        time.sleep(self.drip)
                else:
                    sink.sendall(data)
        self._close(source, sink)

    def _is_dead(self, count: int) -> bool:
        self._passed += count
        return self.die_after is not None and self._passed > self.die_after

    def _close(self, *sockets: socket.socket) -> None:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._close(*self._open)


@contextmanager
def start_proxy(target: int) -> Iterator[Proxy]:
    """A proxy in front of the server that listens on port `target`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        proxy = Proxy(target, port=listening.getsockname()[1])
        thread = threading.Thread(target=proxy.serve, args=(listening,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.close()
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
            thread.join(10)
