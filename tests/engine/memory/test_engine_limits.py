"""The memory of the whole process is bounded, however many contexts it has computed."""

from __future__ import annotations

import random
from pathlib import Path

from api_engines import start_engine, write_tiny

# isort: split
import mlx.core as mx
import pytest

from engine.memory.limits import MemoryLimits, set_limits

TOKENS = 500
TOKEN_BYTES = 4 * 2 * 2 * 128 * 4  # of the tiny model with heads of 128: layers, K and V, heads, values, float32
CONTEXTS = 32 << 20
SLACK = 64 << 20  # for Python, and buffers of the running step
FEW = 16  # agents that fill the memory for contexts twice
GB = 10**9


@pytest.mark.parametrize("agents", [50, pytest.param(500, marks=pytest.mark.soak)])
def test_long_agents_take_no_more_memory_than_some(tmp_path: Path, agents: int) -> None:
    """Without the limit, the contexts of these agents would be many times as large as the bound."""
    words = random.Random(1)
    model = write_tiny(tmp_path / "tiny", head_dim=128)
    with start_engine(model, "--memory", str(CONTEXTS)) as engine, engine.client() as client:

        def ask(agent: int) -> int:
            prompt = [words.randrange(96) for _ in range(TOKENS)]
            client.completions.create(model="tiny", prompt=prompt, max_tokens=4, user=f"agent-{agent}")
            return engine.rss()

        few = max(map(ask, range(FEW)))  # one after another: how many run in a step would depend on the machine
        many = max(map(ask, range(FEW, agents)))
    assert many - few < SLACK
    assert (agents - FEW) * TOKENS * TOKEN_BYTES > 2 * SLACK, "the test is of no use"


def test_mlx_gets_the_limits_that_are_printed() -> None:
    before = mx.get_memory_limit()
    try:
        limits = set_limits()
        assert mx.get_memory_limit() == limits.mlx
        assert mx.set_cache_limit(limits.cache) == limits.cache
        assert 0 < limits.cache < limits.mlx <= limits.machine
    finally:
        mx.set_memory_limit(before)


@pytest.mark.parametrize(
    ("weights", "wanted", "contexts", "words"),
    [
        (2 * GB, None, 8 * GB, "contexts up to 8.0 GB, freed buffers up to 2.0 GB; MLX's limit is 24.0 GB of 32.0 GB"),
        (18 * GB, None, 4 * GB, "weights 18.0 GB, contexts up to 4.0 GB"),
        (18 * GB, 8 * GB, 8 * GB, "These may take 28.0 GB, more than the limit: set a smaller --memory"),
        (40 * GB, None, 1, "more than the limit"),
    ],
)
def test_contexts_get_the_room_that_weights_leave(weights: int, wanted: int | None, contexts: int, words: str) -> None:
    limits = MemoryLimits(32 * GB, 24 * GB, 2 * GB, 0)
    assert limits.contexts(weights, wanted) == contexts
    assert words in limits.described(weights, contexts)
    assert "wired" not in limits.described(weights, contexts)
    assert ", 24.0 GB are wired" in limits._replace(wired=24 * GB).described(weights, contexts)
