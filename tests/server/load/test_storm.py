"""200 connections, a third hostile, a third slow, a third honest: the honest notice nothing, and no memory is lost.

`make soak` lets it last a minute.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from health import MIB
from servers import RunningServer, free_port, start_server, with_constants
from storm import PAGE
from waiting import until
from wire import encode_command

from benchmarks.watchers import TOKEN, watching

pytestmark = pytest.mark.alone

WARM_UP = 4.0
SPARE_FOR = 2.0  # seconds after which a server returns spare memory
IMPATIENT = with_constants("kvpage_server.core.regions", SPARE_FOR=SPARE_FOR)
HONEST = 66
WAIT = 250  # milliseconds: 99 of 100 requests are answered within, on a machine that does nothing else
TURNS, TURN_SECONDS = 40, 4.0  # of storms, every second one watched
PAGES = 2000  # that lie in the server all the while, of 128 KiB


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seconds", "growth", "part"), [(4.0, 1.1, 0.5), pytest.param(60.0, 1.05, 0.99, marks=pytest.mark.soak)]
)  # in a short storm the constant memory of a storm weighs more, and so does other load
def test_honest_clients_notice_nothing_of_a_storm(seconds: float, growth: float, part: float) -> None:
    """On a busy machine every client waits for a processor, too: that is measured in parallel."""
    with start_server("--maxmemory", "1gb", program=IMPATIENT) as server:
        _fill(server)
        with _storm(server, WARM_UP):
            asyncio.run(_be_honest(server, WARM_UP))  # the memory that any storm takes for itself, it takes in this one
        _wait_for_quiet(server)
        time.sleep(2 * SPARE_FOR + 3)  # until spare memory was returned
        before = server.rss()
        with _storm(server, seconds) as deeds:
            waited, late = asyncio.run(_be_honest(server, seconds))
        _check_pages(server)
        _wait_for_quiet(server)
        until(lambda: server.rss() < growth * before, f"less than {growth} times {before / MIB:.0f} MiB")
    print(
        f"\n{len(waited)} honest requests amid {deeds[0]} bad deeds: p50 {share(waited, 0.5):.0f} ms, "
        f"p99 {share(waited, 0.99):.0f} ms, worst {share(waited, 1):.0f} ms; a clock beside them was "
        f"{share(late, 0.99):.0f} ms late at p99; memory {before / MIB:.1f} MiB"
    )
    assert deeds[0] > seconds
    assert len(waited) > 20 * seconds
    assert share(waited, part) < WAIT + 3 * share(late, 0.99)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_scrape_and_dashboards_slow_no_client_of_a_storm() -> None:
    """In alternating short storms, whose requests are combined: a slow one is slow by chance."""
    http = free_port()
    waited: dict[bool, list[float]] = {True: [], False: []}
    with start_server("--maxmemory", "1gb", "--metrics-port", str(http), "--web-token", TOKEN) as server:
        _fill(server)
        for turn in range(TURNS):
            watched = turn % 4 in (1, 2)
            with watching(http) if watched else nullcontext(), _storm(server, TURN_SECONDS):
                waited[watched] += asyncio.run(_be_honest(server, TURN_SECONDS))[0]
    slow, usual = share(waited[True], 0.99), share(waited[False], 0.99)
    print(f"\np99 of {len(waited[True])} requests {slow:.1f} ms watched, of {len(waited[False])} {usual:.1f} ms not")
    assert slow < 1.1 * usual


def share(seconds: list[float], part: float) -> float:
    """The milliseconds that so great a part of them does not exceed."""
    return 1000 * sorted(seconds)[int(part * (len(seconds) - 1))]


@contextmanager
def _storm(server: RunningServer, seconds: float) -> Iterator[list[int]]:
    """Bad weather meanwhile, from a process of its own; afterwards the list holds how many bad deeds were done."""
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "storm.py"), str(server.port), str(seconds)]
    deeds: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        yield deeds
        received, _ = process.communicate(timeout=seconds + 60)
    assert process.returncode == 0
    deeds.append(int(received))


def _body(number: int) -> bytes:
    return random.Random(number).randbytes(128 * 1024)


def _fill(server: RunningServer) -> None:
    with server.client() as client:
        for number in range(PAGES):
            client.execute_command("KVPAGESET", "kept", 0, 0, number, 0, 8, 1024, 128, 0, _body(number))
        client.execute_command("KVPAGESET", *PAGE, 8, MIB, 1, 0, bytes(MIB))


def _check_pages(server: RunningServer) -> None:
    with server.client() as client:
        for number in range(0, PAGES, 37):
            assert client.execute_command("KVPAGEGET", "kept", 0, 0, number, 0) == _body(number)


def _wait_for_quiet(server: RunningServer) -> None:
    """Wait until no client is connected; delete their keys."""
    with server.client() as client:
        until(lambda: len(client.client_list()) == 1, "quiet")
        until(lambda: int(client.info("memory")["mem_clients_normal"]) == 0, "the memory of clients being free")
        for key in client.scan_iter(count=10_000):
            if not key.startswith((b"kv:kept:", b"kv:r:")):
                client.delete(key)


async def _be_honest(server: RunningServer, seconds: float) -> tuple[list[float], list[float]]:
    """66 clients that store and fetch pages; return the seconds of each request, and the delays of a clock.

    No request may fail.
    """
    end = asyncio.get_running_loop().time() + seconds
    late, *times = await asyncio.gather(
        _clock(end), *(_honest_client(server.port, number, end) for number in range(HONEST))
    )
    return [seconds for one in times for seconds in one], late


async def _clock(end: float) -> list[float]:
    """How late this process wakes up."""
    late = []
    while (start := time.perf_counter()) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.005)
        late.append(time.perf_counter() - start - 0.005)
    return late


async def _honest_client(port: int, number: int, end: float) -> list[float]:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    rng = random.Random(number)
    own = [b"honest%d" % number, b"0", b"0", b"0", b"0"]
    body = rng.randbytes(64 * 1024)
    stored = b"$%d\r\n%b\r\n" % (len(body), body)
    kept = _body(number)
    exchanges = [
        (encode_command([b"KVPAGESET", *own, b"8", b"1024", b"64", b"0", body]), b"+OK\r\n"),
        (encode_command([b"KVPAGEGET", *own]), stored),
        (encode_command([b"KVPAGEMGET", b"2", *own, *own]), b"*2\r\n" + stored + stored),
        (
            encode_command([b"KVPAGEGET", b"kept", b"0", b"0", b"%d" % number, b"0"]),
            b"$%d\r\n%b\r\n" % (len(kept), kept),
        ),
        (encode_command([b"KVPAGEEXISTS", *own]), b":1\r\n"),
        (encode_command([b"PING"]), b"+PONG\r\n"),
    ]
    times = []
    turn = 0
    while loop.time() < end:
        request, answer = exchanges[turn % len(exchanges)]
        turn += 1
        start = time.perf_counter()
        writer.write(request)
        assert await reader.readexactly(len(answer)) == answer
        times.append(time.perf_counter() - start)
        await asyncio.sleep(0.1 + rng.random() / 10)
    writer.close()
    return times
