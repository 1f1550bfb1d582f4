"""KVMAP: clients of the unix socket read values in the server's memory, which they map."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, cycle, islice, product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from servers import RunningServer, start_server
from waiting import until
from wire import Error, Wire, encode_command, parse

from kvpage_server.page import checksum

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs sealed shared memory of Linux")

MIB = 1 << 20
BODY = os.urandom(MIB)
SHAPE = (b"16", b"8", b"64", b"0", b"1", b"0", b"1", b"64")  # layers, heads, page_size, ttl, planes: of one MiB


class Local(Wire):
    """A connection to the unix socket, with the regions that it has mapped."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._incoming = self._socket.makefile("rb")
        self.maps: dict[int, mmap.mmap] = {}
        self.descriptors: list[int] = []

    def do(self, *words: bytes | int) -> Any:
        """Return the parsed reply to a command."""
        return parse(self.ask(*(word if isinstance(word, bytes) else b"%d" % word for word in words)))

    def attach(self, *numbers: int) -> list[Any]:
        """Map regions, and return KVMAP ATTACH's reply."""
        self.send(encode_command([b"KVMAP", b"ATTACH", *(b"%d" % number for number in numbers)]))
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 253)
        reply = parse(data)
        for (number, size), descriptor in zip(reply[2], descriptors, strict=True):
            self.maps[number] = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.descriptors += descriptors
        return list(reply)

    def descriptors_of_first(self, many: int) -> int:
        """Read `many` replies, of which the first carries descriptors and the others are errors. Return its number of
        descriptors.
        """
        data, found = b"", 0
        while data.count(b"-ERR descriptors cannot be passed now") < many - 1:
            some, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 253)
            assert some, data
            data += some
            found += len(descriptors)
            self.descriptors += descriptors
        return found

    def area(self, size: int = 8 * MIB) -> mmap.mmap:
        """Return the map of new memory of the connection (KVMAP AREA)."""
        self.send(encode_command([b"KVMAP", b"AREA", b"%d" % size]))
        data, [descriptor], _, _ = socket.recv_fds(self._socket, 1 << 16, 253)
        self.descriptors.append(descriptor)
        return mmap.mmap(descriptor, parse(data), mmap.MAP_SHARED, mmap.PROT_READ)

    def read(self, item: list[Any]) -> bytes:
        """Return the bytes that an item of a reply names."""
        number, offset, size, digest, _ = item
        found = self.maps[number][offset : offset + size]
        assert digest is None or digest == b"%016x" % checksum(found)
        return found

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        super().close()


def set_block(wire: Wire, name: bytes, body: bytes = BODY) -> None:
    assert wire.ask(b"KVBLOCKSET", name, b"0", *SHAPE, body) == b"+OK\r\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mapped") / "socket"


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    options = ("--maxmemory", "128mb", "--maxmemory-clients", "16mb")
    with start_server("--unixsocket", str(path), *options) as server:
        yield server


@pytest.fixture
def local(client: redis.Redis, path: Path) -> Iterator[Local]:
    with Local(path) as local:
        yield local


def lent(client: redis.Redis) -> int:
    """Bytes that all clients hold."""
    return int(client.info("memory")["mem_clients_normal"])


def test_a_block_is_read_from_mapped_memory(local: Local) -> None:
    set_block(local, b"r")
    epoch, existing, passed = local.attach()
    assert existing == [number for number, _ in passed]
    item, absent = local.do(b"KVMAP", b"BLOCKMGET", 2, b"r", 0, b"s", 0)
    assert absent is None
    assert item[2:4] == [MIB, b"%016x" % checksum(BODY)]
    assert item[4] >> 43 == epoch
    assert local.read(item) == BODY
    assert local.do(b"KVMAP", b"RELEASE", item[4]) == 1


