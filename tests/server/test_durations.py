"""Durations while the wall clock of a server is set: leases, idle times, pauses and uptime do not follow it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from servers import RunningServer, start_server
from stored_pages import ask, prefix, set_block, set_page
from waiting import until
from wire import Wire, parse

from kvpage_server.observe.observer import History
from kvpage_server.observe.overview import parse as overview_of

HOUR = 3600 * 10**9  # nanoseconds
JUMPS = pytest.mark.parametrize("jump", [-HOUR, HOUR], ids=["back", "forward"])


class Clock:
    """The wall clock of a server process: it adds the nanoseconds in a file to the clock of the machine."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "jump"
        self.jump(0)

    def jump(self, nanoseconds: int) -> None:
        written = self._file.with_suffix(".new")
        written.write_text(str(nanoseconds), encoding="utf-8")
        written.rename(self._file)

    @property
    def program(self) -> tuple[str, str]:
        """Arguments of Python that start a server with this clock."""
        return "-c", (
            f"import time; from pathlib import Path; real, jump = time.time_ns, Path({str(self._file)!r}); "
            "time.time_ns = lambda: real() + int(jump.read_text()); time.time = lambda: time.time_ns() / 1e9; "
            "from kvpage_server.app import main; main()"
        )


@contextmanager
def started(tmp_path: Path, *options: str) -> Iterator[tuple[RunningServer, redis.Redis, Clock]]:
    clock = Clock(tmp_path)
    with start_server(*options, directory=tmp_path, program=clock.program) as server, server.client() as client:
        yield server, client, clock


def lease_left(client: redis.Redis, page: int = 0) -> int:
    return int(ask(client, "KVPAGESTAT", "r", 0, 0, page, 0)["lease_left_ms"])


def leased(client: redis.Redis) -> int:
    return int(client.info("kvpage")["leased_or_pinned"])


@JUMPS
@pytest.mark.parametrize("command", ["KVPAGELEASE", "KVPAGEPREFIX"])
def test_a_lease_lasts_as_long_as_it_should(tmp_path: Path, jump: int, command: str) -> None:
    with started(tmp_path) as (_, client, clock):
        for page in (0, 1):
            set_block(client, "r", page)
        for page, milliseconds in ((0, 600_000), (1, 500)):
            if command == "KVPAGELEASE":
                assert client.execute_command(command, "r", milliseconds, page) == 1
            else:
                assert prefix(client, "r", page, lease_ms=milliseconds) == 1
        clock.jump(jump)
        assert 500_000 < lease_left(client) <= 600_000
        until(lambda: leased(client) == 1, "the end of the shorter lease")
        assert lease_left(client, 1) == 0
        assert 500_000 < lease_left(client) <= 600_000


@JUMPS
@pytest.mark.parametrize(
    "options",
    [("--maxmemory", "2mb"), ("--maxmemory", "4mb", "--quota", "kv:*", "2mb")],
    ids=["memory", "quota"],
)
def test_eviction_spares_a_leased_block_after_a_jump(tmp_path: Path, jump: int, options: tuple[str, ...]) -> None:
    with started(tmp_path, *options) as (_, client, clock):
        set_page(client, "r", body=bytes(200_000))
        assert client.execute_command("KVPAGELEASE", "r", 600_000) == 1
        clock.jump(jump)
        for number in range(30):
            set_page(client, f"other{number}", body=bytes(200_000))
        assert client.exists("kv:r:0:0:0:0")
        assert not client.exists("kv:other0:0:0:0:0")


@JUMPS
def test_a_lifetime_survives_a_jump_and_a_restart(tmp_path: Path, jump: int) -> None:
    def left(client: redis.Redis) -> int:
        """Milliseconds to the end of the lifetime on the server's wall clock."""
        seconds, _ = client.time()
        return int(ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["kept_until_ms"]) - 1000 * seconds

    with started(tmp_path, "--store", "tiered") as (_, client, clock):
        set_page(client, "r")
        assert client.execute_command("KVPAGEKEEP", "al", 1, 600, "kv:r:0:0:0:0")[0] == 1
        clock.jump(jump)
        until(lambda: 0 < left(client) <= 601_000, "the corrected end")
    tiered = start_server("--store", "tiered", directory=tmp_path, program=clock.program)
    with tiered as server, server.client() as client:
        assert client.info("kvpage")["kept"] == 1
        assert 0 < left(client) <= 601_000


