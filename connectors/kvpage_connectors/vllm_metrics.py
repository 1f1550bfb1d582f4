"""Counts of the connector for vLLM's log and for Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


@dataclass
class Counts(KVConnectorStats):
    """Counts of blocks and bytes: ``job/ok``, ``job/bytes`` and ``job/reason``."""

    def reset(self) -> None:
        """Set all counts to 0."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sums of the counts of two processes."""
        return Counts(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, for the log."""
        return self.data

    def is_empty(self) -> bool:
        """Return whether all counts are 0."""
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """Prometheus counters ``vllm:kvpage_blocks`` by job and result, and ``vllm:kvpage_bytes`` by job."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        labels = self._labelnames
        self._blocks = self._counter_cls(
            name="vllm:kvpage_blocks",
            documentation="Blocks looked up, loaded and saved: ok, or the reason of a miss.",
            labelnames=[*labels, "job", "result"],
        )
        self._bytes = self._counter_cls(
            name="vllm:kvpage_bytes", documentation="Bytes loaded and saved.", labelnames=[*labels, "job"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts of an engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            job, _, result = name.partition("/")
            metric = (
                self._bytes.labels(*engine, job) if result == "bytes" else self._blocks.labels(*engine, job, result)
            )
            metric.inc(count)
