"""The operations: what they compute, how many arguments they take, and of which dtype their result is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Op:
    """An operation. ``result`` is the dtype of what comes out:

    * ``same``: that of the arguments, which must all have one; ``float``: likewise, and it is a float;
    * ``first``: that of the first argument; ``second``: that of the second;
    * ``target``: that of the variable it goes to; else the dtype with this name.

    Parameters are named, and of the type given here; those in ``required`` have no default.
    """

    compute: Callable[..., mx.array]
    arity: range
    result: str
    parameters: Mapping[str, type] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def relu(x: mx.array, *, alpha: float = 0.0, clamp_max: float = math.inf) -> mx.array:
    """x where it is above 0, else alpha x; at most clamp_max."""
    zero = mx.array(0, dtype=x.dtype)
    rectified = mx.maximum(x, zero) if alpha == 0 else mx.where(x > zero, x, x * mx.array(alpha, dtype=x.dtype))
    return rectified if clamp_max == math.inf else mx.minimum(rectified, mx.array(clamp_max, dtype=x.dtype))


def fill(x: mx.array, *, value: float) -> mx.array:
    return mx.full(x.shape, value, dtype=x.dtype)


def softmax(x: mx.array, *, axis: int = -1) -> mx.array:
    return mx.softmax(x, axis=axis)


def rms_norm(x: mx.array, weight: mx.array, *, eps: float = 1e-5) -> mx.array:
    """Root mean square norm of the last axis, times `weight`."""
    return mx.fast.rms_norm(x, weight, eps)


def rope(x: mx.array, *, offset: int = 0, dims: int = 0, base: float = 10000.0, traditional: bool = False) -> mx.array:
    """Rotary position embedding of ``[heads, dim]`` at position `offset`, or of ``[tokens, heads, dim]`` from there on.

    `dims` of each head's elements are rotated, all for 0.
    """
    by_head = mx.expand_dims(x, 1) if x.ndim == 2 else x.swapaxes(0, 1)  # [heads, tokens, dim]
    rotated = mx.fast.rope(by_head, dims or x.shape[-1], traditional=traditional, base=base, scale=1.0, offset=offset)
    return mx.squeeze(rotated, 1) if x.ndim == 2 else rotated.swapaxes(0, 1)


def concat(*arrays: mx.array, axis: int = 0) -> mx.array:
    return mx.concatenate(list(arrays), axis=axis)


def transpose(x: mx.array, *, axes: tuple[int, ...] = ()) -> mx.array:
    """The axes in another order, reversed if none is given."""
    return mx.transpose(x, axes or None)


def reshape(x: mx.array, *, shape: tuple[int, ...]) -> mx.array:
    return mx.reshape(x, shape)


def take(table: mx.array, indices: mx.array) -> mx.array:
    """Rows of a table, as an embedding is looked up."""
    return mx.take(table, indices, axis=0)


def argmax(x: mx.array, *, axis: int = -1) -> mx.array:
    """Where along an axis the largest element is, the first of several."""
    return mx.argmax(x, axis=axis)


def is_finite(x: mx.array) -> mx.array:
    return mx.all(mx.isfinite(x))


def attn(
    q: mx.array, k: mx.array, v: mx.array, wq: mx.array | None = None, *, scale: float = 0.0, causal: bool = False
) -> mx.array:
    """Attention of queries to keys and values of a table, ``[tokens, kv heads, dim]``, or ``[kv heads, dim]`` of one.

    Queries are ``[heads, dim]`` of one token or ``[n, heads, dim]``; with `wq`, ``[n, width]`` that are multiplied by
    it first, ``width = heads * dim``. The result has the shape and dtype of `q`. Heads share keys as in grouped-query
    attention. `scale` is ``1 / sqrt(dim)`` for 0. With `causal` the last query is the last key's.
    """
    if k.ndim == 2:
        k, v = mx.expand_dims(k, 0), mx.expand_dims(v, 0)
    dim = k.shape[-1]
    queries = q if wq is None else (q @ wq).reshape(q.shape[0], -1, dim)
    one = queries.ndim == 2
    by_head = (
        mx.expand_dims(queries, (0, 2)) if one else mx.expand_dims(queries.swapaxes(0, 1), 0)
    )  # [1, heads, n, dim]
    keys, values = [mx.expand_dims(array.astype(q.dtype).swapaxes(0, 1), 0) for array in (k, v)]
    mask = "causal" if causal else None
    attended = mx.fast.scaled_dot_product_attention(by_head, keys, values, scale=scale or dim**-0.5, mask=mask)
    return (attended if one else attended.swapaxes(1, 2)).reshape(q.shape)


_ONE, _TWO = range(1, 2), range(2, 3)

OPS: dict[str, Op] = {
    "add": Op(mx.add, _TWO, "same"),
    "sub": Op(mx.subtract, _TWO, "same"),
    "mul": Op(mx.multiply, _TWO, "same"),
    "div": Op(mx.divide, _TWO, "float"),
    "min": Op(mx.minimum, _TWO, "same"),
    "max": Op(mx.maximum, _TWO, "same"),
    "mod": Op(mx.remainder, _TWO, "same"),
    "abs": Op(mx.abs, _ONE, "same"),
    "neg": Op(mx.negative, _ONE, "same"),
    "exp": Op(mx.exp, _ONE, "float"),
    "tanh": Op(mx.tanh, _ONE, "float"),
    "sigmoid": Op(mx.sigmoid, _ONE, "float"),
    "matmul": Op(mx.matmul, _TWO, "float"),
    "relu": Op(relu, _ONE, "same", {"alpha": float, "clamp_max": float}),
    "fill": Op(fill, _ONE, "same", {"value": float}, frozenset({"value"})),
    "is_finite": Op(is_finite, _ONE, "bool"),
    "cast": Op(lambda x: x, _ONE, "target"),
    "softmax": Op(softmax, _ONE, "float", {"axis": int}),
    "rms_norm": Op(rms_norm, _TWO, "float", {"eps": float}),
    "rope": Op(rope, _ONE, "float", {"offset": int, "dims": int, "base": float, "traditional": bool}),
    "concat": Op(concat, range(1, 65), "same", {"axis": int}),
    "transpose": Op(transpose, _ONE, "same", {"axes": tuple}),
    "reshape": Op(reshape, _ONE, "same", {"shape": tuple}, frozenset({"shape"})),
    "take": Op(take, _TWO, "first"),
    "argmax": Op(argmax, _ONE, "u32", {"axis": int}),
    "attn": Op(attn, range(3, 5), "first", {"scale": float, "causal": bool}),
}
