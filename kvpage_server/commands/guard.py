"""The page family's protection: KVPAGEPREFIX, KVPAGELEASE, KVPAGEPIN, KVPAGEUNPIN.

What is leased or pinned is spared by eviction, by nothing else: what expires or is deleted goes. Leases and pins
together may take half of maxmemory.
"""

from __future__ import annotations

from kvpage_server.commands.arguments import batch, integer_in
from kvpage_server.commands.context import Client
from kvpage_server.commands.keys import requests
from kvpage_server.commands.misses import HOLE, block_missed, count_miss
from kvpage_server.commands.needs import nothing
from kvpage_server.commands.registry import command
from kvpage_server.commands.request import named_blocks, page_id, request_name
from kvpage_server.page import MAX_U32, unix_ms
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import Reply, ReplyError
from kvpage_server.store.index import Block
from kvpage_server.store.lease import LONGEST_LEASE
from kvpage_server.store.memory import Keyspace


def _lease(keyspace: Keyspace, block: Block, milliseconds: int) -> bool:
    until = unix_ms() + milliseconds
    return keyspace.guards.lease(block, block.footprint, until, keyspace.guardable)


@command(
    "kvpageprefix",
    -6,
    "readonly",
    group="page",
    uses=requests(3, 2),
    needs=nothing,
    usage="pages_per_block lease_ms N req page [req page ...]",
    summary="Counts the complete blocks from the first on, and leases exactly those.",
)
def kvpageprefix(client: Client, args: list[Argument]) -> Reply:
    """How many blocks from the first on have `pages_per_block` pages; they are leased for `lease_ms`, 0 for not at all.

    A block that can't be leased, because too much already is, ends the run: what is counted can be relied upon.
    """
    keyspace = client.keyspace
    pages_per_block = integer_in("pages_per_block", args[0], 1, MAX_U32)
    milliseconds = integer_in("lease_ms", args[1], 0, LONGEST_LEASE)
    names = [(request_name(req), page_id(page)) for req, page in batch("KVPAGEPREFIX", args[2:], 2, "block")]
    keyspace.guards.settle(unix_ms())
    found: list[Block] = []
    for req_id, page in names:
        block = keyspace.block(req_id, page)
        if block is None or block.pages != pages_per_block:
            _count_misses(client, names[len(found) :], pages_per_block)
            break
        if milliseconds and not _lease(keyspace, block, milliseconds):
            break
        found.append(block)
    keyspace.chain(found)
    return len(found)


def _count_misses(client: Client, names: list[tuple[bytes, int]], pages_per_block: int) -> None:
    """Count the first block of a broken run as missed, and those behind it that are there as lost to the hole."""
    block_missed(client, *names[0])
    blocks = (client.keyspace.block(req_id, page) for req_id, page in names[1:])
    count_miss(client, HOLE, sum(block is not None and block.pages == pages_per_block for block in blocks))


@command(
    "kvpagelease",
    -3,
    "readonly",
    group="page",
    uses=requests(0),
    needs=nothing,
    usage="req lease_ms [page ...]",
    summary="Protects a request, or some of its blocks, from eviction for a while.",
)
def kvpagelease(client: Client, args: list[Argument]) -> Reply:
    """How many blocks are leased: from the first on, as many as may be. A lease is only ever prolonged."""
    keyspace = client.keyspace
    milliseconds = integer_in("lease_ms", args[1], 1, LONGEST_LEASE)
    blocks = named_blocks(client, [args[0], *args[2:]])
    keyspace.guards.settle(unix_ms())
    leased = 0
    for block in blocks:
        if not _lease(keyspace, block, milliseconds):
            break
        leased += 1
    return leased


@command(
    "kvpagepin",
    -2,
    "write",
    group="page",
    uses=requests(0),
    needs=nothing,
    usage="req [page ...]",
    summary="Protects a request, or some of its blocks, from eviction until they are unpinned.",
)
def kvpagepin(client: Client, args: list[Argument]) -> Reply:
    """How many blocks are pinned: all that were named and exist, or none and an error when that would be too much."""
    keyspace, blocks = client.keyspace, named_blocks(client, args)
    keyspace.guards.settle(unix_ms())
    wanted = sum(block.footprint for block in blocks if not keyspace.guards.of(block).size)
    if keyspace.guards.bytes + wanted > keyspace.guardable:
        raise ReplyError(
            f"ERR leases and pins may take {keyspace.guardable} bytes together, half of maxmemory: "
            f"{wanted} more would be too many"
        )
    return sum(keyspace.guards.pin(block, block.footprint, keyspace.guardable) for block in blocks)


@command(
    "kvpageunpin",
    -2,
    "write",
    group="page",
    uses=requests(0),
    needs=nothing,
    usage="req [page ...]",
    summary="Ends the pins of a request, or of some of its blocks.",
)
def kvpageunpin(client: Client, args: list[Argument]) -> Reply:
    """How many blocks were pinned until now."""
    return sum(client.keyspace.guards.unpin(block) for block in named_blocks(client, args))
