"""The cost of very many pages in a store: memory in addition to bodies, and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.findings import Finding
from benchmarks.pages import ordinary
from benchmarks.pages.rounds import OPS, Contestant, Plan, Target, beside, compare
from benchmarks.pages.work import KIB, pages
from benchmarks.servers import Server, start_kvpage
from kvpage_server.client import Page, PageClient
from kvpage_server.page import HEADER_SIZE, BlockShape, DType, PageKey, Plane

_FEW = 10_000
_PAGES_PER_CALL = 2000
PAGES_A_REQUEST, PAGES_A_BLOCK = 5000, 512
_ROWS, _COLUMNS = 2, 128  # bytes of the pages that only fill the store
_BODY = _ROWS * _COLUMNS
_SHAPE = BlockShape(32, 8, _ROWS, (Plane(0, DType.UINT8, _COLUMNS), Plane(1, DType.UINT8, _COLUMNS)))  # 512 pages


def findings(plan: Plan) -> Iterator[Finding]:
    """Yield bytes per page, for single pages and in blocks; GB/s relative to a store with few pages."""
    count = 100_000 if plan.quick else 1_000_000
    print(f"{count:,} pages ...", flush=True)
    with start_kvpage() as large:
        single = _bytes_a_page(large, fill_with_pages, count) - HEADER_SIZE
        with start_kvpage() as small:
            fill_with_pages(small, _FEW)
            yield from _slower(small, large, count, plan)
    with start_kvpage() as other:
        in_blocks = _bytes_a_page(other, _fill_with_blocks, count)
    for how, found, at_most in (
        ("single pages", single, 200.0),
        ("pages in blocks, which need no headers,", in_blocks, 8.0),
    ):
        yield Finding(
            f"memory beside what was stored, {count:,} {how}",
            "",
            "bytes a page",
            f"resident, pages of {_BODY} bytes",
            found,
            at_most=at_most,
        )


def _bytes_a_page(server: Server, fill: Callable[[Server, int], int], pages: int) -> float:
    """Return the resident memory per byte of bodies."""
    fill(server, 1)
    before = server.resident()
    filled = fill(server, pages)
    return (server.resident() - before) / filled - _BODY


def fill_with_pages(server: Server, count: int) -> int:
    """Store so many pages one by one, 512 a block; how many they are."""
    body = bytes(_BODY)
    with PageClient(server.url, deadline=60) as client:
        for start in range(0, count, _PAGES_PER_CALL):
            ids = range(start, min(start + _PAGES_PER_CALL, count))
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


def _slower(small: Server, large: Server, count: int, plan: Plan) -> Iterator[Finding]:
    work = pages(256, 16 * KIB, "an engine's order")
    few, many = f"{_FEW:,} pages held", f"{count:,} pages held"
    with small.connect() as small_sock, large.connect() as large_sock:
        contestants = {
            many: Contestant(large, ordinary.kvpage_pages(large_sock, work)),
            few: Contestant(small, ordinary.kvpage_pages(small_sock, work)),
        }
        for op in OPS:
            passes = compare(contestants, op, work.nbytes, plan)
            yield from beside(f"{op} {work.name}, {many}", passes, many, few, Target(speed=0.9))
