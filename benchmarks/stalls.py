"""How long a client that PINGs waits while another calls a command with its worst arguments.

Very many keys: absent, present, in blocks, on disk alone; very many words; requests of very many blocks; large values.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.servers import Server, start_kvpage
from kvpage_server.commands.registry import AT_ONCE, TABLE
from kvpage_server.commands.transaction import MOST_QUEUED

MANY = 100_000
LARGE = 256 * 1024**2  # bytes
_LAYERS, _HEADS = 125, 8  # of a block: a thousand pages
_PAGES = _LAYERS * _HEADS
_SETTLE = 0.3  # seconds without anything to do
_BUDGET = 10.0  # milliseconds

Words = list[bytes]


class Scene(NamedTuple):
    """A command of `words`, asked when what `before` stores is there; `cold`: on disk alone."""

    name: str
    words: Words
    before: Sequence[Words] = ()
    cold: bool = False


def spell(words: Sequence[bytes]) -> bytes:
    """A command as it goes over the wire."""
    parts = chain.from_iterable((b"$%d\r\n" % len(word), word, b"\r\n") for word in words)
    return b"*%d\r\n" % len(words) + b"".join(parts)


# -- what is asked -------------------------------------------------------------------------------------------------


def scenes(many: int) -> list[Scene]:
    """Every command with its worst arguments, of which there are so many."""
    found = [*_of_keys(many), *_of_pages(many), *_of_blocks(many), *_of_requests(many), *_of_all(many), *_others(many)]
    have = {scene.words[0].lower() for scene in found}
    words = [b"x"] * many
    rest = [spec for spec in TABLE.values() if spec.arity < 0 and spec.name.split("|")[0].encode() not in have]
    return found + [Scene("words", [*spec.name.encode().split(b"|"), *words]) for spec in rest]


def _of_keys(many: int) -> Iterator[Scene]:
    keys = [b"key:%d" % at for at in range(many)]
    short = [b"MSET", *(word for key in keys for word in (key, b"value"))]
    long = [b"MSET", *(word for key in keys for word in (key, b"v" * 2000))]
    yield Scene("new", short)
    yield Scene("new, long", long)
    yield Scene("again", short, [short])
    yield Scene("too many", [b"MSETNX", *short[1:]])
    for command in (b"DEL", b"UNLINK", b"EXISTS", b"TOUCH", b"MGET", b"WATCH"):
        words = [command, *keys]
        yield Scene("absent", words)
        yield Scene("present", words, [short])
        yield Scene("present, long", words, [long])
        yield Scene("cold", words, [long], cold=True)
    for command in (b"SUBSCRIBE", b"PSUBSCRIBE", b"UNSUBSCRIBE", b"PUNSUBSCRIBE"):
        yield Scene("absent", [command, *keys])
    yield Scene("channels", [b"PUBSUB", b"NUMSUB", *keys])
    yield Scene("names", [b"COMMAND", b"INFO", *[b"get"] * many])
    yield Scene("rules", [b"ACL", b"SETUSER", b"user", *(b"~" + key for key in keys[: AT_ONCE - 3])])


def _of_pages(many: int) -> Iterator[Scene]:
    names = [_page(b"r", at) for at in range(many)]
    keys = [b"kv:" + b":".join(name) for name in names]
    count, arguments = b"%d" % many, list(chain.from_iterable(names))
    others = list(chain.from_iterable(_page(b"q", at) for at in range(many)))
    stored = [b"KVPAGEMSET", count, *_with_bodies(names, b"b" * 64)]
    large = [b"KVPAGEMSET", count, *_with_bodies(names, b"b" * 4096)]
    blocks = [_block(b"r", page) for page in range(-(-many // _PAGES))]
    yield Scene("new", stored)
    yield Scene("again", stored, [stored])
    yield Scene("in blocks", stored, blocks)
    yield Scene("in cold blocks", stored, blocks, cold=True)
    for command in (b"KVPAGEMGET", b"KVPAGEMEXISTS"):
        yield Scene("absent", [command, count, *arguments])
        yield Scene("present", [command, count, *arguments], [stored])
        yield Scene("in blocks", [command, count, *arguments], blocks)
        yield Scene("absent beside blocks", [command, count, *others], blocks)
        yield Scene("cold", [command, count, *arguments], [large], cold=True)
        yield Scene("in cold blocks", [command, count, *arguments], blocks, cold=True)
    for command in (b"DEL", b"EXISTS", b"MGET"):
        yield Scene("pages", [command, *keys], [stored])
        yield Scene("pages in blocks", [command, *keys], blocks)
        yield Scene("cold pages", [command, *keys], [large], cold=True)


def _of_blocks(many: int) -> Iterator[Scene]:
    count = b"%d" % many
    for kind, names in (
        ("of one request", [(b"r", b"%d" % page) for page in range(many)]),
        ("of as many requests", [(b"r%d" % page, b"0") for page in range(many)]),
    ):
        arguments = list(chain.from_iterable(names))
        pages = [[req, b"0", b"0", page, b"0"] for req, page in names]
        stored = [b"KVPAGEMSET", count, *_with_bodies(pages, b"b" * 64)]
        for before, there in (([], "absent"), ([stored], "present")):
            yield Scene(f"{there}, {kind}", [b"KVPAGEPREFIX", b"1", b"1000", count, *arguments], before)
            yield Scene(f"{there}, {kind}", [b"KVBLOCKMGET", count, *arguments], before)
        yield Scene(f"cold, {kind}", [b"KVBLOCKMGET", count, *arguments], [stored], cold=True)
    yield Scene("TYPE set", [b"SCAN", b"0", b"TYPE", b"set", b"COUNT", b"1000000"], [stored])


def _of_requests(many: int) -> Iterator[Scene]:
    ids = [b"%d" % page for page in range(many)]
    pages = [[b"r", b"0", b"0", page, b"0"] for page in ids]
    stored = [b"KVPAGEMSET", b"%d" % many, *_with_bodies(pages, b"b" * 64)]
    for command in (b"KVPAGEDEL", b"KVPAGEVERIFY", b"KVPAGEPIN", b"KVPAGEUNPIN", b"KVPAGELEASE"):
        time = [b"1000"] if command == b"KVPAGELEASE" else []
        yield Scene("whole", [command, b"r", *time], [stored])
        yield Scene("by its blocks", [command, b"r", *time, *ids], [stored])
        yield Scene("absent blocks", [command, b"r", *time, *ids])
    index = b"kv:r:index"
    for words in (
        *([b"KVPAGEINDEX", b"r", b"WITHSIZES"], [b"KVPAGEWHY", b"r"], [b"SMEMBERS", index], [b"SCARD", index]),
        *([b"SISMEMBER", index, b"kv:r:0:0:0:0"], [b"SSCAN", index, b"0", b"COUNT", b"1000000"]),
        *([b"EXISTS", index], [b"TYPE", index], [b"TTL", index], [b"GET", index]),
    ):
        yield Scene("many blocks", words, [stored])


def _of_all(many: int) -> Iterator[Scene]:
    strings = [b"MSET", *(word for at in range(many) for word in (b"key:%d" % at, b"value"))]
    blocks = [_block(b"r", page) for page in range(-(-many // _PAGES))]
    for what, before in (("strings", [strings]), ("blocks", blocks)):
        for words in (
            *([b"KEYS", b"*"], [b"KEYS", b"*a*b*c*"], [b"SCAN", b"0", b"COUNT", b"1000000"], [b"RANDOMKEY"]),
            *([b"DBSIZE"], [b"INFO", b"everything"], [b"FLUSHALL"], [b"FLUSHDB", b"ASYNC"], [b"MEMORY", b"STATS"]),
        ):
            yield Scene(what, words, before)


def _others(many: int) -> Iterator[Scene]:
    value = b"v" * LARGE if many == MANY else b"v" * 8 * 1024**2
    for words in ([b"SET", b"large", value], [b"ECHO", value], [b"GET", value], [b"PUBLISH", b"channel", value]):
        yield Scene("large", words)
    yield Scene("large page", [b"KVPAGESET", *_page(b"r", 0), b"8", b"1", b"1", b"0", value])
    for words in ([b"GET", b"large"], [b"GETRANGE", b"large", b"1", b"-1"], [b"DEL", b"large"]):
        yield Scene("large", words, [[b"SET", b"large", value]])
    yield Scene("ten times as many words", [b"PING", *(b"%d" % at for at in range(10 * many))])
    block = [_block(b"r", 0)]
    for words in ([b"KVBLOCKGET", b"r", b"0"], [b"KVBLOCKEXISTS", b"r", b"0"], [b"DEL", b"kv:r:0:0:0:0"]):
        yield Scene("a block of a thousand pages", words, block)
    queued = [[b"SET", b"key:%d" % at, b"value"] for at in range(min(many, MOST_QUEUED // 3))]
    yield Scene("as much as may be queued", [b"EXEC"], [[b"MULTI"], *queued])


def _page(req_id: bytes, at: int) -> Words:
    block, at = divmod(at, _PAGES)
    return [req_id, b"%d" % (at // _HEADS), b"%d" % (at % _HEADS), b"%d" % block, b"0"]


def _with_bodies(names: Sequence[Words], body: bytes) -> Iterator[bytes]:
    return (word for name in names for word in (*name, b"8", b"1", b"%d" % len(body), b"0", body))


def _block(req_id: bytes, page: int) -> Words:
    shape = [b"%d" % number for number in (page, _LAYERS, _HEADS, 1, 0, 1, 0, 8, 64)]
    return [b"KVBLOCKSET", req_id, *shape, b"b" * 64 * _PAGES]


# -- how long it is felt -------------------------------------------------------------------------------------------


class Replies:
    """A connection that reads replies without looking into them."""

    def __init__(self, sock: socket.socket) -> None:
        self._file = sock.makefile("rb", 1 << 20)

    def skip(self) -> bytes:
        """Read a reply; its first line."""
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


def _ping(port: int, orders: Connection) -> None:
    """In a process of its own: at each order the longest wait since the one before, in milliseconds."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        longest = 0.0
        while True:
            began = time.perf_counter()
            sock.sendall(b"PING\r\n")
            sock.recv(100)
            longest = max(longest, 1000 * (time.perf_counter() - began))
            if orders.poll(0.0005):
                if not orders.recv():
                    return
                orders.send(longest)
                longest = 0.0


