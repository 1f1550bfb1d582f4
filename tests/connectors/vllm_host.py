"""vLLM as a process of a test: reads a line of JSON for each batch of prompts, and writes a line with the results.

    python vllm_host.py '{"url": "redis://127.0.0.1:9221", "dtype": "float32"}'

The environment of vLLM runs it. ``"tier": true`` selects the tier instead of the connector, no ``url`` neither. A line
has ``prompts``, each a list of (first token, number of tokens), ``answers``, the number of tokens to generate, and
``saves``, whether the connector saves the prompts.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

MODEL = "models/smollm2"


def tokens(parts: list[tuple[int, int]]) -> list[int]:
    """Return the tokens of a prompt with these parts."""
    return [(first + i) * 7919 % 40_000 + 100 for first, count in parts for i in range(count)]


def run(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts, greedily, without the cache of earlier ones. Return the results and the connector's counts."""
    from vllm import SamplingParams

    while not llm.reset_prefix_cache():  # vLLM frees the blocks of ended saves in a later step
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1), use_tqdm=False)
    prompts = [{"prompt_token_ids": tokens(parts)} for parts in order["prompts"]]
    greedy = SamplingParams(temperature=0, max_tokens=order["answers"], ignore_eos=True)
    plan = "kvpage_connectors.vllm_connector.KvpageConnector._plan_saves"
    with nullcontext() if order["saves"] else patch(plan):
        begin = time.process_time()
        results = llm.generate(prompts, greedy, use_tqdm=False)
        time.sleep(order["rest"])  # saves go on
        cpu = time.process_time() - begin
    counts = {
        "/".join(metric.labels[name] for name in ("job", "result") if name in metric.labels): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:kvpage_")
    }
    return {
        "answers": [list(one.outputs[0].token_ids) for one in results],
        "reasons": [one.outputs[0].finish_reason for one in results],
        "cached": [one.num_cached_tokens for one in results],
        "first": [one.metrics.first_token_latency for one in results],
        "cpu": cpu,
        "preempted": sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"),
        "counts": counts,
    }


def connector(place: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the connector."""
    return {
        "kv_connector": "KvpageConnector",
        "kv_connector_module_path": "kvpage_connectors.vllm_connector",
        "kv_connector_extra_config": place,
    }


def tier(place: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the tier, below a RAM tier of 200 MB with the eviction policy of the store."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "vllm_cpu_spec",
            "cpu_bytes_to_use": 200_000_000,
            "eviction_policy": "PrefixPolicy",
            "cache_policy_module_path": "kvpage_connectors.vllm_policy",
            "secondary_tiers": [{"type": "KvpageTier", "module_path": "kvpage_connectors.vllm_tier", **place}],
        },
    }


def main() -> None:
    """Start an engine with the connector, and answer lines until the input ends."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = json.loads(sys.argv[1])
    place = {"url": options.pop("url", None), **options.pop("extra", {})}
    connect = tier if options.pop("tier", False) else connector
    transfer = None
    if place["url"]:
        transfer = KVTransferConfig(kv_role="kv_both", kv_load_failure_policy="recompute", **connect(place))
    usual = {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.5}
    usual |= {"model": MODEL, "enforce_eager": True, "disable_log_stats": False, "kv_transfer_config": transfer}
    llm = LLM(**{**usual, **options})
    print("RESULT {}", flush=True)
    for line in sys.stdin:
        print("RESULT", json.dumps(run(llm, json.loads(line))), flush=True)


if __name__ == "__main__":  # vLLM starts processes that import this module
    main()
