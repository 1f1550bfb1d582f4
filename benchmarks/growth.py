"""What a store that holds very many pages costs: memory beside the pages themselves, and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.findings import Finding
from benchmarks.pairs import GENERATIONS, Contestant, compare, speed, speed_ratio
from benchmarks.servers import Server, start_kvpage
from benchmarks.stores import PageStore
from kvpage_server.bench.work import Pages
from kvpage_server.client import Page, PageClient
from kvpage_server.page import HEADER_SIZE, BlockShape, DType, PageKey, Plane

_FEW = 10_000
_AT_ONCE = 2000
PAGES_A_REQUEST, PAGES_A_BLOCK = 5000, 512
_ROWS, _COLUMNS = 2, 128  # bytes of the pages that only fill the store
_BODY = _ROWS * _COLUMNS
_SHAPE = BlockShape(32, 8, _ROWS, (Plane(0, DType.UINT8, _COLUMNS), Plane(1, DType.UINT8, _COLUMNS)))  # 512 pages


def findings(*, pages: int, rounds: int) -> Iterator[Finding]:
    """Bytes a page, for single pages and in blocks; GB/s beside a store that holds few."""
    with start_kvpage() as large:
        single = _bytes_a_page(large, fill_with_pages, pages)
        with start_kvpage() as small:
            fill_with_pages(small, _FEW)
            yield from _slower(small, large, pages, rounds)
    with start_kvpage() as other:
        in_blocks = _bytes_a_page(other, _fill_with_blocks, pages)
    for how, found, at_most in (("single pages", single, 250.0), ("pages in blocks", in_blocks, 8.0)):
        yield Finding(
            f"memory beside the blobs, {pages:,} {how}",
            "",
            "bytes a page",
            f"resident, pages of {_BODY} bytes",
            found,
            at_most=at_most,
        )


def _bytes_a_page(server: Server, fill: Callable[[Server, int], int], pages: int) -> float:
    """Resident memory beside headers and bodies."""
    fill(server, 1)
    before = server.resident()
    filled = fill(server, pages)
    return (server.resident() - before) / filled - HEADER_SIZE - _BODY


def fill_with_pages(server: Server, count: int) -> int:
    """Store so many pages one by one, 512 a block; how many they are."""
    body = bytes(_BODY)
    with PageClient(server.url, deadline=60) as client:
        for start in range(0, count, _AT_ONCE):
            ids = range(start, min(start + _AT_ONCE, count))
            keys = (
                PageKey(b"request%d" % (i // PAGES_A_REQUEST), i // 16 % 32, i // 2 % 8, i // PAGES_A_BLOCK, i % 2)
                for i in ids
            )
            client.mset([Page(key, body, DType.UINT8, _ROWS, _COLUMNS) for key in keys])
    return count


def _fill_with_blocks(server: Server, count: int) -> int:
    body = bytes(_SHAPE.nbytes)
    blocks = -(-count // _SHAPE.pages)
    with PageClient(server.url, deadline=60) as client:
        for block in range(blocks):
            client.set_block((b"request%d" % (block // 10), block), _SHAPE, body)
    return blocks * _SHAPE.pages


def _slower(small: Server, large: Server, pages: int, rounds: int) -> Iterator[Finding]:
    work = Pages(256, 16 * 1024, GENERATIONS)
    contestants = [Contestant(name, PageStore(s.url), s) for name, s in (("small", small), ("large", large))]
    for op in ("write", "read"):
        passes = compare(contestants, op, work, rounds=rounds)
        yield Finding(
            f"{op} {work.name}, {pages:,} pages held",
            f"{_FEW:,} pages held",
            "GB/s",
            f"{speed(passes, 'large'):.2f} / {speed(passes, 'small'):.2f}",
            speed_ratio(passes, "large", "small"),
            at_least=0.9,
        )
