"""The batch engine compared with mlx-lm's own BatchGenerator: the same prompts, the same tokens, on the real small
model.

The engine's time includes its other work: text from tokens, and the contexts as blocks. Four more rows compare the
engine with itself: eight answers that each have other parameters with eight of the likeliest tokens, eight answers in
JSON of a schema with eight free ones, the first tokens of eight answers to one prompt with the first token of one, and
four prompts with quantised caches in a batch with the same in turns.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import QuantizedKVCache

from benchmarks.findings import Finding, show, write
from engine import model
from engine.batch_engine import BlockPoolBatchEngine
from engine.generation.sampling import Sampling
from engine.generation.structure import Constraint, Constraints, of_json
from engine.pool import BlockPool
from engine.scheduling.request import SchedulerConfig, Token
from engine.spec import ModelCacheSpec

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
PROMPTS = [
    f"{opening} {topic}. " * 4 for opening in ("Tell me about", "Write a poem on") for topic in ("the sea", "a lamp")
]
TOKENS = 32  # of each answer
AT_LEAST = 0.95
INTRO = f"{len(PROMPTS)} prompts at once, {TOKENS} tokens each; tokens a second, medians of the ratios of each round"

EIGHT = [
    Sampling(1.0, seed=0),
    Sampling(1.0, top_p=0.9, seed=1),
    Sampling(0.7, top_k=40, seed=2),
    Sampling(1.0, min_p=0.05, seed=3),
    Sampling(1.0, xtc_probability=0.5, seed=4),
    Sampling(repetition_penalty=1.1),
    Sampling(0.7, presence_penalty=0.5, frequency_penalty=0.5, seed=5),
    Sampling(logit_bias={0: -100.0}, min_tokens=8),
]
SCHEMA = {  # an answer has more than TOKENS tokens
    "type": "object",
    "properties": {
        "kind": {"enum": ["poem", "tale"]},
        "lines": {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 20},
    },
    "required": ["kind", "lines"],
    "additionalProperties": False,
}
PROMPT_TOKENS = 1024
ALL_FIRST = 1.3  # at most, of the first token of one answer
KV_BITS = 8
OF_TURNS = 2.0  # at least, of the tokens a second of quantised caches in turns

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


def decoding(
    loaded: Any,
    tokenizer: Any,
    spec: ModelCacheSpec,
    prompts: Answers,
    choices: list[Sampling],
    constraint: Constraint | None = None,
) -> float:
    """Return the tokens a second of one answer for each of `choices`. Each answer matches the constraint."""
    pool = BlockPool()
    batch = BlockPoolBatchEngine(loaded, tokenizer, spec, pool)
    for i, choice in enumerate(choices):
        prompt = prompts[i % len(prompts)]
        processors = [constraint.processor(len(prompt))] if constraint else []
        batch.submit(f"agent-{i}", prompt, max_tokens=TOKENS, sampler=choice, logits_processors=processors)
    started, tokens = time.perf_counter(), 0
    for done in batch.step():
        tokens += len(done.tokens)
        pool.free(done.blocks.block_ids, done.agent_id)
    return tokens / (time.perf_counter() - started)


def first_tokens(loaded: Any, tokenizer: Any, spec: ModelCacheSpec, count: int) -> float:
    """Return the seconds until each of `count` answers to one prompt has its first token."""
    pool, prompt = BlockPool(), (tokenizer.encode(PROMPTS[0]) * 64)[:PROMPT_TOKENS]
    batch = BlockPoolBatchEngine(loaded, tokenizer, spec, pool)
    arrived: dict[int, float] = {}

    def on_token(token: Token) -> None:
        arrived.setdefault(token.uid, time.perf_counter())

    started = time.perf_counter()
    first = batch.submit("agent-0", prompt, max_tokens=2, on_token=on_token, forked=count > 1)
    for i in range(1, count):
        batch.fork(first, f"agent-{i}", max_tokens=2, sampler=Sampling(1.0, seed=i), on_token=on_token)
    for done in batch.step():
        pool.free(done.blocks.block_ids, done.agent_id)
    return max(arrived.values()) - started


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


def _ratio(
    work: str,
    against: str,
    pairs: list[tuple[float, float]],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Finding:
    """Return the medians of each side of `pairs`, and the median of their ratios. Those with a goal `at_most` are
    seconds, others tokens a second.
    """
    unit, digits = ("tokens/s", 1) if at_most is None else ("seconds", 2)
    one, other = map(median, zip(*pairs, strict=True))
    ratio = median(one / other for one, other in pairs)
    return Finding(
        work, against, unit, f"{one:.{digits}f} / {other:.{digits}f}", ratio, at_least=at_least, at_most=at_most
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/engine_batch.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine_batch")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    loaded, tokenizer = model.load(SMOLLM2)
    spec = ModelCacheSpec.probe(loaded, tokenizer)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    cache = [QuantizedKVCache(64, KV_BITS) for _ in loaded.layers]
    quantised = ModelCacheSpec.probe(loaded, tokenizer, cache=cache)
    turns = replace(quantised, batches=False, resumes=False)
    constraints = Constraints(tokenizer, spec.vocab_size, tokenizer.eos_token_ids)
    json_text = constraints.compile(of_json(SCHEMA))
    pairs, mixed, constrained, forked, packed = [], [], [], [], []
    for turn in range(-1, 2 if quick else 9):  # round -1 is a warm-up
        (one, answers), (other, expected) = ours(loaded, tokenizer, spec, prompts), theirs(loaded, tokenizer, prompts)
        if answers != expected:
            raise AssertionError(f"the engine said {answers}, mlx-lm {expected}")
        plain, varied = (decoding(loaded, tokenizer, spec, prompts, some) for some in ([Sampling()] * 8, EIGHT))
        in_json = decoding(loaded, tokenizer, spec, prompts, [Sampling()] * 8, json_text)
        alone, together = (first_tokens(loaded, tokenizer, spec, count) for count in (1, 8))
        greedy = [Sampling()] * len(prompts)
        batched, in_turns = (decoding(loaded, tokenizer, some, prompts, greedy) for some in (quantised, turns))
        if turn >= 0:
            packed.append((batched, in_turns))
            pairs.append((one, other))
            mixed.append((varied, plain))
            constrained.append((in_json, plain))
            forked.append((together, alone))
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
    findings = [
        finding,
        _ratio("8 answers with 8 sets of parameters", "the likeliest tokens", mixed, at_least=AT_LEAST),
        _ratio("8 answers in JSON of a schema", "8 free answers", constrained, at_least=AT_LEAST),
        _ratio(f"first tokens of 8 answers to {PROMPT_TOKENS} tokens", "one answer", forked, at_most=ALL_FIRST),
        _ratio(
            f"{len(prompts)} prompts with {KV_BITS}-bit caches in a batch",
            "the same in turns",
            packed,
            at_least=OF_TURNS,
        ),
    ]
    show(findings, INTRO)
    if not quick:
        write(findings, "engine_batch", {"rounds": len(pairs), "load": os.getloadavg()}, intro=INTRO)


if __name__ == "__main__":
    main()
