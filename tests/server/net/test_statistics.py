"""Counters of INFO, and the effect of CONFIG RESETSTAT."""

from __future__ import annotations

import time
from pathlib import Path

from servers import start_server


def test_rates_and_totals_never_fall_below_zero_after_a_reset() -> None:
    with start_server() as server, server.client() as client:
        client.set("large", b"v" * 10_000_000)
        lowest = 0.0
        for _ in range(2):
            for _ in range(5):
                client.get("large")
            time.sleep(1.1)  # rates are of a second
            client.config_resetstat()
            deadline = time.monotonic() + 1.2
            while time.monotonic() < deadline:
                stats = client.info("stats")
                rates = [value for name, value in stats.items() if name.startswith(("instantaneous", "total"))]
                lowest = min(lowest, *rates)
                assert stats["total_net_output_bytes"] < 10_000_000  # counted from the reset on
                time.sleep(0.05)
        assert lowest == 0


def test_a_reset_includes_counts_of_quotas_and_of_the_disk(tmp_path: Path) -> None:
    options = ("--store", "tiered", "--maxmemory", "2mb", "--quota", "q*", "100kb")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        for number in range(40):
            client.set(f"q{number}", bytes(10_000))
            client.set(f"k{number}", bytes(100_000))
        client.save()
        for number in range(40):
            client.get(f"k{number}")

        def counts() -> list[int]:
            found = client.info("everything")
            usual = [found[name] for name in ("disk_fetched", "disk_dropped_from_memory", "disk_evicted")]
            times = [found[f"disk_{work}_times"]["calls"] for work in ("commit", "fetch")]
            return [*usual, *times, found["quota0"]["evicted_keys"]]

        assert sum(map(bool, counts())) >= 5
        client.config_resetstat()
        assert counts() == [0] * 6
