"""EXP-006: blocks to a cache and back, in the geometry of Gemma 3 12B at float16, compared with plain copies of the
same size.

Reconstruction builds a graph, which costs as much for small pages as for large ones, and evaluating it moves the
bytes. They are measured apart, since no memory moves gigabytes in milliseconds. Bytes go either into memory that was
used before or into memory that is new from the system, which has to find, clear and map it; the plain copy does the
same in the same round.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from statistics import median
from types import SimpleNamespace
from typing import Any

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from numpy.typing import NDArray

from benchmarks.findings import Finding, show, write
from engine.memory import kvcache
from engine.memory.blocks import KVBlock
from engine.spec import BLOCK_TOKENS, ModelCacheSpec

HEADS, HEAD_DIM = 8, 256  # of Gemma 3 12B, which has 48 layers
SIZES = ((1, 12), (4, 24), (8, 30), (16, 30), (32, 48))  # blocks, layers
UNUSED = 1  # rows of the last block that are not restored, because the last token of a prompt is always computed
GRAPH_MS, COPIES = 5.0, 1.5  # targets: milliseconds of the graph, and times the duration of plain copies
MOVED = 8 << 30  # bytes that all rounds of a size copy, about
ROUNDS_WITH_NEW_MEMORY = 3  # few, because each takes long
RING = 512 << 20  # bytes; larger than any CPU's cache
INTRO = (
    f"{HEADS} KV heads of {HEAD_DIM}, float16, blocks of {BLOCK_TOKENS} tokens; "
    "time beside a plain copy of the same bytes, medians of the ratios of each round"
)

Timed = Callable[[], float]  # runs the work, and returns its duration in seconds


def hollow_model(layers: int) -> nn.Module:
    """Return a model with the caches of Gemma 3 12B, if all its layers were global, and hardly any weights."""
    small = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "rms_norm_eps": 1e-6}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    model = llama.Model(llama.ModelArgs("llama", num_hidden_layers=layers, **small, **heads))
    model.set_dtype(mx.float16)
    return model


class Case:
    """A context of `blocks` blocks in `layers` layers."""

    def __init__(self, blocks: int, layers: int) -> None:
        self.spec = ModelCacheSpec.probe(hollow_model(layers), SimpleNamespace(get_vocab=dict))
        self.tokens = blocks * BLOCK_TOKENS - UNUSED
        self.blocks = [self._block(i, min(BLOCK_TOKENS, self.tokens - i * BLOCK_TOKENS), layers) for i in range(blocks)]
        self.name = f"{blocks} x {layers}"

    def _block(self, block_id: int, tokens: int, layers: int) -> KVBlock:
        values = np.arange(HEADS * tokens * HEAD_DIM, dtype=np.uint16).reshape(HEADS, tokens, HEAD_DIM)
        arrays = tuple(tuple(mx.array(values + i * 7 + kv).view(mx.float16) for kv in (0, 1)) for i in range(layers))
        mx.eval(arrays)
        return KVBlock(block_id, tokens, arrays)

    @cached_property
    def cache(self) -> kvcache.Cache:
        """A cache with the tokens of the blocks. It is made at the first use, because it is as large as the blocks."""
        return kvcache.reconstruct(self.spec, self.blocks, self.tokens)

    @property
    def nbytes(self) -> int:
        """Return the transferred bytes."""
        return self.tokens * self.spec.token_nbytes

    def sources(self) -> list[NDArray[np.uint8]]:
        """Return the memory of the blocks' arrays."""
        arrays: list[Any] = [array for block in self.blocks for layer in block.layers for array in layer]
        return [np.frombuffer(memoryview(array).cast("B"), np.uint8) for array in arrays]

    def check(self) -> None:
        """Raise AssertionError unless the cache returns the blocks unchanged."""
        for block, copy in zip(self.blocks, self.extract(), strict=True):
            for layer, copied in zip(block.layers, copy.layers, strict=True):
                if not all(mx.array_equal(a, b, equal_nan=True) for a, b in zip(layer, copied, strict=True)):
                    raise AssertionError(f"{self.name}: blocks have changed on their way")

    def extract(self) -> tuple[KVBlock, ...]:
        """Return blocks with copies of the cache's rows."""
        return kvcache.extract(self.spec, self.cache, range(len(self.blocks)), self.tokens)

    def reconstruct_graph(self) -> float:
        """Time the construction of a cache from blocks, without its evaluation."""
        started = time.perf_counter()
        cache = kvcache.reconstruct(self.spec, self.blocks, self.tokens)
        seconds = time.perf_counter() - started
        del cache
        return seconds

    def extract_graph(self) -> float:
        """Time the construction of blocks from the cache, without their evaluation."""
        started = time.perf_counter()
        copies = kvcache.cut(self.spec, self.cache, [*range(0, self.tokens, BLOCK_TOKENS), self.tokens])
        seconds = time.perf_counter() - started
        del copies
        return seconds

    def reconstruct_eager(self) -> float:
        """Time the construction of a cache from blocks, and its evaluation."""
        started = time.perf_counter()
        cache = kvcache.reconstruct(self.spec, self.blocks, self.tokens)
        mx.eval([[layer.keys, layer.values] for layer in cache])
        seconds = time.perf_counter() - started
        del cache
        return seconds

    def extract_eager(self) -> float:
        """Time the construction of blocks from the cache, and their evaluation."""
        started = time.perf_counter()
        blocks = self.extract()
        seconds = time.perf_counter() - started
        del blocks
        return seconds


