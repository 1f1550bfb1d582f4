"""Runs prompts in a real vLLM on the CPU, and prints the results as JSON in the last line.

The argument is JSON: ``model``, ``prompts`` (token ids, each run after the one before it, with ``tokens`` greedy
tokens), optionally ``config`` (vLLM's --kv-transfer-config) and ``options`` of vLLM.LLM. A prompt may also be a number
of seconds to wait, or the name of a file whose creation is waited for.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run prompts. Return for each its tokens, the seconds until the first token, and the number of restored tokens."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        **{
            "model": job["model"],
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.5,
            "disable_log_stats": False,
            "kv_transfer_config": job.get("config"),
            **job.get("options", {}),
        }
    )
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.get("tokens", 8))
    results = []
    for prompt in job["prompts"]:
        if isinstance(prompt, str):
            while not Path(prompt).exists():
                time.sleep(0.05)
            continue
        if isinstance(prompt, float):
            time.sleep(prompt)
            continue
        began = time.perf_counter()
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        results.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "reason": output.outputs[0].finish_reason,
                "restored": output.num_cached_tokens,
                "first": output.metrics.first_token_latency,
                "seconds": time.perf_counter() - began,
            }
        )
    engine.llm_engine.engine_core.shutdown()
    return results


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)
