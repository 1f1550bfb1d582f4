"""The connector for vLLM with a stub of vLLM's scheduler and worker, on a real server."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
from kvpage_connectors import vllm_hints
from kvpage_connectors.vllm_connector import KvpageConnector
from kvpage_connectors.vllm_metrics import Counts
from proxy import start_proxy
from servers import RunningServer, start_server
from stub_engine import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    TOKENS,
    Engine,
    Request,
    Tensor,
    counts,
    engine_on,
    groups,
    prompt,
    settings,
    values,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from waiting import until

from kvpage_server.page import VERSION


@pytest.fixture
def engine(server: RunningServer, client: redis.Redis) -> Iterator[Engine]:
    with engine_on(server.url) as engine:
        yield engine


def test_another_engine_restores_a_prompt(engine: Engine, server: RunningServer) -> None:
    assert engine.run(prompt("a", 100)) == 0
    with engine_on(server.url) as other:
        assert other.run(prompt("b", 100)) == 96
        assert other.run(prompt("c", 96)) == 80, "one token is computed"
        size = 11 * LAYERS * HEADS * 2 * TOKENS * DIM * 4
        assert counts(other) == {
            "lookup/ok": 11,
            "load/ok": 11,
            "load/bytes": size,
            "save/ok": 1,
            "save/bytes": size // 11,
        }
    assert counts(engine)["save/ok"] == 6


def test_a_block_is_pages_of_each_layer_head_and_plane(engine: Engine, client: redis.Redis) -> None:
    request = prompt("a", 16)
    engine.run(request)
    (key,) = {name.split(b":")[1] for name in client.scan_iter("kv:*") if not name.endswith(b":index")}
    assert key.startswith(b"vllm.lbhnc-vec.")
    block = values(request.block_hashes[0], 1)[2].reshape(2, -1)  # of layer 1 and head 2, K and V
    for plane in (0, 1):
        assert client.execute_command("KVPAGEGET", key, 1, 2, 0, plane) == block[plane].tobytes()
    assert len(client.execute_command("KVBLOCKGET", key, 0)) == LAYERS * HEADS * 2 * TOKENS * DIM * 4


def test_a_longer_prompt_loads_its_stored_beginning(engine: Engine) -> None:
    engine.run(prompt("a", 40))
    assert engine.run(prompt("b", 90)) == 32
    assert engine.run(prompt("c", 90)) == 80
    assert counts(engine)["save/ok"] == 5, "no block is saved twice"


def test_blocks_in_the_paged_cache_are_not_loaded(engine: Engine) -> None:
    engine.run(prompt("a", 100))
    request = prompt("b", 100)
    request.blocks = [engine.free.pop() for _ in range(7)]
    engine.compute(request, 48)
    assert engine.admit(request, computed=48) == 48
    engine.check(request)
    engine.finish(request)


def test_a_prompt_in_the_paged_cache_is_not_looked_up(engine: Engine) -> None:
    request = prompt("a", 40)
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.get_num_new_matched_tokens(request, 32) == (0, False)
    assert counts(engine) == {}


def test_hints_protect_blocks_sessions_and_requests(engine: Engine, client: redis.Redis) -> None:
    """In vLLM's envelope, in a request's `kv_transfer_params` and as its `kv_hints`."""

    def send(name: str, length: int, *actions: tuple[str, dict[str, Any]], session: str = "") -> Request:
        request, found = (
            prompt(name, length, start=0),
            [
                {"action_id": "a", "action_type": kind, "action_version": "1", "payload": payload}
                for kind, payload in actions
            ],
        )
        request.kv_transfer_params = {"kv_hints": {"actions": found}, "kvpage_session": session}
        engine.run(request)
        return request

    def pinned() -> list[bool]:
        return [bool(field(i, b"pinned")) for i in range(len(hashes))]

    def field(i: int, name: bytes) -> Any:
        (key,) = {key.split(b":")[1] for key in client.keys(f"kv:*{hashes[i].hex()}*")}
        return dict(client.execute_command("KVPAGESTAT", key, 0, 0, 0, 0)).get(name)

    hashes = send("a", 32, ("pin", {})).block_hashes
    until(lambda: pinned() == [True, True])
    send("b", 16, ("unpin", {"block_hashes": [hashes[0].hex()]}))
    until(lambda: pinned() == [False, True])
    hashes = send("c", 64, session="s").block_hashes
    send("d", 16, ("pin", {"session_id": "s"}))
    until(lambda: pinned() == [True] * 4)
    request = prompt("e", 16)
    request.kv_hints = SimpleNamespace(
        actions=[SimpleNamespace(action_type="unpin", action_version="1", payload={"session_id": "s"})]
    )
    engine.run(request)
    until(lambda: not any(pinned()))
    send("f", 64, ("pin", {"sesion_id": "s"}), ("retain", {"seconds": 600}), ("split", {}))
    until(lambda: all(field(i, b"lease_left_ms") for i in range(4)))
    assert not any(pinned())
    send("g", 16, ("retain", {"seconds": 4000}))
    assert engine.scheduler.reasons.counts["on_new_request", "ValueError"] == 1


def test_hints_of_an_engine_without_names_reach_no_page(server: RunningServer, client: redis.Redis) -> None:
    client.execute_command("KVPAGESET", "00", 0, 0, 0, 0, 1, 2, 3, 0, b"of another program")
    request = prompt("a", 16)
    actions = [SimpleNamespace(action_type="pin", action_version="1", payload={"block_hashes": ["00"]})]
    request.kv_hints = SimpleNamespace(actions=actions)
    with engine_on(server.url, weights="") as nameless:
        assert nameless.scheduler.reasons.counts
        nameless.scheduler.on_new_request(request)
    assert client.info()["leased_or_pinned"] == 0


@pytest.mark.parametrize(("count", "pinned"), [(4096, 1), (4097, 0)])
def test_hints_name_a_limited_number_of_blocks(engine: Engine, client: redis.Redis, count: int, pinned: int) -> None:
    saved, request = prompt("a", 16), prompt("b", 16)
    engine.run(saved)
    named = [saved.block_hashes[0].hex(), *(count - 1) * ["00"]]
    actions = [SimpleNamespace(action_type="pin", action_version="1", payload={"block_hashes": named})]
    request.kv_hints = SimpleNamespace(actions=actions)
    engine.run(request)
    assert engine.scheduler.reasons.counts.get(("on_new_request", "ValueError"), 0) == 1 - pinned
    until(lambda: client.info()["leased_or_pinned"] == pinned)


def test_sessions_have_a_limited_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_hints, "_BLOCKS", 10)
    sessions = vllm_hints.Sessions[int]()
    sessions.add({"kvpage_session": "old"}, range(6))
    sessions.add({"kvpage_session": "new"}, range(4))
    sessions.add({"kvpage_session": "new"}, range(2, 4))
    assert [len(sessions.blocks(name)) for name in ("old", "new")] == [6, 4]
    sessions.add({"kvpage_session": "new"}, range(5))
    assert [len(sessions.blocks(name)) for name in ("old", "new")] == [0, 5]
    sessions.add({"kvpage_session": "new"}, range(11))
    assert sessions.blocks("new") == ()


def test_a_request_can_refuse_the_cache(engine: Engine) -> None:
    engine.run(prompt("a", 40))
    request = prompt("b", 40)
    request.skip_reading_prefix_cache = True
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda blob: b"no page", "size"),
        (lambda blob: blob[:-1], "size"),
        (lambda blob: blob[:4] + bytes([VERSION + 1]) + blob[5:], "header"),
        (lambda blob: b"KVPG\x01" + blob[5:32] + blob[64:], "size"),
    ],
    ids=["text", "short", "later version", "prototype's version"],
)
@pytest.mark.parametrize("is_found", [True, False], ids=["after the lookup", "before the lookup"])
def test_a_damaged_block_is_computed_and_saved_again(
    engine: Engine,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes], bytes],
    reason: str,
    is_found: bool,
) -> None:
    """A damaged page is no page: a lookup does not count its block, and a load of it is a miss with a reason."""
    request, allocated = prompt("a", 100), engine.scheduler.update_state_after_alloc
    engine.run(request)
    name = next(client.scan_iter(f"kv:*{request.block_hashes[3].hex()}:0:0:0:0"))
    blob = client.get(name)

    def damaged(*args: Any) -> None:
        client.set(name, damage(blob))
        allocated(*args)

    if is_found:
        monkeypatch.setattr(engine.scheduler, "update_state_after_alloc", damaged)
    else:
        client.set(name, damage(blob))
    counts(engine)
    assert engine.run(prompt("b", 100)) == 48
    monkeypatch.undo()
    found = counts(engine)
    assert found["save/ok"] == 3
    assert found.get(f"load/{reason}", 0) == is_found
    assert engine.run(prompt("c", 100)) == 96


def test_a_block_with_another_layout_is_not_loaded(engine: Engine, client: redis.Redis) -> None:
    """With fewer heads it is incomplete, with pages of another size it is lost."""
    for heads, reason in ((HEADS - 1, None), (HEADS, "load/size")):
        request = prompt(f"{heads} a", 100, start=1000 * heads)
        engine.run(request)
        name = next(client.scan_iter(f"kv:*{request.block_hashes[3].hex()}:0:0:0:0")).split(b":")[1]
        client.execute_command("KVPAGEDEL", name)
        for layer, head, plane in product(range(LAYERS), range(heads), (0, 1)):
            half = bytes(TOKENS * DIM * 2)
            client.execute_command("KVPAGESET", name, layer, head, 0, plane, 1, TOKENS, DIM, 0, half)
        counts(engine)
        assert engine.run(prompt(f"{heads} b", 100, start=1000 * heads)) == 48
        assert counts(engine).get(reason or "", 0) == (reason is not None)
        assert engine.run(prompt(f"{heads} c", 100, start=1000 * heads)) == 96


def test_a_lost_first_block_is_not_loaded_again_and_again(engine: Engine, client: redis.Redis) -> None:
    engine.run(prompt("a", 100))
    for name in client.scan_iter("kv:*:0:0:0:0"):
        client.execute_command("KVPAGESET", name.split(b":")[1], 0, 0, 0, 0, 1, 2, 3, 0, b"shorter")
    assert engine.run(prompt("b", 100)) == 0
    assert engine.run(prompt("c", 100)) == 96


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.kv_transfer_config.kv_connector_extra_config.update(weights="0124"),
        lambda config: setattr(config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        lambda config: setattr(config.cache_config, "kv_cache_layout", "LBNHC"),
        lambda config: setattr(config.model_config, "quantization", "awq"),
        lambda config: setattr(config.model_config, "hf_config", SimpleNamespace(to_dict=lambda: {"rope_theta": 1})),
        lambda config: setattr(config.attention_config, "backend", "OTHER"),
        lambda config: setattr(config.parallel_config, "tensor_parallel_size", 2),
    ],
    ids=["weights", "hash", "layout", "quantization", "config", "backend", "tp"],
)
def test_another_engine_finds_nothing(engine: Engine, server: RunningServer, change: Any) -> None:
    engine.run(prompt("a", 40))
    with engine_on(server.url, change) as other:
        assert other.run(prompt("b", 40)) == 0


def test_the_path_of_a_model_does_not_matter(engine: Engine, server: RunningServer) -> None:
    engine.run(prompt("a", 40))
    moved = SimpleNamespace(to_dict=lambda: {"_name_or_path": "y"})
    with engine_on(server.url, lambda config: setattr(config.model_config, "hf_config", moved)) as other:
        assert other.run(prompt("b", 40)) == 32


def test_ranks_write_pages_of_the_same_block(server: RunningServer, client: redis.Redis) -> None:
    """A block is complete when all ranks have saved it."""

    def of_rank(rank: int) -> Callable[[SimpleNamespace], None]:
        return lambda config: config.parallel_config.__dict__.update(rank=rank, world_size=2, tensor_parallel_size=2)

    with engine_on(server.url, of_rank(0)) as first, engine_on(server.url, of_rank(1)) as second:
        first.run(prompt("a", 40))
        assert first.run(prompt("b", 40)) == 0
        second.run(prompt("a", 40))
        assert first.run(prompt("c", 40)) == 32
        assert second.run(prompt("d", 40)) == 32


def test_preemption_waits_for_saves_of_the_request(server: RunningServer, client: redis.Redis) -> None:
    with start_proxy(server.port) as proxy, engine_on(proxy.url, threads=1) as engine:
        proxy.hold = 0.05
        requests = [prompt(str(i), 100, start=1000 * i) for i in range(4)]
        for request in requests:
            engine.admit(request)
        engine.step(*((request, 100) for request in requests))
        engine.step(preempted=frozenset(request.request_id for request in requests))
        for cache in engine.cache:
            cache[:] = 0  # other requests have the blocks
        with engine_on(server.url) as other:
            for i in range(4):
                other.run(prompt(str(i), 100, start=1000 * i))


def test_a_request_that_ends_during_a_load_is_freed_once(engine: Engine) -> None:
    engine.run(prompt("a", 100))
    request = prompt("b", 100)
    engine.scheduler.on_new_request(request)
    tokens, _ = engine.matched(request)
    request.blocks = [engine.free.pop() for _ in range(7)]
    engine.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (request.blocks,)), tokens)
    assert engine.scheduler.request_finished(request, request.blocks) == (False, None)
    ended: list[tuple[set[str], set[str]]] = []
    until(lambda: ended.append(engine.step()) or ended[-1][1] == {"b"})  # type: ignore[func-returns-value]
    assert not any(sent for sent, _ in ended)


def test_a_store_that_is_away_is_a_miss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"redis://127.0.0.1:{bound.getsockname()[1]}"
    with engine_on(url, lookup_seconds=1, transfer_seconds=1) as engine:
        assert engine.run(prompt("a", 40)) == 0
        assert engine.run(prompt("b", 40)) == 0
        found = counts(engine)
        assert found["lookup/away"] >= 2
        assert found["save/away"] >= 2


def test_a_silent_store_is_a_miss_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with engine_on(url, lookup_seconds=0.1, transfer_seconds=0.1) as engine:
            assert engine.run(prompt("a", 40)) == 0
            assert engine.run(prompt("b", 40)) == 0


def test_a_store_that_dies_during_a_load_is_a_miss(engine: Engine, server: RunningServer) -> None:
    engine.run(prompt("a", 100))
    with start_proxy(server.port) as proxy, engine_on(proxy.url, transfer_seconds=1) as other:
        request = prompt("b", 100)
        other.scheduler.on_new_request(request)
        assert other.matched(request) == (96, True)
        proxy.die_after = 0
        assert other.run(prompt("c", 100)) == 0


def test_leases_of_an_engine_that_died_end(engine: Engine, server: RunningServer, client: redis.Redis) -> None:
    """Close an engine between the lookup and the load of a prompt."""
    engine.run(prompt("a", 100))
    with engine_on(server.url, lease_ms=2000) as other:
        request = prompt("b", 100)
        other.scheduler.on_new_request(request)
        assert other.matched(request) == (96, True)
        assert client.info()["leased_or_pinned"] == 6
    until(lambda: client.info()["leased_or_pinned"] == 0, "the end of the leases", within=60)


def test_a_request_id_may_have_colons(engine: Engine, server: RunningServer) -> None:
    engine.run(prompt("cmpl:1:0", 100))
    with engine_on(server.url) as other:
        assert other.run(prompt("cmpl:2:0", 100)) == 96


def test_a_full_store_is_a_miss() -> None:
    options = "--maxmemory", "1mb", "--maxmemory-policy", "noeviction"
    with start_server(*options) as server, engine_on(server.url) as engine:
        for i in range(40):
            engine.run(prompt(str(i), 100, start=1000 * i))
        assert counts(engine)["save/oom"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, cache: setattr(config.device_config, "device_type", "cuda"), "use the tier"),
        (lambda config, cache: cache.kv_cache_groups.extend(cache.kv_cache_groups), "one group"),
        (lambda config, cache: setattr(cache.kv_cache_groups[0], "kv_cache_spec", SimpleNamespace()), "one group"),
        (lambda config, cache: setattr(cache.kv_cache_groups[0].kv_cache_spec, "dtype", "torch.int4"), "dtype"),
        (lambda config, cache: setattr(config.cache_config, "hash_block_size", 8), "hashed as a whole"),
    ],
)
def test_an_unsupported_cache_is_not_connected(
    server: RunningServer, caplog: pytest.LogCaptureFixture, change: Any, message: str
) -> None:
    config, cache = settings(server.url), groups()
    change(config, cache)
    connectors = [KvpageConnector(config, role, cache) for role in KVConnectorRole]
    assert message in caplog.text
    scheduler, worker = connectors
    request = prompt("a", 40)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    assert scheduler.request_finished(request, []) == (False, None)
    worker.register_kv_caches({})
    for connector in connectors:
        connector.shutdown()


def test_memory_in_another_order_is_not_saved(server: RunningServer, client: redis.Redis) -> None:
    with engine_on(server.url) as engine:
        engine.worker._memory = []
        swapped = [np.zeros((BLOCKS, TOKENS, HEADS, 2 * DIM), np.float32).transpose(0, 2, 1, 3) for _ in NAMES]
        engine.worker.register_kv_caches({name: Tensor(one) for name, one in zip(NAMES, swapped, strict=True)})
        engine.run(prompt("a", 40))
        assert client.dbsize() == 0
        assert counts(engine)["save/ValueError"] == 2


def test_an_unknown_request_is_a_miss(engine: Engine) -> None:
    assert engine.scheduler.get_num_new_matched_tokens(prompt("a", 40), 0) == (0, False)
    engine.scheduler.update_state_after_alloc(prompt("a", 40), None, 16)
    assert engine.scheduler.request_finished(prompt("a", 40), []) == (False, None)
    assert set(counts(engine)) == {
        "get_num_new_matched_tokens/KeyError", "update_state_after_alloc/KeyError", "request_finished/KeyError"
    }  # fmt: skip


def test_a_reset_gives_blocks_new_names(engine: Engine) -> None:
    engine.run(prompt("a", 40))
    assert engine.scheduler.reset_cache()
    assert engine.run(prompt("b", 40)) == 0
    assert engine.run(prompt("c", 40)) == 32


def test_the_default_failure_policy_is_a_warning(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with engine_on(server.url, lambda config: setattr(config.kv_transfer_config, "kv_load_failure_policy", "fail")):
        assert 'set kv_load_failure_policy to "recompute"' in caplog.text


@pytest.mark.parametrize("option", [{"url": "http://x"}, {"threads": 0}, {"lookup_seconds": 0}])
def test_an_invalid_option_is_an_error_at_the_start(server: RunningServer, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"URL|must be"):
        KvpageConnector(settings(**{"url": server.url, **option}), KVConnectorRole.SCHEDULER, groups())


def test_saves_end_before_the_shutdown_does(server: RunningServer, client: redis.Redis) -> None:
    with engine_on(server.url) as engine:
        request = prompt("a", 100)
        engine.admit(request)
        engine.step((request, 100))
    with engine_on(server.url) as other:
        assert other.run(prompt("b", 100)) == 96


class Counter:
    """Stub of a Prometheus counter."""

    values: dict[tuple[str, ...], float]

    def __init__(self, name: str, labelnames: list[str], **_: str) -> None:
        assert name.startswith("vllm:kvpage_")
        self.values = {}
        self.names = labelnames

    def labels(self, *labels: str) -> Any:
        assert len(labels) == len(self.names)

        def add(count: float) -> None:
            self.values[labels] = self.values.get(labels, 0) + count

        return SimpleNamespace(inc=add)


def test_counts_are_prometheus_counters() -> None:
    metrics: Any = KvpageConnector.build_prom_metrics(None, {Counter: Counter}, ["engine"], {0: ["0"]})
    stats = KvpageConnector.build_kv_connector_stats({"load/ok": 3, "load/bytes": 100})
    assert isinstance(stats, Counts)
    both = stats.aggregate(Counts({"load/ok": 1, "save/away": 2}))
    assert not both.is_empty()
    metrics.observe(both.reduce())
    metrics.observe({"load/ok": 1})
    assert metrics._blocks.values == {("0", "load", "ok"): 5, ("0", "save", "away"): 2}
    assert metrics._bytes.values == {("0", "load"): 100}
    stats.reset()
    assert stats.is_empty()


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
