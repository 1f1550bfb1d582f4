"""How long others wait while somebody calls a command with its worst arguments: all of them, see `worst`.

Two figures for each. The longest turn of the server's loop, in processor time: it is valid on a busy machine too, and
has to stay below 10 ms. And the longest wait of a client that sends PINGs meanwhile, which includes the kernel, the
server's other threads and other load.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import Server, _run
from benchmarks.turns import Turns
from benchmarks.worst import MANY, Scene, Words, scene_name, scenes, spell

BUDGET = 10.0  # milliseconds
_SETTLE = 0.15  # seconds of rest, so that earlier work has ended
_PATIENCE = 60.0  # seconds, timeout of a reply
_FEW = 100  # connections whose end is measured, at most: the end of thousands is many events of one turn in any case
_COMMANDS_PER_PIPELINE = 256  # commands that are sent before their replies are read
_OPTIONS = (
    *("--client-query-buffer-limit", "1gb", "--proto-max-bulk-len", "512mb", "--maxmemory-clients", "3gb"),
    *("--maxclients", "12000", "--client-output-buffer-limit", *["normal", "0", "0", "0", "pubsub", "0", "0", "0"]),
)


class Figures(NamedTuple):
    """Milliseconds of the loop's longest turn, of the longest wait of a PING, and of the command."""

    turn: float
    waited: float
    took: float
    name: str

    @property
    def line(self) -> str:
        """Return the printed line."""
        mark = "  <" if self.turn > BUDGET else ""
        return f"{self.turn:8.1f} ms {self.waited:8.1f} ms {self.took:9.1f} ms  {self.name}{mark}"


class Replies:
    """A connection that reads replies without storing them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", 1 << 20)

    def ask(self, commands: Sequence[Words]) -> None:
        """Send some commands and read their replies. Raises error replies."""
        for start in range(0, len(commands), _COMMANDS_PER_PIPELINE):
            some = commands[start : start + _COMMANDS_PER_PIPELINE]
            for words in some:
                self.send(words)
            for words in some:
                line = self.skip()
                if line[:1] == b"-" and not line.startswith(b"-NOPERM"):
                    raise ValueError(f"{words[0].decode()} {words[1:2]}: {line.decode()}")

    def send(self, words: Words) -> None:
        """Send a command, without a copy of a large value."""
        data = spell([*words[:-1], b""]) if len(words[-1]) > 1 << 20 else b""
        if not data:
            self._sock.sendall(spell(words))
            return
        self._sock.sendall(data[: -len(b"$0\r\n\r\n")] + b"$%d\r\n" % len(words[-1]))
        self._sock.sendall(words[-1])
        self._sock.sendall(b"\r\n")

    def skip(self) -> bytes:
        """Read a reply, and return its first line."""
        line = self._file.readline()
        if not line:
            raise ConnectionError("the connection ended")
        if line[:1] in b"$=" and line[1:2] != b"-":
            left = int(line[1:]) + 2
            while left:
                left -= len(self._file.read(min(left, 1 << 20)))
        elif line[:1] in b"*~>%" and line[1:2] != b"-":
            for _ in range(int(line[1:]) * (2 if line[:1] == b"%" else 1)):
                self.skip()
        return line


class Side:
    """A server, and the process that sends PINGs to it."""

    def __init__(self, server: Server, pings: Connection) -> None:
        self.server = server
        self.turns = Turns(server.directory)
        self._pings = pings

    def forget(self) -> None:
        """Reset the longest turn."""
        self.longest()

    def longest(self) -> tuple[float, float]:
        """Return the milliseconds of the longest turn, and of the longest wait of a PING, since the last call."""
        self._pings.send(True)
        return self.turns.longest(), float(self._pings.recv())

    def figures(self, scene: Scene) -> Figures:
        """Return a scene's cost for other clients."""
        with ExitStack() as stack:
            sock = stack.enter_context(self.server.connect())
            sock.settimeout(_PATIENCE)
            replies = Replies(sock)
            replies.ask([[b"FLUSHALL"], *scene.before, *([[b"SAVE"]] if scene.cold else [])])
            for _ in range(scene.crowd):
                Replies(stack.enter_context(self.server.connect())).ask(scene.they_say)
            time.sleep(_SETTLE)
            self.forget()
            began = time.perf_counter()
            replies.send(scene.words)
            with suppress(ConnectionError):  # QUIT
                replies.skip()
            took = 1000 * (time.perf_counter() - began)
            time.sleep(scene.rest or _SETTLE)  # work after the reply
            turn, waited = self.longest()
        if scene.after:
            with self.server.connect() as sock:
                Replies(sock).ask(scene.after)
        time.sleep(_SETTLE)
        ended = self.longest() if 0 < scene.crowd < _FEW else (0.0, 0.0)  # and when the connections end
        return Figures(max(turn, ended[0]), max(waited, ended[1]), took, scene_name(scene))


