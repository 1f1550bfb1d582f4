"""Jobs of a connector with a stub engine on a real server: no error and no wait reaches the engine."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier, Event, Timer
from typing import Any

import numpy as np
import pytest
import redis
from kvpage_connectors.jobs import _PIECES, Blocks, Jobs
from kvpage_connectors.reasons import Reasons, guarded
from proxy import start_proxy
from servers import RunningServer, start_server
from waiting import eventually

from kvpage_server.client.page import BlockPages, PageLayout
from kvpage_server.page import DType

LOG = logging.getLogger("kvpage.test")
LAYERS, TOKENS, DIM = 2, 16, 32
PAGES = LAYERS * 2  # of a block
NBYTES = PAGES * TOKENS * DIM * 4
PLACES = [(layer, plane) for layer in range(LAYERS) for plane in (0, 1)]
LAYOUT = PageLayout([(layer, 0, plane, DType.FLOAT32, TOKENS, DIM) for layer, plane in PLACES])


@dataclass
class Engine:
    """Stub of an engine: one head, K and V of each layer side by side in the rows of a paged cache."""

    jobs: Jobs
    blocks: int = 8
    layout: str = "kv"
    cache: np.ndarray[Any, Any] = field(init=False)  # [layer, block, plane, token, dim]

    def __post_init__(self) -> None:
        self.cache = np.zeros((LAYERS, self.blocks, 2, TOKENS, DIM), np.float32)

    def name(self, block: int) -> bytes:
        return f"stub.{self.layout}.{block}".encode()

    def pages(self, names: list[int], rows: list[int], part: slice) -> BlockPages:
        bodies = [self.cache[layer, row, plane] for row in rows[part] for layer, plane in PLACES]
        return BlockPages([(self.name(name), 0) for name in names[part]], LAYOUT, bodies)

    def some(self, names: list[int], rows: list[int]) -> Blocks:
        return Blocks(len(names), NBYTES, partial(self.pages, names, rows))

    def compute(self) -> None:
        self.cache[:] = np.arange(self.cache.size).reshape(self.cache.shape)

    def save(self, names: list[int], rows: list[int]) -> list[bool]:
        return self.jobs.save(self.some(names, rows)).result(60)

    def load(self, names: list[int], rows: list[int]) -> list[bool]:
        return self.jobs.load(self.some(names, rows)).result(60)

    def count(self, names: list[int], within: float = 60) -> int:
        lookup = self.jobs.lookup(lambda: [(self.name(name), 0) for name in names], len(names), PAGES)
        end = time.monotonic() + within
        while (found := lookup.answer(0.001)) is None:
            assert time.monotonic() < end
        return found


@contextmanager
def engine_on(url: str, layout: str = "kv", **options: Any) -> Iterator[Engine]:
    jobs = Jobs(url, LOG, **{"lookup_seconds": 30, "transfer_seconds": 30, **options})
    try:
        yield Engine(jobs, layout=layout)
    finally:
        jobs.close()


@pytest.fixture
def engine(server: RunningServer, client: redis.Redis) -> Iterator[Engine]:
    with engine_on(server.url) as engine:
        yield engine


def test_another_engine_restores_saved_blocks(engine: Engine, server: RunningServer) -> None:
    engine.compute()
    assert engine.save([0, 1, 2], [5, 6, 7]) == [True] * 3
    with engine_on(server.url) as other:
        assert other.count([0, 1, 2, 3]) == 3
        assert other.load([0, 1, 2], [1, 0, 2]) == [True] * 3
        assert np.array_equal(other.cache[:, [1, 0, 2]], engine.cache[:, [5, 6, 7]])
        size = 3 * NBYTES
        assert other.jobs.moved == {"lookup/ok": 3, "load/ok": 3, "load/bytes": size}
        assert not other.jobs.reasons.counts
    assert engine.jobs.moved == {"save/ok": 3, "save/bytes": size}


def test_blocks_are_pages_for_redis_clients(engine: Engine, client: redis.Redis) -> None:
    engine.compute()
    engine.save([4], [2])
    assert client.execute_command("KVPAGEGET", "stub.kv.4", 1, 0, 0, 1) == engine.cache[1, 2, 1].tobytes()


def test_found_blocks_are_leased(engine: Engine, client: redis.Redis) -> None:
    engine.save([0, 1], [0, 1])
    assert engine.count([0, 1]) == 2
    assert client.info()["leased_or_pinned"] == 2


def test_missed_blocks_are_reported_one_by_one(engine: Engine, client: redis.Redis) -> None:
    engine.compute()
    engine.save([0, 1, 2], [0, 1, 2])
    client.delete("kv:stub.kv.1:1:0:0:1")  # one page of a block
    assert engine.count([0, 1, 2]) == 1
    assert engine.load([0, 1, 2], [3, 4, 5]) == [True, False, True]
    assert engine.jobs.reasons.counts == {("load", "absent"): 1}
    assert np.array_equal(engine.cache[:, [3, 5]], engine.cache[:, [0, 2]])


def test_another_layout_is_absent(engine: Engine, server: RunningServer) -> None:
    """The seed's layout and the one of today have pages of equal sizes, so only the name differs."""
    engine.save([0], [0])
    with engine_on(server.url, layout="x16") as other:
        assert other.count([0]) == 0
        assert other.load([0], [0]) == [False]
        assert other.jobs.reasons.counts == {("load", "absent"): 1}


