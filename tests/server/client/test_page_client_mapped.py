"""PageClient reads blocks from the server's memory over a unix socket, or falls back to the connection."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import numpy as np
import pytest
import redis
from page_batches import Array
from servers import RunningServer, start_server
from waiting import PATIENCE, until

from kvpage_server.client import AsyncPageClient, Closed, Page, PageClient, Unsupported, WrongReply
from kvpage_server.client import mapped as reads
from kvpage_server.client.commands import Missed, PageCommands, ask_dialect
from kvpage_server.client.mapped import Maps, Meanwhile, Steps, read_mapped
from kvpage_server.client.wire.connection import Deadline, page_pool
from kvpage_server.client.wire.exchange import Request
from kvpage_server.core import Memory
from kvpage_server.page import BlockShape, DType, KVType, PageKey, Plane

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs sealed shared memory of Linux")

SHAPE = BlockShape(8, 4, 64, (Plane(KVType.K, DType.FLOAT16, 64), Plane(KVType.V, DType.FLOAT16, 64)))  # half a MiB
OF_EQUAL_SIZE = BlockShape(8, 4, 64, (Plane(KVType.K, DType.BFLOAT16, 64), Plane(KVType.V, DType.BFLOAT16, 64)))
COUNT = 12
NAMES = [(b"r%d" % i, i) for i in range(COUNT)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client ask for few blocks at once, so that it copies some while the server looks up others."""
    monkeypatch.setattr(reads, "_PART_BYTES", 2 * SHAPE.nbytes)


def bodies(seed: int = 0) -> list[Array]:
    return list(np.random.default_rng(seed).integers(0, 255, (COUNT, SHAPE.nbytes), np.uint8))


def empty() -> list[Array]:
    return [np.zeros(SHAPE.nbytes, np.uint8) for _ in range(COUNT)]


@contextmanager
def started(directory: Path, *options: str) -> Iterator[tuple[RunningServer, str]]:
    """Start a server with a unix socket. Yield it, and the URL of the socket."""
    path = directory / "socket"
    with start_server("--unixsocket", str(path), *options, directory=directory) as server:
        yield server, f"unix://{path}"


def mapped(server: RunningServer) -> int:
    """Number of calls of KVMAP BLOCKMGET so far."""
    with server.client() as client:
        stats = client.info("commandstats")
        return int(stats.get("cmdstat_kvmap|blockmget", {"calls": 0})["calls"])


def over_the_wire(server: RunningServer) -> int:
    """Number of reads of blocks over a connection so far."""
    with server.client() as client:
        stats = client.info("commandstats")
        names = ("cmdstat_kvblockmget", "cmdstat_kvblockget")
        return sum(int(stats.get(name, {"calls": 0})["calls"]) for name in names)


def check(client: PageClient, written: list[Array]) -> None:
    """Check that all blocks are read."""
    into = empty()
    assert client.mget_blocks_into(NAMES, SHAPE, into) == [True] * COUNT
    assert all((found == body).all() for found, body in zip(into, written, strict=True))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("verify", [True, False], ids=["verify", "no verify"])
@pytest.mark.parametrize("connections", [1, 3])
def test_blocks_are_read_from_the_server_s_memory(tmp_path: Path, verify: bool, connections: int) -> None:
    with (
        started(tmp_path) as (server, url),
        PageClient(url, verify=verify, connections=connections, deadline=30) as client,
    ):
        written = bodies()
        client.mset_blocks(NAMES, SHAPE, written)
        for _ in range(3):
            check(client, written)
        assert mapped(server) >= 3
        assert over_the_wire(server) == 0
        client.mset_blocks(NAMES, SHAPE, bodies(1))
        check(client, bodies(1))
        client.delete_request(NAMES[3][0])
        reasons = client.fetch_blocks_into(NAMES, SHAPE, empty())
        assert reasons == [None] * 3 + ["absent"] + [None] * (COUNT - 4)
        with server.client() as other:
            assert int(other.info("memory")["mem_clients_normal"]) < SHAPE.nbytes


