"""The connector in the real vLLM on the CPU: one process saves a context, another restores it, and the store fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

from proxy import Proxy, start_proxy
from servers import RunningServer, start_server
from vllm_process import QUICK, Vllm, needs_vllm, print_ratio, vllm
from waiting import until

pytestmark = needs_vllm
LONG = [(0, 2049)]  # sixteen blocks and a token
PATIENT: dict[str, Any] = {"dtype": "float32", "extra": {"lookup_seconds": 30, "transfer_seconds": 60}}
PAGES = 30 * 3 * 2  # of a block: layers, heads, K and V


def test_a_context_is_restored_and_failures_are_misses(tmp_path: Path) -> None:
    """The first engine has a faulty connection. Other processes restore the saved blocks, without a proxy."""
    unix = tmp_path / "store.sock"
    with (
        start_server("--maxmemory", "4gb", "--unixsocket", str(unix), killed=not QUICK) as store,
        store.client() as client,
        start_proxy(store.port) as proxy,
        vllm(tmp_path / "first", url=proxy.url, **PATIENT) as first,
    ):
        computed = first.run(LONG)
        assert computed["cached"] == [0]
        until(lambda: client.dbsize() == 16 * PAGES, "the saved blocks on the server", within=60)
        with vllm(tmp_path / "second", url=store.url, **PATIENT) as second:
            _restored(second, computed)
            if QUICK:
                return
            _partial_hits(first, second)
            _two_at_once(first, second)
        for number, url in enumerate((store.url, f"unix://{unix}")):
            with vllm(tmp_path / f"fresh{number}", url=url, **PATIENT) as fresh:
                print("by", url.partition(":")[0], end=", ")
                _restored(fresh, computed)
        _failures(first, proxy, store, computed)
        _killed_during_save(first, store)


def _restored(engine: Vllm, computed: dict[str, Any]) -> None:
    """Restore the long prompt as the first request of a process, and print its time."""
    restored = engine.run(LONG)
    assert restored["answers"] == computed["answers"]
    assert restored["cached"] == [2048]
    assert restored["counts"]["load/ok"] == 16
    print_ratio(computed, restored)


def _partial_hits(first: Vllm, second: Vllm) -> None:
    for length, stored in ((700, 640), (129, 128), (100, 0)):
        parts = [(0, length), (9000, 200)]
        found = second.run(parts)
        assert found["cached"] == [stored]
        again = first.run(parts)
        assert again["answers"] == found["answers"]


def _two_at_once(first: Vllm, second: Vllm) -> None:
    prompts = [[(i * 3000, 400)] for i in range(1, 4)]
    first.begin(*prompts)
    second.begin(*prompts)
    assert first.end()["answers"] == second.end()["answers"]
    assert first.run(*prompts)["cached"] == [384] * 3


def _failures(engine: Vllm, proxy: Proxy, store: RunningServer, computed: dict[str, Any]) -> None:
    with store.client() as client:
        for name in [*client.scan_iter("kv:*:7:1:0:1")][::3]:
            client.execute_command("KVPAGESET", name.split(b":")[1], 7, 1, 0, 1, 1, 2, 3, 0, b"shorter")
    found = engine.run(LONG)
    assert found["answers"] == computed["answers"]
    assert missed_loads(found) >= 1
    until(lambda: engine.run(LONG)["counts"].get("load/ok") == 16, "a load of the lost blocks, saved again", within=120)

    for offset in (2_000_000, 20_000_000):  # a flipped byte in the answers on a new connection, of four
        proxy.close()
        proxy.flip_at = offset
        found = engine.run(LONG)
        assert found["answers"] == computed["answers"]
        assert missed_loads(found) >= 1
        proxy.flip_at = None
        until(lambda: engine.run(LONG)["counts"].get("load/ok") == 16, "a load without a flip", within=120)

    proxy.die_after = proxy_bytes(proxy) + 30_000_000  # the store dies during a load
    found = engine.run(LONG)
    assert found["answers"] == computed["answers"]
    assert missed_loads(found) >= 1
    proxy.die_after = 0
    begin = time.monotonic()
    assert engine.run([(20_000, 200)])["cached"] == [0]
    assert time.monotonic() - begin < 60
    proxy.die_after = None
    time.sleep(1.1)
    assert engine.run(LONG)["answers"] == computed["answers"]


def _killed_during_save(engine: Vllm, store: RunningServer) -> None:
    """Kill the store when it has received a part of a save, which waits there. The engine goes on without it."""
    new = [(20_000, 1025)]
    with store.client() as client:
        client.execute_command("CLIENT", "PAUSE", 600_000, "WRITE")
        before = client.info()["total_net_input_bytes"]
        engine.begin(new)
        until(lambda: client.info()["total_net_input_bytes"] > before + 1_000_000, "a part of a save", within=120)
        os.kill(store.pid, signal.SIGKILL)
    found = engine.end()
    again = engine.run(new)
    assert again["cached"] == [0]
    assert again["answers"] == found["answers"]
    assert sum(one["counts"].get(f"save/{reason}", 0) for one in (found, again) for reason in ("away", "deadline")) >= 8


def missed_loads(found: dict[str, Any]) -> float:
    return sum(n for name, n in found["counts"].items() if name.startswith("load/") and name[5:] not in ("ok", "bytes"))


def proxy_bytes(proxy: Proxy) -> int:
    return proxy._passed


def test_saving_adds_little_to_a_prompt(tmp_path: Path) -> None:
    """Run new prompts of sixteen blocks with and without saving, and print the medians of the pairs.

    One process runs them all, because two processes with the same prompts differ by more than a save costs. The order
    alternates from pair to pair. On a busy machine the times differ by chance, the processor seconds less.
    """
    with (
        start_server("--maxmemory", "2gb") as store,
        store.client() as client,
        vllm(tmp_path / "log", url=store.url, **PATIENT) as engine,
    ):
        pairs: list[dict[bool, Any]] = []
        for pair in range(7):  # the first pair warms up
            runs = {}
            for saves in (False, True) if pair % 2 else (True, False):
                prompt = [(3000 * (2 * pair + saves), 2049)]
                runs[saves] = engine.run(prompt, answers=1, rest=0.5, saves=saves)
                assert runs[saves]["cached"] == [0]
                # vLLM reports the save in a later step, so the pages are counted on the server.
                pages = 16 * PAGES * (len(pairs) + (True in runs))
                until(lambda: client.dbsize() == pages)  # noqa: B023 - it is called at once
            pairs.append(runs)
        added = {}
        for what, value in (("first token", lambda run: run["first"][0]), ("processor time", lambda run: run["cpu"])):
            added[what] = median(value(runs[True]) / value(runs[False]) - 1 for runs in pairs[1:])
            print(f"saving adds to the {what}: {added[what]:+.1%}, the median of {len(pairs) - 1} pairs")
        assert added["processor time"] < 0.1


def test_preemption_and_bfloat16(tmp_path: Path, server: RunningServer) -> None:
    """Seven blocks for two prompts that grow over them. One of them is preempted, and goes on later."""
    options = {"url": server.url, "dtype": "bfloat16", "num_gpu_blocks_override": 8, "max_model_len": 512}
    prompts = [[(0, 300)], [(5000, 300)]]
    with vllm(tmp_path / "log", **options) as engine:
        alone = [engine.run(prompt, answers=150)["answers"][0] for prompt in prompts]
        together = engine.run(*prompts, answers=150)
        assert together["preempted"] > 0
        assert together["answers"] == alone


def test_a_full_or_locked_store_is_a_miss(tmp_path: Path) -> None:
    full = "--maxmemory", "20mb", "--maxmemory-policy", "noeviction"
    with start_server(*full) as server, vllm(tmp_path / "log", url=server.url, dtype="float32") as engine:
        found = engine.run([(0, 1000)])
        assert found["counts"]["save/oom"] >= 1
        with server.client() as client:
            client.config_set("requirepass", "secret")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        again = engine.run([(0, 1000)])
        assert again["answers"] == found["answers"]
        assert again["cached"] == [0]
        until(lambda: engine.run([(0, 300)])["counts"].get("lookup/noauth"), "a lookup without a password", within=120)
