"""Instances on several servers: side by side, and on a Valkey Cluster. The same is promised as on one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from homes import Home, home_of
from proxy import start_proxy
from servers import RunningServer, start_server
from waiting import until

# isort: split
from test_persistent_store import advance, goes_on_after_a_save, reference, simulator, state

from engine.cli import main
from engine.persistent import PersistentStore
from engine.persistent.errors import ConflictError, DamagedError


@pytest.fixture(params=["side by side", "cluster"])
def home(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Home]:
    servers: Any = {"cluster": request.getfixturevalue("masters")} if request.param == "cluster" else None
    with home_of(**(servers or {"servers": [server, request.getfixturevalue("second_server")]})) as home:
        home.flush()
        yield home


@pytest.fixture
def store(home: Home) -> Iterator[PersistentStore]:
    store = PersistentStore(home.url)
    yield store
    store.close()


def test_a_resume_finds_saved_changes_and_saves_are_incremental(store: PersistentStore, home: Home) -> None:
    run = advance(simulator(store).make_executor("ring"), 6)
    assert run.save().pages == len(home.keys("kv:*")) == 14
    assert run.save().pages == 0
    assert advance(run, 1).save().pages == 5
    assert len(home.keys("kv:*")) == 15
    run = simulator(store).resume("ring")
    assert (run.steps, state(run)) == (7, reference(7))
    advance(run, 3).save()
    assert state(simulator(store).resume("ring")) == reference(10)


def test_one_of_two_concurrent_savers_is_refused(store: PersistentStore) -> None:
    advance(simulator(store).make_executor("one"), 2).save()
    first, second = (simulator(store).resume("one") for _ in range(2))
    advance(first, 1).save()
    with pytest.raises(ConflictError, match="was saved by somebody else"):
        advance(second, 1).save()
    assert state(simulator(store).resume("one")) == reference(3)


def test_deleting_leaves_nothing_anywhere(store: PersistentStore, home: Home) -> None:
    run = advance(simulator(store).make_executor("gone"), 2)
    run.save()
    advance(run, 1).save()
    assert store.delete("gone")
    assert home.keys() == set()
    assert not store.delete("gone")


def test_a_missing_page_is_an_error(store: PersistentStore, home: Home) -> None:
    advance(simulator(store).make_executor("hurt"), 3).save()
    page = min(home.keys("kv:*"))
    home.ask(page, "DEL", page)
    with pytest.raises(DamagedError, match="is gone, or not what was written"):
        simulator(store).resume("hurt")


def test_a_server_that_does_not_answer_is_no_damage() -> None:
    """Its manifest is on one of them, its pages are on one: without either there is an error, and it is not that."""
    with start_server() as one, start_server() as two, start_server() as three:
        servers = [one, two, three]
        store = PersistentStore(",".join(server.url for server in servers), deadline=10)
        advance(simulator(store).make_executor("here"), 2).save()
        needed = [server for server in servers if _has_any(server)]
        for server in needed:
            server.process.send_signal(signal.SIGSTOP)
            with pytest.raises(redis.RedisError, match=r"silent|left alone|does not answer"):
                simulator(store).resume("here")
            server.process.send_signal(signal.SIGCONT)
        until(lambda: _resumed(store) == 2)
        store.close()


def _has_any(server: RunningServer) -> bool:
    with server.client() as client:
        return client.dbsize() > 0


def _resumed(store: PersistentStore) -> int:
    """Return the number of steps of the resumed instance; a silent server is not asked for a while."""
    with suppress(redis.RedisError):
        return simulator(store).resume("here").steps
    return 0


def test_an_interrupted_save_leaves_the_state_before() -> None:
    """The answers of both servers are cut after so many bytes; the next save makes up for it."""
    with start_server() as one, start_server() as two, start_proxy(one.port) as first, start_proxy(two.port) as second:
        url = f"{first.url},{second.url}"
        store, proxies = PersistentStore(url, deadline=10), (first, second)
        advance(simulator(store).make_executor("cut"), 5).save()
        for cut in range(0, 800, 80):
            run = simulator(store).resume("cut")
            before = run.steps
            advance(run, 1)
            for proxy in proxies:
                proxy.cut_after, proxy.mend_after = cut, 1
            saved = True
            try:
                run.save()
            except redis.RedisError:
                saved = False
            for proxy in proxies:
                proxy.cut_after = None
            goes_on_after_a_save(store, run, before, saved)
        store.close()


def test_a_shell_takes_the_same_urls(home: Home, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "count.oinf.txt"
    graph.write_text("persistent { n: i32; } block entry { cache.increment n; }", encoding="utf-8")
    for steps in (1, 2):
        assert main(["run", str(graph), "--instance", "c", "--url", home.url]) == 0
        assert f"c after step {steps}" in capsys.readouterr().out