def test_a_lifetime_ends_after_its_length_if_the_clock_is_behind(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    clock.jump(48 * HOUR)
    for restarts in range(3):
        server = start_server("--store", "tiered", directory=tmp_path, program=clock.program)
        with server as running, running.client() as client:
            if not restarts:
                set_page(client, "r")
                client.execute_command("KVPAGEKEEP", "al", 1, 600, "kv:r:0:0:0:0")
            ends = int(ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["kept_until_ms"])
            if restarts < 2:
                first, left = ends, ends - 1000 * client.time()[0]
                assert 590_000 < left <= 601_000
            else:
                assert ends == first, "the end on disk was corrected, too"
        clock.jump(0)


def test_a_block_with_an_ended_lease_is_evicted_after_a_jump(tmp_path: Path) -> None:
    with started(tmp_path, "--maxmemory", "2mb") as (_, client, clock):
        set_page(client, "r", body=bytes(200_000))
        assert client.execute_command("KVPAGELEASE", "r", 300) == 1
        clock.jump(-HOUR)
        until(lambda: leased(client) == 0)
        for number in range(30):
            set_page(client, f"other{number}", body=bytes(200_000))
        assert not client.exists("kv:r:0:0:0:0")


@JUMPS
def test_times_since_something_do_not_jump(tmp_path: Path, jump: int) -> None:
    with started(tmp_path) as (server, client, clock):
        client.set("key", bytes(1000))
        with pytest.raises(redis.AuthenticationError), server.client(username="nobody", password="x") as other:
            other.ping()
        clock.jump(jump)
        until(lambda: client.info("server")["uptime_in_seconds"] >= 2, "the third second")
        assert client.info("server")["uptime_in_seconds"] < 1000
        assert 1 <= client.object("idletime", "key") < 1000
        (line,) = client.client_list()
        assert 0 <= int(line["age"]) < 1000
        assert 0 <= int(line["idle"]) < 1000
        (refused,) = client.acl_log()
        assert 0 <= float(refused["age-seconds"]) < 1000


@JUMPS
def test_a_pause_lasts_as_long_as_it_should(tmp_path: Path, jump: int) -> None:
    with started(tmp_path) as (server, client, clock), server.client(socket_timeout=1) as impatient:
        client.execute_command("CLIENT", "PAUSE", 300, "WRITE")
        clock.jump(jump)
        assert client.set("key", "1"), "the pause ends within the client's patience of a minute"
        client.execute_command("CLIENT", "PAUSE", 600_000, "WRITE")
        clock.jump(0)
        with pytest.raises(redis.TimeoutError):
            impatient.set("key", "2")
        client.execute_command("CLIENT", "UNPAUSE")


@JUMPS
def test_an_idle_connection_is_closed_in_time(tmp_path: Path, jump: int) -> None:
    with started(tmp_path) as (server, client, clock), server.client() as idle:
        idle.ping()
        clock.jump(jump)
        client.config_set("timeout", 600)
        looked = client.info("server")["uptime_in_seconds"] + 2  # the server looks at connections once a second
        until(lambda: client.info("server")["uptime_in_seconds"] >= looked)
        assert idle.ping()
        client.config_set("timeout", 1)
        until(lambda: client.info("clients")["connected_clients"] == 1, "the end of the idle connection")


@JUMPS
def test_a_scan_continues_after_a_jump(tmp_path: Path, jump: int) -> None:
    with started(tmp_path) as (_, client, clock):
        keys = {b"key:%d" % number for number in range(1000)}
        client.mset(dict.fromkeys(keys, "1"))
        cursor, found = client.scan(count=10)
        seen = list(found)
        clock.jump(jump)
        swept = client.info("server")["uptime_in_seconds"] + 1
        until(lambda: client.info("server")["uptime_in_seconds"] > swept)
        while cursor:
            cursor, found = client.scan(cursor, count=10)
            seen += found
        assert sorted(seen) == sorted(keys), "every key once"


def test_a_time_to_live_follows_the_wall_clock_as_in_redis(tmp_path: Path) -> None:
    with started(tmp_path) as (_, client, clock):
        client.set("key", "1", ex=1000)
        clock.jump(-HOUR)
        assert 4500 < client.ttl("key") <= 4600
        clock.jump(HOUR)
        until(lambda: not client.exists("key"))


@JUMPS
def test_idle_times_of_a_store_that_was_stopped(tmp_path: Path, jump: int) -> None:
    with started(tmp_path, "--store", "tiered") as (_, client, _clock):
        client.set("short", "1")
        client.set("long", bytes(100_000))
        set_page(client, "r")
        set_block(client, "r2", 0)
    clock = Clock(tmp_path)
    clock.jump(jump)
    low, high = (0, 100) if jump < 0 else (3600, 3700)
    tiered = start_server("--store", "tiered", directory=tmp_path, program=clock.program)
    with tiered as server, server.client() as client:
        for key in ("short", "long", "kv:r:0:0:0:0", "kv:r2:0:0:0:0"):
            assert low <= client.object("idletime", key) < high, key
        clock.jump(0)
        assert low <= client.object("idletime", "long") < high


def test_rates_go_on_after_a_jump(server: RunningServer) -> None:
    with Wire(server.port) as wire:
        first = overview_of(parse(wire.ask(b"INFO", b"EVERYTHING")).decode())
    history = History()
    assert history.add(first) is None
    previous = first.at
    for number, wall in enumerate((1, -3600, -3599, 7200), start=1):
        overview = replace(
            first,
            at=first.at + wall,
            read=first.read + number,
            traffic=replace(first.traffic, commands=first.traffic.commands + 10 * number),
        )
        moment = history.add(overview)
        assert moment is not None
        assert (moment.seconds, round(moment.commands), round(moment.at - previous, 3)) == (1, 10, 1)
        previous = moment.at


def test_values_are_stored_before_1970(tmp_path: Path) -> None:
    with started(tmp_path, "--store", "tiered") as (_, client, clock):
        clock.jump(-time.time_ns() - HOUR)
        set_page(client, "r")
        assert client.set("string", "value", ex=600)
        assert client.save()
        assert 0 < client.ttl("string") <= 600
    tiered = start_server("--store", "tiered", directory=tmp_path, program=clock.program)
    with tiered as server, server.client() as client:
        assert client.get("string") == b"value"
