"""`kvpage connectors verify vllm`: whether vLLM in this environment saves a context, and restores it unchanged.

Two processes run the same prompt through vLLM's own interface. The first computes and saves it. The second must restore
it, and answer the same.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import asdict
from typing import Any

from kvpage_connectors.verify import ANSWER, TOKENS, Job, Run, answer_job, verify_answers

MODULE = "kvpage_connectors.vllm_verify"


def verify(url: str, model: str, *, tier: bool, options: dict[str, Any]) -> list[str]:
    """Print the comparison of two runs, and return the failures.

    `tier` selects the tier below vLLM's offloading instead of the connector. `options` are those of vLLM.LLM.
    """
    job = {"config": transfer_config(url, tier=tier), "options": {"model": model, **options}}
    # one process, so that the scheduler's messages are in it
    return verify_answers("vLLM", MODULE, job, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def transfer_config(url: str, *, tier: bool) -> dict[str, Any]:
    """Return vLLM's --kv-transfer-config for the store at `url`."""
    place = {"url": url, "lookup_seconds": 30, "transfer_seconds": 60}
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if not tier:
        module = "kvpage_connectors.vllm_connector"
        return {
            **common,
            "kv_connector": "KvpageConnector",
            "kv_connector_module_path": module,
            "kv_connector_extra_config": place,
        }
    below = {"type": "KvpageTier", "module_path": "kvpage_connectors.vllm_tier", **place}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": [below]}
    return {**common, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


# -- in a process of its own -------------------------------------------------------------------------------------------


def run_vllm(job: Job) -> Job:
    """Run the prompt in vLLM, after a short one that warms it up."""
    from vllm import LLM, SamplingParams, __version__

    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return True

    logging.getLogger("vllm.kvpage").addFilter(keep)  # vLLM removes handlers when it configures its loggers
    options = {"disable_log_stats": False, "enforce_eager": True, **job["options"]}
    engine = LLM(**options, kv_transfer_config=job["config"])
    config = engine.llm_engine.model_config
    length = min(TOKENS, config.max_model_len - ANSWER)
    prompt = [100 + i * 7919 % (config.get_vocab_size() - 200) for i in range(length)]
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
    engine.generate([{"prompt_token_ids": prompt[:8]}], greedy, use_tqdm=False)
    (output,) = engine.generate([{"prompt_token_ids": prompt, "cache_salt": job["salt"]}], greedy, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    answer = output.outputs[0]
    return asdict(
        Run(
            versions=f"vLLM {__version__}, Python {platform.python_version()}, {config.dtype}",
            prompt=length,
            restored=output.num_cached_tokens,
            first_token=output.metrics.first_token_latency,
            answer=list(answer.token_ids),
            chances=[chances[token].logprob for token, chances in zip(answer.token_ids, answer.logprobs, strict=True)],
            messages=messages,
        )
    )


if __name__ == "__main__":
    answer_job(run_vllm)
