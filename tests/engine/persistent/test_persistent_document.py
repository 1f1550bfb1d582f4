"""Every example of OpenInfer's persistent-memory document, and of its programs that use such memory, with the shapes
that they state."""

from __future__ import annotations

from typing import Any

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from engine.persistent import Executor, Model, Simulator, parse
from engine.persistent.errors import DTypeError, GrowthError

B, D, H, DH = 3, 6, 2, 3  # D = H * Dh


def executor(text: str, tensors: dict[str, mx.array] | None = None, **sizes: int) -> Executor:
    sizes = {"B": B, "D": D, "H": H, "Dh": DH} | sizes
    return Simulator(Model(sizes, tensors or {}), parse(text)).make_executor()


def shapes(text: str, *names: str, steps: int = 1, **inserted: Any) -> list[tuple[int, ...]]:
    run = executor(text)
    for _ in range(steps):
        run.insert(inserted)
        run.step()
    return [run.fetch(name).shape for name in names]


def test_declaring_a_cache() -> None:
    run = executor("persistent { step: i32 @init(0); cache: f16[H, H]; } block entry { return; }")
    assert run.fetch("step").item() == 0
    assert (run.fetch("cache").shape, run.fetch("cache").dtype) == ((H, H), mx.float16)
    assert not run.fetch("cache").any().item()


def test_an_integer_is_no_init_of_a_float() -> None:
    declared = "persistent {{ x: f32 @init({}); }} block entry {{ return; }}"
    with pytest.raises(DTypeError, match=r"@init of x must be a float, such as 5\.0 for f32, got 5"):
        executor(declared.format("5"))
    assert executor(declared.format("5.0")).fetch("x").item() == 5.0


PREFIXED = """
persistent {
    A(i): f32[D] @table;
    B(i, j): f32[D] @table;
    C(i): f16[D, H] @table;
    D(i, j): f16[D, H] @table @fixed(i=1024, j=256);

    // Example of KV[H, Dh] matrix for each attention head and token.
    K(l, t): f16[H, Dh] @table;
    V(l, t): f16[H, Dh] @table;
}
volatile { a: f32[1, D]; b: f32[1, 1, D]; c: f16[1, D, H]; d: f16[1023, 255, D, H]; one: f32[D]; k: f16[H, Dh];
           a1: f32[D]; b1: f32[D]; c1: f16[D, H]; d1: f16[D, H]; }
block entry {
    cache.read A[4] >> a1;
    cache.read B[2, 5] >> b1;
    cache.read C[3] >> c1;
    cache.read D[1023, 255] >> d1;
    cache.read K[1, 6] >> k;
    cache.read V[1, 6] >> k;

    cache.read A[0..i] >> a;
    cache.read B[0..i, 0..j] >> b;
    cache.read C[0..i] >> c;
    cache.read D[0..1023, 0..255] >> d;
    return;
}
"""


def test_prefixed_cache() -> None:
    names = "a1", "b1", "c1", "d1", "a", "b", "c", "k"
    found = shapes(PREFIXED, *names)
    assert found[:4] == [(D,), (D,), (D, H), (D, H)]
    assert found[4:] == [(5, D), (3, 6, D), (4, D, H), (H, DH)]


def test_a_fixed_table_has_all_its_entries_from_the_start() -> None:
    run = executor(PREFIXED)
    assert run.fetch("D").shape == (1024, 256, D, H)
    assert [run.fetch(name).shape for name in "AB"] == [(0, D), (0, 0, D)]


def test_a_table_index_picks_a_tensor_and_a_slice_stacks_them() -> None:
    text = """
    persistent { A(i): f32[D] @table; B(i, j): f32[D] @table @fixed(i=3, j=6); }
    volatile { a: f32[D]; many: f32[3, D]; grid: f32[2, 3, D]; b: f32[D]; }
    block entry {
        cache.read A[3] >> a;
        cache.read A[0..3] >> many;
        cache.read B[2, 5] >> b;
        cache.read B[0..2, 0..3] >> grid;
        return;
    }
    """
    assert shapes(text, "a", "many", "b", "grid") == [(D,), (3, D), (D,), (2, 3, D)]


