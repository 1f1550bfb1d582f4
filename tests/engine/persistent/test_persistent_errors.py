"""An error in a graph is reported with its position and a caret, and a failed step changes nothing."""

from __future__ import annotations

from typing import Any

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persistent_models import EXAMPLES

from benchmarks.decoder import decoder
from engine.persistent import Device, Executor, Model, Simulator, parse
from engine.persistent import errors as e

SIZES = {"D": 4, "H": 2, "Big": 2**31 - 1}
DECLARED = """
dynamic { x: f32[D]; i: i32; go: bool; }
constant { w: f32[D, D]; F(l): f32[D] @pattern("F.{l}"); }
volatile { y: f32[D]; m: f32[D, H]; flag: bool; half: f16[D]; whole: i32[D]; one: i32; }
volatile { nohead: f32[0, H]; nodim: f32[D, 0]; }
persistent {
    n: i32 @init(1);
    f: f32;
    B: bool;
    W: f32[D];
    A(i): f32[D] @table @init(2.0);
    K(l, t): f32[D] @table @fixed(l=2);
    M(r, c): f32[D, H] @auto_dim(r, c) @fixed(r=3);
}
"""
TENSORS = {"w": mx.eye(4), "F.0": mx.ones(4), "F.1": mx.ones(3)}


def simulator(text: str, device: Device | None = None) -> Simulator:
    return Simulator(Model(SIZES, TENSORS), parse(text, "g.oinf.txt"), device)


def graph(statements: str, more: str = "") -> Simulator:
    return simulator(f"{DECLARED}block entry {{\n    {statements}\n}}\n{more}")


SYNTAX = [
    ("dynamic { x f32; }", 1, 13, 'unexpected "f32", expected "(" or ":"'),
    ("persistent {\n  n: i32\n}", 3, 1, 'unexpected "}"'),
    ("block entry { op add(x y) >> z; }", 1, 24, 'unexpected "y"'),
    ("block entry { retur; }", 1, 15, 'unexpected "retur"'),
    ("block entry {\n  return;\n", 2, 10, "unexpected the end of the text"),
    ("persistent { a: i32 @init(0) ! }", 1, 30, "unexpected"),
    ("persistent { a: i32 @init(-x); }", 1, 28, "a number belongs after -, got x"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), SYNTAX)
def test_a_text_that_is_no_graph(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(e.ParseError) as caught:
        parse(text, "g.oinf.txt")
    error = caught.value
    assert error.at is not None
    assert (error.at.line, error.at.column) == (line, column)
    assert str(error).startswith(f"g.oinf.txt:{line}:{column}: {message}")
    *_, shown, caret = str(error).split("\n")
    assert shown == text.split("\n")[line - 1]
    assert caret == " " * (column - 1) + "^"


def test_the_caret_stands_right_after_tabs_too() -> None:
    with pytest.raises(e.ParseError) as caught:
        parse("block entry {\n\t\tcache.read K[ >> k;\n}")
    assert str(caught.value).split("\n")[1:] == ["\t\tcache.read K[ >> k;", "\t\t" + " " * 14 + "^"]


def test_too_deep_nesting_and_too_long_loops_are_refused() -> None:
    assert parse(f"persistent {{ a: f32[{'(' * 3000}D{')' * 3000}]; }}") == parse("persistent { a: f32[D]; }")
    for some, too_many in (("D" + "+1" * 90, "D" + "+1" * 3000), ("-" * 90 + "D", "-" * 3000 + "D")):
        parse(f"persistent {{ a: f32[{some}]; }}")
        with pytest.raises(e.ParseError, match="nested too deeply, at most 100 deep is allowed"):
            parse(f"persistent {{ a: f32[{too_many}]; }}")
    for text in ("persistent { a: i32 @init(-9", "persistent { a: i32[9", "block entry { cache.increment 9"):
        with pytest.raises(e.ParseError, match=r"an integer has at most 20 digits|unexpected"):
            parse(f"{text}{'9' * 5000}")
    with pytest.raises(e.ParseError, match="an integer has at most 20 digits"):
        parse(f"block entry {{ cache.increment {'9' * 5000} n; }}")


PIECES = ["K", "[", "]", "..", "-1", "0", "(", ")", ";", "{", "}", ">>", "@table", "@auto_dim(t)", "@init(1.5)", "f16"]
PIECES += [
    "u8",
    " t ",
    " l ",
    "cache.read ",
    "cache.reset ",
    "branch entry;",
    "op ",
    "loop a (t in 0..2) {",
    "%",
    "9" * 21,
]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from(PIECES)), min_size=1, max_size=3))
def test_any_text_is_a_graph_or_one_of_our_errors(edits: list[tuple[float, int, str]]) -> None:
    text = (EXAMPLES / "attention.oinf.txt").read_text(encoding="utf-8")
    for place, removed, piece in edits:
        at = int(place * len(text))
        text = text[:at] + piece + text[at + removed :]
    raised = None
    try:
        Simulator(decoder(), parse(text))
    except e.PersistentError as error:
        raised = error
    if isinstance(raised, e.GraphError) and "no block entry" not in str(raised):
        assert raised.at is not None
        assert str(raised).count("\n") == 2


