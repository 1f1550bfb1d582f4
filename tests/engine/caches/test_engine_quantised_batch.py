"""Quantised caches in one batch: each keeps the bits of a cache alone, whatever joins, leaves and is padded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_families import STOCK, Family

# isort: split
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlx_lm.models.cache import QuantizedKVCache

from engine.caches import QuantizedLayer
from engine.caches.token_layers import BatchQuantizedCache

HEADS, DIM, BITS, GROUP = 2, 64, 4, 32
ENGINE = Path(__file__).parents[1]
LAYER = QuantizedLayer.describe(QuantizedKVCache(GROUP, BITS))

Rows = npt.NDArray[np.float32]
lengths = st.lists(st.integers(0, 300), min_size=1, max_size=3)


class Batches(RuleBasedStateMachine):
    """A batch, and for each of its sequences a cache of mlx-lm's."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(5)
        self.batch: BatchQuantizedCache | None = None
        self.alone: list[QuantizedKVCache] = []

    def rows(self, count: int) -> mx.array:
        return mx.array(self.random.standard_normal((1, HEADS, count, DIM)).astype(np.float32))

    @rule(lengths=lengths)
    def join(self, lengths: list[int]) -> None:
        new = []
        for length in lengths:
            cache, twin = LAYER.empty(), QuantizedKVCache(GROUP, BITS)
            if length:
                keys, values = self.rows(length), self.rows(length)
                for each in (cache, twin):
                    each.update_and_fetch(keys, values)
            new.append(cache)
            self.alone.append(twin)
        merged = new[0].merge(new)
        if self.batch:
            self.batch.extend(merged)
        else:
            self.batch = merged

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A step of one row, or a chunk in which shorter prompts are padded on the right."""
        assert self.batch
        counts = [1] * len(self.alone)
        if data.draw(st.booleans()):
            counts = [data.draw(st.integers(1, 270)) for _ in self.alone]
        most, given = max(counts), []
        for cache, count in zip(self.alone, counts, strict=True):
            keys, values = self.rows(count), self.rows(count)
            cache.update_and_fetch(keys, values)
            given.append([mx.concatenate([part, self.rows(most - count)], axis=2) for part in (keys, values)])
        padding = [most - count for count in counts]
        if max(padding):
            self.batch.prepare(lengths=counts, right_padding=padding)
        self.batch.update_and_fetch(*(mx.concatenate(list(part)) for part in zip(*given, strict=True)))
        if max(padding):
            self.batch.finalize()

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        assert self.batch
        keep = sorted(data.draw(st.sets(st.integers(0, len(self.alone) - 1))))
        self.alone = [self.alone[i] for i in keep]
        if keep:
            self.batch.filter(keep)
        else:
            self.batch = None

    @invariant()
    def each_sequence_has_the_bits_of_its_cache_alone(self) -> None:
        for i, cache in enumerate(self.alone):
            assert self.batch
            found = self.batch.extract(i)
            assert type(found) is QuantizedKVCache
            assert (found.offset, self.batch.offset[i].item()) == (cache.offset, cache.offset)
            if cache.offset:
                expected = [array[..., : cache.offset, :] for array in (*cache.keys, *cache.values)]
                assert all(map(mx.array_equal, (*found.keys, *found.values), expected))

    @invariant()
    def padding_is_masked(self) -> None:
        if self.batch and self.alone:
            visible = self.batch.make_mask(1)[:, 0, 0].sum(axis=1).tolist()
            assert visible == [cache.offset + 1 for cache in self.alone]


TestBatches = Batches.TestCase
TestBatches.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


@pytest.mark.skipif(STOCK, reason="is what this test starts")
def test_answers_have_the_bits_of_answers_alone() -> None:
    """With MLX's own BLAS: ragged batches, forks, windows, restored turns, prompts that join and leave. In a process of
    its own, since a process has one BLAS."""
    names = ("families/test_engine_families_batch.py", "test_engine_forks.py", "scheduling/test_engine_interleaving.py")
    kinds = "q8 or q4 and not test_engine_forks"
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *(str(ENGINE / name) for name in names), "-k", kinds],
        env={**os.environ, "KVPAGE_BLAS": "stock"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert process.returncode == 0, process.stdout
    assert " passed" in process.stdout


@pytest.mark.parametrize("bits", [4, 8])
def test_a_batch_that_shows_the_padding_is_not_used(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """The negative control of the trial: without the mask, prompts run in turns."""

    def unmasked(self: BatchQuantizedCache, count: int, **_: Any) -> Any:
        return mx.tril(mx.ones((count, self._idx + count), mx.bool_), self._idx)

    kind = f"llama q{bits}/64"
    assert Family(kind).spec.batches
    monkeypatch.setattr(BatchQuantizedCache, "make_mask", unmasked)
    assert not Family(kind).spec.batches