def test_indices_slice_access() -> None:
    text = """
    persistent { n: i32; A(i): f32[D] @table; }
    dynamic { x: f32[D]; }
    volatile { all: f32[10, D]; five: f32[5, D]; three: f32[3, D]; seven: f32[7, D]; }
    block entry { loop fill (l in 0..10) { cache.write x >> A[l]; } branch slices; return; }
    block slices {
        cache.read A[] >> all;
        cache.read A[0..5] >> five;
        cache.read A[2..5] >> three;
        cache.read A[0..-3] >> seven;
        return;
    }
    """
    found = shapes(text, "all", "five", "three", "seven", x=mx.ones(D))
    assert found == [(10, D), (5, D), (3, D), (7, D)]


AUTODIM = """
persistent {
    i: i32 @init(0);
    j: i32 @init(0);
    A(r, c): f32[D, H] @auto_dim(r, c);
    B(i, j): f32[D, H] @auto_dim(i, j) @fixed(i=1024, j=256);
    C(l, i, j): f32[D, H] @table @auto_dim(i, j);
}
volatile { a: f32[D, H]; b: f32[D, H]; c: f32[D, H]; many: f32[4, D, H]; part: f32[4, D, H]; corner: f32[D, H]; }
block entry {
    cache.increment 3 i;
    cache.increment 2 j;
    cache.read A[i, j] >> a;
    cache.read B[i, j] >> b;
    cache.read C[3, i, j] >> c;
    cache.read C[0..4, i, j] >> many;
    cache.read C[0..4, 0..D, 0..H] >> part;
    cache.read A[0..r, 0..c] >> corner;
    return;
}
"""


def test_autodim_cache() -> None:
    found = shapes(AUTODIM, "a", "b", "c", "many", "part", "corner", steps=2)
    grown = (D + 6, H + 4)
    assert found == [grown, grown, grown, (4, *grown), (4, D, H), (6, 4)]


@pytest.mark.parametrize(("size", "fits"), [("1024, 256", True), ("1025, 256", False), ("1024, 257", False)])
def test_autodim_is_bounded_by_fixed(size: str, fits: bool) -> None:
    text = f"""
    persistent {{ B(i, j): f32[D, H] @auto_dim(i, j) @fixed(i=1024, j=256); }}
    volatile {{ b: f32[D, H]; }}
    block entry {{ cache.read B[{size}] >> b; return; }}
    """
    if fits:
        assert shapes(text, "b") == [(D + 1024, H + 256)]
    else:
        with pytest.raises(GrowthError):
            shapes(text, "b")


def test_growing_the_cache_per_step() -> None:
    text = """
    persistent {
        rows: i32 @init(0);
        cols: i32 @init(0);
        M(r, c): f16[D, H] @auto_dim(r, c);
    }
    volatile { seen: f16[D, H]; }

    block entry {
        assign out: f16[D, H];

        cache.increment 3 rows;
        cache.increment 5 cols;

        // Access with scalar indices updates auto-dim counts and grows M.
        cache.read M[rows, cols] >> out;
        transfer out >> seen;
        return;
    }
    """
    for steps in (1, 2, 3):
        assert shapes(text, "seen", "M", steps=steps) == [(D + 3 * steps, H + 5 * steps)] * 2


def test_cache_operations() -> None:
    text = """
    persistent { step: i32 @init(2); K(l, t): f16[H, Dh] @table; V(l, t): f16[H, Dh] @table; n: i32; m: i32; }
    dynamic { v: f16[H, Dh]; }
    volatile { k: f16[H, Dh]; after: f16[2, 3, H, Dh]; }
    block entry {
        loop l (l in 0..2) {
            cache.read  K[l, step] >> k;
            cache.write v >> V[l, step];
            cache.write v >> K[l, step];
            cache.write v >> K[l, 0];
        }
        cache.increment n;
        cache.increment 5 n;
        cache.decrement n;
        cache.decrement 2 n;
        cache.increment 7 m;
        cache.reset m;
        loop l (l in 0..1) {
            cache.reset K[l, step];
            cache.read K[] >> after;
            cache.reset K[l];
        }
        cache.reset V;
        return;
    }
    """
    run = executor(text)
    run.insert(v=mx.ones((H, DH), dtype=mx.float16))
    run.step()
    assert (run.fetch("n").item(), run.fetch("m").item(), run.fetch("step").item()) == (3, 0, 2)
    assert run.fetch("after")[:, :, 0, 0].tolist() == [[1, 0, 0], [1, 0, 1]]
    assert run.fetch("K")[:, :, 0, 0].tolist() == [[0, 0, 0], [1, 0, 1]]
    assert run.fetch("V").shape == (0, 0, H, DH)


