"""The tier in the real vLLM on the CPU: one process saves contexts, another restores them, and the store fails.

The first engine has a faulty connection, the second none. vLLM's RAM tier has the store's eviction policy. Each failure
has a context of its own, because the RAM tier keeps restored ones.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from proxy import start_proxy
from servers import start_server
from vllm_process import QUICK, Parts, Vllm, needs_vllm, print_ratio, vllm
from waiting import until

pytestmark = needs_vllm

LONG: Parts = [(0, 2049)]  # sixteen blocks and a token
LOST, FLIPPED, KILLED, AWAY, NEW = ([(first, 385)] for first in (4000, 5000, 6000, 7000, 8000))  # three blocks each
CHUNK = 128 * 30 * 2 * 3 * 64 * 4  # bytes: tokens, layers, K and V, heads, elements of float32


def test_contexts_are_restored_and_failures_are_misses(tmp_path: Path) -> None:
    options = {"dtype": "float32", "tier": True, "extra": {"lookup_seconds": 30, "transfer_seconds": 30, "threads": 1}}
    with (
        start_server("--maxmemory", "2gb", killed=not QUICK) as store,
        start_proxy(store.port) as proxy,
        store.client() as client,
    ):
        computed: dict[str, Any] = {}
        names: dict[str, list[bytes]] = {}  # keys of each context

        def compute(engine: Vllm, parts: Parts) -> None:
            before = {*client.scan_iter()}
            computed[str(parts)] = engine.run(parts)
            assert computed[str(parts)]["cached"] == [0]
            count = len(before) + parts[0][1] // 128
            until(lambda: client.dbsize() == count, "the chunks on the server", within=60)
            names[str(parts)] = [*{*client.scan_iter()} - before]

        def run(engine: Vllm, parts: Parts) -> dict[str, Any]:
            found = engine.run(parts)
            assert found["answers"] == computed[str(parts)]["answers"]
            return found

        with vllm(tmp_path / "first", url=proxy.url, **options) as first:
            compute(first, LONG)
            with vllm(tmp_path / "second", url=store.url, **options) as second:
                restored = run(second, LONG)
                assert restored["cached"] == [2048]
                assert restored["counts"]["lookup/ok"] == restored["counts"]["load/ok"] == 16
                print_ratio(computed[str(LONG)], restored)
                if QUICK:
                    return
                for parts in (LOST, FLIPPED, KILLED, AWAY):
                    compute(second, parts)

            for name in names[str(LOST)][:2]:  # pages of another size
                client.execute_command("KVPAGESET", name.split(b":")[1], 0, 0, 0, 0, 1, 2, 3, 0, b"shorter")
            assert missed(run(first, LOST), "load") == 2

            proxy.close()  # it counts the bytes of a connection
            proxy.flip_at = CHUNK + CHUNK // 2
            assert missed(run(first, FLIPPED), "load") == 1
            proxy.flip_at = None

            proxy.die_after = proxy._passed + CHUNK + CHUNK // 2
            assert missed(run(first, KILLED), "load") >= 2
            assert run(first, AWAY)["cached"] == [0]
            proxy.die_after = None
            time.sleep(1.1)  # the pause after a failure
            assert run(first, AWAY)["cached"] == [384]

            _killed_during_save(first, store.pid)


def _killed_during_save(engine: Vllm, server: int) -> None:
    """Kill the store while a prompt is computed. Its chunks are in RAM, but not on the server."""
    engine.begin(NEW)
    os.kill(server, signal.SIGKILL)
    found = engine.end()
    again = engine.run(NEW)
    assert again["answers"] == found["answers"]
    assert missed(found, "save") + missed(again, "save") == 3


def missed(found: dict[str, Any], job: str) -> float:
    """Return the number of chunks that a job missed in a run."""
    counts = found["counts"]
    return sum(count for name, count in counts.items() if name.startswith(f"{job}/") and not name.endswith("/ok"))
