"""The block family: all pages of one (req_id, page_id) in one body. KVBLOCKSET, KVBLOCKGET, KVBLOCKMGET, KVBLOCKEXISTS.

The body's order is layer, plane, head, token, dim. A block and its pages are the same data: a block that was set whole
is read page by page too, and pages that were set one by one are read as a block once it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage_server.commands.arguments import batch, integer_in, plain
from kvpage_server.commands.context import Client
from kvpage_server.commands.keys import requests
from kvpage_server.commands.misses import block_missed
from kvpage_server.commands.registry import command
from kvpage_server.commands.request import page_id, request_name
from kvpage_server.commands.value import make_room
from kvpage_server.page import (
    MAX_HEAD,
    MAX_KV_TYPE,
    MAX_LAYER,
    MAX_TTL,
    MAX_U32,
    BlockShape,
    PageError,
    Plane,
    check_dtype,
    unix_ms,
)
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import OK, Reply, ReplyError, Stream
from kvpage_server.store.arena import Slot
from kvpage_server.store.blocks import has_block, read_block, write_block

_BEFORE_PLANES = 7  # req page layers heads page_size ttl P
_PLANE = 3  # type dtype head_dim


@command(
    "kvblockset",
    -12,
    "write denyoom",
    group="page",
    uses=requests(0),
    usage="req page layers heads page_size ttl P type dtype head_dim [type dtype head_dim ...] body",
    summary="Stores a block: all its pages at once, in place of those it had; ttl is in seconds, 0 for none.",
)
def kvblockset(client: Client, args: list[Argument]) -> Reply:
    """OK. P is the number of planes. The body is exactly layers x planes x heads x page_size x head_dim elements."""
    req_id, page, shape = request_name(args[0]), page_id(args[1]), _read_shape(args)
    ttl = integer_in("ttl", args[5], 0, MAX_TTL)
    body = args[-1].body if isinstance(args[-1], Slot) else memoryview(plain(args[-1]))
    if len(body) != shape.nbytes:
        raise ReplyError(f"ERR body must be {shape.nbytes} bytes for this shape, got {len(body)}")
    make_room(client)
    write_block(
        client.keyspace,
        req_id,
        page,
        shape,
        body,
        created_ms=unix_ms(),
        ttl=ttl,
        with_checksums=client.server.config.page_checksums,
    )
    return OK


def _read_shape(args: list[Argument]) -> BlockShape:
    """The shape that KVBLOCKSET's arguments describe. Raises ReplyError saying what is wrong with it."""
    layers = integer_in("layers", args[2], 1, MAX_LAYER + 1)
    heads = integer_in("heads", args[3], 1, MAX_HEAD + 1)
    page_size = integer_in("page_size", args[4], 1, MAX_U32)
    count = integer_in("P", args[6], 1, MAX_KV_TYPE + 1)
    numbers = args[_BEFORE_PLANES:-1]
    if len(numbers) != count * _PLANE:
        raise ReplyError(
            f"ERR KVBLOCKSET with P = {count} takes {count * _PLANE} arguments between P and the body, "
            f"{_PLANE} a plane, got {len(numbers)}"
        )
    try:
        planes = [_read_plane(numbers[i : i + _PLANE]) for i in range(0, len(numbers), _PLANE)]
        return BlockShape(layers, heads, page_size, tuple(planes))
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def _read_plane(numbers: list[Argument]) -> Plane:
    kv_type, dtype, head_dim = numbers
    return Plane(
        kv_type=integer_in("kv_type", kv_type, 0, MAX_KV_TYPE),
        dtype=check_dtype(integer_in("dtype", dtype, 0, 255)),
        head_dim=integer_in("head_dim", head_dim, 1, MAX_U32),
    )


def _read(client: Client, req_id: bytes, page: int) -> Reply:
    block = read_block(client.keyspace, req_id, page)
    if block is None:
        block_missed(client, req_id, page)
    return block


@command(
    "kvblockget",
    3,
    "readonly",
    group="page",
    uses=requests(0),
    usage="req page",
    summary="Returns a block's bytes, null unless it is complete.",
)
def kvblockget(client: Client, args: list[Argument]) -> Reply:
    """One bulk string: layer by layer, in it plane by plane, in it head by head."""
    return _read(client, request_name(args[0]), page_id(args[1]))


@command(
    "kvblockmget",
    -4,
    "readonly",
    group="page",
    uses=requests(1, 2),
    usage="N req page [req page ...]",
    summary="Returns N blocks' bytes, null for those that are not complete.",
)
def kvblockmget(client: Client, args: list[Argument]) -> Reply:
    """An array of bulk strings, each block looked up as the reply comes to it."""
    names = [(request_name(req), page_id(page)) for req, page in batch("KVBLOCKMGET", args, 2, "block")]

    def bodies() -> Iterator[Reply]:
        for req_id, page in names:
            yield _read(client, req_id, page)

    return Stream(len(names), bodies())


@command(
    "kvblockexists",
    3,
    "readonly",
    group="page",
    uses=requests(0),
    usage="req page",
    summary="Says whether a block is there and complete.",
)
def kvblockexists(client: Client, args: list[Argument]) -> Reply:
    """1 or 0."""
    return int(has_block(client.keyspace, request_name(args[0]), page_id(args[1])))