SINGLE_STEP = """
graph! {

  dynamic {
    x: f32[B, D];
  }

  volatile {
    z: f32[B, D];
    W(l): f32[D, D] pattern("W.{l}");
  }

  persistent {
    step: i32 @init(0);
    K(l, t): f16[H, Dh] @table;
    V(l, t): f16[H, Dh] @table;
  }

  block entry {
    assign h: f32[B, D];
    assign k: f16[H, Dh];
    assign v: f16[H, Dh];

    transfer x >> h;

    loop layers (l in 0..10) {
      cache.read  K[l, step] >> k;
      cache.read  V[l, step] >> v;

      op attn(h, k, v, W[l]) >> h;

      cache.write k >> K[l, step];
      cache.write v >> V[l, step];
    }

    cache.increment step;

    return;
  }
}
"""


def test_one_and_several_inference_steps_with_a_cache() -> None:
    weights = {f"W.{i}": mx.random.normal((D, D), key=mx.random.key(i)) for i in range(10)}
    run = executor(SINGLE_STEP, weights)
    for step in range(1, 4):
        run.insert(x=mx.ones((B, D)))
        run.step()
        assert run.fetch("step").item() == step
        assert run.fetch("K").shape == run.fetch("V").shape == (10, step, H, DH)
        assert run.fetch("z").shape == (B, D)


# -- the example programs ----------------------------------------------------------------------------------------------


def rows(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).uniform(-1, 1, shape or (D,)).astype(np.float32))


def test_program_scalar() -> None:
    run = executor("""
    volatile { out_step: i32; }
    persistent { step: i32 @init(0); }
    block entry { cache.read step >> out_step; cache.increment step; return; }
    """)
    for step in range(3):
        run.step()
        assert run.fetch("out_step").item() == step


def test_program_table() -> None:
    run = executor("""
    dynamic { x: f32[D]; }
    volatile { out_full: f32[3, D]; out_slice: f32[2, D]; out_reset: f32[3, D]; }
    persistent { A(i): f32[D] @table @fixed(i=3); }
    block entry {
        cache.write x >> A[0];
        cache.write x >> A[1];
        cache.write x >> A[2];
        cache.read A[] >> out_full;
        cache.read A[0..2] >> out_slice;
        cache.reset A[1];
        cache.read A[] >> out_reset;
        return;
    }
    """)
    x = rows(1)
    run.insert(x=x)
    run.step()
    assert mx.array_equal(run.fetch("out_full"), mx.stack([x, x, x]))
    assert mx.array_equal(run.fetch("out_slice"), mx.stack([x, x]))
    assert mx.array_equal(run.fetch("out_reset"), mx.stack([x, mx.zeros(D), x]))


AUTO_DIM_PROGRAM = """
dynamic { bias: f32; }
volatile { out_l: f32[D, H]; out_m: f32[D, H]; out_n: f32[D, H]; }
persistent {
    l_rows: i32 @init(0);
    l_cols: i32 @init(0);
    m_cols: i32 @init(0);
    n_rows: i32 @init(0);
    L(r, c): f32[D, H] @auto_dim(r, c);
    M(r, c): f32[D, H] @auto_dim(r, c);
    N(r, c): f32[D, H] @auto_dim(r, c);
}
block entry {
    cache.increment 3 l_rows;
    cache.increment 2 l_cols;
    cache.increment 5 m_cols;
    cache.increment 5 n_rows;

    cache.read L[l_rows, l_cols] >> out_l;
    cache.read M[0, m_cols] >> out_m;
    cache.read N[n_rows, 0] >> out_n;

    op add(out_l, bias) >> out_l;
    op add(out_m, bias) >> out_m;
    op add(out_n, bias) >> out_n;

    cache.write out_l >> L[l_rows, l_cols];
    cache.write out_m >> M[0, m_cols];
    cache.write out_n >> N[n_rows, 0];
    return;
}
"""


