"""`kvpage connectors verify mlx-lm`: whether mlx-lm's prompt cache saves a context, and restores it unchanged.

Two processes run the same prompt with mlx-lm, and with the prompt cache of `kvpage-engine mlx-lm server`.
"""

from __future__ import annotations

import copy
import logging
import os
import platform
import random
import sys
import time
from dataclasses import asdict
from importlib.metadata import version

from kvpage_connectors.mlx_lm_command import VERSIONS
from kvpage_connectors.verify import ANSWER, TOKENS, Job, Run, answer_job, verify_answers

MODULE = "kvpage_connectors.mlx_lm_verify"


def verify(url: str, model: str) -> list[str]:
    """Print the comparison of two runs, and return the failures."""
    if not (found := version("mlx-lm")).startswith(VERSIONS):
        return [f"mlx-lm {found} was not tried, only {' and '.join(VERSIONS)}"]
    return verify_answers("mlx-lm", MODULE, {"url": url, "model": model})


# -- in a process of its own -------------------------------------------------------------------------------------------


def run_mlx_lm(job: Job) -> Job:
    """Run the prompt in mlx-lm, after a short one that warms it up."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    from kvpage_connectors.mlx_lm import StoredPromptCache

    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return True

    logging.getLogger("kvpage").addFilter(keep)
    try:
        model, tokenizer = mlx_lm.load(job["model"])[:2]
    except (OSError, ValueError) as error:  # mlx-lm's and the hub's, for a model that is missing or none
        sys.exit(f"--model {job['model']} cannot be loaded: {' '.join(str(error).split())}")
    key, stored = (job["model"], None, None), StoredPromptCache(job["url"])
    stored.attach(key, model, tokenizer)
    low = min(100, tokenizer.vocab_size // 4)  # other tokens may be special
    common = [low + i * 7919 % (tokenizer.vocab_size - 2 * low) for i in range(TOKENS)]
    salted = random.Random(job["salt"]).sample(common, 16)
    prompt = [*salted, *common[len(salted) :]]
    for _ in mlx_lm.stream_generate(model, tokenizer, common[:8], max_tokens=2):
        pass
    begun = time.perf_counter()
    stored.prefetch(key, prompt)
    cache, rest = stored.fetch_nearest_cache(key, prompt)
    run = Run(prompt=len(prompt), restored=len(prompt) - len(rest), messages=messages)
    cache = cache or make_prompt_cache(model)
    if beginning := rest[:-1]:  # as mlx-lm's server, keep the prompt: layers with states need one at its end
        model(mx.array([beginning]), cache=cache)
        mx.eval([layer.state for layer in cache])
        stored.insert_cache(key, prompt[:-1], copy.deepcopy(cache), cache_type="user")
        rest = rest[-1:]
    for token in mlx_lm.stream_generate(model, tokenizer, rest, max_tokens=ANSWER, prompt_cache=cache):
        run.first_token = run.first_token or time.perf_counter() - begun
        run.answer.append(token.token)
        run.chances.append(float(token.logprobs[token.token]))
    stored.insert_cache(key, [*prompt, *run.answer], cache)
    stored.close()
    run.versions = f"mlx-lm {version('mlx-lm')}, Python {platform.python_version()}"
    return asdict(run)


if __name__ == "__main__":
    answer_job(run_mlx_lm)
    os._exit(0)  # MLX's threads may abort an ordinary exit
