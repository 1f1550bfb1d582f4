"""The arguments of a failed call are freed with the call, without a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from page_batches import SHAPE
from servers import RunningServer, free_port

from kvpage_server.client import AsyncPageClient, PageClient, PageClientError

NAMES = [(b"{forgotten}%d" % i, i) for i in range(4)]


@pytest.fixture
def hangs_up() -> Iterator[str]:
    """Where every connection is closed at once."""

    def accept() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def refuses(redis_server: RunningServer) -> str:
    """A server that is no cluster, and of which this user may ask nothing that is needed."""
    with redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "stranger", "on", "nopass", "+@connection", "~*")
    return f"stranger:@127.0.0.1:{redis_server.port}"


def call(url: str, given: list[Any]) -> str:
    with PageClient(url, deadline=2) as client:
        try:
            client.mset_blocks(NAMES, SHAPE, given)
        except PageClientError as error:
            return str(error)
    return ""


async def await_(url: str, given: list[Any]) -> str:
    client = AsyncPageClient(url, deadline=2)
    try:
        await client.mset_blocks(NAMES, SHAPE, given)
    except PageClientError as error:
        return str(error)
    finally:
        await client.close()
    return ""


@pytest.mark.parametrize("do", [call, lambda url, given: asyncio.run(await_(url, given))], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["redis://", "valkey-cluster://", "side by side"])
@pytest.mark.parametrize("where", ["nobody", "hangs_up", "refuses"])
def test_arguments_of_a_failed_call_are_freed_at_once(
    do: Callable[[str, list[Any]], str], kind: str, where: str, request: pytest.FixtureRequest
) -> None:
    at = f"127.0.0.1:{free_port()}" if where == "nobody" else request.getfixturevalue(where)
    url = f"redis://{at},redis://{at}/1" if kind == "side by side" else kind + at
    given = [np.zeros(SHAPE.nbytes, np.uint8) for _ in NAMES]
    left = weakref.ref(given[0])
    gc.collect()
    gc.disable()
    try:
        assert do(url, given)
        given.clear()
        assert left() is None
    finally:
        gc.enable()