DECLARATIONS = [
    ("persistent { a: i33; }", e.UnknownNameError, "there is no dtype i33, only f16, bf16"),
    ("persistent { a: f32[Q]; }", e.UnknownNameError, "the model has no size Q, only Big, D, H"),
    ("persistent { a: f32[D - 5]; }", e.DimError, "a dimension is between 0 and 2147483647, a would have one of -1"),
    ("persistent { a: f32[Big + 1]; }", e.DimError, "would have one of 2147483648"),
    ("persistent { a: f32[99999999999999999999]; }", e.DimError, "would have one of 99999999999999999999"),
    ("persistent { a: f32[Big, Big, Big]; }", e.DimError, "bytes, this machine has"),
    ("persistent { a: f32[D / 0]; }", e.DimError, "division by zero"),
    ("persistent { a: i32; } volatile { a: i32; }", e.DeclarationError, "a is declared twice"),
    ("persistent { a: i32 @inti(0); }", e.UnknownNameError, "there is no attribute @inti, only @init, @table"),
    ("persistent { a: i32 @init(0) @init(1); }", e.DeclarationError, "a has @init twice"),
    ("persistent { a: f32 @init(5); }", e.DTypeError, "@init of a must be a float, such as 5.0 for f32, got 5"),
    ("persistent { a: i32 @init(5.0); }", e.DTypeError, "an integer from -2147483648 to 2147483647 for i32, got 5.0"),
    ("persistent { a: u8 @init(256); }", e.DTypeError, "an integer from 0 to 255 for u8, got 256"),
    ("persistent { a: i32 @init(true); }", e.DTypeError, "for i32, got true"),
    ("persistent { a: bool @init(2); }", e.DTypeError, "true, false, 0 or 1 for bool, got 2"),
    ("persistent { a(i): i32; }", e.DeclarationError, "the indices of a need @table or @auto_dim"),
    ("persistent { a: i32 @table; }", e.DeclarationError, "a has @table, but no index in parentheses"),
    ("persistent { a(i, i): i32 @table; }", e.DeclarationError, "a has an index twice"),
    ("persistent { a(i): i32 @table @fixed(j=3); }", e.DeclarationError, "j is no index of a"),
    ("persistent { a(i): i32 @table @fixed(i=0); }", e.DeclarationError, "@fixed allows at least 1"),
    ("persistent { a(i): i32 @table @fixed(3); }", e.DeclarationError, "@fixed takes the sizes of indices"),
    ("persistent { a(i, l): f32[D] @table @auto_dim(i); }", e.DeclarationError, "@auto_dim come last"),
    ("persistent { a(i, j): f32[D] @auto_dim(i, j); }", e.DeclarationError, "@auto_dim names 2 dimensions, a has 1"),
    ("volatile { a(i): f32[D] @table; }", e.DeclarationError, "only persistent memory has @table"),
    ("volatile { a(i): f32[D]; }", e.DeclarationError, "the indices of a need a @pattern that names each: {i}"),
    ('volatile { a(i): f32[D] @pattern("W.{l}"); }', e.DeclarationError, "need a @pattern that names each: {i}"),
    ('persistent { a: f32[D] @ref("w"); }', e.DeclarationError, "only volatile and constant memory comes from the"),
    ("dynamic { a: f32 @init(0.0); }", e.DeclarationError, "dynamic memory comes from outside"),
]


