"""How each server is written to and read from: over one connection of the page client, with as little else as can be.

Pages go to kvpage-server with KVPAGEMSET and KVPAGEMGET, and to Redis and Valkey as values of the same bytes with MSET
and MGET: no header, no checksum. So what differs is the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from kvpage_server.bench.raw import Raw
from kvpage_server.bench.work import Array, Blocks, Pages, Work
from kvpage_server.client.commands import PageCommands
from kvpage_server.client.connection import lend, page_pool
from kvpage_server.client.deadline import Deadline
from kvpage_server.client.exchange import Piece, Request
from kvpage_server.client.page import sized
from kvpage_server.client.reply import Values
from kvpage_server.client.scatter import CRLF, Bodies

Step = Callable[[], None]
_DEADLINE = 60.0  # seconds


class Store(Protocol):
    """What the benchmark asks of each server."""

    def writes(self, work: Work) -> list[Step]:
        """What writes a batch, for each generation."""

    def reads(self, work: Work) -> list[Step]:
        """What reads it."""


class _Connection:
    def __init__(self, url: str) -> None:
        self._connection = lend(page_pool(url, {}))

    def writing(self, request: Request[None]) -> Step:
        """A step that asks."""
        return lambda: self._connection.ask(request, Deadline(_DEADLINE))

    def reading(self, request: Request[dict[int, str]]) -> Step:
        """A step that asks, and must not miss anything."""

        def step() -> None:
            missed = self._connection.ask(request, Deadline(_DEADLINE))
            if missed:
                raise AssertionError(f"{len(missed)} were missed")

        return step


class PageStore(_Connection):
    """kvpage-server."""

    _commands = PageCommands()

    def writes(self, work: Work) -> list[Step]:
        """KVPAGEMSET, or KVBLOCKSET as often as there are blocks, pipelined."""
        if isinstance(work, Pages):
            return [self.writing(self._commands.set_pages(sized(pages, 0), 0)) for pages in work.pages]
        assert isinstance(work, Blocks)
        return [
            self.writing(self._commands.set_blocks(names, work.shape, [[body] for body in views(batch.written)], 0))
            for names, batch in zip(work.names, work.batches, strict=True)
        ]

    def reads(self, work: Work) -> list[Step]:
        """KVPAGEMGET or KVBLOCKMGET."""
        if isinstance(work, Pages):
            return [
                self.reading(self._commands.read_pages(keys, views(batch.read), verify=False))
                for keys, batch in zip(work.keys, work.batches, strict=True)
            ]
        assert isinstance(work, Blocks)
        return [
            self.reading(self._commands.read_blocks(names, work.shape, views(batch.read), verify=False))
            for names, batch in zip(work.names, work.batches, strict=True)
        ]


class ValueStore(_Connection):
    """Redis or Valkey: MSET and MGET of plain values. Blocks go whole, or as the single pages that they consist of."""

    def __init__(self, url: str, *, single_pages: bool = False) -> None:
        super().__init__(url)
        self._single_pages = single_pages

    def writes(self, work: Work) -> list[Step]:
        """MSET."""
        return [
            self.writing(_mset(*self._keys_and_values(work, generation, batch.written)))
            for generation, batch in enumerate(work.batches)
        ]

    def reads(self, work: Work) -> list[Step]:
        """MGET."""
        return [
            self.reading(_mget(*self._keys_and_values(work, generation, batch.read)))
            for generation, batch in enumerate(work.batches)
        ]

    def _keys_and_values(self, work: Work, generation: int, items: Array) -> tuple[list[bytes], list[memoryview]]:
        if isinstance(work, Pages) or self._single_pages:
            keys = [bytes(key) for key in work.page_keys(generation)]
        else:
            keys = [b"block:%d:%d" % (generation, i) for i in range(work.count)]
        return keys, views(items.reshape(len(keys), -1))


class RawStore:
    """No server: bare sockets."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw

    def writes(self, work: Work) -> list[Step]:
        """The bytes alone."""
        return [partial(self._raw.write, work, generation) for generation in range(len(work.batches))]

    def reads(self, work: Work) -> list[Step]:
        """The bytes alone."""
        return [partial(self._raw.read, work, generation) for generation in range(len(work.batches))]


def views(items: Array) -> list[memoryview]:
    """The rows of an array."""
    return [memoryview(item) for item in items]


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _mset(keys: list[bytes], values: list[memoryview]) -> Request[None]:
    def pieces() -> Iterator[Piece]:
        before = b"*%d\r\n%b" % (1 + 2 * len(keys), _bulk(b"MSET"))
        for key, value in zip(keys, values, strict=True):
            yield b"%b%b$%d\r\n" % (before, _bulk(key), len(value))
            yield value
            before = CRLF
        yield CRLF

    def read(answer: list[object]) -> None:
        assert answer == [b"OK"], answer

    return Request(pieces, Values, read)


def _mget(keys: list[bytes], places: list[memoryview]) -> Request[dict[int, str]]:
    text = b"*%d\r\n%b" % (1 + len(keys), b"".join(map(_bulk, [b"MGET", *keys])))
    return Request(lambda: iter((text,)), lambda: Bodies(places, array=True), dict)