def _ping(port: int, orders: Connection) -> None:
    """Run the process that sends PINGs. At each message, send back the longest wait since the last one, in
    milliseconds.
    """
    longest = 0.0
    while True:  # the scene may close this connection
        with socket.create_connection(("127.0.0.1", port)) as sock, suppress(ConnectionError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer = b"+PONG"
            while answer:
                began = time.perf_counter()
                sock.sendall(b"PING\r\n")
                answer = sock.recv(100)
                longest = max(longest, 1000 * (time.perf_counter() - began))
                if orders.poll(0.0005):
                    if not orders.recv():
                        return
                    orders.send(longest)
                    longest = 0.0


@contextmanager
def _pinging(port: int) -> Iterator[Connection]:
    """Run the process that sends PINGs during the block."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_ping, args=(port, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send(False)
        process.join()


@contextmanager
def _started(*options: str) -> Iterator[Server]:
    """Run the server on a loop that measures its turns, with files that it may rewrite."""
    with tempfile.TemporaryDirectory() as directory:
        configured, users = Path(directory, "kvpage.conf"), Path(directory, "users.acl")
        users.touch()
        configured.write_text(f"aclfile {users}\n", encoding="utf-8")
        command = (sys.executable, "-m", "benchmarks.turns", str(configured))
        with _run("kvpage-server", "kvpage_version", *command, more=(*_OPTIONS, *options)) as server:
            yield server


def all_figures(chosen: Iterable[Scene]) -> Iterator[Figures]:
    """Yield the figures of each scene, one after the other."""
    with ExitStack() as stack:
        sides: dict[bool, Side] = {}
        for cold, options in (
            (False, ("--store", "memory", "--maxmemory", "0")),
            (True, ("--store", "tiered", "--maxmemory", "4mb")),
        ):
            server = stack.enter_context(_started(*options))
            sides[cold] = Side(server, stack.enter_context(_pinging(server.port)))
        yield sides[False].figures(Scene("with nothing to do", [b"PING"], rest=1.0))
        for scene in chosen:
            try:
                yield sides[scene.cold].figures(scene)
            except TimeoutError:
                yield Figures(*sides[scene.cold].longest(), 1000 * _PATIENCE, f"{scene_name(scene)}: no reply")


def main(arguments: list[str] | None = None) -> None:
    """Print a line per scene, then the scenes over the budget."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the arguments")
    parser.add_argument("--only", metavar="TEXT", default="", help="what has this in its name, such as 'ACL SETUSER'")
    args = parser.parse_args(arguments)
    many = MANY // 10 if args.quick else MANY
    print(f"of the loop's longest turn, that a PING waited, that the command took; {many} arguments\n", flush=True)
    found = []
    for figures in all_figures(s for s in scenes(many) if args.only.lower() in scene_name(s).lower()):
        print(figures.line, flush=True)
        found.append(figures)
    over = sorted((figures for figures in found if figures.turn > BUDGET), reverse=True)
    print(f"\n{len(over)} of {len(found)} hold the loop for more than {BUDGET:.0f} ms")
    for figures in over:
        print(figures.line)


if __name__ == "__main__":
    main()