@pytest.mark.parametrize(("text", "error", "message"), DECLARATIONS)
def test_a_declaration_that_cannot_be(text: str, error: type[e.GraphError], message: str) -> None:
    with pytest.raises(error) as caught:
        simulator(f"{text}\nblock entry {{ return; }}")
    assert message in str(caught.value)
    assert caught.value.at is not None
    assert caught.value.at.line == 1
    assert str(caught.value).endswith("^")


STATEMENTS = [
    ("cache.read Q[0] >> y;", e.UnknownNameError, 16, "there is no variable Q, only x, i, go, w"),
    ("cache.read A[q] >> y;", e.UnknownNameError, 18, "q is no loop variable, integer scalar or size"),
    ("cache.read A[W] >> y;", e.DTypeError, 18, "W is no integer without dimensions"),
    ("cache.read A[f] >> y;", e.DTypeError, 18, "f is no integer without dimensions"),
    ("cache.read A[0, 1] >> y;", e.RankError, 16, "A takes at most 1 (i), got 2"),
    ("cache.read W[0] >> y;", e.RankError, 16, "W takes no indices"),
    ("cache.read A >> y;", e.RankError, 16, "A is a table: A[] is all of it"),
    ("cache.read A[0..2] >> y;", e.RankError, 16, "A[...] has 2 dimensions, y has 1"),
    ("cache.read K[0, 1] >> m;", e.RankError, 16, "K[...] has 1 dimensions, m has 2"),
    ("cache.read A[0] >> half;", e.DTypeError, 16, "A gives f32, half is f16"),
    ("cache.read A[-1] >> y;", e.NegativeIndexError, 16, "an index of A is 0 or more, got -1"),
    ("cache.read A[-2..1] >> m;", e.NegativeIndexError, 18, "a slice of A starts at 0 or more, got -2"),
    ("cache.read A[0] >> W;", e.AccessError, 5, "W is persistent: cache.write puts values into it"),
    ("cache.read A[0] >> w;", e.AccessError, 5, "w comes from the model and cannot be written"),
    ("cache.read y >> y;", e.AccessError, 16, "y is volatile, cache statements take persistent memory"),
    ("cache.write x >> A[0..1];", e.SliceWriteError, 22, "a write takes one entry, A[i], no slice of A"),
    ("cache.write x >> A[];", e.SliceWriteError, 22, "a write takes one entry, A[i], no slice of A"),
    ("cache.write x >> K[0];", e.SliceWriteError, 22, "a write takes one entry, K[l, t], no slice of K"),
    ("cache.write half >> A[0];", e.DTypeError, 17, "A holds f32, half is f16"),
    ("cache.reset A[0..1];", e.SliceResetError, 17, "a reset takes A, an entry or its first indices, no slice"),
    ("cache.reset M[1];", e.RankError, 17, "the dimensions of M can't be reset alone"),
    ("cache.increment A;", e.DTypeError, 5, "increment and decrement need a numeric scalar, A is f32[4]"),
    ("cache.increment B;", e.DTypeError, 5, "increment and decrement need a numeric scalar, B is bool"),
    ("cache.increment y;", e.AccessError, 5, "y is volatile"),
    ("op sine(x) >> y;", e.UnknownNameError, 5, "there is no operation sine, only add, sub"),
    ("op add(x) >> y;", e.RankError, 5, "add takes 2 arguments, got 1"),
    ("op add(x, half) >> y;", e.DTypeError, 5, "add takes arguments of one dtype, got f32, f16"),
    ("op softmax(whole) >> whole;", e.DTypeError, 5, "softmax takes floats, got i32"),
    ("op add(x, x) >> half;", e.DTypeError, 5, "add gives f32, half is f16"),
    ("op add(A, x) >> y;", e.AccessError, 12, "A is persistent: cache.read takes values out of it"),
    ("op relu(x, beta=1.0) >> y;", e.UnknownNameError, 5, "relu has no parameter beta, only alpha, clamp_max"),
    ("op fill(x) >> y;", e.UnknownNameError, 5, "fill needs the parameter value"),
    ("op softmax(x, axis=1.5) >> y;", e.DTypeError, 5, "the parameter axis of softmax is an integer"),
    ("op add(x, F[0..1]) >> y;", e.RankError, 15, "F is read one tensor at a time, not by slices"),
    ("op add(x, F) >> y;", e.RankError, 15, "F takes 1 indices (l), got 0"),
    ("transfer half >> y;", e.DTypeError, 5, "half gives f16, y is f32"),
    ("branch nowhere;", e.UnknownNameError, 5, "there is no block nowhere, only entry"),
    ("branch x entry entry;", e.BlockCycleError, 5, "blocks branch in a circle: entry -> entry"),
    ("loop a (l in 0..2) { loop b (l in 0..2) { return; } }", e.AccessError, 26, "the loop variable l is already in"),
    ("assign x: f32;", e.DeclarationError, 12, "x is declared twice"),
    ("loop a (l in 0..2) { op add(l, x) >> y; }", e.AccessError, 33, "l is a loop variable, which is an index"),
]


