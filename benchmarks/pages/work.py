"""The work: batches of pages under names in three orders, with bodies of one length or of many."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count as numbers

from kvpage_server.bench import spell
from kvpage_server.page import BlockShape, PageKey

KIB = 1024
GENERATIONS = 8
_REQ_ID = b"kvpage-bench"
_POOL = 1 << 20  # bytes of the pool in which bodies begin
_STEP = 1021  # between one body's beginning and the next one's; a prime, so no two begin at the same place

SHORT, LONGEST = 3, 300 * 1000  # bytes of the shortest and the longest body of mixed lengths


@dataclass(frozen=True)
class Batch:
    """Pages that are transferred together. No two bodies of a work are equal."""

    keys: list[PageKey]
    bodies: list[memoryview]


@dataclass(frozen=True)
class Work:
    """Batches of pages, one for each generation, with the same lengths and other names, so that the CPU's cache has
    none.
    """

    name: str
    batches: list[Batch]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the bodies of a batch."""
        return sum(map(len, self.batches[0].bodies))


def _in_an_engines_order(count: int, generation: int) -> list[PageKey]:
    """Return keys in the order of an engine: by block, layer, head, K and V."""
    return [PageKey(_REQ_ID, i // 16, i // 2 % 8, generation, i % 2) for i in range(count)]


def _layers_fastest(count: int, generation: int) -> list[PageKey]:
    """Return keys in an order in which each page has another layer than the page before."""
    return [PageKey(_REQ_ID, i % 32, i // 32 % 8, generation, i // 256) for i in range(count)]


def _at_random(count: int, generation: int) -> list[PageKey]:
    """Return random keys: each page has a request of its own; ids have 1 to 10 digits, layers and heads 1 to 5."""
    noise = random.Random(f"{count} {generation}")

    def number(digits: int, below: int) -> int:
        return min(noise.randrange(10 ** noise.randint(1, digits)), below - 1)

    keys: dict[bytes, PageKey] = {}
    while len(keys) < count:
        req_id = b"%d" % number(10, 10**10)
        key = PageKey(req_id, number(5, 1 << 16), number(5, 1 << 16), number(10, 1 << 32), noise.randrange(2))
        keys.setdefault(bytes(key), key)
    return list(keys.values())


ORDERS: dict[str, Callable[[int, int], list[PageKey]]] = {
    "an engine's order": _in_an_engines_order,
    "layers fastest": _layers_fastest,
    "random ids": _at_random,
}


def pages(count: int, nbytes: int, order: str) -> Work:
    """Return the work with `count` pages of `nbytes` bytes."""
    return _work(f"{count} pages of {spell(nbytes)}", [nbytes] * count, order)


def mixed_pages(count: int, order: str) -> Work:
    """Return the work with mixed lengths: every fourth body has 3 bytes, the others 1 to 300 KB, half of them below
    17 KB.
    """
    noise = random.Random(count)
    lengths = [SHORT if i % 4 == 3 else int(1000 * (LONGEST / 1000) ** noise.random()) for i in range(count)]
    return _work(mixed_name(count), lengths, order)


def mixed_name(count: int) -> str:
    """Return the name of the work, without the order of its keys."""
    return f"{count} pages of 3 bytes to 300 KB"


def _work(name: str, lengths: Sequence[int], order: str) -> Work:
    name_pages = ORDERS[order]
    batches = [
        Batch(name_pages(len(lengths), generation), bodies(lengths, generation)) for generation in range(GENERATIONS)
    ]
    return Work(f"{name}, {order}", batches)


@dataclass(frozen=True)
class BlockWork:
    """Batches of blocks of one shape, one for each generation, with other names."""

    name: str
    shape: BlockShape
    names: list[list[tuple[bytes, int]]]
    bodies: list[list[memoryview]]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the bodies of a batch."""
        return len(self.names[0]) * self.shape.nbytes


def blocks(count: int, shape: BlockShape) -> BlockWork:
    """Return the work with `count` blocks in a batch."""
    number = numbers()
    names = [[(_REQ_ID, next(number)) for _ in range(count)] for _ in range(GENERATIONS)]
    all_bodies = [bodies([shape.nbytes] * count, generation) for generation in range(GENERATIONS)]
    return BlockWork(f"{count} blocks of {spell(shape.nbytes)}", shape, names, all_bodies)


def bodies(lengths: Sequence[int], generation: int) -> list[memoryview]:
    """Return bodies with these lengths: pieces of one pool of noise, each with another beginning."""
    noise = memoryview(_noise(_POOL + max(lengths)))
    first = generation * len(lengths)
    starts = ((first + i) * _STEP % _POOL for i in range(len(lengths)))
    return [noise[start : start + nbytes] for start, nbytes in zip(starts, lengths, strict=True)]


@cache
def _noise(nbytes: int) -> bytes:
    return random.Random(0).randbytes(nbytes)