def test_program_auto_dim() -> None:
    run = executor(AUTO_DIM_PROGRAM)
    for step in range(1, 4):
        run.insert(bias=1.0)
        run.step()
        assert run.fetch("out_l").shape == (D + 3 * step, H + 2 * step)
        assert run.fetch("out_m").shape == (D, H + 5 * step)
        assert run.fetch("out_n").shape == (D + 5 * step, H)
    grown = np.asarray(run.fetch("L"))
    assert grown[: D + 3, : H + 2].min() == grown.max() == 3  # old values stay at the origin
    assert grown[D + 6 :].max() == grown[:, H + 4 :].max() == 1  # zeros have had one step


def test_program_fixed_limit() -> None:
    run = executor("""
    dynamic { bias: f32; }
    volatile { out: f32[D, H]; }
    persistent {
        rows: i32 @init(0);
        cols: i32 @init(0);
        M(r, c): f32[D, H] @auto_dim(r, c) @fixed(r=4, c=4);
    }
    block entry {
        cache.increment 5 rows;
        cache.increment 5 cols;
        cache.read M[rows, cols] >> out;
        op add(out, bias) >> out;
        cache.write out >> M[rows, cols];
        return;
    }
    """)
    run.insert(bias=1.0)
    with pytest.raises(GrowthError, match="index r of M is @fixed to a count of 4, got 5"):
        run.step()
    assert run.fetch("rows").item() == 0
    assert run.fetch("M").shape == (D, H)


def test_program_weight_update() -> None:
    run = executor("""
    dynamic { x: f32[D]; delta: f32[D]; }
    volatile { tmp: f32[D]; out: f32[D]; }
    persistent { W: f32[D] @init(0.0); }
    block entry {
        cache.read W >> tmp;
        op add(tmp, x) >> tmp;
        op add(tmp, delta) >> tmp;
        cache.write tmp >> W;
        cache.read W >> out;
        return;
    }
    """)
    x, delta, wanted = rows(3), rows(9), mx.zeros(D)
    for _ in range(3):
        run.insert(x=x, delta=delta)
        run.step()
        wanted = wanted + x + delta
        assert mx.array_equal(run.fetch("out"), wanted)


def test_program_online_weight_update() -> None:
    text = """
    dynamic { x: f32[B, D]; delta: f32[D, O]; }
    constant { zero: f32[D, O]; }
    volatile { w: f32[D, O]; y: f32[B, O]; }
    persistent { W: f32[D, O] @init(0.0); }
    block entry {
        cache.read W >> w;
        op add(w, zero) >> w;
        op matmul(x, w) >> y;
        op add(w, delta) >> w;
        cache.write w >> W;
        return;
    }
    """
    run = executor(text, {"zero": mx.zeros((D, 4))}, O=4)
    x, delta = rows(5, B, D), rows(6, D, 4)
    for step in range(3):
        run.insert(x=x, delta=delta)
        run.step()
        assert mx.allclose(run.fetch("y"), x @ (delta * step), atol=1e-6)


def test_program_window_slice() -> None:
    text = """
    dynamic { x: f32[D]; }
    constant { limit: i32; zero: i32; }
    volatile { window: f32[3, D]; start_val: i32; end_val: i32; start_clamped: i32; end_clamped: i32; }
    persistent {
        write_idx: i32 @init(0);
        start: i32 @init(0);
        end: i32 @init(3);
        A(i): f32[D] @table @fixed(i=6);
    }
    block entry {
        cache.write x >> A[write_idx];
        cache.increment 1 write_idx;

        cache.read start >> start_val;
        cache.read end >> end_val;
        op max(start_val, zero) >> start_clamped;
        op min(end_val, limit) >> end_clamped;
        cache.write start_clamped >> start;
        cache.write end_clamped >> end;
        cache.read A[start..end] >> window;

        cache.increment 1 start;
        cache.increment 1 end;
        return;
    }
    """
    run = executor(text, {"limit": mx.array(6), "zero": mx.array(0)})
    written = [rows(step) for step in range(4)]
    for step, x in enumerate(written):
        run.insert(x=x)
        run.step()
        wanted = [written[i] if i <= step else mx.zeros(D) for i in range(step, step + 3)]
        assert mx.array_equal(run.fetch("window"), mx.stack(wanted))


