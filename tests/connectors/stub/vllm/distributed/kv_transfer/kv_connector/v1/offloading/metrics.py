"""Statistics of tiers."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class OffloadingConnectorStats(KVConnectorStats):
    def increase_counter(self, name: str, value: int | float = 1, labelvalues: tuple[str, ...] = ()) -> None:
        values: dict[tuple[str, ...], Any] = self.data.setdefault(name, {})
        values[labelvalues] = values.get(labelvalues, 0) + value
