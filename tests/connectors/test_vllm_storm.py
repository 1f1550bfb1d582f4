"""Engines with connector or tier, whose store is killed, slow and cut off: no wrong byte, no exception, no hang."""

from __future__ import annotations

import random
import signal
from contextlib import ExitStack

import pytest
from proxy import Weather, start_proxy
from servers import RunningServer, start_server
from stub_engine import TOKENS, Engine, Request, counts, engine_on
from stub_manager import SIZE, Manager, manager_on

from benchmarks.ports import free_port


def conversation(choose: random.Random, number: int) -> Request:
    """Return a prompt of up to fifteen blocks. Prompts with a common beginning differ after some blocks."""
    shared, own, first = choose.randrange(8), choose.randrange(1, 8), 1000 * choose.randrange(6)
    beginning = [first + i for i in range(shared * TOKENS)]
    return Request(str(number), beginning + [100_000 + number % 50 + i for i in range(own * TOKENS + 1)])


def storm(blocks: int, seed: int) -> dict[str, int]:
    """Run prompts with this number of blocks on two engines, and return the counts of both."""
    choose, port, done, number = random.Random(seed), free_port(), 0, 0
    found: dict[str, int] = {}
    with start_proxy(port) as proxy, ExitStack() as stack:
        proxy.weather = Weather(flips=0, truncations=0, cuts=5, delays=30, longest=0.2, random=choose)
        options = {"lookup_seconds": 0.3, "transfer_seconds": 0.6}
        engines: list[Engine] = [stack.enter_context(engine_on(proxy.url, **options)) for _ in range(2)]
        while done < blocks:
            with start_server("--maxmemory", "3mb", port=port, killed=True) as server:
                for _ in range(choose.randrange(20, 60)):
                    request = conversation(choose, number)
                    choose.choice(engines).run(request)
                    done, number = done + len(request.block_hashes), number + 1
                end(server)
            choose.choice(engines).run(conversation(choose, number))  # without a store
            number += 1
        for engine in engines:
            for name, count in counts(engine).items():
                found[name] = found.get(name, 0) + count
    return found


def storm_of_chunks(chunks: int, seed: int) -> dict[str, int]:
    """Look up, load and store this number of chunks by two tiers. Compare every loaded byte. Return their counts."""
    choose, port, done = random.Random(seed), free_port(), 0
    found: dict[str, int] = {}
    with start_proxy(port) as proxy, ExitStack() as stack:
        proxy.weather = Weather(flips=10, truncations=5, cuts=5, delays=30, longest=0.2, random=choose)
        options = {"lookup_seconds": 0.3, "transfer_seconds": 0.6}
        tiers: list[Manager] = [stack.enter_context(manager_on(proxy.url, **options)) for _ in range(2)]

        def request() -> int:
            first = 0x4E00 + 16 * choose.randrange(20)
            names = "".join(map(chr, range(first, first + choose.randrange(1, 16))))
            tier = choose.choice(tiers)
            restored, _ = tier.load(names, str(done)) if tier.lookup(names, str(done)) else ("", None)
            if missing := "".join(name for name in names if name not in restored):
                tier.store(missing, str(done))
            return len(names)

        while done < chunks:
            with start_server("--maxmemory", f"{64 * SIZE}", port=port, killed=True) as server:
                for _ in range(choose.randrange(20, 60)):
                    done += request()
                end(server)
            done += request()  # without a store
        for tier in tiers:
            stats = tier.tier.get_stats()
            assert stats
            for name, count in stats.data["vllm:kvpage_blocks"].items():
                found["/".join(name)] = found.get("/".join(name), 0) + count
    return found


def end(server: RunningServer) -> None:
    server.stop(signal.SIGKILL)


def check(found: dict[str, int]) -> None:
    assert {name.partition("/")[0] for name in found} == {"lookup", "load", "save"}  # no method raised
    assert found["load/ok"] > 0
    assert found["save/ok"] > 0
    assert sum(n for name, n in found.items() if name.endswith(("/away", "/deadline"))) > 0


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines ask again soon after a failure, so that more of their requests meet the next one."""
    monkeypatch.setattr("kvpage_connectors.jobs._PAUSE", 0.02)


def test_a_storm_of_failures_reaches_no_engine() -> None:
    check(storm(500, seed=1))


@pytest.mark.soak
def test_ten_thousand_blocks_in_storms() -> None:
    check(storm(10_000, seed=2))


def test_a_storm_of_failures_reaches_no_tier() -> None:
    check(storm_of_chunks(500, seed=3))


@pytest.mark.soak
def test_ten_thousand_chunks_in_storms() -> None:
    check(storm_of_chunks(10_000, seed=4))