@pytest.mark.parametrize(("statement", "error", "column", "message"), STATEMENTS)
def test_an_impossible_statement_is_found_before_the_first_step(
    statement: str, error: type[e.GraphError], column: int, message: str
) -> None:
    with pytest.raises(error) as caught:
        graph(statement)
    assert message in str(caught.value)
    at = caught.value.at
    assert at is not None
    assert (at.line, at.column) == (DECLARED.count("\n") + 2, column)


def test_blocks_that_branch_in_a_circle() -> None:
    with pytest.raises(e.BlockCycleError, match="a -> b -> a"):
        graph("branch a; return;", "block a { branch go b b; }\nblock b { loop l (i in 0..1) { branch a; } }")
    with pytest.raises(e.UnknownNameError, match="there is no block entry"):
        simulator("block exit { return; }")
    with pytest.raises(e.DTypeError, match=r"a branch takes one bool, x is f32\[4\]"):
        graph("branch x a a;", "block a { return; }")


def test_two_blocks_of_one_name_are_refused() -> None:
    with pytest.raises(e.DeclarationError, match="the block one is declared twice") as caught:
        simulator("block entry { return; }\nblock one { return; }\nblock one { return; }")
    assert caught.value.at
    assert caught.value.at.line == 3


def chain(blocks: int, statement: str = "branch b{};", first: int = 0) -> str:
    """Return blocks of which each branches to the next."""
    begins = "".join(f"block b{i} {{ {statement.format(i + 1)} }}\n" for i in range(blocks - 1))
    return f"block entry {{ branch b{first}; branch b0; }}\n{begins}block b{blocks - 1} {{ return; }}"


@pytest.mark.parametrize(
    "text",
    [
        chain(102),
        chain(20_000),
        chain(102, first=60),
        chain(40, "loop l (i in 0..1) {{ loop m (j in 0..1) {{ branch b{}; }} }}"),
    ],
    ids=["102", "20000", "in two orders", "in loops"],
)
def test_deeply_nested_branches_are_refused(text: str) -> None:
    with pytest.raises(e.BlockCycleError, match="nested too deeply, at most 100 deep is allowed"):
        simulator(text)


