"""A context's blocks received through the page clients, compared with a bare loop of `recv_into` from the same server.

The buffers have been touched before: the first touch of fresh memory is not the client's cost.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import uvloop

from benchmarks.findings import Finding
from benchmarks.pages.client_costs import Way, compared
from benchmarks.pages.ordinary import receive, spell
from benchmarks.servers import Server
from kvpage_server.bench import Blocks
from kvpage_server.client import AsyncPageClient, PageClient
from kvpage_server.page import BlockShape, DType, KVType, Plane

_BLOCK = BlockShape(30, 3, 256, tuple(Plane(plane, DType.FLOAT32, 64) for plane in (KVType.K, KVType.V)))
_BLOCKS = 4  # a thousand tokens of SmolLM2-135M in float32
_GENERATIONS = 2


def findings(server: Server, rounds: int) -> Iterator[Finding]:
    """PageClient, and AsyncPageClient on uvloop. Raises AssertionError for wrong bytes."""
    work = Blocks(_BLOCKS, _BLOCK, _GENERATIONS)
    loop = uvloop.new_event_loop()
    with closing(loop), PageClient(server.url) as client, server.connect() as sock:
        asynchronous = AsyncPageClient(server.url)
        for names, batch in zip(work.names, work.batches, strict=True):
            client.mset_blocks(names, _BLOCK, list(batch.written))

        def blocking(generation: int) -> list[bool]:
            return client.mget_blocks_into(work.names[generation], _BLOCK, list(work.batches[generation].read))

        def awaited(generation: int) -> list[bool]:
            into = list(work.batches[generation].read)
            return loop.run_until_complete(asynchronous.mget_blocks_into(work.names[generation], _BLOCK, into))

        def right(generation: int, found: list[bool]) -> bool:
            work.batches[generation].check()
            return all(found)

        for name, move in (("PageClient", blocking), ("AsyncPageClient", awaited)):
            against = f"{name}, read {work.name}", "a loop of recv_into"
            yield from compared(against, ((move, right), _bare(sock, work)), work, server, rounds=rounds)
        loop.run_until_complete(asynchronous.close())
    server.admin.flushall()


def _bare(sock: socket.socket, work: Blocks) -> Way:
    """Receive bytes in place, and ignore the bytes between them."""
    between = bytearray(b"\r\n$%d\r\n" % work.nbytes)
    before, after = bytearray(len(b"*%d\r\n" % work.count) + len(between) - 2), bytearray(2)

    def fill(buffer: bytearray | memoryview) -> None:
        receive(sock, memoryview(buffer))

    def move(generation: int) -> None:
        names = [part for name in work.names[generation] for part in (name[0], b"%d" % name[1])]
        sock.sendall(spell(b"KVBLOCKMGET", b"%d" % work.count, *names))
        first, *others = work.batches[generation].read
        fill(before)
        fill(memoryview(first))
        for body in others:
            fill(between)
            fill(memoryview(body))
        fill(after)

    def right(generation: int, _: None) -> bool:
        work.batches[generation].check()
        return True

    return move, right