def test_program_kv_cache_decode() -> None:
    text = """
    dynamic { q: f32[D]; }
    constant { zero: f32[D]; }
    volatile { k_hist: f32[4, D]; }
    persistent { t: i32 @init(0); K(i): f32[D] @table @fixed(i=4); }
    block entry {
        op add(q, zero) >> q;
        cache.write q >> K[t];
        cache.increment 1 t;
        cache.read K[] >> k_hist;
        return;
    }
    """
    run = executor(text, {"zero": mx.zeros(D)})
    history = [rows(step) for step in range(3)]
    for step, q in enumerate(history):
        run.insert(q=q)
        run.step()
        wanted = [*history[: step + 1], *[mx.zeros(D)] * (3 - step)]
        assert mx.array_equal(run.fetch("k_hist"), mx.stack(wanted))


def test_program_branching() -> None:
    text = """
    dynamic { x: f32[B, D]; }
    constant { w: f32[D, D]; }
    volatile { h: f32[B, D]; cond: bool @init(true); }
    block entry {
        op matmul(x, w) >> h;
        op is_finite(h) >> cond;
        branch cond ok bad;
        branch algorithm;
        return;
    }
    block ok { op relu(h, alpha=0.0) >> h; return; }
    block bad { op fill(x, value=0.0) >> x; op fill(h, value=0.0) >> h; return; }
    block algorithm { op add(h, x) >> h; return; }
    """
    w, x = rows(1, D, D), rows(2, B, D)
    run = executor(text, {"w": w})
    run.insert(x=x)
    run.step()
    assert mx.array_equal(run.fetch("h"), mx.maximum(x @ w, 0) + x)
    run.insert(x=x * float("inf"))
    run.step()
    assert not run.fetch("cond").item()
    assert not run.fetch("h").any().item()


def test_program_loops_over_a_family_of_tensors() -> None:
    text = """
    dynamic { x: f32[D, 3*D]; }
    volatile { y: f32[D, 3*D] @init(0.0); }
    constant { QKV(layer, head): f32[D, 3*D] @pattern("attn.{head}.qkv.{layer}"); }
    block entry {
        op add(x, QKV[0, 0]) >> y;
        loop layers (l in 0..num_layers) { loop heads (h in 0..num_heads) { op add(y, QKV[l, h]) >> y; } }
        return;
    }
    """
    family = {f"attn.{head}.qkv.{i}": rows(10 * i + head, D, 3 * D) for i in range(2) for head in range(3)}
    run = executor(text, family, num_layers=2, num_heads=3)
    x = rows(42, D, 3 * D)
    run.insert(x=x)
    run.step()
    wanted = x + family["attn.0.qkv.0"]
    for layer in range(2):
        for head in range(3):
            wanted = wanted + family[f"attn.{head}.qkv.{layer}"]
    assert mx.array_equal(run.fetch("y"), wanted)


def test_program_reference() -> None:
    text = """
    dynamic { x: f32[B]; }
    volatile { state: f32[B] @ref("state.0"); out: f32[B]; }
    constant { weight: f32[B] @ref("weight.0"); bias: f32 @ref("bias.0"); }
    block entry {
        assign t0: f32[B];
        op add(x, weight) >> t0;
        op add(t0, state) >> out;
        op add(out, bias) >> out;
        return;
    }
    """
    state, weight, x = rows(1, B), rows(2, B), rows(7, B)
    run = executor(text, {"state.0": state, "weight.0": weight, "bias.0": mx.array(0.5)})
    run.insert(x=x)
    run.step()
    assert mx.array_equal(run.fetch("out"), x + weight + state + 0.5)