@pytest.mark.parametrize(
    "text", [chain(99), chain(33, "loop l (i in 0..1) {{ loop m (j in 0..1) {{ branch b{}; }} }}")]
)
def test_branches_may_be_a_hundred_deep(text: str) -> None:
    run = simulator(text).make_executor()
    run.step()
    assert run.steps == 1


def test_a_model_without_a_named_tensor_is_refused() -> None:
    with pytest.raises(e.ModelError, match="the model has no tensor missing, which missing names"):
        simulator("constant { missing: f32; } block entry { return; }")
    with pytest.raises(e.ModelError, match=r"w is f32\[4\], the model's w is f32\[4, 4\]"):
        simulator("constant { w: f32[D]; } block entry { return; }")
    with pytest.raises(e.ModelError, match=r"w is f16\[4, 4\], the model's w is f32\[4, 4\]"):
        simulator("constant { w: f16[D, D]; } block entry { return; }")
    with pytest.raises(e.ModelError, match="the size D must be between 0 and 2147483647, got -1"):
        Model({"D": -1})


def test_f64_is_for_the_cpu() -> None:
    text = "persistent { a: f64[D]; } block entry { return; }"
    assert simulator(text, Device.CPU).make_executor().fetch("a").dtype == mx.float64
    with pytest.raises(e.DeviceError, match="a is f64, which MLX computes only on the CPU"):
        simulator(text, Device.GPU)


