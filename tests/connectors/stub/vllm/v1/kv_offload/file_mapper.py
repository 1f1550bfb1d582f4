"""Properties of an engine in the names of vLLM's files."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec


class FileMapper:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def from_offloading_spec(
        cls, root_dir: str, offloading_spec: OffloadingSpec, blocks_per_file: int = 1, parallel_agnostic: bool = False
    ) -> FileMapper:
        config = offloading_spec.config
        return cls(
            {
                "model_name": config.model.name,
                "tp_size": config.parallel.tp_size,
                "pp_size": config.parallel.pp_size,
                "dtype": config.model.dtype,
                "kv_cache_groups": config.groups,
            }
        )

    def get_run_config(self) -> dict[str, Any]:
        return dict(self.fields)
