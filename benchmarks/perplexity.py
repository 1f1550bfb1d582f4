"""How much a model forgets with quantised keys and values: SmolLM2's perplexity of the handbook, by format.

The handbook is the project's own text (engine/demo/handbook.txt). It is read in steps, so that every token but those of
the first is foretold from keys and values that were kept in the format. Attention takes the values that the packed ones
stand for: MLX's attention to packed values differs from that by rounding, and is slow on a CPU.
"""

from __future__ import annotations

import argparse
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from benchmarks.findings import Finding, show, write
from engine import model
from engine.spec import ModelCacheSpec

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
FORMATS = {
    "float32": None,
    "8-bit, groups of 64": (64, 8),
    "4-bit, groups of 32": (32, 4),
    "4-bit, groups of 64": (64, 4),
}
TARGETS = {"8-bit, groups of 64": 1.01}
STEP = 64  # tokens of a step
INTRO = "perplexity of SmolLM2-135M on engine/demo/handbook.txt, and how many times that with float32 keys and values"


class Unpacked:
    """A quantised cache that returns dequantised values to attention."""

    def __init__(self, packed: QuantizedKVCache) -> None:
        self.packed = packed

    @property
    def offset(self) -> int:
        """Number of tokens in the cache."""
        return int(self.packed.offset)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask of the quantised cache."""
        return self.packed.make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Append keys and values, and return all of them, dequantised."""
        kept = self.packed.update_and_fetch(keys, values)
        group_size, bits = self.packed.group_size, self.packed.bits
        return tuple(mx.dequantize(words, scales, biases, group_size, bits) for words, scales, biases in kept)


def empty_cache(loaded: Any, quantised: tuple[int, int] | None) -> list[Any]:
    """Return an empty cache, quantised by (group size, bits), or in the model's own dtype."""
    return [QuantizedKVCache(*quantised) for _ in loaded.layers] if quantised else make_prompt_cache(loaded)


def perplexity(loaded: Any, tokens: list[int], cache: list[Any]) -> float:
    """Return the perplexity of the tokens after the first one, each predicted from all tokens before it."""
    surprise = 0.0
    for start in range(0, len(tokens) - 1, STEP):
        read = tokens[start : min(start + STEP, len(tokens) - 1)]
        foretold = mx.array(tokens[start + 1 : start + 1 + len(read)])
        logits = loaded(mx.array([read]), cache=cache)[0].astype(mx.float32)
        surprise += nn.losses.cross_entropy(logits, foretold, reduction="sum").item()
    return math.exp(surprise / (len(tokens) - 1))


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/perplexity.json and .md, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks perplexity")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    loaded, tokenizer = model.load(SMOLLM2)
    tokens = tokenizer.encode(files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8"))[
        : 200 if quick else None
    ]
    found: dict[str, float] = {}
    findings = []
    for name, quantised in FORMATS.items():
        cache = empty_cache(loaded, quantised)
        found[name] = perplexity(loaded, tokens, [Unpacked(layer) for layer in cache] if quantised else cache)
        spec = ModelCacheSpec.probe(loaded, tokenizer, cache=empty_cache(loaded, quantised))
        findings.append(
            Finding(
                name,
                "float32",
                "perplexity",
                f"{found[name]:.3f}, {spec.token_nbytes:,} bytes a token",
                found[name] / found["float32"],
                at_most=TARGETS.get(name),
            )
        )
    show(findings, INTRO)
    if not quick:
        write(findings, "perplexity", {"tokens": len(tokens), "step": STEP}, intro=INTRO)


if __name__ == "__main__":
    main()