def test_strings_and_pages_are_read_from_mapped_memory(local: Local) -> None:
    local.do(b"MSET", b"short", b"a", b"long", b"b" * 5000)
    local.do(b"KVPAGESET", b"p", 0, 0, 0, 0, 1, 64, 64, 0, BODY[:8192])
    set_block(local, b"r")
    local.attach()
    page, extent = b"kv:p:0:0:0:0", b"kv:r:1:0:0:0"
    values = local.do(b"KVMAP", b"MGET", b"short", b"long", page, extent, b"absent")
    assert [values[0], values[4]] == [b"a", None]
    assert local.read(values[1]) == b"b" * 5000
    assert local.read(values[2]) == BODY[:8192]
    assert values[2][3] == b"%016x" % checksum(BODY[:8192])
    assert local.read(values[3]) == BODY[MIB // 16 : MIB // 16 + 8192]
    assert local.do(b"KVMAP", b"RELEASE", *(item[4] for item in values[1:4])) == 3


def test_a_block_of_single_pages_is_not_mapped(local: Local) -> None:
    local.do(b"KVPAGESET", b"p", 0, 0, 0, 0, 1, 64, 64, 0, BODY[:8192])
    [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"p", 0)
    assert item == "NOMAP the block consists of single pages"


def replace_block(local: Local, client: redis.Redis, how: str) -> None:
    """Overwrite, delete, evict or flush the block "r", and store other blocks, so that its memory is used again."""
    if how == "overwritten":
        set_block(local, b"r", bytes(MIB))
    elif how == "deleted":
        assert client.execute_command("KVPAGEDEL", "r") == 128
    elif how == "flushed":
        client.flushall()
    for number in range(200 if how == "evicted" else 20):
        set_block(local, b"rs%d" % number, os.urandom(MIB))
    assert local.do(b"KVBLOCKEXISTS", b"r", 0) == (how == "overwritten")


@pytest.mark.parametrize("how", ["overwritten", "deleted", "evicted", "flushed"])
def test_bytes_stay_until_the_release(local: Local, client: redis.Redis, how: str) -> None:
    set_block(local, b"r")
    local.attach()
    [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)
    replace_block(local, client, how)
    assert local.read(item) == BODY
    assert local.do(b"KVMAP", b"RELEASE", item[4]) == 1


def test_tickets_end_with_their_connection(client: redis.Redis, path: Path) -> None:
    before = lent(client)
    with Local(path) as local:
        for name in b"abcd":
            set_block(local, b"%d" % name)
            [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"%d" % name, 0)
            assert item[2] == MIB
        assert lent(client) > before + 4 * MIB
    until(lambda: lent(client) <= before, "the end of the tickets")


def test_reset_ends_tickets(local: Local, client: redis.Redis) -> None:
    set_block(local, b"r")
    [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)
    assert local.do(b"RESET") == "RESET"
    assert local.do(b"KVMAP", b"RELEASE", item[4]) == f"ERR ticket {item[4]} was released before"
    assert lent(client) < MIB


def test_tickets_take_half_of_the_memory_for_clients(local: Local, client: redis.Redis) -> None:
    for number in range(20):
        set_block(local, b"%d" % number)
    names = [word for number in range(20) for word in (b"%d" % number, b"0")]
    items = local.do(b"KVMAP", b"BLOCKMGET", 20, *names)
    granted = [item for item in items if isinstance(item, list)]
    assert 4 <= len(granted) <= 8
    assert all(item.startswith("OOM") for item in items[len(granted) :])
    assert lent(client) <= 8 * MIB
    local.do(b"KVMAP", b"RELEASE", *(item[4] for item in granted))
    assert isinstance(local.do(b"KVMAP", b"BLOCKMGET", 1, b"19", b"0")[0], list)


def test_held_tickets_do_not_evict_other_values(local: Local, client: redis.Redis) -> None:
    """They count for clients: as many other values fit as without them."""
    for number in range(6):
        set_block(local, b"a%d" % number)
        local.do(b"KVMAP", b"BLOCKMGET", 1, b"a%d" % number, 0)
    client.flushall()
    for number in range(80):
        set_block(local, b"b%d" % number)
    assert client.info("stats")["evicted_keys"] == 0 or client.dbsize() >= 80 * 128


ATTACH_OVER_TCP = "ERR KVMAP needs a connection to the server's unix socket (unixsocket)"


def test_wrong_tickets_have_errors_of_their_own(local: Local, server: RunningServer, path: Path) -> None:
    set_block(local, b"r")
    [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)
    ticket = item[4]
    with Local(path) as other:
        assert other.do(b"KVMAP", b"RELEASE", ticket) == f"ERR ticket {ticket} is not one of this connection"
    twice = local.do(b"KVMAP", b"RELEASE", ticket, ticket)
    assert twice == f"ERR ticket {ticket} is there twice"
    future = ticket + 1000
    assert local.do(b"KVMAP", b"RELEASE", ticket, future) == f"ERR ticket {future} is not one of this connection"
    old = ticket ^ (1 << 50)
    assert local.do(b"KVMAP", b"RELEASE", old) == f"ERR ticket {old} is of another epoch: the server was restarted"
    assert local.do(b"KVMAP", b"RELEASE", ticket) == 1
    assert local.do(b"KVMAP", b"RELEASE", ticket) == f"ERR ticket {ticket} was released before"
    assert isinstance(local.do(b"KVMAP", b"RELEASE", b"x"), Error)
    assert local.do(b"PING") == "PONG"


def test_other_mistakes_have_errors_of_their_own(local: Local, server: RunningServer) -> None:
    assert local.do(b"KVMAP", b"ATTACH", 12345) == "ERR there is no region 12345"
    many = local.do(b"KVMAP", b"ATTACH", *range(1, 200))
    assert many == "ERR KVMAP ATTACH passes at most 128 regions at once, got 199"
    assert isinstance(local.do(b"KVMAP", b"BLOCKMGET", 2, b"r", 0), Error)
    assert isinstance(local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", b"x"), Error)
    with Wire(server.port) as wire:
        for words in ((b"ATTACH",), (b"BLOCKMGET", b"1", b"r", b"0"), (b"MGET", b"r")):
            assert parse(wire.ask(b"KVMAP", *words)) == ATTACH_OVER_TCP
        assert wire.ask(b"PING") == b"+PONG\r\n"
    local.do(b"MULTI")
    assert "inside a transaction" in local.do(b"KVMAP", b"ATTACH")
    assert "EXECABORT" in local.do(b"EXEC")


def test_the_unix_socket_is_named_over_tcp(
    local: Local, client: redis.Redis, server: RunningServer, path: Path
) -> None:
    found = client.execute_command("KVMAP", "SOCKET")
    assert [str(word, "utf-8") for word in found] == [str(path), client.info("server")["run_id"]]
    assert local.do(b"KVMAP", b"SOCKET") == found
    assert isinstance(local.do(b"KVMAP", b"SOCKET", b"x"), Error)


def test_descriptors_are_passed_only_after_all_replies(local: Local) -> None:
    set_block(local, b"r")
    local.send(encode_command([b"PING"]) + encode_command([b"KVMAP", b"ATTACH"]))
    assert local.reply() == b"+PONG\r\n"
    assert b"read all earlier replies" in local.reply()
    assert local.attach()[2]


def test_a_user_with_limited_rights_is_refused(local: Local, client: redis.Redis, path: Path) -> None:
    set_block(local, b"r")
    client.execute_command("ACL", "SETUSER", "tenant", "on", "nopass", "~kv:r:*", "+@all")
    client.execute_command("ACL", "SETUSER", "careful", "on", "nopass", "~*", "+@all", "-@dangerous")
    try:
        with Local(path) as tenant:
            tenant.do(b"AUTH", b"tenant", b"")
            for words in ((b"ATTACH",), (b"BLOCKMGET", b"1", b"r", b"0"), (b"MGET", b"kv:r:0:0:0:0")):
                assert tenant.do(b"KVMAP", *words).startswith("NOPERM")
            assert tenant.do(b"KVBLOCKGET", b"r", b"0") == BODY
            tenant.do(b"AUTH", b"careful", b"")
            assert tenant.do(b"KVMAP", b"ATTACH").startswith("NOPERM")
    finally:
        client.execute_command("ACL", "DELUSER", "tenant", "careful")


# -- copies for users with limited rights ------------------------------------------------------------------------------

TENANT = ("on", "nopass", "resetkeys", "~kv:r*", "+@all")  # rules of its user
FULL = "NOMAP the memory of KVMAP AREA has no room for the block"


@pytest.fixture
def tenant(client: redis.Redis, path: Path) -> Iterator[Local]:
    """A connection of the user `tenant`."""
    client.execute_command("ACL", "SETUSER", "tenant", *TENANT)
    with Local(path) as tenant:
        tenant.do(b"AUTH", b"tenant", b"")
        yield tenant
    client.execute_command("ACL", "DELUSER", "tenant")


def copy_of(area: mmap.mmap, item: list[Any]) -> bytes:
    """Return the bytes that an item of KVMAP COPY's reply names."""
    at, size, digest = item
    assert digest is None or digest == b"%016x" % checksum(area[at : at + size])
    return area[at : at + size]


def test_blocks_are_copied_for_a_user_with_limited_rights(tenant: Local) -> None:
    set_block(tenant, b"r")
    set_block(tenant, b"r2", BODY[::-1])
    for layer, head, kind in product(range(2), range(2), range(2)):
        tenant.do(b"KVPAGESET", b"r3", layer, head, 0, kind, 1, 64, 64, 0, BODY[:8192])
    area = tenant.area()
    items = tenant.do(b"KVMAP", b"COPY", 5, 4, b"r", 0, b"r4", 0, b"r2", 0, b"r3", 0)
    assert [copy_of(area, items[i]) for i in (0, 2, 3)] == [BODY, BODY[::-1], BODY[:8192] * 8]
    assert [items[0][2], items[1], items[3][2]] == [b"%016x" % checksum(BODY), None, None]
    again = tenant.do(b"KVMAP", b"COPY", 3 * MIB, 1, b"r2", 0)
    assert copy_of(area, again[0]) == BODY[::-1]
    assert copy_of(area, items[0]) == BODY


@pytest.mark.parametrize("how", ["overwritten", "deleted", "evicted", "flushed"])
def test_copies_stay_without_their_blocks(tenant: Local, client: redis.Redis, how: str) -> None:
    set_block(tenant, b"r")
    area = tenant.area()
    [item] = tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)
    replace_block(tenant, client, how)
    assert copy_of(area, item) == BODY


def test_wrong_copies_have_errors_of_their_own(tenant: Local, server: RunningServer) -> None:
    set_block(tenant, b"r")
    assert tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", 0) == "ERR KVMAP COPY needs memory of its connection: KVMAP AREA"
    for size in (0, (32 << 20) + 1, b"x"):
        assert isinstance(tenant.do(b"KVMAP", b"AREA", size), Error)
    area = tenant.area(MIB + 4096)
    assert tenant.do(b"KVMAP", b"COPY", 0, 2, b"r", 0, b"r", 0)[1] == FULL
    assert tenant.do(b"KVMAP", b"COPY", len(area), 1, b"r", 0) == [FULL]
    for offset in (-1, len(area) + 1, b"x"):
        assert isinstance(tenant.do(b"KVMAP", b"COPY", offset, 1, b"r", 0), Error)
    assert isinstance(tenant.do(b"KVMAP", b"COPY", 0, 2, b"r", 0), Error)
    assert isinstance(tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", b"x"), Error)
    with Wire(server.port) as wire:
        assert parse(wire.ask(b"KVMAP", b"AREA", b"4096")) == ATTACH_OVER_TCP
        assert parse(wire.ask(b"KVMAP", b"COPY", b"0", b"1", b"r", b"0")) == ATTACH_OVER_TCP
    tenant.send(encode_command([b"PING"]) + encode_command([b"KVMAP", b"AREA", b"4096"]))
    assert tenant.reply() == b"+PONG\r\n"
    assert b"read all earlier replies" in tenant.reply()
    assert tenant.do(b"RESET") == "RESET"
    assert "needs memory" in tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)


def test_a_refused_area_leaves_the_one_before_it(tenant: Local) -> None:
    set_block(tenant, b"r")
    area = tenant.area()
    [item] = tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)
    error = "OOM clients hold up to 8388608 bytes, and 33554432 more of memory of a connection do not fit"
    assert tenant.do(b"KVMAP", b"AREA", 32 << 20) == error
    tenant.send(encode_command([b"PING"]) + encode_command([b"KVMAP", b"AREA", b"4096"]))
    assert tenant.reply() == b"+PONG\r\n"
    assert b"read all earlier replies" in tenant.reply()
    assert copy_of(area, item) == BODY
    [again] = tenant.do(b"KVMAP", b"COPY", 2 * MIB, 1, b"r", 0)
    assert copy_of(area, again) == BODY