def test_other_bytes_under_the_same_name_are_a_miss(engine: Engine, client: redis.Redis) -> None:
    engine.save([0, 1], [0, 1])
    client.set("kv:stub.kv.0:0:0:0:0", "no page")
    client.execute_command("KVPAGESET", "stub.kv.1", 0, 0, 0, 0, 1, 2, 3, 0, b"shorter")
    assert engine.load([0, 1], [2, 3]) == [False, False]
    assert sum(engine.jobs.reasons.counts.values()) == 2


@pytest.mark.parametrize("offset", [3_000, 20_000])
def test_a_flipped_byte_is_a_miss(engine: Engine, server: RunningServer, offset: int) -> None:
    engine.compute()
    engine.save([0, 1, 2, 3], [0, 1, 2, 3])
    with start_proxy(server.port) as proxy, engine_on(proxy.url, threads=1) as other:
        assert other.count([0]) == 1
        proxy.flip_at = offset
        proxy._passed = 0
        found = other.load([0, 1, 2, 3], [4, 5, 6, 7])
        for block, ok in enumerate(found):
            assert not ok or np.array_equal(other.cache[:, 4 + block], engine.cache[:, block])


def test_the_threads_connect_at_the_start(server: RunningServer, client: redis.Redis) -> None:
    with engine_on(server.url) as engine:
        assert eventually(lambda: client.info()["connected_clients"] > 2)  # with `client`, and of both kinds of threads
        assert engine.jobs.drain(30)
        before = client.info()["total_connections_received"]
        assert engine.count([0]) == 0
        assert engine.load([0], [0]) == [False]
        assert client.info()["total_connections_received"] == before


