"""Counters of INFO, and the effect of CONFIG RESETSTAT."""

from __future__ import annotations

import time

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