def test_areas_take_half_of_the_memory_for_clients(tenant: Local, client: redis.Redis, path: Path) -> None:
    before = lent(client)
    for _ in range(20):
        tenant.area(6 * MIB)
    assert 6 * MIB <= lent(client) - before < 7 * MIB
    with Local(path) as other:
        assert other.do(b"KVMAP", b"AREA", 6 * MIB).startswith("OOM")
        assert len(other.area(MIB)) == MIB
    assert tenant.do(b"RESET") == "RESET"
    until(lambda: lent(client) <= before + 4096, "the end of the memory")


@pytest.mark.parametrize("how", ["closed", "killed", "user deleted", "reset", "replaced"])
def test_memory_of_a_connection_ends_with_it(
    tenant: Local, client: redis.Redis, server: RunningServer, path: Path, how: str
) -> None:
    """A client that keeps the map keeps neither its bytes nor memory of the system."""
    with Local(path) as other:
        other.do(b"AUTH", b"tenant", b"")
        set_block(other, b"r")
        area = other.area()
        [descriptor] = other.descriptors
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600, "other users of the system cannot open it"
        writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # as its owner, or as root
        try:
            for size in (0, 1 << 40):
                assert refused(partial(os.ftruncate, writable, size)) == errno.EPERM
            assert refused(partial(fcntl.fcntl, writable, 1033, 16)) == errno.EPERM  # a seal against its end
            [item] = other.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)
            assert os.fstat(writable).st_blocks * 512 >= MIB
            if how == "closed":
                other._socket.shutdown(socket.SHUT_RDWR)
            elif how == "killed":
                client.execute_command("CLIENT", "KILL", "USER", "tenant", "TYPE", "normal")
            elif how == "user deleted":
                client.execute_command("ACL", "DELUSER", "tenant")
            elif how == "reset":
                other.do(b"RESET")
            else:
                other.area()
            until(lambda: os.fstat(writable).st_blocks == 0, "the end of the memory")
            assert area[item[0] : item[0] + item[1]] == bytes(MIB)
        finally:
            os.close(writable)


