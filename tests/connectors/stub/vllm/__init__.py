"""Interfaces of vLLM 0.32 that the connectors implement or call, for mypy and for tests without vLLM."""

from __future__ import annotations

from typing import Any

__version__ = "0.32.0"


class LLM:
    def __init__(self, **options: Any) -> None:
        self.llm_engine: Any = None

    def generate(self, prompts: list[Any], sampling_params: SamplingParams, *, use_tqdm: bool) -> list[Any]:
        return []


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        self.options = options