class Ring:
    """Target memory of copies: writes reach the machine's memory and do not stay in the CPU's cache."""

    def __init__(self) -> None:
        self._memory = np.ones(RING, np.uint8)  # the system provides memory only when it is written, and not for zeros
        self._at = 0

    def copy(self, sources: Sequence[NDArray[np.uint8]]) -> float:
        """Copy all sources behind the last copy, and return the seconds."""
        started = time.perf_counter()
        for source in sources:
            self._at = self._at if self._at + len(source) <= RING else 0
            self._memory[self._at : self._at + len(source)] = source
            self._at += len(source)
        return time.perf_counter() - started


def copy_into_new_memory(sources: Sequence[NDArray[np.uint8]], nbytes: int) -> float:
    """Copy all sources into new memory of the system, and return the seconds."""
    started = time.perf_counter()
    with mmap.mmap(-1, nbytes) as memory:
        target = np.frombuffer(memory, np.uint8)
        at = 0
        for source in sources:
            target[at : at + len(source)] = source
            at += len(source)
        del target
    return time.perf_counter() - started


def measure(case: Case, *, rounds: int, graphs: int) -> Iterator[Finding]:
    """Yield the findings of one size."""
    moved = f"{case.name}, {case.nbytes / 1e9:.2f} GB"
    sources = case.sources()
    ring = Ring()
    work: dict[str, tuple[Timed, Timed]] = {
        "reconstruct": (case.reconstruct_graph, case.reconstruct_eager),
        "extract": (case.extract_graph, case.extract_eager),
    }
    for name, (build, run) in work.items():
        build()
        taken = [build() * 1e3 for _ in range(graphs)]
        p50, p95 = np.percentile(taken, [50, 95])
        yield Finding(f"{name} {moved}", "", "graph, ms", f"p50 {p50:.2f}, p95 {p95:.2f}", p95, at_most=GRAPH_MS)
        run()
        used = [(run(), ring.copy(sources)) for _ in range(rounds)]
        yield _beside_a_copy(f"{name} {moved}", "copy, used memory", used, case.nbytes)
        fresh = []
        for _ in range(min(rounds, ROUNDS_WITH_NEW_MEMORY)):
            mx.clear_cache()
            fresh.append((run(), copy_into_new_memory(sources, case.nbytes)))
        yield _beside_a_copy(f"{name} {moved}", "copy, new memory", fresh, case.nbytes)


def _beside_a_copy(name: str, against: str, pairs: Sequence[tuple[float, float]], nbytes: int) -> Finding:
    ours, theirs = zip(*pairs, strict=True)
    p50, p95 = np.percentile(ours, [50, 95]) * 1e3
    speeds = f"{nbytes / median(ours) / 1e9:.2f} / {nbytes / median(theirs) / 1e9:.2f} GB/s"
    ratio = median(one / other for one, other in pairs)
    return Finding(name, against, "eager", f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, {speeds}", ratio, at_most=COPIES)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/engine_reconstruct.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine_reconstruct")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kept = mx.set_cache_limit(memory // 2)  # limit of freed memory that MLX keeps: memory that was used before
    findings: list[Finding] = []
    try:
        for blocks, layers in SIZES[:2] if quick else SIZES:
            case = Case(blocks, layers)
            if 4 * case.nbytes > memory:
                print(f"{case.name} is left out: four times {case.nbytes / 1e9:.1f} GB are more than this machine has")
                continue
            print(f"{case.name} ...", flush=True)
            rounds = 4 if quick else max(5, min(15, MOVED // case.nbytes))
            findings += measure(case, rounds=rounds, graphs=20 if quick else 100)
            case.check()
            del case
            mx.clear_cache()
    finally:
        mx.set_cache_limit(kept)
    show(findings, INTRO)
    if not quick:
        write(findings, "engine_reconstruct", {"load": os.getloadavg()}, intro=INTRO)


if __name__ == "__main__":
    main()