def test_rights_are_those_of_the_moment_of_a_copy(tenant: Local, client: redis.Redis) -> None:
    set_block(tenant, b"r")
    area = tenant.area()
    [item] = tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)
    client.execute_command("ACL", "SETUSER", "tenant", "resetkeys", "~kv:other*")
    client.execute_command("KVBLOCKSET", "r", "0", *SHAPE, BODY[::-1])
    assert tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", 0).startswith("NOPERM")
    assert copy_of(area, item) == BODY
    client.execute_command("ACL", "SETUSER", "tenant", *TENANT)
    [item] = tenant.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)
    assert copy_of(area, item) == BODY[::-1]


SECRET = b"what only the other tenant may read "  # in the values and names of another tenant


def learn(path: Path, pid: int, said: Connection) -> None:
    """Send everything that a tenant's process, of another user of the system, can read through maps and /proc."""
    found, denied = [], []
    with Local(path) as local:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        local.do(b"AUTH", b"tenant", b"")
        for size in (1, 4096, MIB, 8 * MIB):
            area = local.area(size)
            found.append(repr(local.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)).encode())
            for name in (b"other", b"deleted", b"r", b"absent"):
                calls = (b"COPY", 0, 2, b"r", 0, name, 0), (b"COPY", 0, 1, name, 0), (b"BLOCKMGET", 1, name, 0)
                found += [repr(local.do(b"KVMAP", *words)).encode() for words in calls]
            found.append(area[:])
        found += [repr(local.do(b"KVMAP", *words)).encode() for words in ((b"ATTACH",), (b"MGET", b"kv:other:0:0:0:0"))]
        own = [place for place in Path("/proc/self/fd").iterdir() if "memfd:kvpage" in os.path.realpath(place)]
        found += [os.pread(int(place.name), 16 * MIB, 0) for place in own]
        for name in ("fd", "map_files", "maps", "mem", "environ"):
            try:
                place = Path(f"/proc/{pid}/{name}")
                found.append(repr(os.listdir(place)).encode() if place.is_dir() else place.read_bytes())
            except OSError:
                denied.append(name)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kvpage")
    said.send((b"".join(found), denied, maps))
    said.recv()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_maps_and_proc_show_a_tenant_nothing_of_others(
    tenant: Local, client: redis.Redis, local: Local, path: Path, server: RunningServer
) -> None:
    set_block(tenant, b"r")
    secret = (SECRET * (MIB // len(SECRET) + 1))[:MIB]
    for name in (b"other", b"deleted", b"evicted"):
        set_block(local, name, secret)
    client.set(SECRET, secret)
    client.execute_command("KVPAGEDEL", "deleted")
    with Local(path) as other:  # another connection's memory, which ends
        other.area()
        other.do(b"KVMAP", b"COPY", 0, 1, b"other", 0)
    processes = get_context("forkserver")
    here, there = processes.Pipe()
    process = processes.Process(target=learn, args=(path, server.pid, there), daemon=True)
    process.start()
    there.close()
    try:
        found, denied, maps = here.recv()
        here.send(None)
    finally:
        here.close()
        process.join()
    assert SECRET[:16] not in found
    assert found.count(BODY) >= 2  # in the last map, and through its descriptor
    assert {*denied} >= {"fd", "map_files", "mem", "environ"}
    assert maps == 1  # its last memory; the ones before are not mapped any longer
    [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"other", 0)
    local.attach()
    assert SECRET[:16] in local.read(item)  # or the test would prove nothing


def ticket(local: Local) -> int:
    """Return a new ticket for the block `r`."""
    return int(local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)[0][4])


def test_ticket_numbers_do_not_depend_on_other_clients(local: Local, path: Path) -> None:
    set_block(local, b"r")
    first = ticket(local)
    with Local(path) as other:
        others = [ticket(other) for _ in range(3)]
        assert others == [*range(others[0], others[0] + 3)]
        for unknown in (others[0], others[2] + 1000):
            assert local.do(b"KVMAP", b"RELEASE", unknown) == f"ERR ticket {unknown} is not one of this connection"
    assert ticket(local) == first + 1


@contextmanager
def few_descriptors(pid: int, free: int) -> Iterator[None]:
    """A process can open only `free` more files during the ``with`` block."""
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    unused = islice((number for number in count() if number not in used), free, None)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(unused), before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


NO_DESCRIPTORS = "ERR the system cannot seal and open shared memory: Too many open files"


def test_memory_is_attached_after_a_time_without_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with start_server("--unixsocket", str(path)) as server, Local(path) as local:
        set_block(local, b"r")
        with few_descriptors(server.pid, 0):
            for _ in range(3):
                error = local.do(b"KVMAP", b"ATTACH")
                assert error == NO_DESCRIPTORS
        assert local.attach()[2]
        [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)
        assert local.read(item) == BODY


def test_unread_replies_carry_few_descriptors(local: Local, client: redis.Redis, path: Path) -> None:
    """The kernel limits the descriptors in transit of all clients together."""
    set_block(local, b"r")
    regions = len(local.attach()[1])
    client.config_resetstat()
    with Local(path) as silent:
        silent.send(encode_command([b"KVMAP", b"ATTACH"]) * 100)
        until(lambda: calls(client, "attach") == 100, "the last command")
        assert silent.descriptors_of_first(100) == regions


def calls(client: redis.Redis, subcommand: str) -> int:
    """Number of calls of a subcommand of KVMAP."""
    return int(client.info("commandstats").get(f"cmdstat_kvmap|{subcommand}", {"calls": 0})["calls"])


def killed_while_it_runs(work: Callable[[Path, Connection], None], path: Path) -> None:
    """Call a function in another process, and kill that when it has sent something.

    It is forked from a process without threads: this one may have those of MLX.
    """
    processes = get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    heard, said = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(path, said), daemon=True)
    process.start()
    said.close()
    try:
        assert heard.recv_bytes() == b"x"
    finally:
        heard.close()
        process.kill()
        process.join()


