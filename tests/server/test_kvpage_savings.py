"""`kvpage savings`: tokens, time, energy and memory that reuse saves, of published statistics and of a trace."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import redis
from servers import RunningServer
from test_kvpage_cli import kvpage

from kvpage_server.look.savings import shared_bytes
from kvpage_server.observe.engines import EngineFigures, TierFigures, parse
from kvpage_server.observe.memory_by_agent import Agent, ContextBlock, Holdings, Manifest

TIER = {"hits": 2, "tokens": 3000, "bytes": 1 << 20, "seconds": 0.5}
NONE = dict.fromkeys(TIER, 0)
ENGINE = {"name": "host:1", "model": "tiny", "answers": 4, "computed": 1000, "used": 0, "room": 0}
TIERS = {"hot": NONE, "prefix": NONE, "page": TIER, "cold": NONE}


def publish_until_stopped(client: redis.Redis, stop: threading.Event, **changes: object) -> None:
    while not stop.wait(0.1):
        client.publish("kvpage:engines", json.dumps(ENGINE | {"tiers": TIERS, "prefill_rate": 100.0} | changes))


@pytest.fixture(params=[{}, {"prefill_rate": None}])
def rate(request: pytest.FixtureRequest, client: redis.Redis) -> object:
    stop = threading.Event()
    publisher = threading.Thread(target=publish_until_stopped, args=(client, stop), kwargs=request.param)
    publisher.start()
    yield request.param.get("prefill_rate", 100.0)
    stop.set()
    publisher.join()


def test_the_savings_of_an_engine_follow_from_its_statistics(server: RunningServer, rate: float | None) -> None:
    """3,000 tokens at 100 tokens a second, less the half second of their load, take 29.5 s."""
    code, shown, errors = kvpage("savings", "--watts", "100", "--json", url=server.url)
    assert (code, errors) == (0, "")
    found = json.loads(shown)
    assert (found["prompt_tokens"], found["reused_tokens"], found["bytes"]) == (4000, 3000, 0)
    assert found["seconds"] == (29.5 if rate else None)
    assert found["kwh"] == (pytest.approx(29.5 * 100 / 3.6e6) if rate else None)


def test_without_engines_it_says_how_to_start_one(server: RunningServer) -> None:
    code, shown, errors = kvpage("savings", url=server.url)
    assert (code, shown) == (1, "")
    assert "no engine publishes statistics" in errors
    assert "start one with --store" in errors


def test_a_trace_reuses_blocks_up_to_the_first_new_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [[1, 2, 3], [1, 2, 4], [1, 5, 3]]
    trace.write_text("\n".join(json.dumps({"timestamp": 0, "hash_ids": ids}) for ids in prompts), encoding="utf-8")
    words = ["savings", str(trace), "--block-tokens", "10", "--rate", "5", "--token-bytes", "100"]
    code, shown, errors = kvpage(*words, "--json")
    assert (code, errors) == (0, "")
    found = json.loads(shown)
    assert (found["prompt_tokens"], found["reused_tokens"], found["seconds"]) == (90, 30, 6.0)
    assert found["bytes"] == (9 - 5) * 10 * 100
    assert "30 of 90 prompt tokens reused (33.3%)" in kvpage(*words)[1]


def test_a_trace_without_a_rate_gives_tokens_only(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}', encoding="utf-8")
    shown = kvpage("savings", str(trace))[1]
    assert "0 of 512 prompt tokens reused" in shown
    assert "unknown: no rate of prefill" in shown
    trace.write_text("{}", encoding="utf-8")
    code, _, errors = kvpage("savings", str(trace))
    assert code == 1
    assert "line 1: must be an object with timestamp and hash_ids" in errors


def test_a_shared_block_saves_a_copy_per_further_context() -> None:
    def agent(name: str, *blocks: bytes) -> Agent:
        manifest = Manifest(b"", name, "", "tiny", 1, 1, blocks, 0, 0, "")
        return Agent(manifest, tuple(ContextBlock(block, 1, bytes=7) for block in blocks), 0, 0, 0, None)

    agents = agent("ann", b"a", b"b"), agent("bob", b"a", b"c"), agent("eve", b"a", b"b")
    assert shared_bytes(Holdings(agents=agents)) == 7 * (2 + 1)


def test_loads_that_take_longer_than_prefill_save_no_time() -> None:
    slow = EngineFigures("e", "m", 1, 0, 0, 0, {"page": TierFigures(1, 100, 1, seconds=9.0)}, prefill_rate=100.0)
    assert slow.seconds_saved == 0
    earlier_version = parse(json.dumps(ENGINE | {"tiers": {tier: {**NONE, "tokens": 5} for tier in TIERS}}).encode())
    assert earlier_version
    assert (earlier_version.reused, earlier_version.seconds_saved) == (20, 0)
