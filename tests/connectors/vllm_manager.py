"""The tier below vLLM's own manager of tiers, without a model: backpressure, lost chunks, and uses.

    python vllm_manager.py redis://127.0.0.1:9221

The environment of vLLM runs it. Every manager is another engine on the same store.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import redis
from vllm.v1.kv_offload import config as settings
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

SIZE = 1 << 20  # bytes of a chunk
WITHIN = 60  # seconds


def spec(url: str, engine: str, **tier: Any) -> TieringOffloadingSpec:
    place = {"type": "KvpageTier", "module_path": "kvpage_connectors.vllm_tier", "url": url, "weights": "0123", **tier}
    return TieringOffloadingSpec(
        settings.OffloadingConfig(
            groups=(settings.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=SIZE,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": 64 * SIZE, "secondary_tiers": [place]},
            engine_id=engine,
            model=settings.OffloadingModelConfig("a/model", "float16"),
            cache=settings.OffloadingCacheConfig(16, 1),
            parallel=settings.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
            kv_cache_layout="LBHNC",
        )
    )


@contextmanager
def manager_on(url: str, engine: str, **tier: Any) -> Iterator[TieringOffloadingManager]:
    manager = spec(url, engine, **tier).get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    try:
        yield manager
    finally:
        manager.shutdown()


def step(manager: TieringOffloadingManager) -> None:
    manager.on_schedule_end(ScheduleEndContext([], []))


def keys_of(names: str) -> list[OffloadKey]:
    return [make_offload_key(sha256(name.encode()).digest(), 0) for name in names]


def request(manager: TieringOffloadingManager, name: str, keys: list[OffloadKey]) -> ReqContext:
    context = ReqContext(name)
    for position, key in enumerate(keys):
        context.set_offload_key_position(key, position)
    manager.on_new_request(context)
    return context


def store(manager: TieringOffloadingManager, names: str) -> None:
    """Store chunks, and wait until no job is left."""
    keys = keys_of(names)
    context = request(manager, f"store {names}", keys)
    output = manager.prepare_store(keys, context)
    assert output
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    wait_for(lambda: not manager.has_pending_work(), manager)


def look_up(manager: TieringOffloadingManager, names: str) -> list[LookupResult]:
    """Look up chunks, which are loaded, until no answer changes any more. Return the first and the last answers."""
    keys = keys_of(names)
    context = request(manager, f"load {names}", keys)
    assert {manager.lookup(key, context) for key in keys} == {LookupResult.RETRY}, "a thread asks the store"
    found: list[LookupResult] = []

    def is_known() -> bool:
        found[:] = [manager.lookup(key, context) for key in keys]
        return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & {*found}

    wait_for(is_known, manager)
    manager.on_request_finished(context)
    return found


def wait_for(is_true: Any, manager: TieringOffloadingManager) -> None:
    end = time.monotonic() + WITHIN
    while not is_true():
        assert time.monotonic() < end, "it did not happen in time"
        step(manager)


def dropped(manager: TieringOffloadingManager) -> float:
    """Return the number of chunks that vLLM did not store because of backpressure since the last call."""
    stats = manager.get_stats()
    values = stats.data["data"].get("vllm:kv_offload_tiering_backpressure_blocks_dropped", {}) if stats else {}
    return float(sum(values.values()))


def backpressure(url: str, client: Any) -> None:
    """While the store is slow, vLLM stores nothing in the tier. After a while it tries again."""
    pressure = {"backpressure_cls": "EMABackpressureDetector", "high_water_s": 0.5, "low_water_s": 0.4, "alpha": 1.0}
    pressure |= {"warmup_completions": 1, "decay_half_life_s": 2.0, "cooldown_s": 0.0}
    with manager_on(url, "pressed", backpressure=pressure) as manager:
        store(manager, "a")
        client.execute_command("CLIENT", "PAUSE", 2000, "WRITE")
        store(manager, "b")
        before = client.dbsize()
        store(manager, "cd")
        assert dropped(manager) == 2
        assert client.dbsize() == before
        time.sleep(6)
        store(manager, "e")
        assert dropped(manager) == 0
        assert client.dbsize() == before + 1


def lost_chunks(url: str, client: Any) -> None:
    """A chunk that is lost between lookup and load is a miss, and no reason to load for ever. The others are hits."""
    with manager_on(url, "storing") as manager:
        store(manager, "fgh")
    with manager_on(url, "loading") as manager:
        (name,) = client.scan_iter(f"*{keys_of('g')[0][:-4].hex()}*")
        client.execute_command("KVPAGESET", name.split(b":")[1], 0, 0, 0, 0, 8, 1, 7, 0, b"shorter")
        assert look_up(manager, "fgh") == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]


def uses(url: str, client: Any) -> None:
    """vLLM's `touch` is a use on the server."""
    with manager_on(url, "touching") as manager:
        store(manager, "i")
        before = asked(client)
        context = request(manager, "touch", keys_of("i"))
        manager.touch(keys_of("i"), context)
        wait_for(lambda: asked(client) > before, manager)


def asked(client: Any) -> int:
    return int(client.info("commandstats")["cmdstat_kvpageprefix"]["calls"])


if __name__ == "__main__":
    for check in (backpressure, lost_chunks, uses):
        check(sys.argv[1], redis.Redis.from_url(sys.argv[1]))
        print(check.__name__, "is right")