def refused(call: Any) -> int:
    """Return the error number with which the system refuses a call."""
    with pytest.raises(OSError, match=r".") as caught:
        call()
    return caught.value.errno or 0


def try_to_change(local: Local, item: list[Any]) -> None:
    """Check that the system refuses to write to mapped memory, or to change its length."""
    [descriptor, *_] = local.descriptors
    denied = (errno.EPERM, errno.EACCES, errno.EBADF, errno.EINVAL)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # as its owner, or as root
    try:
        for mine in (descriptor, again):
            assert refused(partial(mmap.mmap, mine, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)) in denied
            assert refused(partial(os.ftruncate, mine, 0)) in denied
            assert refused(partial(os.ftruncate, mine, 1 << 40)) in denied
            assert refused(partial(os.pwrite, mine, b"x", 0)) in denied
            assert refused(partial(fcntl.fcntl, mine, 1033, 1)) in denied
    finally:
        os.close(again)
    address = ctypes.c_void_p(address_of(local.maps[item[0]]))
    assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE) != 0


def test_other_processes_cannot_write_to_the_memory(local: Local) -> None:
    set_block(local, b"r")
    local.attach()
    [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)
    try_to_change(local, item)
    assert local.read(item) == BODY
    assert local.do(b"KVBLOCKGET", b"r", 0) == BODY


