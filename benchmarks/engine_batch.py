"""The batch engine compared with mlx-lm's own BatchGenerator: the same prompts, the same tokens, on the real small
model.

The engine's time includes its other work: text from tokens, and the contexts as blocks.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
from mlx_lm.generate import BatchGenerator

from benchmarks.findings import Finding, show, write
from engine import model
from engine.batch_engine import BlockPoolBatchEngine
from engine.pool import BlockPool
from engine.scheduling.request import SchedulerConfig
from engine.spec import ModelCacheSpec

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
PROMPTS = [
    f"{opening} {topic}. " * 4 for opening in ("Tell me about", "Write a poem on") for topic in ("the sea", "a lamp")
]
TOKENS = 32  # of each answer
AT_LEAST = 0.95
INTRO = f"{len(PROMPTS)} prompts at once, {TOKENS} tokens each; tokens a second, medians of the ratios of each round"

Answers = list[list[int]]  # token ids of the answer to each prompt


def ours(loaded: Any, tokenizer: Any, spec: ModelCacheSpec, prompts: Answers) -> tuple[float, Answers]:
    """Answer the prompts with our batch engine. Return the seconds, and the answers."""
    started = time.perf_counter()
    pool = BlockPool()
    batch = BlockPoolBatchEngine(loaded, tokenizer, spec, pool)
    uids = [batch.submit(f"agent-{i}", prompt, max_tokens=TOKENS) for i, prompt in enumerate(prompts)]
    done = {answer.uid: answer for answer in batch.step()}
    seconds = time.perf_counter() - started
    for answer in done.values():
        pool.free(answer.blocks.block_ids, answer.agent_id)
    return seconds, [list(done[uid].tokens) for uid in uids]


def theirs(loaded: Any, tokenizer: Any, prompts: Answers) -> tuple[float, Answers]:
    """Answer the prompts with mlx-lm's BatchGenerator. Return the seconds, and the answers."""
    started = time.perf_counter()
    stop = [[token] for token in tokenizer.eos_token_ids]
    generator = BatchGenerator(loaded, stop_tokens=stop, prefill_step_size=SchedulerConfig().prefill_chunk)
    uids = generator.insert(prompts, [TOKENS] * len(prompts))
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    running = len(uids)
    while running:
        _, responses = generator.next()
        for response in responses:
            if response.finish_reason != "stop":
                answers[response.uid].append(response.token)
            running -= response.finish_reason is not None
    seconds = time.perf_counter() - started
    generator.close()
    return seconds, [answers[uid] for uid in uids]


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/engine_batch.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine_batch")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    loaded, tokenizer = model.load(SMOLLM2)
    spec = ModelCacheSpec.probe(loaded, tokenizer)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    pairs = []
    for turn in range(-1, 2 if quick else 9):  # round -1 is a warm-up
        (one, answers), (other, expected) = ours(loaded, tokenizer, spec, prompts), theirs(loaded, tokenizer, prompts)
        if answers != expected:
            raise AssertionError(f"the engine said {answers}, mlx-lm {expected}")
        if turn >= 0:
            pairs.append((one, other))
    tokens = sum(map(len, answers))
    speeds = [tokens / median(seconds) for seconds in zip(*pairs, strict=True)]
    finding = Finding(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens",
        "BatchGenerator",
        "tokens/s",
        "{:.1f} / {:.1f}".format(*speeds),
        median(other / one for one, other in pairs),
        at_least=AT_LEAST,
    )
    show([finding], INTRO)
    if not quick:
        write([finding], "engine_batch", {"rounds": len(pairs), "load": os.getloadavg()}, intro=INTRO)


if __name__ == "__main__":
    main()
