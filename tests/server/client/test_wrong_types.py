"""Arguments of a wrong type: the error names the argument, the type that is needed and the one that was given."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from servers import RunningServer

from kvpage_server.client import AsyncPageClient, Page, PageClient
from kvpage_server.page import BlockShape, DType, PageError, PageKey, Plane

PLANE = Plane(0, DType.FLOAT32, 8)
SHAPE = BlockShape(1, 1, 4, (PLANE,))
BODY = bytes(SHAPE.nbytes)
KEY = PageKey(b"x", 0, 0, 0, 0)

Call = Callable[[Any], Any]  # of a client


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PageKey("x", 0, 0, 0, 0), "req_id must be bytes, got str"),  # type: ignore[arg-type]
        (lambda: PageKey(b"x", "0", 0, 0, 0), "layer_idx must be an integer, got str"),  # type: ignore[arg-type]
        (lambda: PageKey(b"x", 0, 0.5, 0, 0), "head_idx must be an integer, got float"),  # type: ignore[arg-type]
        (lambda: BlockShape("1", 1, 4, (PLANE,)), "layers must be an integer, got str"),  # type: ignore[arg-type]
        (lambda: BlockShape(1, 1, 4, ("K",)), "planes must be Planes, got str"),  # type: ignore[arg-type]
        (lambda: Plane("K", DType.FLOAT32, 8), "kv_type must be an integer, got str"),  # type: ignore[arg-type]
    ],
)
def test_a_name_or_shape_of_a_wrong_type_is_refused(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(error)}$"):
        make()


CALLS: list[tuple[Call, str]] = [
    (lambda c: c.mset_blocks(["agent-1"], SHAPE, [BODY]), "a block's name is a tuple (req_id, page_id), got 'agent-1'"),
    (lambda c: c.mset_blocks([("agent-1", 0)], SHAPE, [BODY]), "req_id must be bytes, got str"),
    (lambda c: c.mset_blocks([(b"agent-1", "0")], SHAPE, [BODY]), "page_id must be an integer, got str"),
    (lambda c: c.mset_blocks([(b"agent-1", 0)], (1, 1, 4), [BODY]), "a block's shape must be a BlockShape, got tuple"),
    (lambda c: c.mget_blocks_into([("a", 0)], SHAPE, [bytearray(BODY)]), "req_id must be bytes, got str"),
    (lambda c: c.prefix([b"a"], pages_per_block=1), "a block's name is a tuple (req_id, page_id), got b'a'"),
    (
        lambda c: c.lengths([(b"a", 0)], [(b"a", 0)], pages_per_block=1),
        "a state's name is a tuple (req_id, page_id, need), got (b'a', 0)",
    ),
    (lambda c: c.lease("agent-1", 5), "req_id must be bytes, got str"),
    (lambda c: c.delete_request("agent-1"), "req_id must be bytes, got str"),
    (lambda c: c.get_page("kv:x:0:0:0:0"), "a page's key must be a PageKey, got str"),
    (lambda c: c.mget_into([b"x"], [bytearray(4)]), "a page's key must be a PageKey, got bytes"),
    (lambda c: c.exists("x"), "a page's key must be a PageKey, got str"),
    (lambda c: c.delete(["x"]), "a page's key must be a PageKey, got str"),
    (lambda c: c.set_page("x"), "page 0 must be a Page whose key is a PageKey, got 'x'"),
    (
        lambda c: c.mset([Page(KEY, BODY, DType.FLOAT32, 4, 8), Page("x", BODY, DType.FLOAT32, 4, 8)]),  # type: ignore[arg-type]
        "page 1 must be a Page whose key is a PageKey, got Page(key='x', body=b'",
    ),
]


@pytest.mark.parametrize(("call", "error"), CALLS, ids=range(len(CALLS)))
def test_a_call_with_a_wrong_type_is_refused(server: RunningServer, call: Call, error: str) -> None:
    async def call_async() -> None:
        async with AsyncPageClient(server.url) as client:
            await call(client)

    expected = f"^{re.escape(error)}"
    with PageClient(server.url) as client, pytest.raises(TypeError, match=expected):
        call(client)
    with pytest.raises(TypeError, match=expected):
        asyncio.run(call_async())


def test_a_dtype_by_name_is_refused_with_the_numbers(server: RunningServer) -> None:
    page = Page(KEY, BODY, "float32", 4, 8)  # type: ignore[arg-type]
    with PageClient(server.url) as client, pytest.raises(PageError, match="dtype must be one of 1 float16, 2 float32"):
        client.set_page(page)
