"""Several servers hold what one has no room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import pytest
from page_batches import SHAPE, block_body
from servers import start_server

from benchmarks import valkey_cluster
from kvpage_server.client import PageClient

Servers = Callable[[int], AbstractContextManager[str]]  # so many of them, by their URL
LIMIT = 16 << 20  # bytes that each may have
ROOM = ("--maxmemory", str(LIMIT), "--maxmemory-policy", "allkeys-lru")


@contextmanager
def side_by_side(count: int) -> Iterator[str]:
    with ExitStack() as stack:
        yield ",".join(stack.enter_context(start_server(*ROOM)).url for _ in range(count))


@contextmanager
def a_cluster(count: int) -> Iterator[str]:
    with valkey_cluster.run(*ROOM, masters=count, replicas=False) as cluster:
        yield cluster.url


@pytest.mark.parametrize("servers", [side_by_side, a_cluster])
def test_what_fills_most_of_three_is_found_whole_and_one_has_room_for_a_third(servers: Servers) -> None:
    names = [(b"{segment-%d}" % i, 0) for i in range(int(2.2 * LIMIT / SHAPE.nbytes))]
    body, found = block_body(1), {}
    for count in (1, 3):
        into = np.zeros((len(names), SHAPE.nbytes), np.uint8)
        with servers(count) as url, PageClient(url, deadline=60) as pages:
            pages.mset_blocks(names, SHAPE, [body] * len(names))
            found[count] = sum(pages.mget_blocks_into(names, SHAPE, list(into)))
    assert LIMIT / 2 < found[1] * SHAPE.nbytes <= LIMIT
    assert found[3] == len(names)
    assert (into == body).all()