@contextmanager
def pinging(port: int) -> Iterator[Connection]:
    """Somebody who PINGs all the while."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_ping, args=(port, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send(False)
        process.join()


def longest_wait(server: Server, scene: Scene, orders: Connection) -> tuple[float, float]:
    """Milliseconds that a PING waited at most while the scene's command ran, and that the command took."""
    server.admin.flushall()
    with server.connect() as sock:
        replies = Replies(sock)
        for words in scene.before:
            sock.sendall(spell(words))
            replies.skip()
        if scene.cold:
            server.admin.execute_command("SAVE")
        data = spell(scene.words)
        time.sleep(_SETTLE)
        _ask(orders)
        began = time.perf_counter()
        sock.sendall(data)
        replies.skip()
        took = 1000 * (time.perf_counter() - began)
    time.sleep(_SETTLE)  # what is done after the reply, and when the connection ends
    return _ask(orders), took


def _ask(orders: Connection) -> float:
    orders.send(True)
    return float(orders.recv())


def main(arguments: list[str] | None = None) -> None:
    """Print a line a scene, those that were felt longest first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stalls")
    parser.add_argument("--quick", action="store_true", help="a tenth of the arguments")
    many = MANY // 10 if parser.parse_args(arguments).quick else MANY
    found: list[tuple[float, float, str]] = []
    with ExitStack() as stack:
        options = ("--client-query-buffer-limit", "1gb", "--proto-max-bulk-len", "512mb", "--maxmemory-clients", "2gb")
        memory = stack.enter_context(start_kvpage(*options))
        disk = stack.enter_context(start_kvpage("--store", "tiered", "--maxmemory", "4mb", *options))
        waits = {server.port: stack.enter_context(pinging(server.port)) for server in (memory, disk)}
        idle = _ask(waits[memory.port]) and (time.sleep(1), _ask(waits[memory.port]))[1]
        for scene in scenes(many):
            server = disk if scene.cold else memory
            name = scene.words[0].decode() + " " + scene.name
            waited, took = longest_wait(server, scene, waits[server.port])
            found.append((waited, took, name))
            print(f"{waited:8.1f} ms  {took:9.1f} ms  {name}", flush=True)
    found.sort(reverse=True)
    print(f"\nlongest wait of a PING, time of the command; {many} arguments; with nothing to do {idle:.1f} ms\n")
    for waited, took, name in found:
        print(f"{waited:8.1f} ms  {took:9.1f} ms  {name}{'  <' if waited > _BUDGET else ''}")
