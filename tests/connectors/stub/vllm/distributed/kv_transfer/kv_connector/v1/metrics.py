"""Statistics of connectors."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> None:
        (self._counter_cls,) = [made for kind, made in metric_types.items() if kind.__name__ == "Counter"]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues
