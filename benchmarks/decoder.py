"""The decoder of examples/attention.oinf.txt: its weights, and the same model written in plain MLX."""

from __future__ import annotations

import engine  # noqa: F401  # it chooses the BLAS, before MLX is imported

# isort: split
import mlx.core as mx
import numpy as np

from engine.persistent import Model

SIZES = {"L": 2, "D": 64, "H": 4, "Dh": 16, "KV": 2, "F": 128, "Words": 97}


def decoder(sizes: dict[str, int] = SIZES) -> Model:
    """Return a model with random weights, which are the same for the same sizes."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> mx.array:
        return mx.array((random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32))

    width, wide = sizes["D"], sizes["F"]
    queries, keys = sizes["H"] * sizes["Dh"], sizes["KV"] * sizes["Dh"]
    tensors = {"embed": matrix(sizes["Words"], width), "unembed": matrix(width, sizes["Words"]), "norm": mx.ones(width)}
    for i in range(sizes["L"]):
        layer = {
            "norm_attn": mx.ones(width),
            "wq": matrix(width, queries),
            "wk": matrix(width, keys),
            "wv": matrix(width, keys),
            "wo": matrix(queries, width),
            "norm_mlp": mx.ones(width),
            "up": matrix(width, wide),
            "down": matrix(wide, width),
        }
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return Model(sizes, tensors)


class Plain:
    """The same decoder, written in plain MLX."""

    GROWTH = 256

    def __init__(self, model: Model) -> None:
        self.tensors, self.sizes = model.tensors, model.sizes
        room = (self.GROWTH, self.sizes["KV"], self.sizes["Dh"])
        self.keys = [mx.zeros(room) for _ in range(self.sizes["L"])]
        self.values = [mx.zeros(room) for _ in range(self.sizes["L"])]
        self.t = 0
        self.word = mx.array(1, dtype=mx.uint32)
        self.logits = mx.zeros(self.sizes["Words"])

    def step(self) -> None:
        heads, kv, dim, t = self.sizes["H"], self.sizes["KV"], self.sizes["Dh"], self.t
        x = self.tensors["embed"][self.word]
        for i in range(self.sizes["L"]):
            norm_attn, wq, wk, wv, wo, norm_mlp, up, down = (
                self.tensors[f"layers.{i}.{name}"]
                for name in ("norm_attn", "wq", "wk", "wv", "wo", "norm_mlp", "up", "down")
            )
            h = mx.fast.rms_norm(x, norm_attn, 1e-5)
            if t == len(self.keys[i]):
                room = mx.zeros((self.GROWTH, kv, dim))
                self.keys[i] = mx.concatenate([self.keys[i], room])
                self.values[i] = mx.concatenate([self.values[i], room])
            self.keys[i][t] = self._rope((h @ wk).reshape(kv, dim))
            self.values[i][t] = (h @ wv).reshape(kv, dim)
            k, v = (cache[i][: t + 1].swapaxes(0, 1)[None] for cache in (self.keys, self.values))
            q = self._rope((h @ wq).reshape(heads, dim))[None, :, None]
            attended = mx.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5)
            x = x + attended.reshape(-1) @ wo
            h = mx.fast.rms_norm(x, norm_mlp, 1e-5)
            x = x + mx.maximum(h @ up, 0) @ down
        self.logits = mx.fast.rms_norm(x, self.tensors["norm"], 1e-5) @ self.tensors["unembed"]
        self.word = mx.argmax(self.logits)
        self.t += 1
        mx.eval(self.logits, self.word, self.keys, self.values)

    def _rope(self, x: mx.array) -> mx.array:
        options = {"traditional": False, "base": 10000.0, "scale": 1.0}
        return mx.fast.rope(x[:, None], x.shape[-1], **options, offset=self.t)[:, 0]
