"""Arguments of a wrong type: the error names the argument, the type that is needed and the one that was given."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from servers import RunningServer

from kvpage_server.client import AsyncPageClient, Page, PageClient, RawCommand
from kvpage_server.page import BlockShape, DType, PageError, PageKey, Plane

PLANE = Plane(0, DType.FLOAT32, 8)
SHAPE = BlockShape(1, 1, 4, (PLANE,))
BODY = bytes(SHAPE.nbytes)
KEY = PageKey(b"x", 0, 0, 0, 0)
GET = RawCommand(["GET", "a"])
URL = "redis://127.0.0.1:1"

Call = Callable[[Any], Any]  # of a client


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PageKey("x", 0, 0, 0, 0), "req_id must be bytes, got str"),  # type: ignore[arg-type]
        (lambda: PageKey(b"x", "0", 0, 0, 0), "layer_idx must be an integer, got str"),  # type: ignore[arg-type]
        (lambda: PageKey(b"x", 0, 0.5, 0, 0), "head_idx must be an integer, got float"),  # type: ignore[arg-type]
        (lambda: BlockShape("1", 1, 4, (PLANE,)), "layers must be an integer, got str"),  # type: ignore[arg-type]
        (lambda: BlockShape(1, 1, 4, ("K",)), "planes must be Planes, got str"),  # type: ignore[arg-type]
        (lambda: PageKey(b"x", True, 0, 0, 0), "layer_idx must be an integer, got bool"),
        (lambda: Plane(0, 1.0, 8), "dtype must be an integer, got float"),  # type: ignore[arg-type]
        (lambda: PageClient(URL, connections=1.5), "connections must be an integer, got float"),  # type: ignore[arg-type]
        (lambda: AsyncPageClient(URL, connections=True), "connections must be an integer, got bool"),
        (lambda: PageClient(URL, deadline=None), "a deadline must be a number of seconds, got NoneType"),  # type: ignore[arg-type]
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
    (lambda c: c.prefix([(b"a", 0)], pages_per_block=1.9), "pages_per_block must be an integer, got float"),
    (lambda c: c.prefix([], pages_per_block=True), "pages_per_block must be an integer, got bool"),
    (lambda c: c.prefix([(b"a", 0)], pages_per_block=1, lease_ms=None), "lease_ms must be an integer, got NoneType"),
    (lambda c: c.lengths([], [], pages_per_block=1.0), "pages_per_block must be an integer, got float"),
    (lambda c: c.lengths([], [], pages_per_block=1, lease_ms=0.5), "lease_ms must be an integer, got float"),
    (lambda c: c.lease(b"a", 1.5), "lease_ms must be an integer, got float"),
    (lambda c: c.lease(b"a", 5, [True]), "page_id must be an integer, got bool"),
    (lambda c: c.delete_request(b"a", [0.5]), "page_id must be an integer, got float"),
    (lambda c: c.set_block((b"a", 0), SHAPE, BODY, ttl=True), "ttl must be an integer, got bool"),
    (lambda c: c.mset([], ttl=None), "ttl must be an integer, got NoneType"),
    (lambda c: c.keep([], 1.9), "seconds must be an integer, got float"),
    (lambda c: c.keep([b"a"], None), "seconds must be an integer, got NoneType"),
    (lambda c: c.keep([b"a"], 1, tenants=1.5), "tenants must be an integer, got float"),
    (lambda c: c.keep([b"a"], 1, tenants=True), "tenants must be an integer, got bool"),
    (lambda c: c.keep([b"a"], 1, tenant=b"t"), "tenant must be str, got bytes"),
    (lambda c: c.keep([KEY], 5), "a key must be bytes, got PageKey: bytes(key) is its name"),
    (lambda c: c.keep(["a"], 5), "a key must be bytes, got str"),
    (lambda c: c.exists(KEY, deadline="5"), "a deadline must be a number of seconds, got str"),
    (lambda c: c.exists(KEY, deadline=True), "a deadline must be a number of seconds, got bool"),
    (lambda c: c.ask([[b"PING"]]), "a command must be a RawCommand, got [b'PING']"),
    (lambda c: c.ask([RawCommand("PING")]), "the words of a command must be a list, got 'PING'"),
    (lambda c: c.ask([RawCommand(["EXPIRE", "a", 1.5])]), "a word of a command must be str, bytes or int, got float"),  # type: ignore[list-item]
    (lambda c: c.ask([RawCommand(["SET", "a", None])]), "a word of a command must be str, bytes or int, got NoneType"),  # type: ignore[list-item]
    (lambda c: c.transaction(["a"], ["GET", "a"], list), "a command must be a RawCommand, got ['GET', 'a']"),
    (lambda c: c.transaction([1.5], GET, list), "a word of a command must be str, bytes or int, got float"),
    (lambda c: c.transaction(["a"], GET, lambda _: [["PING"]]), "a command must be a RawCommand, got ['PING']"),
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


def refuses(url: str, call: Call, error: str) -> None:
    """Expect the TypeError from both clients."""

    async def call_async() -> None:
        async with AsyncPageClient(url) as client:
            await call(client)

    expected = f"^{re.escape(error)}"
    with PageClient(url) as client, pytest.raises(TypeError, match=expected):
        call(client)
    with pytest.raises(TypeError, match=expected):
        asyncio.run(call_async())


@pytest.mark.parametrize(("call", "error"), CALLS, ids=range(len(CALLS)))
def test_a_call_with_a_wrong_type_is_refused(server: RunningServer, call: Call, error: str) -> None:
    refuses(server.url, call, error)


NUMBERS = [(call, error) for call, error in CALLS if "integer" in error or "deadline" in error]


@pytest.mark.parametrize("url", ["valkey-cluster://127.0.0.1:1", "redis://127.0.0.1:1,redis://127.0.0.1:2"])
def test_clients_of_several_servers_refuse_the_same_numbers(url: str) -> None:
    for call, error in NUMBERS:  # nothing listens there, so nothing was sent
        refuses(url, call, error)


def test_a_dtype_by_name_is_refused_with_the_numbers(server: RunningServer) -> None:
    page = Page(KEY, BODY, "float32", 4, 8)  # type: ignore[arg-type]
    with PageClient(server.url) as client, pytest.raises(PageError, match="dtype must be one of 1 float16, 2 float32"):
        client.set_page(page)