def test_a_silent_store_delays_no_start(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with engine_on(f"redis://127.0.0.1:{silent.getsockname()[1]}", lookup_seconds=3):
            assert time.monotonic() - begin < 2.5
            assert eventually(lambda: "kvpage: connect missed 0 blocks, reason: deadline" in caplog.text)


def test_a_store_that_is_away_is_a_miss_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"redis://127.0.0.1:{bound.getsockname()[1]}"
    with engine_on(url, lookup_seconds=1, transfer_seconds=1) as engine:
        assert engine.count([0]) == 0
        begin = time.monotonic()
        assert engine.load([0], [0]) == [False]
        assert engine.save([0], [0]) == [False]
        assert time.monotonic() - begin < 0.5, "no request in the pause after a failure"
        assert engine.jobs.take_counts() == {"lookup/away": 1, "load/away": 1, "save/away": 1}


def test_a_silent_store_is_a_miss_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with engine_on(url, lookup_seconds=0.2, transfer_seconds=0.3) as engine:
            assert engine.count([0, 1], within=30) == 0
            assert engine.jobs.drain(30)
            time.sleep(0.1)
            assert sum(engine.jobs.reasons.counts.values()) == 2


def test_a_store_that_dies_during_a_load_is_a_miss(engine: Engine, server: RunningServer) -> None:
    engine.save([0, 1, 2, 3], [0, 1, 2, 3])
    with start_proxy(server.port) as proxy, engine_on(proxy.url, transfer_seconds=2, threads=1) as other:
        assert other.count([0, 1, 2, 3]) == 4
        proxy.die_after = 10_000
        assert not all(other.load([0, 1, 2, 3], [0, 1, 2, 3]))
        assert {job for (job, _), missed in other.jobs.reasons.counts.items() if missed} == {"load"}


def test_earlier_pieces_of_a_load_count(engine: Engine, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_PIECES, "load", 2 * NBYTES)
    engine.compute()
    engine.save([0, 1, 2, 3], [0, 1, 2, 3])
    with start_proxy(server.port) as proxy, engine_on(proxy.url, transfer_seconds=2, threads=1) as other:
        assert other.count([0]) == 1
        proxy.die_after = proxy._passed + 25_000  # a block has 8,192 bytes
        assert other.load([0, 1, 2, 3], [0, 1, 2, 3]) == [True, True, False, False]
        assert np.array_equal(other.cache[:, :2], engine.cache[:, :2])
        assert sum(other.jobs.reasons.counts.values()) == 2


def test_a_full_store_counts_oom() -> None:
    options = "--maxmemory", "1mb", "--maxmemory-policy", "noeviction"
    with start_server(*options) as server, engine_on(server.url) as engine:
        saved = [engine.save([name], [0])[0] for name in range(200)]
        assert saved[0]
        assert not saved[-1]
        assert engine.jobs.reasons.counts == {("save", "oom"): saved.count(False)}


@pytest.mark.parametrize(("url", "reason"), [("redis://:wrong@", "wrongpass"), ("redis://", "noauth")])
def test_a_wrong_password_is_a_miss(url: str, reason: str) -> None:
    with start_server("--requirepass", "secret") as server, engine_on(f"{url}127.0.0.1:{server.port}") as engine:
        assert engine.count([0]) == 0
        assert engine.load([0], [0]) == [False]
        assert set(engine.jobs.take_counts()) == {f"lookup/{reason}", f"load/{reason}"}


def test_url_and_password_can_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave them out of the options, which vLLM logs."""
    with start_server("--requirepass", "secret") as server:
        monkeypatch.setenv("KVPAGE_PASSWORD", "secret")
        monkeypatch.setenv("KVPAGE_URL", server.url)
        for url, options in (("", {}), (server.url, {}), (server.url, {"username": "default", "password": "secret"})):
            with engine_on(url, **options) as engine:
                assert engine.save([0], [0]) == [True]


def test_a_plain_redis_is_a_miss(redis_server: RunningServer) -> None:
    with engine_on(redis_server.url) as engine:
        assert engine.count([0]) == 0
        assert engine.jobs.take_counts() == {"lookup/unsupported": 1}


def test_a_faulty_engine_is_a_miss(engine: Engine) -> None:
    def broken(part: slice) -> BlockPages:
        raise KeyError("no such request")

    assert engine.jobs.load(Blocks(3, NBYTES, broken)).result(60) == [False] * 3
    assert engine.jobs.save(Blocks(2, NBYTES, broken)).result(60) == [False] * 2
    assert engine.jobs.reasons.counts == {("load", "KeyError"): 3, ("save", "KeyError"): 2}


def test_counts_are_taken_once(engine: Engine) -> None:
    engine.save([0], [0])
    assert engine.jobs.take_counts() == {"save/ok": 1, "save/bytes": NBYTES}
    assert engine.load([0, 1], [0, 1]) == [True, False]
    assert engine.jobs.take_counts() == {"load/ok": 1, "load/absent": 1, "load/bytes": NBYTES}
    assert engine.jobs.take_counts() == {}


def test_threads_share_a_large_save(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts of four blocks wait for each other, which one thread alone could not do."""
    monkeypatch.setitem(_PIECES, "save", 2 * NBYTES)
    together, parts = Barrier(2, timeout=60), list[slice]()

    def meet(part: slice) -> BlockPages:
        together.wait()
        parts.append(part)
        return engine.some([0, 1, 2, 3], [0, 1, 2, 3]).pages(part)

    with engine_on(server.url) as engine:
        engine.compute()
        assert engine.jobs.save(Blocks(4, NBYTES, meet), threads=2).result(60) == [True] * 4
        assert sorted(part.start for part in parts) == [0, 2]
        assert engine.count([0, 1, 2, 3]) == 4
        assert engine.jobs.save(Blocks(0, NBYTES, meet), threads=2).result(60) == []


def test_a_small_save_is_one_request(engine: Engine) -> None:
    asked = list[slice]()

    def some(part: slice) -> BlockPages:
        asked.append(part)
        return engine.some([0, 1, 2], [0, 1, 2]).pages(part)

    assert engine.jobs.save(Blocks(3, NBYTES, some), threads=2).result(60) == [True] * 3
    assert asked == [slice(0, 3)]


def test_abandoned_saves_end_or_never_begin(server: RunningServer) -> None:
    begun, go_on = Event(), Event()

    def slow(part: slice) -> BlockPages:
        begun.set()
        go_on.wait(60)
        return engine.some([0], [0]).pages(part)

    with engine_on(server.url, threads=1) as engine:
        running, queued = map(engine.jobs.save, (Blocks(1, NBYTES, slow), engine.some([1], [1])))
        assert begun.wait(60)
        Timer(0.05, go_on.set).start()
        engine.jobs.abandon([running, queued])
        assert running.result(0) == [True]
        assert queued.cancelled()
        assert engine.jobs.drain(0)


def test_an_answer_is_old_when_its_lease_has_ended(server: RunningServer) -> None:
    with engine_on(server.url, lease_ms=1, lookup_seconds=0.05) as engine:
        lookup = engine.jobs.lookup(lambda: [(engine.name(0), 0)], 1, PAGES)
        assert not lookup.is_old
        assert eventually(lambda: lookup.is_old)


def test_a_request_id_with_a_colon_is_a_miss(engine: Engine) -> None:
    engine.layout = "a:b"
    assert engine.count([0]) == 0
    assert engine.save([0], [0]) == [False]
    assert engine.jobs.reasons.counts == {("lookup", "PageError"): 1, ("save", "PageError"): 1}


def test_a_lookup_has_an_answer_after_its_deadline(server: RunningServer) -> None:
    go_on = Event()

    def slow() -> list[tuple[bytes, int]]:
        go_on.wait(60)
        return []

    with engine_on(server.url, lookup_seconds=0.1) as engine:
        first = engine.jobs.lookup(slow, 1, PAGES)
        assert engine.count([0]) == 0, "it waits in the queue"
        assert first.answer() == 0
        go_on.set()
        assert eventually(lambda: sum(engine.jobs.reasons.counts.values()) == 2)


def test_closing_waits_for_saves_and_refuses_later_ones(engine: Engine, server: RunningServer) -> None:
    begun, go_on = Event(), Event()

    def slow(part: slice) -> BlockPages:
        begun.set()
        go_on.wait(60)
        return engine.some([0], [0]).pages(part)

    saved = engine.jobs.save(Blocks(1, NBYTES, slow))
    assert begun.wait(60)
    assert not engine.jobs.drain(0.01)
    go_on.set()
    engine.jobs.close(60)
    assert saved.result(0) == [True]
    assert engine.save([1], [1]) == [False]
    assert engine.count([0]) == 0
    assert engine.jobs.reasons.counts == {("save", "closed"): 1, ("lookup", "closed"): 1}


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"lookup_seconds": 0}, {"lease_ms": -1}, {"transfer_seconds": 0}, {"url": "http://x"}]
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|URL|deadline"):
        Jobs(**{"url": "redis://127.0.0.1", "log": LOG, **options})


# -- guarded methods ---------------------------------------------------------------------------------------------------


class Host:
    """Stub of a connector, whose method raises."""

    def __init__(self, reasons: Reasons) -> None:
        self.reasons = reasons

    @guarded(lambda: (0, False))
    def matched(self, ask: Callable[[], tuple[int, bool]]) -> tuple[int, bool]:
        return ask()


def test_an_exception_in_a_guarded_method_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(Reasons(LOG))
    assert host.matched(lambda: (3, True)) == (3, True)
    for _ in range(3):
        assert host.matched(lambda: {}["x"]) == (0, False)  # type: ignore[index]
    assert host.reasons.counts == {("matched", "KeyError"): 3}
    assert [record.message for record in caplog.records] == [
        "kvpage: matched missed 1 block, reason: KeyError KeyError('x')"
    ]


def test_each_reason_is_logged_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    reasons = Reasons(LOG)
    for _ in range(100):
        reasons.count("load", "absent", 2)
        reasons.count("load", "away", 1, "refused")
    assert reasons.counts == {("load", "absent"): 200, ("load", "away"): 100}
    assert len(caplog.records) == 2