@pytest.mark.parametrize("cores", [1, 2])
def test_threads_on_other_cores_share_a_copy(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(reads, "_cores", lambda: cores)
    maps, meet, threads = Maps(page_pool("redis://127.0.0.1:1", {})), Barrier(cores), set[int]()

    def copy(i: int) -> str | None:
        meet.wait(60)
        threads.add(get_ident())
        return "checksum" if i % 2 else None

    assert maps.copy_each(copy, range(6), 1 << 30) == {1: "checksum", 3: "checksum", 5: "checksum"}
    assert len(threads) == cores
    with pytest.raises(ZeroDivisionError):
        maps.copy_each(lambda i: str(1 // (i - 5)), range(6), 1 << 30)
    maps.close()
    if cores > 1:
        with pytest.raises(Closed):
            maps.copy_each(copy, range(6), 1 << 30)


FORKED = """
import os, threading
from kvpage_server.client import mapped
from kvpage_server.client.wire.connection import page_pool

mapped._cores = lambda: 4
maps = mapped.Maps(page_pool("redis://127.0.0.1:1", {}))
together = threading.Barrier(4)
maps.copy_each(lambda i: together.wait(60) and None, range(4), 1 << 30)
child = os.fork()
together = threading.Barrier(4)
maps.copy_each(lambda i: together.wait(60) and None, range(4), 1 << 30)
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_threads_share_the_copies_in_a_fork_too() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=PATIENCE)


def test_blocks_are_read_in_place(tmp_path: Path) -> None:
    with started(tmp_path) as (server, url), PageClient(url, deadline=30) as client:
        written = bodies()
        client.mset_blocks(NAMES, SHAPE, written)
        with client.blocks_in_place([*NAMES, (b"absent", 0)], SHAPE) as blocks:
            client.mset_blocks(NAMES, SHAPE, bodies(1))
            assert blocks.pop() is None
            assert all(
                view and view.readonly and bytes(view) == body.tobytes()
                for view, body in zip(blocks, written, strict=True)
            )
        assert client.misses == {"absent": 1}
        with client.blocks_in_place(NAMES, OF_EQUAL_SIZE) as blocks:
            assert blocks == [None] * COUNT
        assert client.fetch_blocks_into(NAMES, OF_EQUAL_SIZE, empty()) == ["shape"] * COUNT
        with server.client() as other:
            assert int(other.info("memory")["mem_clients_normal"]) < SHAPE.nbytes
        overwrite(server.pid, bodies(1)[2][:64].tobytes())
        with client.blocks_in_place(NAMES, SHAPE) as blocks:
            assert [i for i, view in enumerate(blocks) if view is None] == [2]
        with pytest.raises(ZeroDivisionError), client.blocks_in_place(NAMES, SHAPE):
            raise ZeroDivisionError
        with server.client() as other:
            until(lambda: int(other.info("memory")["mem_clients_normal"]) < SHAPE.nbytes, "the end of the tickets")


async def read_in_place(url: str) -> None:
    async with AsyncPageClient(url, deadline=30) as client:
        async with client.blocks_in_place([*NAMES, (b"absent", 0)], SHAPE) as blocks:
            assert blocks.pop() is None
            assert all(view and bytes(view) == body.tobytes() for view, body in zip(blocks, bodies(), strict=True))
        with pytest.raises(ZeroDivisionError):
            async with client.blocks_in_place(NAMES, SHAPE):
                raise ZeroDivisionError
        assert (client.misses, client.mapped_bytes) == ({"absent": 1}, 0)


def test_an_event_loop_reads_blocks_in_place(tmp_path: Path) -> None:
    with started(tmp_path) as (_, url):
        with PageClient(url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
            check(client, bodies())
            assert client.mapped_bytes == COUNT * SHAPE.nbytes
        asyncio.run(read_in_place(url))


@pytest.mark.parametrize("connections", [1, 3])
def test_a_client_over_tcp_finds_the_unix_socket(tmp_path: Path, connections: int) -> None:
    with started(tmp_path, "--requirepass", "secret") as (server, _):
        url = server.url.replace("//", "//:secret@")
        with PageClient(url, connections=connections, deadline=30) as client, server.client(password="secret") as other:
            client.mset_blocks(NAMES, SHAPE, bodies())
            for _ in range(3):
                check(client, bodies())
            assert client.mapped_bytes == 3 * COUNT * SHAPE.nbytes
            assert int(other.info("commandstats")["cmdstat_kvmap|attach"]["calls"]) <= connections
            with client.blocks_in_place(NAMES, SHAPE) as blocks:
                assert all(view and bytes(view) == body.tobytes() for view, body in zip(blocks, bodies(), strict=True))
        with PageClient(url, mapped=False, deadline=30) as client:
            check(client, bodies())
            assert client.mapped_bytes == 0


def test_threads_that_ask_at_once_use_one_pool() -> None:
    """The first use of the pool does not fail because another thread's reply replaced it."""
    maps = Maps(page_pool("redis://127.0.0.1:1", {}))
    maps.found_socket([b"/absent", b"run"])
    first = maps.socket
    maps.found_socket([b"/absent", b"run"])
    assert first is not None
    assert maps.socket is first
    maps.found_socket([b"/absent", b"another run"])
    maps.lose_socket(first)  # by a thread that has used it until now
    assert (maps.socket is not None, maps.refused) == (True, False)
    assert maps.socket
    maps.lose_socket(maps.socket)
    assert (maps.socket, maps.refused) == (None, True)
    maps.close()


async def read_by_tcp(server: RunningServer, expected: int) -> None:
    async with AsyncPageClient(server.url, deadline=30) as client:
        into = empty()
        assert await client.mget_blocks_into(NAMES, SHAPE, into) == [True] * COUNT
        assert all((found == body).all() for found, body in zip(into, bodies(), strict=True))
        assert client.mapped_bytes == expected


def test_an_event_loop_over_tcp_finds_the_unix_socket(tmp_path: Path) -> None:
    with started(tmp_path) as (server, url):
        with PageClient(url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
        asyncio.run(read_by_tcp(server, COUNT * SHAPE.nbytes))
        (tmp_path / "socket").unlink()
        asyncio.run(read_by_tcp(server, 0))


def test_without_its_unix_socket_tcp_is_used(tmp_path: Path) -> None:
    with started(tmp_path) as (server, _), PageClient(server.url, deadline=30) as client:
        client.mset_blocks(NAMES, SHAPE, bodies())
        check(client, bodies())
        with server.client() as other:
            other.execute_command("CLIENT", "KILL", "LADDR", f"{tmp_path / 'socket'}:0")
        (tmp_path / "socket").unlink()
        check(client, bodies())
        check(client, bodies())
        assert client.mapped_bytes == COUNT * SHAPE.nbytes
        assert over_the_wire(server) == 2


def test_a_unix_socket_of_another_server_is_not_used(tmp_path: Path) -> None:
    """Only one of two servers in different file systems listens at the path that both have."""
    with started(tmp_path) as (server, _):
        (tmp_path / "socket").rename(tmp_path / "old")
        with started(tmp_path) as (another, _), PageClient(server.url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
            check(client, bodies())
            check(client, bodies())
            assert client.mapped_bytes == mapped(another) == mapped(server) == 0
            assert over_the_wire(server) == 2


def test_a_user_with_fewer_rights_asks_for_no_socket_twice(tmp_path: Path) -> None:
    with (
        started(tmp_path, "--user", "tenant", "on", "nopass", "~kv:r*", "+@all", "-@dangerous") as (server, _),
        PageClient(server.url.replace("//", "//tenant:x@"), deadline=30) as client,
        server.client() as other,
    ):
        client.mset_blocks(NAMES, SHAPE, bodies())
        for _ in range(3):
            check(client, bodies())
        assert client.mapped_bytes == 0
        assert int(other.info("commandstats")["cmdstat_kvmap|socket"]["rejected_calls"]) == 1


@pytest.mark.parametrize("user", ["default", "tenant"])
def test_a_restarted_server_is_mapped_again_over_tcp(tmp_path: Path, user: str) -> None:
    """The first read after the restart is out of mapped memory, and so is the one after a lost connection."""
    with started(tmp_path, *TENANT) as (first, _):
        url = of_tenant(first.url) if user == "tenant" else first.url
        with PageClient(url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
            check(client, bodies())
            with first.client() as other:
                other.execute_command("CLIENT", "KILL", "LADDR", f"{tmp_path / 'socket'}:0")
            check(client, bodies())
            assert over_the_wire(first) == 0
            first.stop()
            with start_server("--unixsocket", str(tmp_path / "socket"), *TENANT, port=first.port) as second:
                client.mset_blocks(NAMES, SHAPE, bodies(1))
                check(client, bodies(1))
                assert over_the_wire(second) == 0
            assert client.mapped_bytes == 3 * COUNT * SHAPE.nbytes


async def read_around_a_restart(directory: Path) -> None:
    with started(directory) as (first, _):
        async with AsyncPageClient(first.url, deadline=30) as client:
            await client.mset_blocks(NAMES, SHAPE, bodies())
            assert await client.mget_blocks_into(NAMES, SHAPE, empty()) == [True] * COUNT
            first.stop()
            with start_server("--unixsocket", str(directory / "socket"), port=first.port) as second:
                await client.mset_blocks(NAMES, SHAPE, bodies(1))
                assert await client.mget_blocks_into(NAMES, SHAPE, empty()) == [True] * COUNT
                assert over_the_wire(second) == 0
            assert client.mapped_bytes == 2 * COUNT * SHAPE.nbytes


def test_an_event_loop_maps_a_restarted_server_again(tmp_path: Path) -> None:
    asyncio.run(read_around_a_restart(tmp_path))


def test_blocks_are_not_read_in_place_without_a_socket(server: RunningServer) -> None:
    with PageClient(server.url) as client, pytest.raises(Unsupported), client.blocks_in_place(NAMES, SHAPE):
        pass


async def read_and_cancel(url: str, written: list[Array]) -> None:
    """Read all blocks with an AsyncPageClient, several times at once, and cancel other reads meanwhile."""
    async with AsyncPageClient(url, connections=2, deadline=30) as client:
        for _ in range(10):
            into = [empty() for _ in range(3)]
            reads = [asyncio.create_task(client.mget_blocks_into(NAMES, SHAPE, some)) for some in into]
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0)), *reads], return_when=asyncio.FIRST_COMPLETED)
            reads[0].cancel()
            found = await asyncio.gather(*reads, return_exceptions=True)
            kept = [array.copy() for array in into[0]]
            assert found[1:] == [[True] * COUNT] * 2
            for some in into[1:]:
                assert all((one == body).all() for one, body in zip(some, written, strict=True))
            assert all((one == before).all() for one, before in zip(into[0], kept, strict=True))


@pytest.mark.usefixtures("small_parts")
def test_an_event_loop_reads_from_the_server_s_memory(tmp_path: Path) -> None:
    with started(tmp_path) as (server, url):
        with PageClient(url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
        asyncio.run(read_and_cancel(url, bodies()))
        assert mapped(server) >= 20
        assert over_the_wire(server) == 0
        with server.client() as other:
            until(lambda: int(other.info("memory")["mem_clients_normal"]) < SHAPE.nbytes, "the end of the tickets")


@pytest.mark.usefixtures("small_parts")
def test_threads_share_the_maps(tmp_path: Path) -> None:
    with started(tmp_path) as (_, url), PageClient(url, deadline=30) as client, ThreadPoolExecutor(6) as threads:
        written = bodies()
        client.mset_blocks(NAMES, SHAPE, written)
        for done in [threads.submit(check, client, written) for _ in range(30)]:
            done.result()


@pytest.mark.usefixtures("small_parts")
def test_new_regions_are_mapped_when_they_are_needed(tmp_path: Path) -> None:
    with started(tmp_path, "--maxmemory", "0") as (server, url), PageClient(url, deadline=60) as client:
        written = bodies()
        for generation in range(30):  # more than the first region has
            names = [(b"%d-%d" % (generation, i), 0) for i in range(COUNT)]
            client.mset_blocks(names, SHAPE, written)
            into = empty()
            assert client.mget_blocks_into(names, SHAPE, into) == [True] * COUNT
            assert all((found == body).all() for found, body in zip(into, written, strict=True))
        assert over_the_wire(server) == 0


def test_other_blocks_are_read_over_the_connection(tmp_path: Path) -> None:
    """A block of single pages, and blocks beyond the limit of tickets, are not mapped."""
    limits = ("--maxmemory-clients", "6mb", "--maxmemory", "256mb")
    with started(tmp_path, *limits) as (server, url), PageClient(url, deadline=30) as client:
        written = bodies()
        client.mset_blocks(NAMES, SHAPE, written)
        with server.client() as other:
            page = written[2][: SHAPE.page_nbytes(SHAPE.planes[0])].tobytes()
            other.execute_command("KVPAGESET", NAMES[2][0], 0, 0, NAMES[2][1], 0, 1, 64, 64, 0, page)  # splits it
        check(client, written)
        check(client, written)
        assert mapped(server) == over_the_wire(server) == 2


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("user", ["", "tenant"])
def test_a_mapped_block_in_another_shape_is_a_miss(tmp_path: Path, user: str) -> None:
    other = BlockShape(8, 8, 64, (Plane(KVType.K, DType.BFLOAT16, 64),))
    with started(tmp_path, *TENANT) as (server, url), PageClient(of_tenant(url) if user else url) as client:
        client.mset_blocks(NAMES, SHAPE, bodies())
        client.mset_blocks(NAMES[1:2], other, bodies()[:1])
        assert client.fetch_blocks_into(NAMES, SHAPE, empty()) == [None, "shape", *[None] * (COUNT - 2)]
        assert client.mapped_bytes == (COUNT - 1) * SHAPE.nbytes
        with server.client() as admin:
            assert admin.info("kvpage")["page_misses_shape"] == 1


def test_a_tenant_without_the_right_reads_over_the_connection(tmp_path: Path) -> None:
    with started(tmp_path, "--user", "tenant", "on", "nopass", "~kv:r*", "+@all", "-kvmap") as (server, url):
        with PageClient(url.replace("unix://", "unix://tenant:x@"), deadline=30) as client:
            written = bodies()
            client.mset_blocks(NAMES, SHAPE, written)
            check(client, written)
            check(client, written)
        assert over_the_wire(server) == 2


TENANT = ("--user", "tenant", "on", "nopass", "~kv:r*", "+@all")  # may not read every key


def of_tenant(url: str) -> str:
    """Return the URL with which the user `tenant` connects."""
    return url.replace("//", "//tenant:x@")


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("way", ["unix", "tcp"])
@pytest.mark.parametrize("verify", [True, False], ids=["verify", "no verify"])
@pytest.mark.parametrize("connections", [1, 3])
def test_a_tenant_reads_copies(tmp_path: Path, verify: bool, connections: int, way: str) -> None:
    with started(tmp_path, *TENANT) as (server, socket):
        url = of_tenant(socket if way == "unix" else server.url)
        with PageClient(url, verify=verify, connections=connections, deadline=30) as client, server.client() as other:
            written = bodies()
            client.mset_blocks(NAMES, SHAPE, written)
            for _ in range(3):
                check(client, written)
            assert client.mapped_bytes == 3 * COUNT * SHAPE.nbytes
            assert over_the_wire(server) == 0
            client.mset_blocks(NAMES, SHAPE, bodies(1))
            client.delete_request(NAMES[3][0])
            into = empty()
            reasons = client.fetch_blocks_into(NAMES, SHAPE, into)
            assert reasons == [None] * 3 + ["absent"] + [None] * (COUNT - 4)
            read = [i for i, why in enumerate(reasons) if why is None]
            assert all((into[i] == bodies(1)[i]).all() for i in read)
            with client.blocks_in_place(NAMES, SHAPE) as blocks:
                assert blocks == [None] * COUNT
            stats = other.info("commandstats")
            assert int(stats["cmdstat_kvmap|area"]["calls"]) < 4 * connections
            assert int(stats["cmdstat_kvmap|blockmget"]["rejected_calls"]) <= connections
        with server.client() as other:
            until(lambda: int(other.info("memory")["mem_clients_normal"]) < SHAPE.nbytes, "the end of the memory")


async def read_copies(url: str, written: list[Array]) -> None:
    await read_and_cancel(url, written)
    async with AsyncPageClient(url, deadline=30) as client:
        into = empty()
        assert await client.mget_blocks_into(NAMES, SHAPE, into) == [True] * COUNT
        assert all((found == body).all() for found, body in zip(into, written, strict=True))
        assert client.mapped_bytes == COUNT * SHAPE.nbytes


def test_an_event_loop_of_a_tenant_reads_copies(tmp_path: Path) -> None:
    with started(tmp_path, *TENANT) as (server, url):
        with PageClient(url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
        asyncio.run(read_copies(of_tenant(url), bodies()))
        assert over_the_wire(server) == 0


@pytest.mark.parametrize(("layers", "copied"), [(31, 3), (250, 3), (310, 3), (600, 0)])
def test_copies_of_large_blocks(tmp_path: Path, layers: int, copied: int) -> None:
    """Blocks of 2, 15, 19 and 37 MiB: in two halves of the memory, in all of it, and over the connection."""
    shape = BlockShape(layers, 4, 64, (Plane(KVType.K, DType.FLOAT16, 128),))
    names = [(b"r", page) for page in range(3)]
    written = list(np.random.default_rng(0).integers(0, 255, (3, shape.nbytes), np.uint8))
    with started(tmp_path, *TENANT) as (_, url), PageClient(of_tenant(url), deadline=60) as client:
        client.mset_blocks(names, shape, written)
        for _ in range(2):
            into = [np.zeros(shape.nbytes, np.uint8) for _ in names]
            assert client.mget_blocks_into(names, shape, into) == [True] * 3
            assert all((found == body).all() for found, body in zip(into, written, strict=True))
        assert client.mapped_bytes == 2 * copied * shape.nbytes


def kill_tenant(server: RunningServer) -> None:
    with server.client() as client:
        assert client.execute_command("CLIENT", "KILL", "USER", "tenant") > 0


def test_a_lost_connection_of_a_tenant_gets_new_memory(tmp_path: Path) -> None:
    with started(tmp_path, *TENANT) as (server, url), PageClient(of_tenant(url), deadline=60) as client:
        client.mset_blocks(NAMES, SHAPE, bodies())
        for number in range(3):
            check(client, bodies())
            assert client.mapped_bytes == (number + 1) * COUNT * SHAPE.nbytes
            kill_tenant(server)


def test_copies_of_a_connection_that_ends_are_not_used(tmp_path: Path) -> None:
    """The server has overwritten the memory with zeros. No digest is compared, but the next command fails."""
    into, pool = empty(), page_pool(of_tenant(f"unix://{tmp_path / 'socket'}"), {})
    maps, killed = Maps(pool), 0
    maps.copies_only = True
    with started(tmp_path, *TENANT) as (server, url), pool.lent() as connection:
        with PageClient(url, deadline=60) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
        to = connection.ask(ask_dialect(), Deadline(60))
        assert isinstance(to, PageCommands)
        places = Memory(into, writable=True)
        steps = read_mapped(maps, to, NAMES, SHAPE, places, verify=False).steps(connection)
        step = next(steps)
        with suppress(StopIteration):
            while True:
                if isinstance(step, Meanwhile):
                    answer: object = connection.converse_while(step.request, step.work, Deadline(60))
                elif isinstance(step, Request):
                    answer = connection.ask(step, Deadline(60))
                else:
                    area = connection.area
                    assert area
                    kill_tenant(server)
                    until(lambda: not any(area[:4096]), "the zeros")  # noqa: B023 - it is called here
                    answer, killed = step(), killed + 1
                step = steps.send(answer)
        assert (killed, maps.read_bytes, over_the_wire(server)) == (1, 0, 1)
        assert all((found == body).all() for found, body in zip(into, bodies(), strict=True))
        pool.close()


def save(server: RunningServer, page_code: str) -> None:
    """Write all values to disk, and with `always` wait until memory has only their codes."""
    with server.client() as client:
        client.execute_command("SAVE")
        if page_code == "always":
            until(lambda: int(client.info("kvpage")["memory_coded_values"]) == COUNT, "the codes")


@pytest.mark.parametrize("user", ["default", "tenant"])
@pytest.mark.parametrize("page_code", ["disk", "always"])
def test_values_on_disk_are_loaded_and_mapped(tmp_path: Path, page_code: str, user: str) -> None:
    options = ("--store", "tiered", "--maxmemory", "256mb", "--page-code", page_code, *TENANT)
    of_user = of_tenant if user == "tenant" else str
    values = np.random.default_rng(0).standard_normal((COUNT, SHAPE.nbytes // 2)).astype(np.float16)
    written = list(values.view(np.uint8))
    with started(tmp_path, *options) as (server, url), PageClient(of_user(url), deadline=30) as client:
        client.mset_blocks(NAMES, SHAPE, written)
        check(client, written)
        save(server, page_code)
        check(client, written)
        assert over_the_wire(server) == 0
    with started(tmp_path, *options) as (server, url), PageClient(of_user(url), deadline=30) as client:
        check(client, written)
        check(client, written)
        assert over_the_wire(server) == 0


@pytest.mark.usefixtures("small_parts")
def test_a_restarted_server_is_mapped_again(tmp_path: Path) -> None:
    written = bodies()
    with started(tmp_path) as (first, url), PageClient(url, deadline=30) as client:
        client.mset_blocks(NAMES, SHAPE, written)
        check(client, written)
        first.stop()
        with started(tmp_path) as (second, _):
            assert client.mget_blocks_into(NAMES, SHAPE, empty()) == [False] * COUNT
            client.mset_blocks(NAMES, SHAPE, bodies(5))
            check(client, bodies(5))
            assert mapped(second) >= 2
            assert over_the_wire(second) == 0


ROUNDS = pytest.mark.parametrize("rounds", [2, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])


@contextmanager
def one_free_descriptor() -> Iterator[None]:
    """This process can open only one more file during the ``with`` block. It is the receiver's copy of its socket."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("small_parts")
@ROUNDS
def test_without_free_descriptors_the_connection_is_used(tmp_path: Path, rounds: int) -> None:
    written = bodies()
    with started(tmp_path) as (server, url), server.client() as other:
        with PageClient(url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, written)
            other.ping()
        mine, files = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server.pid}/fd"))
        for number in range(rounds):
            with PageClient(url, deadline=30) as client:
                client.mset_blocks(NAMES, SHAPE, written)
                with one_free_descriptor():
                    check(client, written)
            assert over_the_wire(server) == number + 1
            until(lambda: int(other.info("memory")["mem_clients_normal"]) < SHAPE.nbytes, "the end of the tickets")
            until(lambda: len(os.listdir("/proc/self/fd")) <= mine, "the end of the descriptors")
            until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= files + 1, "the end of the connections")


# -- large pages -------------------------------------------------------------------------------------------------------

PAGE_BYTES = 192 * 1024
KEYS = [PageKey(b"r%d" % i, 0, 0, 0, 0) for i in range(COUNT)]


def page_bodies(nbytes: int = PAGE_BYTES) -> list[Array]:
    return list(np.random.default_rng(5).integers(0, 255, (COUNT, nbytes), np.uint8))


def pages(written: list[Array]) -> list[Page]:
    return [Page(key, body, DType.UINT8, 1, len(body)) for key, body in zip(KEYS, written, strict=True)]


def mapped_pages(server: RunningServer) -> int:
    """Number of calls of KVMAP MGET so far."""
    with server.client() as client:
        return int(client.info("commandstats").get("cmdstat_kvmap|mget", {"calls": 0})["calls"])


def check_pages(client: PageClient, written: list[Array], absent: Collection[int] = ()) -> None:
    """Check that all pages but the absent ones are read."""
    into = [np.zeros_like(body) for body in written]
    assert client.mget_into(KEYS, into) == [i not in absent for i in range(COUNT)]
    assert all((into[i] == written[i]).all() for i in range(COUNT) if i not in absent)


@pytest.mark.parametrize("way", ["unix", "tcp"])
@pytest.mark.parametrize("verify", [True, False], ids=["verify", "no verify"])
def test_large_pages_are_read_from_the_server_s_memory(tmp_path: Path, way: str, verify: bool) -> None:
    with started(tmp_path) as (server, socket):
        with PageClient(socket if way == "unix" else server.url, verify=verify, deadline=30) as client:
            client.mset(pages(page_bodies()))
            check_pages(client, page_bodies())
            client.delete_request(KEYS[3].req_id)
            check_pages(client, page_bodies(), absent=[3])
            assert client.misses == {"absent": 1}
            assert (client.mapped_bytes, mapped_pages(server)) == ((2 * COUNT - 1) * PAGE_BYTES, 2)
            client.mset(pages(page_bodies(4096)))
            check_pages(client, page_bodies(4096))
            assert mapped_pages(server) == 2
        with server.client() as other:
            until(lambda: int(other.info("memory")["mem_clients_normal"]) < PAGE_BYTES, "the end of the tickets")


async def read_pages(url: str) -> None:
    async with AsyncPageClient(url, deadline=30) as client:
        into = [np.zeros_like(body) for body in page_bodies()]
        assert await client.mget_into(KEYS, into) == [True] * COUNT
        assert all((found == body).all() for found, body in zip(into, page_bodies(), strict=True))
        assert client.mapped_bytes == COUNT * PAGE_BYTES


def test_an_event_loop_reads_large_pages_from_memory(tmp_path: Path) -> None:
    with started(tmp_path) as (server, _):
        with PageClient(server.url, deadline=30) as client:
            client.mset(pages(page_bodies()))
        asyncio.run(read_pages(server.url))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("verify", [True, False], ids=["verify", "no verify"])
def test_values_under_keys_of_pages_are_as_without_maps(tmp_path: Path, verify: bool) -> None:
    """Strings of any length, and pages of another size."""
    with started(tmp_path) as (server, url):
        into = [np.zeros(PAGE_BYTES, np.uint8) for _ in KEYS]
        found, misses = [], []
        for is_mapped in (True, False):
            with PageClient(url, verify=verify, mapped=is_mapped, deadline=30) as client, server.client() as other:
                client.mset(pages(page_bodies()))
                other.set(bytes(KEYS[1]), b"short")
                other.set(bytes(KEYS[2]), bytes(PAGE_BYTES))
                other.set(bytes(KEYS[4]), bytes(PAGE_BYTES + 64))
                client.set_page(Page(KEYS[5], b"another size", DType.UINT8, 1, 12))
                found.append(client.mget_into(KEYS, into))
                misses.append(client.misses)
        assert found[0] == found[1] == [i not in (1, 2, 4, 5) for i in range(COUNT)]
        assert misses[0] == misses[1]


def test_without_rights_to_map_pages_only_blocks_are_mapped(tmp_path: Path) -> None:
    user = ("--user", "some", "on", "nopass", "~*", "+@all", "-kvmap|mget")
    with started(tmp_path, *user) as (_, url), PageClient(url.replace("//", "//some:x@"), deadline=30) as client:
        client.mset(pages(page_bodies()))
        check_pages(client, page_bodies())
        check_pages(client, page_bodies())
        assert client.mapped_bytes == 0
        client.mset_blocks(NAMES, SHAPE, bodies())
        check(client, bodies())
        assert client.mapped_bytes == COUNT * SHAPE.nbytes


def test_a_tenant_reads_large_pages_over_the_wire(tmp_path: Path) -> None:
    with started(tmp_path, *TENANT) as (_, url), PageClient(of_tenant(url), deadline=30) as client:
        client.mset(pages(page_bodies()))
        check_pages(client, page_bodies())
        check_pages(client, page_bodies())
        assert client.mapped_bytes == 0


def test_pages_of_a_block_are_read_from_the_server_s_memory(tmp_path: Path) -> None:
    shape = BlockShape(2, 2, 1024, (Plane(KVType.K, DType.FLOAT16, 96),))  # pages of 192 KiB
    keys = [PageKey(b"r0", layer, head, 0, 0) for layer in range(2) for head in range(2)]
    with started(tmp_path) as (_, url), PageClient(url, deadline=30) as client:
        written = np.random.default_rng(6).integers(0, 255, (4, PAGE_BYTES), np.uint8)
        client.mset_blocks([(b"r0", 0)], shape, [written.reshape(-1)])
        into = np.zeros_like(written)
        assert all(client.mget_into(keys, list(into)))
        assert (into == written).all()


def test_a_large_page_in_damaged_memory_is_a_miss(tmp_path: Path) -> None:
    with started(tmp_path) as (server, url), PageClient(url, deadline=30) as client:
        client.mset(pages(page_bodies()))
        check_pages(client, page_bodies())
        assert overwrite(server.pid, page_bodies()[2][:64].tobytes()) == 1
        check_pages(client, page_bodies(), absent=[2])
        assert client.misses == {"checksum": 1}


@pytest.mark.parametrize("page_code", ["disk", "always"])
def test_large_pages_on_disk_are_read(tmp_path: Path, page_code: str) -> None:
    options = ("--store", "tiered", "--maxmemory", "256mb", "--page-code", page_code)
    values = np.random.default_rng(0).standard_normal((COUNT, PAGE_BYTES // 2)).astype(np.float16)
    written = list(values.view(np.uint8))
    sent = [Page(key, body, DType.FLOAT16, PAGE_BYTES // 128, 64) for key, body in zip(KEYS, written, strict=True)]
    with started(tmp_path, *options) as (server, url), PageClient(url, deadline=30) as client:
        client.mset(sent)
        check_pages(client, written)
        save(server, page_code)
        check_pages(client, written)
    with started(tmp_path, *options) as (_, url), PageClient(url, deadline=30) as client:
        check_pages(client, written)
        check_pages(client, written)


# -- replies of a server with errors, without a server -----------------------------------------------------------------


def dialogue(*, copies: bool, area: int = 10 << 20) -> Steps[Missed]:
    """Return the dialogue that reads a block of a MiB out of a region, or by way of an area of `area` bytes."""
    pool = page_pool("unix:///absent", {})
    connection, maps = pool.lend(), Maps(pool)
    maps.copies_only = copies
    if copies:
        connection.area = memoryview(bytes(area))
    shape = BlockShape(16, 4, 64, (Plane(KVType.K, DType.FLOAT16, 128),))
    places = Memory([bytearray(shape.nbytes)], writable=True)
    return read_mapped(maps, PageCommands(None), [(b"r", 0)], shape, places, verify=True).steps(connection)


MIB = 1 << 20


def memory(nbytes: int = MIB, seals: int = 2) -> int:
    """Return a descriptor of memory that is sealed so that it cannot become shorter."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, 1033, seals)
    return descriptor


OUTSIDE = [(-1, MIB), (1, MIB), (0, -1), (0, 1 << 62), (1 << 62, MIB), (11 * MIB, 0), (b"0", MIB), (0, None)]


def read_at(place: tuple[Any, Any]) -> Any:
    """Read a block at an offset, and of a number of bytes, of a region of a MiB. Return the misses."""
    steps = dialogue(copies=False)
    next(steps)
    steps.send([[7, *place, None, 1]])
    work: Any = steps.send(([3, [7], [[7, MIB]]], [memory()]))
    return work()


@pytest.mark.parametrize("place", OUTSIDE)
def test_a_place_outside_of_a_region_is_a_wrong_reply(place: tuple[Any, Any]) -> None:
    with pytest.raises(WrongReply):
        read_at(place)


def copy_at(place: tuple[Any, Any]) -> Any:
    """Read a block at an offset, and of a number of bytes, of an area. Return the misses."""
    steps = dialogue(copies=True)
    next(steps)
    work: Any = steps.send([[*place, None]])
    return work()


@pytest.mark.parametrize("place", OUTSIDE)
def test_a_place_outside_of_an_area_is_a_wrong_reply(place: tuple[Any, Any]) -> None:
    if place == (1, MIB):  # the area is larger than the region
        assert copy_at(place) == {}
    else:
        with pytest.raises(WrongReply):
            copy_at(place)


@pytest.mark.parametrize("copies", [False, True], ids=["region", "area"])
def test_a_block_of_another_size_is_a_miss(copies: bool) -> None:
    assert (copy_at if copies else read_at)((0, 5)) == {0: "size"}


@pytest.mark.parametrize(("nbytes", "seals"), [(MIB, 4), (MIB - 1, 2)], ids=["not sealed", "too short"])
@pytest.mark.parametrize("copies", [False, True], ids=["region", "area"])
def test_memory_that_may_become_shorter_is_not_mapped(copies: bool, nbytes: int, seals: int) -> None:
    """A process that reads behind its end is killed."""
    descriptor = memory(nbytes, seals)
    steps = dialogue(copies=copies, area=0)
    next(steps)
    if not copies:
        steps.send([[7, 0, MIB, None, 1]])
    with pytest.raises(WrongReply, match=r"not sealed|shorter"):
        steps.send((MIB, [descriptor]) if copies else ([3, [7], [[7, MIB]]], [descriptor]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def maps_of_this_process() -> int:
    """Number of maps of servers' memory that this process has."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kvpage")


@pytest.mark.usefixtures("small_parts")
@ROUNDS
def test_a_client_outlives_the_servers_that_it_maps(tmp_path: Path, rounds: int) -> None:
    """Each server has another size than the one before, and is killed while its memory is read."""
    path, others = tmp_path / "socket", maps_of_this_process()  # those of other tests, which may end meanwhile
    with PageClient(f"unix://{path}", deadline=30) as client:
        for number, size in zip(range(rounds), cycle(("64mb", "256mb")), strict=False):
            with start_server("--unixsocket", str(path), "--maxmemory", size, killed=True) as server:
                written = bodies(number)
                client.mset_blocks(NAMES, SHAPE, written)
                check(client, written)
                assert client.mapped_bytes == (number + 1) * COUNT * SHAPE.nbytes
                with pytest.raises(redis.ConnectionError):
                    read_while_it_is_killed(client, server, written)
            assert maps_of_this_process() <= others + 1
    until(lambda: maps_of_this_process() <= others, "the end of the maps")


def read_while_it_is_killed(client: PageClient, server: RunningServer, written: list[Array]) -> None:
    """Kill a server while its memory is read, and check that the bytes are the same as before."""
    with client.blocks_in_place(NAMES, SHAPE) as blocks:
        server.stop(signal.SIGKILL)
        assert all(view and bytes(view) == body.tobytes() for view, body in zip(blocks, written, strict=True))


def overwrite(pid: int, wanted: bytes) -> int:
    """Overwrite some bytes in the shared memory of a process with zeros. Return how often they were there."""
    found = 0
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    with Path(f"/proc/{pid}/mem").open("r+b", 0) as memory:
        for line in lines:
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            if "memfd:kvpage" not in line:
                continue
            memory.seek(start)
            at = memory.read(min(stop - start, 32 << 20)).find(wanted)
            if at >= 0:
                memory.seek(start + at)
                memory.write(bytes(len(wanted)))
                found += 1
    return found


@pytest.mark.usefixtures("small_parts")
def test_damaged_memory_is_a_miss(tmp_path: Path) -> None:
    """The server's process is changed as a defect of memory would."""
    with started(tmp_path) as (server, url), PageClient(url, deadline=30) as client:
        written = bodies()
        client.mset_blocks(NAMES, SHAPE, written)
        assert overwrite(server.pid, written[4][1000:1064].tobytes()) == 1
        into = empty()
        assert client.fetch_blocks_into(NAMES, SHAPE, into) == [None] * 4 + ["checksum"] + [None] * 7


@pytest.mark.usefixtures("small_parts")
def test_a_killed_server_is_an_error_and_no_wrong_bytes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with (
        start_server("--unixsocket", str(path), killed=True) as server,
        PageClient(f"unix://{path}", deadline=5) as client,
    ):
        client.mset_blocks(NAMES, SHAPE, bodies())
        check(client, bodies())
        server.stop(signal.SIGKILL)
        with pytest.raises(redis.ConnectionError):
            client.mget_blocks_into(NAMES, SHAPE, empty())


def test_a_closed_client_keeps_no_descriptor(tmp_path: Path) -> None:
    with started(tmp_path) as (_, url):
        before = len(os.listdir("/proc/self/fd"))
        with PageClient(url, deadline=30) as client:
            client.mset_blocks(NAMES, SHAPE, bodies())
            check(client, bodies())
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the end of the maps")