@pytest.mark.skipif(mx.is_available(mx.Device(mx.gpu)), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(e.DeviceError, match="MLX has no GPU on this machine"):
        simulator("block entry { return; }", Device.GPU)


# Each changes all state first, and then fails.
STEPS = [
    ("cache.read A[0..9] >> grid;", e.SliceRangeError, "index i of A goes to 8, the slice 0..9 from 0 to 9"),
    ("cache.read A[i..] >> grid;", e.SliceRangeError, "the slice 50.. from 50 to 8"),
    ("cache.read A[0..0 - 9] >> grid;", e.SliceRangeError, "from 0 to -1"),
    ("cache.read A[0 - i..3] >> grid;", e.NegativeIndexError, "a slice of index i of A starts at 0 or more, got -50"),
    ("cache.write x >> A[0 - i];", e.NegativeIndexError, "index i of A is 0 or more, got -50"),
    ("cache.write x >> K[2, 0];", e.GrowthError, "index l of K is @fixed to 2 entries, got index 2"),
    ("cache.read M[4, 0] >> m;", e.GrowthError, "index r of M is @fixed to a count of 3, got 4"),
    ("cache.read M[2, 1] >> m; op matmul(m, m) >> m;", e.OperationError, "matmul of [6, 12], [6, 12]:"),
    ("cache.write wide >> A[1];", e.ShapeError, "an entry of A has the shape [4], got [5]"),
    ("cache.reset M; cache.write m >> M;", e.ShapeError, "M has the shape [4, 2], got [5, 12]"),
    ("op concat(x, x) >> y;", e.ShapeError, "y has the shape [4], got [8]"),
    ("op reshape(x, shape=[2, 2]) >> y;", e.RankError, "y has 1 dimensions, got the shape [2, 2]"),
    ("op add(x, F[9]) >> y;", e.ModelError, "the model has no tensor F.9"),
    ("op add(x, F[1]) >> y;", e.ModelError, "F is f32[4], the model's F.1 is f32[3]"),
    ("op take(w, one) >> y; cache.read A[n / (i - 50)] >> y;", e.DimError, "division by zero"),
    ("op fill(whole, value=-1) >> whole; op take(w, whole) >> m;", e.NegativeIndexError, "is 0 or more, got -1"),
    ("op fill(one, value=4) >> one; op take(w, one) >> y;", e.OperationError, "take of 4 rows has no row 4"),
    ("op fill(one, value=100000000) >> one; op take(w, one) >> y;", e.OperationError, "has no row 100000000"),
    ("op reshape(x, shape=[2147483648]) >> y;", e.OperationError, "reshape of [4]:"),
    ("op attn(m, nohead, nohead) >> m;", e.OperationError, "keys have at least one head and one dimension"),
    ("op attn(nodim, nodim, nodim) >> nodim;", e.OperationError, "keys have at least one head and one dimension"),
    ("cache.write x >> A[99999999999];", e.GrowthError, "index i of A is below 2147483647"),
]


def snapshot(run: Executor) -> list[Any]:
    kept: list[Any] = [
        [name, np.asarray(run.fetch(name)).tolist()] for name in (*run.memory.scalars, *run.memory.tables)
    ]
    return kept + [[sorted(table.entries()), table.sizes, table.counts] for table in run.memory.tables.values()]


@pytest.mark.parametrize(("statement", "error", "message"), STEPS)
def test_a_failed_step_leaves_persistent_memory_unchanged(statement: str, error: type[Exception], message: str) -> None:
    change = """
    assign grid: f32[2, D];
    assign wide: f32[5];
    cache.write x >> A[0];
    cache.write y >> A[n];
    cache.write x >> K[1, n];
    cache.write x >> W;
    cache.increment 3 n;
    cache.increment 1 f;
    cache.read M[1, n] >> m;
    op add(m, m) >> m;
    cache.write m >> M;
    cache.reset K[0];
    """
    late = f"branch go fail pass;\n    return;\n}}\nblock pass {{ return; }}\nblock fail {{\n    {statement}"
    run = graph(change + late).make_executor()
    for step in range(2):
        run.insert(x=mx.full(4, step + 1.0), i=50, go=False)
        run.step()
    before = snapshot(run)
    kept = run.fetch("A")
    run.insert(x=mx.full(4, 9.0), i=50, go=True)
    with pytest.raises(error) as caught:
        run.step()
    assert message in str(caught.value)
    if isinstance(caught.value, e.GraphError):
        assert caught.value.at is not None
        assert statement in str(caught.value)
    assert snapshot(run) == before
    assert run.steps == 2
    run.insert(x=mx.full(4, 3.0), i=50, go=False)
    run.step()
    undisturbed = graph(change + late).make_executor()
    for step in range(3):
        undisturbed.insert(x=mx.full(4, step + 1.0), i=50, go=False)
        undisturbed.step()
    assert snapshot(run) == snapshot(undisturbed)
    assert kept[0].tolist() == [2.0] * 4


def test_an_input_needs_the_declared_dtype_and_shape() -> None:
    run = graph("return;").make_executor()
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"y": mx.zeros(4)}, "y is no dynamic variable, those are x, i, go"),
        ({"x": mx.zeros(5)}, r"x is f32\[4\], got f32\[5\]"),
        ({"x": np.zeros(4)}, r"x is f32\[4\], got f64\[4\]"),
        ({"x": [0.0] * 4}, r"x is f32\[4\], got list"),
        ({"i": 2**31}, r"i is i32\[\], got 2147483648"),
        ({"i": 1.5}, r"i is i32\[\], got 1.5"),
        ({"go": 2}, r"go is bool\[\], got 2"),
    ]
    for values, message in refusals:
        with pytest.raises(e.InputError, match=message):
            run.insert(values)
    with pytest.raises(e.InputError, match="x, i, go must be inserted before each step"):
        run.step()
    run.insert(x=np.zeros(4, np.float32), i=np.int32(3), go=True)
    run.step()
    with pytest.raises(e.InputError, match="must be inserted"):
        run.step()


def test_a_fetch_of_an_empty_variable_is_an_error() -> None:
    run = graph("assign t: f32; return;").make_executor()
    for name in ("y", "x", "t", "F"):
        with pytest.raises(e.InputError, match=f"{name} holds nothing that can be fetched now"):
            run.fetch(name)
    with pytest.raises(e.UnknownNameError, match="there is no variable nothing"):
        run.fetch("nothing")
    with pytest.raises(e.InputError, match="trace=True"):
        run.trace()
