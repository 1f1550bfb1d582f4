"""A graph runs step by step: volatile variables are new each time, persistent ones stay, and operations compute the
results of MLX.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from persistent_models import EXAMPLES, attention

from engine.persistent import Device, Executor, Graph, GraphBuilder, Model, Simulator, parse
from engine.persistent.compile import OPS
from engine.persistent.errors import BrokenExecutorError, InputError, ModelError, UnknownNameError


def executor(text: str, tensors: dict[str, mx.array] | None = None, trace: bool = False, **sizes: int) -> Executor:
    return Simulator(Model({"D": 4} | sizes, tensors or {}), parse(text)).make_executor(trace=trace)


def test_volatile_is_fresh_each_step_and_persistent_stays() -> None:
    run = executor(
        """
        volatile { fresh: f32[D] @init(1.0); given: f32[D]; zero: f32[D]; }
        persistent { kept: f32[D] @init(1.0); }
        block entry {
            assign temporary: f32[D];
            op add(temporary, fresh) >> temporary;
            op add(temporary, fresh) >> fresh;
            op add(given, fresh) >> given;
            op add(zero, fresh) >> zero;
            cache.read kept >> temporary;
            op add(temporary, temporary) >> temporary;
            cache.write temporary >> kept;
        }
        """,
        {"given": mx.full(4, 5.0)},
    )
    for step in range(1, 4):
        run.step()
        assert [run.fetch(name)[0].item() for name in ("fresh", "given", "zero", "kept")] == [2, 7, 2, 2**step]


def test_a_fetched_array_does_not_change() -> None:
    run = executor("""
        dynamic { x: f32[D]; }
        persistent { A(i): f32[D] @table @fixed(i=2); }
        block entry { cache.write x >> A[0]; }
    """)
    fetched = []
    for step in range(4):
        run.insert(x=mx.full(4, float(step)))
        run.step()
        fetched.append(run.fetch("A"))
    assert [array[0, 0].item() for array in fetched] == [0, 1, 2, 3]


def test_an_entry_read_before_a_write_shows_the_old_value() -> None:
    run = executor(
        """
        dynamic { x: f32[D]; }
        volatile { before: f32[D]; after: f32[D]; all: f32[2, D]; }
        persistent { A(i): f32[D] @table @fixed(i=2); }
        block entry {
            cache.read A[0] >> before;
            cache.read A[] >> all;
            cache.write x >> A[0];
            cache.read A[0] >> after;
            cache.write after >> A[1];
        }
    """.replace("cache.write all >> A[1];", "cache.write after >> A[1];")
    )
    for step in range(1, 4):
        run.insert(x=mx.full(4, float(step)))
        run.step()
        found = [run.fetch(name).reshape(-1, 4)[:, 0].tolist() for name in ("before", "all", "after")]
        assert found == [[step - 1], [step - 1, step - 1], [step]]


def test_names_in_slices_are_loops_and_scalars_before_lengths() -> None:
    run = executor("""
        volatile { by_length: f32[5, D]; by_scalar: f32[2, D]; by_loop: f32[3, D]; x: f32[D]; }
        persistent { A(i): f32[D] @table; B(n): f32[D] @table; n: i32 @init(2); }
        block entry {
            cache.write x >> A[4];
            cache.write x >> B[4];
            cache.read A[0..i] >> by_length;
            cache.read B[0..n] >> by_scalar;
            loop k (i in 3..4) { cache.read A[0..i] >> by_loop; }
        }
    """)
    run.step()
    assert [run.fetch(f"by_{name}").shape[0] for name in ("length", "scalar", "loop")] == [5, 2, 3]


def test_a_loop_of_a_block_leaves_its_callers_variable_alone() -> None:
    run = executor("""
        persistent { A(i): f32 @table; one: f32; }
        volatile { x: f32 @init(1.0); }
        block entry { loop outer (l in 0..3) { branch inner; cache.write x >> A[l]; } }
        block inner { loop outer (l in 7..9) { cache.read A[l] >> x; } op fill(x, value=1.0) >> x; }
    """)
    run.step()
    assert run.fetch("A").tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_a_return_in_a_loop_ends_the_block() -> None:
    run = executor("persistent { n: i32; } block entry { loop a (l in 0..3) { cache.increment n; return; } }")
    run.step()
    assert run.fetch("n").item() == 1


def test_a_trace_lists_the_effect_of_each_statement() -> None:
    text = """dynamic { x: f32[D]; }
    volatile { y: f32[D]; }
    persistent { A(i): f32[D] @table; n: i32; }
    block entry {
        loop twice (l in 0..2) {
            cache.write x >> A[l];
        }
        op add(x, x) >> y;
        cache.increment n;
        return;
    }"""
    run = executor(text, trace=True)
    for step in range(2):
        run.insert(x=mx.ones(4))
        run.step()
        found = [(event.step, event.what, event.line, event.loops, event.to, event.shape) for event in run.trace()]
        assert found == [
            (step, "cache.write A", 6, {"l": 0}, None, None),
            (step, "cache.write A", 6, {"l": 1}, None, None),
            (step, "loop twice", 5, {}, None, None),
            (step, "op add", 8, {}, "y", (4,)),
            (step, "cache.increment n", 9, {}, None, None),
            (step, "return", 10, {}, None, None),
        ]


A, B3 = (np.random.default_rng(seed).uniform(-2, 2, (3, 4)).astype(np.float32) for seed in (0, 1))
MATRIX = np.random.default_rng(2).uniform(-2, 2, (4, 5)).astype(np.float32)


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _rope(x: np.ndarray, offset: int, base: float) -> np.ndarray:
    """``[tokens, heads, dim]``, halves rotated against each other. RoFormer, arXiv:2104.09864."""
    half = x.shape[-1] // 2
    angles = np.arange(offset, offset + len(x))[:, None, None] * base ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)], -1
    )


def _attn(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    """``[n, heads, dim]`` to ``[tokens, kv heads, dim]``."""
    k, v = (np.repeat(array, q.shape[1] // array.shape[1], 1) for array in (k, v))
    scores = np.einsum("nhd,thd->hnt", q, k) / np.sqrt(q.shape[-1])
    if causal:
        later = np.arange(len(k))[None] > np.arange(len(q))[:, None] + len(k) - len(q)
        scores = np.where(later, -np.inf, scores)
    return np.einsum("hnt,thd->nhd", _softmax(scores, -1), v)


Q, KEYS, VALUES = (
    np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
    for seed, shape in ((3, (2, 4, 6)), (4, (5, 2, 6)), (5, (5, 2, 6)))
)
WIDE = np.random.default_rng(6).uniform(-1, 1, (24, 24)).astype(np.float32)

LEAST = np.array([-(2**31), -(2**31), -(2**31) + 1], np.int32)
COMPUTED: list[tuple[str, list[np.ndarray], Any]] = [
    ("add(a, b)", [A, B3], A + B3),
    ("sub(a, b)", [A, B3], A - B3),
    ("mul(a, b)", [A, B3], A * B3),
    ("div(a, b)", [A, B3], A / B3),
    ("min(a, b)", [A, B3], np.minimum(A, B3)),
    ("max(a, b)", [A, B3], np.maximum(A, B3)),
    ("mod(a, b)", [A, B3], np.mod(A, B3)),
    ("mod(a, b)", [LEAST, np.full(3, -1, np.int32)], np.zeros(3, np.int32)),
    ("mod(a, b)", [LEAST, np.array([-1, -3, 7], np.int32)], np.mod(LEAST.astype(np.int64), [-1, -3, 7]).astype("i4")),
    ("abs(a)", [A], abs(A)),
    ("neg(a)", [A], -A),
    ("exp(a)", [A], np.exp(A)),
    ("tanh(a)", [A], np.tanh(A)),
    ("sigmoid(a)", [A], 1 / (1 + np.exp(-A))),
    ("matmul(a, b)", [A, MATRIX], A @ MATRIX),
    ("relu(a)", [A], np.maximum(A, 0)),
    ("relu(a, alpha=0.5, clamp_max=1)", [A], np.minimum(np.where(A > 0, A, A / 2), 1)),
    ("fill(a, value=-0.5)", [A], np.full_like(A, -0.5)),
    ("is_finite(a)", [A], np.array(True)),
    ("is_finite(a)", [np.where(A > 1, np.inf, A).astype(np.float32)], np.array(False)),
    ("softmax(a)", [A], _softmax(A, -1)),
    ("softmax(a, axis=0)", [A], _softmax(A, 0)),
    ("rms_norm(a, b, eps=0.1)", [A, B3[0]], A / np.sqrt((A**2).mean(-1, keepdims=True) + 0.1) * B3[0]),
    ("rope(a, offset=3)", [Q], _rope(Q, 3, 10000.0)),
    ("rope(a, offset=2 + 5, base=100.0)", [Q[0]], _rope(Q[:1], 7, 100.0)[0]),
    ("concat(a, b)", [A, B3], np.concatenate([A, B3])),
    ("concat(a, b, axis=1)", [A, B3], np.concatenate([A, B3], 1)),
    ("transpose(a)", [A], A.T),
    ("transpose(a, axes=[1, 2, 0])", [Q], Q.transpose(1, 2, 0)),
    ("reshape(a, shape=[2, 6])", [A], A.reshape(2, 6)),
    ("take(a, b)", [A, np.array([2, 0], np.int32)], A[[2, 0]]),
    ("argmax(a)", [A], A.argmax(-1).astype(np.uint32)),
    ("argmax(a, axis=0)", [A], A.argmax(0).astype(np.uint32)),
    ("cast(a)", [A], A),
    ("attn(a, b, c)", [Q, KEYS, VALUES], _attn(Q, KEYS, VALUES)),
    ("attn(a, b, c, causal=true)", [Q, KEYS, VALUES], _attn(Q, KEYS, VALUES, causal=True)),
    ("attn(a, b, c)", [Q[0], KEYS[0], VALUES[0]], np.repeat(VALUES[0], 2, 0)),
    (
        "attn(a, b, c, d)",
        [Q.reshape(2, 24), KEYS, VALUES, WIDE],
        _attn((Q.reshape(2, 24) @ WIDE).reshape(2, 4, 6), KEYS, VALUES).reshape(2, 24),
    ),
]
NAMES = {np.dtype(np.float32): "f32", np.dtype(np.int32): "i32", np.dtype(np.uint32): "u32", np.dtype(bool): "bool"}


@pytest.mark.parametrize(
    ("call", "arguments", "wanted"), COMPUTED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_operations_compute_the_documented_results(call: str, arguments: list[np.ndarray], wanted: np.ndarray) -> None:
    declared = "".join(
        f"{name}: {NAMES[array.dtype]}{list(array.shape)}; " for name, array in zip("abcd", arguments, strict=False)
    )
    wanted = np.asarray(wanted)
    wanted = wanted.astype(np.float32) if wanted.dtype == np.float64 else wanted
    text = f"""
    dynamic {{ {declared} }}
    volatile {{ y: {NAMES[wanted.dtype]}{list(wanted.shape)}; }}
    block entry {{ op {call} >> y; }}
    """
    run = executor(text)
    run.insert(dict(zip("abcd", arguments, strict=False)))
    run.step()
    assert np.allclose(np.asarray(run.fetch("y")), wanted, atol=2e-5)


def test_every_operation_is_tested() -> None:
    assert {call.split("(")[0] for call, _, _ in COMPUTED} == set(OPS)


def built_window() -> Graph:
    """Return the graph of examples/window.oinf.txt."""
    g = GraphBuilder()
    x = g.dynamic("x", "f32", ["D"])
    window = g.volatile("window", "f32", [4, "D"])
    mean = g.volatile("mean", "f32", ["D"])
    n = g.persistent("n", "i64", init=0)
    seen = g.persistent("seen", "f32", ["D"], indices=["i"], table=True, fixed={"i": 4})
    total_so_far = g.persistent("sum", "f32", ["D"], init=0.0)
    with g.block("entry") as b:
        old = b.assign("old", "f32", ["D"])
        total = b.assign("total", "f32", ["D"])
        quarter = b.assign("quarter", "f32")
        b.read(seen["n % 4"], old)
        b.read(total_so_far, total)
        b.op("sub", total, old, to=total)
        b.op("add", total, x, to=total)
        b.write(total, total_so_far)
        b.write(x, seen["n % 4"])
        b.increment(n)
        b.op("fill", quarter, value=0.25, to=quarter)
        b.op("mul", total, quarter, to=mean)
        b.read(seen[()], window)
        b.stop()
    return g.graph()


def test_the_builder_makes_the_graph_of_the_text() -> None:
    assert built_window() == parse((EXAMPLES / "window.oinf.txt").read_text(encoding="utf-8"))
    model = Model({"D": 4})
    text, built = (
        Simulator(model, parse((EXAMPLES / "window.oinf.txt").read_text(encoding="utf-8"))),
        Simulator(model, built_window()),
    )
    assert text.fingerprint == built.fingerprint
    with pytest.raises(UnknownNameError) as caught:
        Simulator(model, Graph((), built_window().blocks))
    assert str(caught.value) == "there is no variable seen, only old, total, quarter", "without a text, without a place"


def test_the_builder_has_every_statement() -> None:
    g = GraphBuilder()
    go = g.dynamic("go", "bool")
    w = g.constant("W", "f32", ["3 * D"], indices=["l"], reference="W.{l}")
    y = g.volatile("y", "f32", ["3*D"], reference="y0")
    k = g.persistent("K", "f32", ["3*D"], indices=["l", "t"], table=True)
    m = g.persistent("M", "f32", ["D", 2], indices=["r"], auto_dim=["r"], fixed={"r": 9})
    t = g.persistent("t", "i32")
    with g.block("entry") as b:
        part = b.assign("part", "f32", [2, "3*D"])
        with b.loop("all", "l", 0, "D") as layer:
            layer.op("add", y, w["l"], to=y)
            layer.write(y, k["l", t])
            layer.read(k["l", 0:"t+1"], part)
            layer.read(k["l", "..2"], part)
        b.transfer(y, y)
        b.branch(go, "then", "then")
        b.go("then")
        b.op("reshape", y, shape=["D", 3], to=y)
        b.op("rope", y, traditional=True, offset=t, to=y)
        b.increment(t, 3)
        b.decrement(t)
        b.reset(k["l"])
        b.reset(m)
        b.stop()
    with g.block("then") as b:
        b.stop()
    assert g.graph() == parse("""
    dynamic { go: bool; }
    constant { W(l): f32[3 * D] @pattern("W.{l}"); }
    volatile { y: f32[3*D] @ref("y0"); }
    persistent { K(l, t): f32[3*D] @table; M(r): f32[D, 2] @auto_dim(r) @fixed(r=9); t: i32; }
    block entry {
        assign part: f32[2, 3*D];
        loop all (l in 0..D) {
            op add(y, W[l]) >> y;
            cache.write y >> K[l, t];
            cache.read K[l, 0..t+1] >> part;
            cache.read K[l, ..2] >> part;
        }
        transfer y >> y;
        branch go then then;
        branch then;
        op reshape(y, shape=[D, 3]) >> y;
        op rope(y, traditional=true, offset=t) >> y;
        cache.increment 3 t;
        cache.decrement t;
        cache.reset K[l];
        cache.reset M;
        return;
    }
    block then { return; }
    """)
    with pytest.raises(ValueError, match="have no step"):
        _ = k[0:4:2]


def test_the_window_example_means_its_last_four() -> None:
    run = Simulator(Model({"D": 2}), built_window()).make_executor()
    seen: list[float] = [0.0] * 4
    for step in range(10):
        run.insert(x=mx.full(2, float(step)))
        run.step()
        seen = [*seen[1:], float(step)]
        assert run.fetch("mean")[0].item() == sum(seen) / 4
        assert sorted(run.fetch("window")[:, 0].tolist()) == sorted(seen)


def test_a_model_file_has_tensors_and_sizes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    mx.save_safetensors(str(path), {"a": mx.arange(3)}, {"D": "7", "note": "none"})
    model = Model.load(path, {"H": 2})
    assert model.sizes == {"D": 7, "H": 2}
    assert model.tensors["a"].tolist() == [0, 1, 2]
    assert model.digest() == Model({}, {"a": mx.arange(3)}).digest() != Model({}, {"a": mx.arange(3) + 1}).digest()
    path.write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"m\.safetensors"):
        Model.load(path)


@pytest.mark.parametrize(("shape", "nbytes"), [([-2, -2], 16), ([(1 << 32) + 4], 16), ([0, 1 << 40], 0)])
def test_dimensions_that_mlx_reads_wrongly_are_named(tmp_path: Path, shape: list[int], nbytes: int) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    with pytest.raises(ModelError) as caught:
        Model.load(path)
    assert str(caught.value).startswith(f"{path}: the tensor x has the dimensions {shape}, from 0 to 2147483647")


def of_another_thread() -> mx.array:
    """An array that MLX refuses to compute in this thread."""
    made: list[mx.array] = []

    def make() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            made.append(mx.ones(4) + 1)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def test_an_unsupported_input_is_refused_before_the_step() -> None:
    run = executor("dynamic { x: f32[D]; } block entry { return; }")
    with pytest.raises(InputError, match="x could not be computed"):
        run.insert(x=of_another_thread())


def test_an_mlx_failure_breaks_the_executor_and_is_not_saved() -> None:
    run = executor(
        "constant { w: f32[D]; } persistent { W: f32[D]; } block entry { cache.write w >> W; }",
        {"w": mx.ones(4)},
    )
    run.step()
    run.memory.journal.pending("spoilt", of_another_thread)
    with pytest.raises(BrokenExecutorError):
        run._evaluate(lambda: mx.eval(run.memory.journal.arrays()))
    with pytest.raises(BrokenExecutorError, match="resume the instance, or start anew"):
        run.step()


def test_the_attention_example_is_the_same_in_every_form() -> None:
    assert attention() == attention()
    assert repr(attention()) == repr(attention())


def test_exp_of_f64_is_computed_in_float32() -> None:
    """The documentation names these operations. It changes with an MLX that computes them in float64."""
    text = "volatile { a: f64 @init(100.0); b: f64; c: f64; } block entry { op exp(a) >> b; op tanh(a) >> c; }"
    run = Simulator(Model(), parse(text), Device.CPU).make_executor()
    run.step()
    assert [run.fetch(name).item() for name in "bc"] == [np.inf, np.tanh(100.0)]
