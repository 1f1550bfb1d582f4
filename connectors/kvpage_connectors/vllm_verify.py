"""`kvpage connectors verify vllm`: whether vLLM in this environment saves a context, and restores it unchanged.

Two processes run the same prompt, one after the other, through vLLM's own interface. The first computes and saves the
prompt, which is new because of its salt. The second must restore it, and answer the same.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

TOKENS = 1025
_ANSWER = 16  # tokens
_NOISE = 0.25  # of a log probability: kernels round differently for prompts of other lengths
_RESULT = "kvpage-result "


@dataclass
class Run:
    """Result of a process."""

    versions: str = ""
    prompt: int = 0  # tokens
    restored: int = 0  # tokens
    first_token: float = 0.0  # seconds
    answer: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # log probability of each token of the answer
    messages: list[str] = field(default_factory=list)  # of the connector


def verify(url: str, model: str, *, tier: bool, options: dict[str, Any]) -> list[str]:
    """Print the comparison of two runs, and return the failures.

    `tier` selects the tier below vLLM's offloading instead of the connector. `options` are those of vLLM.LLM.
    """
    job = {"config": transfer_config(url, tier=tier), "salt": uuid.uuid4().hex, "options": {"model": model, **options}}
    runs: list[Run] = []
    for number in (1, 2):
        run, error = _start(job)
        if run is None:
            return [f"process {number} of vLLM failed:\n{error}"]
        if not runs:
            print(run.versions)
        for message in run.messages:
            if message not in (runs[0].messages if runs else []):
                print(message)
        runs.append(run)
    computed, restored = runs
    ratio = restored.first_token / computed.first_token
    print(f"prompt of {computed.prompt} tokens: {restored.restored} restored by another process")
    print(
        f"first token: {computed.first_token:.3f} s computed, {restored.first_token:.3f} s restored, ratio {ratio:.3f}"
    )
    return list(failures(computed, restored))


def failures(computed: Run, restored: Run) -> list[str]:
    """Compare the two runs, and print the comparison. Return a line for each failure."""
    found = []
    if computed.restored:
        found.append(f"a new prompt had {computed.restored} restored tokens")
    if not restored.restored:
        found.append("nothing was restored")
    difference = max(
        (abs(one - other) for one, other in zip(computed.chances, restored.chances, strict=False)), default=0
    )
    if computed.answer != restored.answer:
        found.append(f"the answers differ: {computed.answer} and {restored.answer}")
    elif difference > _NOISE:
        found.append(f"the log probabilities differ by {difference:.3f}")
    else:
        print(f"answers of {len(computed.answer)} tokens are equal, log probabilities within {difference:.6f}")
    return found


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


def _start(job: dict[str, Any]) -> tuple[Run | None, str]:
    """Run a process. Return its result, or the last lines of its output. The job passes a pipe: it has a password."""
    command = [sys.executable, "-m", __name__]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the scheduler's messages are in the process
    done = subprocess.run(
        command, input=json.dumps(job), env=environment, capture_output=True, encoding="utf-8", errors="replace"
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not lines:
        return None, "\n".join((done.stdout + done.stderr).splitlines()[-20:])
    return Run(**json.loads(lines[-1].removeprefix(_RESULT))), ""


# -- in a process of its own -------------------------------------------------------------------------------------------


def run_vllm(job: dict[str, Any]) -> Run:
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
    length = min(TOKENS, config.max_model_len - _ANSWER)
    prompt = [100 + i * 7919 % (config.get_vocab_size() - 200) for i in range(length)]
    greedy = SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True, logprobs=1)
    engine.generate([{"prompt_token_ids": prompt[:8]}], greedy, use_tqdm=False)
    (output,) = engine.generate([{"prompt_token_ids": prompt, "cache_salt": job["salt"]}], greedy, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    answer = output.outputs[0]
    return Run(
        versions=f"vLLM {__version__}, Python {platform.python_version()}, {config.dtype}",
        prompt=length,
        restored=output.num_cached_tokens,
        first_token=output.metrics.first_token_latency,
        answer=list(answer.token_ids),
        chances=[chances[token].logprob for token, chances in zip(answer.token_ids, answer.logprobs, strict=True)],
        messages=messages,
    )


def main() -> None:
    """Run the job on standard input, and print the result."""
    print(_RESULT + json.dumps(asdict(run_vllm(json.load(sys.stdin)))), flush=True)


if __name__ == "__main__":
    main()