def address_of(region: mmap.mmap) -> int:
    """Return the address of a read-only mapping."""
    return int(np.frombuffer(region, np.uint8).ctypes.data)


def open_memory(pid: int) -> int:
    """Number of descriptors of shared memory that a process has."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += "memfd:kvpage" in os.readlink(entry)
    return found


def read_with_ticket(path: Path, said: Connection) -> None:
    """Map the memory, get a ticket, and read for ever."""
    local = Local(path)
    local.attach()
    [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)
    said.send_bytes(b"x")
    while True:
        local.read(item)


def test_a_server_without_a_unix_socket_shares_nothing() -> None:
    with start_server() as server, Wire(server.port) as wire:
        set_block(wire, b"r")
        assert parse(wire.ask(b"KVMAP", b"ATTACH")) == ATTACH_OVER_TCP
        assert parse(wire.ask(b"KVMAP", b"SOCKET")) is None
        assert open_memory(server.pid) == 0


# -- rounds: `make test` runs a few, `make soak` two hundred -----------------------------------------------------------

ROUNDS = pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])


def open_files(pid: int) -> int:
    """Number of descriptors that a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def used_memory(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def shared_memory(pid: int) -> int:
    """Bytes of shared memory that the values of a server take, also where only other processes map them."""
    found: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if "memfd:kvpage" in os.readlink(entry):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512  # a region has two descriptors
    return sum(found.values())


def checked(rounds: int, server: RunningServer, client: redis.Redis) -> Iterator[None]:
    """Yield for each round. After it, the store is emptied: then the server has no ticket, and not more descriptors
    and memory than after the first round.

    One descriptor may be that of a connection that ends. A few more slots are taken if others are not free yet.
    """

    def kept() -> tuple[int, int, int]:
        return open_files(server.pid), used_memory(client), shared_memory(server.pid)

    def is_within(most: tuple[int, int, int]) -> bool:
        return all(map(le, kept(), most))

    most: tuple[int, int, int] | None = None
    for _ in range(rounds):
        yield
        client.flushall()
        until(lambda: lent(client) < MIB, "the end of the tickets")
        if most is None:
            files, used, shared = kept()
            most = files + 1, used + MIB, shared + 16 * MIB
        until(partial(is_within, most), f"{most} after {kept()}")


@ROUNDS
def test_a_killed_reader_leaves_nothing(client: redis.Redis, path: Path, server: RunningServer, rounds: int) -> None:
    with Local(path) as local:
        for _ in checked(rounds, server, client):
            set_block(local, b"r")
            killed_while_it_runs(read_with_ticket, path)
            assert local.do(b"KVBLOCKGET", b"r", 0) == BODY


@ROUNDS
def test_tickets_hold_under_eviction_and_lower_limits(
    client: redis.Redis, path: Path, server: RunningServer, rounds: int
) -> None:
    names = [b"held%d" % number for number in range(6)]
    with Local(path) as local:
        for _ in checked(rounds, server, client):
            bodies = [os.urandom(MIB) for _ in names]
            for name, body in zip(names, bodies, strict=True):
                set_block(local, name, body)
            items = local.do(b"KVMAP", b"BLOCKMGET", len(names), *(word for name in names for word in (name, b"0")))
            local.attach(*({item[0] for item in items} - {*local.maps}))
            client.config_set("maxmemory", "32mb")
            for number in range(60):
                set_block(local, b"other%d" % number)
            assert not any(local.do(b"KVBLOCKEXISTS", name, 0) for name in names)
            client.config_set("maxmemory", "128mb")
            assert [local.read(item) for item in items] == bodies
            assert local.do(b"KVMAP", b"RELEASE", *(item[4] for item in items)) == len(names)


@ROUNDS
def test_a_client_that_releases_nothing_ends_at_its_limit(
    client: redis.Redis, path: Path, server: RunningServer, rounds: int
) -> None:
    names = [word for number in range(12) for word in (b"%d" % number, b"0")]
    with Local(path) as other:
        for _ in checked(rounds, server, client):
            for number in range(12):
                set_block(other, b"%d" % number)
            with Local(path) as greedy:
                assert greedy.do(b"KVMAP", b"BLOCKMGET", 12, *names)[11].startswith("OOM")
                assert other.do(b"KVMAP", b"BLOCKMGET", 1, b"0", 0)[0].startswith("OOM")
                assert other.do(b"KVBLOCKGET", b"0", 0) == BODY
                greedy.send(b"*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$%d\r\n" % (12 * MIB))
                with pytest.raises((EOFError, OSError)):
                    list(iter(greedy.reply, b""))  # an error may arrive before the end
                until(lambda: lent(client) < MIB, "the end of the tickets")
                [item] = other.do(b"KVMAP", b"BLOCKMGET", 1, b"0", 0)
                assert other.do(b"KVMAP", b"RELEASE", item[4]) == 1


@ROUNDS
def test_a_hostile_client_harms_no_other_client(
    client: redis.Redis, path: Path, server: RunningServer, rounds: int
) -> None:
    with Local(path) as local:
        for _ in checked(rounds, server, client):
            set_block(local, b"r")
            mine = ticket(local)
            with Local(path) as hostile:
                hostile.attach()
                [item] = hostile.do(b"KVMAP", b"BLOCKMGET", 1, b"r", 0)
                try_to_change(hostile, item)
                assert hostile.do(b"KVMAP", b"RELEASE", mine) == f"ERR ticket {mine} is not one of this connection"
                unread = [b"KVMAP", b"ATTACH"], [b"KVMAP", b"BLOCKMGET", b"1", b"r", b"0"]
                hostile.send(b"".join(map(encode_command, unread)) * 50)
            assert local.do(b"KVMAP", b"RELEASE", mine) == 1
            assert local.do(b"KVBLOCKGET", b"r", 0) == BODY


def copy_for_ever(path: Path, said: Connection) -> None:
    """Copy blocks as a tenant, and read them."""
    local = Local(path)
    local.do(b"AUTH", b"tenant", b"")
    area = local.area(4 * MIB)
    said.send_bytes(b"x")
    while True:
        for item in local.do(b"KVMAP", b"COPY", 0, 3, b"r", 0, b"r", 0, b"r", 0):
            copy_of(area, item)


@ROUNDS
def test_a_killed_reader_of_copies_leaves_nothing(
    tenant: Local, client: redis.Redis, path: Path, server: RunningServer, rounds: int
) -> None:
    for _ in checked(rounds, server, client):
        set_block(tenant, b"r")
        killed_while_it_runs(copy_for_ever, path)
        assert tenant.do(b"KVBLOCKGET", b"r", 0) == BODY


@ROUNDS
def test_readers_keep_their_copies_when_servers_die(tmp_path: Path, rounds: int) -> None:
    path, maps = tmp_path / "socket", maps_of_this_process()
    for _ in range(rounds):
        user = ("--user", "tenant", *TENANT)
        with start_server("--unixsocket", str(path), *user, killed=True) as server, Local(path) as local:
            local.do(b"AUTH", b"tenant", b"")
            set_block(local, b"r")
            with few_descriptors(server.pid, 0):
                assert local.do(b"KVMAP", b"AREA", MIB) == NO_DESCRIPTORS
            area = local.area()
            [item] = local.do(b"KVMAP", b"COPY", 0, 1, b"r", 0)
            server.stop(signal.SIGKILL)
            with pytest.raises((EOFError, OSError)):
                local.do(b"PING")
            assert copy_of(area, item) == BODY
            area.close()
        assert maps_of_this_process() <= maps


def maps_of_this_process() -> int:
    """Number of maps of servers' memory that this process has."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kvpage")


def shared_memory_of_all() -> int:
    """Bytes of shared memory of all processes, which the kernel has not freed."""
    [line] = [line for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if "Shmem:" in line]
    return int(line.split()[1]) * 1024


@ROUNDS
def test_readers_keep_their_bytes_when_servers_die(tmp_path: Path, rounds: int) -> None:
    """Each server has another size than the one before, and no free descriptor at first."""
    path, options = tmp_path / "socket", ("--unixsocket", str(tmp_path / "socket"), "--maxmemory")
    before, maps, old, epochs = shared_memory_of_all(), maps_of_this_process(), 0, set[int]()
    for size, blocks in islice(cycle([("64mb", 1), ("256mb", 80)]), rounds):
        with start_server(*options, size, killed=True) as server, Local(path) as local:
            for number in range(blocks):
                set_block(local, b"%d" % number)
            with few_descriptors(server.pid, 0):
                assert local.do(b"KVMAP", b"ATTACH") == NO_DESCRIPTORS
            epochs.add(local.attach()[0])
            if old:
                assert "of another epoch" in local.do(b"KVMAP", b"RELEASE", old)
            [item] = local.do(b"KVMAP", b"BLOCKMGET", 1, b"0", 0)
            old = item[4]
            server.stop(signal.SIGKILL)
            with pytest.raises((EOFError, OSError)):
                local.do(b"PING")
            assert local.read(item) == BODY
            local.maps.clear()
        assert maps_of_this_process() <= maps  # maps of other tests may end meanwhile
    assert len(epochs) == rounds
    if rounds > 100:  # other tests use shared memory, too
        assert shared_memory_of_all() < before + rounds * MIB
