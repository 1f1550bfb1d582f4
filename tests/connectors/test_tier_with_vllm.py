"""The tier in the real vLLM on the CPU: one process saves contexts, another restores them, and the store fails.

vLLM's RAM tier has the store's eviction policy. Each failure has a context of its own, because the RAM tier keeps those
that were restored.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from proxy import start_proxy
from servers import start_server
from vllm_process import Parts, Vllm, needs_vllm, vllm
from waiting import until

pytestmark = needs_vllm

LONG: Parts = [(0, 2049)]  # sixteen blocks and a token
LOST, FLIPPED, KILLED, AWAY, NEW = ([(first, 385)] for first in (4000, 5000, 6000, 7000, 8000))  # three blocks each
CHUNK = 128 * 30 * 2 * 3 * 64 * 4  # bytes: tokens, layers, K and V, heads, elements of float32


def test_contexts_are_restored_and_failures_are_misses(tmp_path: Path) -> None:
    options = {"dtype": "float32", "tier": True, "extra": {"lookup_seconds": 30, "transfer_seconds": 30, "threads": 1}}
    with (
        start_server("--maxmemory", "2gb", killed=True) as store,
        start_proxy(store.port) as proxy,
        store.client() as client,
    ):
        computed: dict[str, Any] = {}
        names: dict[str, list[bytes]] = {}  # keys of each context
        with vllm(tmp_path / "first", url=store.url, **options) as first:
            for parts in (LONG, LOST, FLIPPED, KILLED, AWAY):
                before = {*client.scan_iter()}
                computed[str(parts)] = first.run(parts)
                count = len(before) + parts[0][1] // 128
                until(lambda count=count: client.dbsize() == count, "the chunks on the server", within=60)
                names[str(parts)] = [*{*client.scan_iter()} - before]
        assert all(one["cached"] == [0] for one in computed.values())

        def run(parts: Parts) -> dict[str, Any]:
            found = second.run(parts)
            assert found["answers"] == computed[str(parts)]["answers"]
            return found

        with vllm(tmp_path / "second", url=proxy.url, **options) as second:
            restored = run(LONG)
            assert restored["cached"] == [2048]
            assert restored["counts"]["lookup/ok"] == restored["counts"]["load/ok"] == 16
            times = computed[str(LONG)]["first"][0], restored["first"][0]
            print(f"first token: computed {times[0]:.3f} s, restored {times[1]:.3f} s, ratio {times[1] / times[0]:.3f}")

            for name in names[str(LOST)][:2]:  # pages of another size
                client.execute_command("KVPAGESET", name.split(b":")[1], 0, 0, 0, 0, 1, 2, 3, 0, b"shorter")
            assert missed(run(LOST), "load") == 2

            proxy.close()  # it counts the bytes of a connection
            proxy.flip_at = CHUNK + CHUNK // 2
            assert missed(run(FLIPPED), "load") == 1
            proxy.flip_at = None

            proxy.die_after = proxy._passed + CHUNK + CHUNK // 2
            assert missed(run(KILLED), "load") >= 2
            assert run(AWAY)["cached"] == [0]
            proxy.die_after = None
            time.sleep(1.1)  # the pause after a failure
            assert run(AWAY)["cached"] == [384]

            _killed_during_save(second, store.pid)


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
