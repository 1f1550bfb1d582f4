"""Several servers hold more than one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import pytest
from page_batches import SHAPE, block_body
from servers import start_server

from benchmarks import valkey_cluster
from kvpage_server.client import PageClient

Servers = Callable[[], AbstractContextManager[str]]  # their URL
LIMIT = 16 << 20  # bytes that each may have
ROOM = ("--maxmemory", str(LIMIT), "--maxmemory-policy", "allkeys-lru")


@contextmanager
def side_by_side() -> Iterator[str]:
    with ExitStack() as stack:
        yield ",".join(stack.enter_context(start_server(*ROOM)).url for _ in range(3))


@contextmanager
def a_cluster() -> Iterator[str]:
    with valkey_cluster.run(*ROOM, replicas=False) as cluster:
        yield cluster.url


@pytest.mark.parametrize("three", [side_by_side, a_cluster])
def test_three_servers_hold_more_than_two(three: Servers) -> None:
    body = block_body(1)
    with three() as url, PageClient(url, deadline=60) as pages:
        for times, enough in ((2.2, True), (3.3, False)):
            names = [(b"{segment-%d}" % i, 0) for i in range(int(times * LIMIT / SHAPE.nbytes))]
            pages.mset_blocks(names, SHAPE, [body] * len(names))
            into = np.zeros((len(names), SHAPE.nbytes), np.uint8)
            found = pages.mget_blocks_into(names, SHAPE, list(into))
            assert all(found) == enough
            assert (into[found] == body).all()
