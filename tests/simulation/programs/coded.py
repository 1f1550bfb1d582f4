"""Pages and blocks of bfloat16 whose exponents repeat, so that the server's lossless code makes them shorter.

They are drawn in addition to a program's other steps, by a chance of their own, in a fourth of the seeds: with any
`page-code`, so that a seed with the code and one without it have the same kinds of steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from kvpage_server.lossless import encode_block_body
from kvpage_server.page import BlockShape, DType, Plane, checksum
from tests.simulation.model.model import Words
from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, PEERS, Step

_SHARE = 0.12  # of steps that one of these follows
_DTYPE, _COLUMNS = 4, 16  # bfloat16
_ROWS = [8, 32, 80]  # the longest pages have more than one page of the file


def page_code(number: int) -> str:
    """Return the parameter `page-code` of a seed with a disk."""
    rng = random.Random(f"page code {number}")
    return rng.choice(["disk", "idle", "always"]) if rng.random() < 0.5 else "off"


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws some of them, and mostly none, after each step."""
    rng = random.Random(f"coded {seed.number}")
    share = _SHARE if rng.random() < (0.6 if page_code(seed.number) != "off" else 0.15) else 0.0

    def pick() -> list[Step]:
        seed.peer = rng.randrange(PEERS)
        return rng.choice([_stored, _stored, _stored, _read, _read, _rested])(seed)

    return seed.beside(rng, share, pick)


def _values(seed: Seed, count: int) -> bytes:
    """Return so many values of a random sign and mantissa, and of one of two exponents."""
    sign_and_exponent = seed.rng.choices(b"\x3f\xbf", k=count)
    return bytes(byte for high in sign_and_exponent for byte in (seed.rng.randrange(256), high))


def _described(seed: Seed, page: Words) -> Words:
    """Return a page with its dtype, shape, time to live and body."""
    rows, ttl = seed.rng.choice(_ROWS), seed.rng.choice([0, 0, 0, 0, 2])
    return *page, b"%d" % _DTYPE, b"%d" % rows, b"%d" % _COLUMNS, b"%d" % ttl, _values(seed, rows * _COLUMNS)


def _stored(seed: Seed) -> list[Step]:
    rng, req = seed.rng, b"q%d" % seed.peer
    kind = rng.random()
    if kind < 0.3:
        words: Words = (b"KVPAGESET", *_described(seed, commands.any_page(seed, req)))
    elif kind < 0.6:
        names = [(req, *(b"%d" % part for part in name[1:])) for name in commands.batch(seed)]
        pages = [_described(seed, name) for name in names]
        words = b"KVPAGEMSET", b"%d" % len(pages), *(word for page in pages for word in page)
    else:
        planes = rng.choice([1, 1, 2])
        rows = rng.choice(_ROWS)
        of_planes = [word for kind in range(planes) for word in (kind, _DTYPE, _COLUMNS)]
        head = (rng.randrange(8), commands.LAYERS, commands.HEADS, rows, rng.choice([0, 0, 0, 2]), planes, *of_planes)
        body = _values(seed, planes * commands.LAYERS * commands.HEADS * rows * _COLUMNS)
        words = b"KVBLOCKSET", req, *(b"%d" % number for number in head), body
        if rng.random() < 0.4:
            words = _coded(words)
        stored = seed.send(seed.peer, words)
        if rng.random() < 0.6:
            several = (req, words[2], req, b"%d" % rng.randrange(8))
            read = seed.send(
                rng.choice([seed.peer, seed.peer, rng.randrange(PEERS)]), (b"KVBLOCKMGETCODED", b"2", *several)
            )
            return [stored, seed.soon(read, rng.choice([1, MS, 50 * MS]))]
        return [stored]
    return [seed.send(seed.peer, words)]


def _coded(words: Words) -> Words:
    """Return the KVBLOCKSETCODED that is the same as a KVBLOCKSET, or this if its body has no code."""
    req, page, layers, heads, rows, ttl, count, *planes, body = words[1:]
    numbers = [*map(int, planes)]
    kinds = [Plane(numbers[at], DType(numbers[at + 1]), numbers[at + 2]) for at in range(0, len(numbers), 3)]
    code = encode_block_body(body, BlockShape(int(layers), int(heads), int(rows), (*kinds,)))
    if code is None:
        return words
    return (
        b"KVBLOCKSETCODED",
        req,
        page,
        layers,
        heads,
        rows,
        ttl,
        count,
        *planes,
        b"%016x" % checksum(body),
        bytes(code),
    )


def _read(seed: Seed) -> list[Step]:
    """Return reads of pages and blocks, some of them at the same time."""
    rng = seed.rng
    steps = []
    for _ in range(rng.randrange(1, 6)):
        seed.peer = rng.randrange(PEERS)
        page = commands.any_page(seed, commands.any_request(seed))
        key = b"kv:" + b":".join(page)
        several = commands.batch_get(seed)
        words = rng.choice([
            (b"KVPAGEGET", *page), (b"KVPAGESTAT", *page), (b"KVBLOCKGET", page[0], page[3]), several, several,
            commands.block_get(seed), (b"KVBLOCKMGETCODED", b"2", page[0], page[3], page[0], b"1"), (b"GET", key),
            (b"STRLEN", key), (b"MGET", key, *seed.own_strings[:2]),
            (b"GETRANGE", key, b"60", b"90"), (b"KVPAGEVERIFY", page[0]), (b"EXPIRE", key, b"50"), (b"DEL", key),
            (b"MEMORY", b"USAGE", key), (b"KVPAGELEASE", page[0], b"3000", page[3]), (b"CLIENT", b"NO-TOUCH", b"ON"),
            (b"CLIENT", b"NO-TOUCH", b"OFF"), (b"PING",) if seed.is_tenant else (b"KVDECODE",),
        ])  # fmt: skip
        steps.append(seed.soon(seed.send(seed.peer, words), rng.choice([1, MS, 50 * MS])))
    return steps


def _rested(seed: Seed) -> list[Step]:
    """Return a write, a pause in which the server encodes, and reads."""
    stored = _stored(seed)
    pause = replace(seed.step("settle"), gap=seed.rng.choice([1_200, 3_000, 12_000]) * MS)
    return [*stored, pause, *_read(seed)]
