"""Tables and tensors that grow behave as a dictionary of numpy arrays would, whatever is done to them in any order."""

from __future__ import annotations

from itertools import product
from typing import Any

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.persistent.errors import GraphError, GrowthError, NegativeIndexError, ShapeError, SliceRangeError
from engine.persistent.graph import DTYPES
from engine.persistent.state import Journal, Layout, Scalar, Table

SHAPE = (2, 3)
Entry = tuple[int, ...]


class Model:
    """Model of a table: arrays by index, a length along each table index, and counts."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.limits = [layout.limit(index) for index in layout.indices]
        self.caps = [layout.limit(index) for index in layout.auto]
        self.clear()

    def clear(self) -> None:
        self.entries: dict[Entry, np.ndarray] = {}
        self.sizes = [limit or 0 for limit in self.limits]
        self.counts = [0] * len(self.caps)

    def copy(self) -> Model:
        other = Model(self.layout)
        other.entries, other.sizes, other.counts = dict(self.entries), list(self.sizes), list(self.counts)
        return other

    @property
    def shape(self) -> Entry:
        grown = [*self.counts, *[0] * (len(SHAPE) - len(self.counts))]
        return tuple(base + count for base, count in zip(SHAPE, grown, strict=True))

    def tensor(self, entry: Entry) -> np.ndarray:
        whole = np.zeros(self.shape, np.float32)
        base = np.full(SHAPE, self.layout.init or 0, np.float32)
        kept = self.entries.get(entry, base)
        whole[tuple(slice(0, size) for size in kept.shape)] = kept
        return whole

    def whole(self) -> np.ndarray:
        whole = np.zeros((*self.sizes, *self.shape), np.float32)
        for entry in product(*map(range, self.sizes)):
            whole[entry] = self.tensor(entry)
        return whole

    def grow(self, selection: list[Any]) -> None:
        """Raises IndexError where the table must refuse."""
        rank = len(self.limits)
        sizes, counts = list(self.sizes), list(self.counts)
        for i, index in enumerate(selection[:rank]):
            if isinstance(index, int):
                if index < 0 or (self.limits[i] is not None and index >= self.limits[i]):
                    raise IndexError
                sizes[i] = max(sizes[i], index + 1)
        if not any(isinstance(index, slice) for index in selection[rank:]):
            for i, count in enumerate(selection[rank:]):
                if count < 0 or (self.caps[i] is not None and count > self.caps[i]):
                    raise IndexError
                counts[i] = max(counts[i], count)
        for i, index in enumerate(selection):
            mixed = i < rank or any(isinstance(other, slice) for other in selection[rank:])
            size = sizes[i] if i < rank else self.shape[i - rank]
            if isinstance(index, slice):
                stop = size if index.stop is None else index.stop + size if index.stop < 0 else index.stop
                if (index.start or 0) < 0 or not (index.start or 0) <= stop <= size:
                    raise IndexError
            elif mixed and i >= rank and not 0 <= index < size:
                raise IndexError
        self.sizes, self.counts = sizes, counts

    def read(self, selection: list[Any]) -> np.ndarray:
        self.grow(selection)
        rank = len(self.limits)
        if not any(isinstance(index, slice) for index in selection[rank:]):
            selection = selection[:rank]
        return self.whole()[tuple(selection)]

    def write(self, selection: list[int], value: np.ndarray) -> None:
        self.grow(selection)
        self.entries[tuple(selection[: len(self.limits)])] = value

    def reset(self, prefix: list[int]) -> None:
        if not prefix:
            self.clear()
        if any(index < 0 or (limit is not None and index >= limit) for index, limit in zip(prefix, self.limits)):  # noqa: B905
            raise IndexError
        for entry in [entry for entry in self.entries if entry[: len(prefix)] == tuple(prefix)]:
            del self.entries[entry]


LAYOUTS = [
    Layout("W", DTYPES["f32"], SHAPE),
    Layout("W", DTYPES["f32"], SHAPE, init=0.5),
    Layout("A", DTYPES["f32"], SHAPE, indices=("i",)),
    Layout("A", DTYPES["f32"], SHAPE, init=-1.0, indices=("i",), fixed=(("i", 3),)),
    Layout("K", DTYPES["f32"], SHAPE, indices=("l", "t")),
    Layout("K", DTYPES["f32"], SHAPE, init=2.0, indices=("l", "t"), fixed=(("l", 2),)),
    Layout("E", DTYPES["f32"], SHAPE, indices=("a", "b", "c")),
    Layout("M", DTYPES["f32"], SHAPE, auto=("r", "c")),
    Layout("M", DTYPES["f32"], SHAPE, init=1.5, auto=("r",), fixed=(("r", 4),)),
    Layout("C", DTYPES["f32"], SHAPE, init=1.5, indices=("l",), auto=("r", "c"), fixed=(("c", 3),)),
]

numbers = st.integers(-1, 5)
bounds = st.none() | st.integers(-3, 6)
slices = st.builds(slice, bounds, bounds)
operations = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "write", "reset", "begin", "fail"]),
        st.lists(numbers | slices, max_size=5),
        st.lists(numbers, max_size=3),
        st.integers(0, 99),
    ),
    max_size=25,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.init}-{layout.fixed}")
@given(operations)
def test_a_table_is_a_dictionary_of_arrays(layout: Layout, steps: list[Any]) -> None:
    journal = Journal()
    table, model = Table(layout, journal), Model(layout)
    before = model.copy()
    journal.begin()
    shown: list[tuple[mx.array, np.ndarray]] = []  # results of reads do not change
    for what, selection, scalars, seed in steps:
        if what == "begin":
            mx.eval(journal.arrays())
            journal.begin()
            before = model.copy()
        elif what == "fail":
            journal.rollback()
            model = before.copy()
        elif what == "read":
            chosen = selection[: len(layout.names)]
            try:
                wanted = model.read(chosen)
            except IndexError:
                with pytest.raises((NegativeIndexError, SliceRangeError, GrowthError)):
                    table.read(chosen)
            else:
                found = table.read(chosen)
                assert found.shape == wanted.shape
                shown.append((found, wanted))
        elif what == "write":
            entry = [*scalars, 0, 1, 2][: len(layout.indices)] + scalars[: len(layout.auto)]
            try:
                model.grow(entry)
            except IndexError:
                with pytest.raises((NegativeIndexError, GrowthError)):
                    table.write(entry, mx.zeros(model.shape))
            else:
                value = np.random.default_rng(seed).random(model.shape, np.float32)
                model.write(entry, value)
                table.write(entry, mx.array(value))
        else:
            prefix = scalars[: len(layout.indices)]
            try:
                model.reset(prefix)
            except IndexError:
                with pytest.raises((NegativeIndexError, GrowthError)):
                    table.reset(prefix)
            else:
                table.reset(prefix)
        assert (table.sizes, table.counts) == (model.sizes, model.counts)
        assert set(table.entries()) == set(model.entries)
    for found, wanted in shown:
        assert np.array_equal(np.asarray(found), wanted)
    whole = table.read(())
    assert np.array_equal(np.asarray(whole), model.whole())


def table(**options: Any) -> Table:
    journal = Journal()
    return Table(Layout("A", DTYPES["f32"], (2,), **options), journal)


def test_a_slice_of_ten_rows() -> None:
    rows = table(indices=("i",))
    for i in range(10):
        rows.write((i,), mx.array([i, -i], dtype=mx.float32))
    assert rows.read(()).shape == (10, 2)
    assert rows.read((slice(0, 5),)).shape == (5, 2)
    assert rows.read((slice(2, 5),))[:, 0].tolist() == [2, 3, 4]
    assert rows.read((slice(0, -3),)).shape == (7, 2)
    assert rows.read((slice(None, None),)).shape == (10, 2)
    assert rows.read((9,)).tolist() == [9, -9]


def test_reading_an_entry_extends_the_table_and_a_slice_does_not() -> None:
    rows = table(indices=("i",), init=3.0)
    assert rows.read((4,)).tolist() == [3, 3]
    assert rows.sizes == [5]
    with pytest.raises(SliceRangeError, match=r"index i of A goes to 5, the slice 2\.\.6"):
        rows.read((slice(2, 6),))
    assert rows.sizes == [5]


def test_invalid_accesses_are_refused() -> None:
    rows = table(indices=("i", "j"), fixed=(("i", 2),))
    one = mx.zeros(2)
    refusals: list[tuple[type[GraphError], Any]] = [
        (GrowthError, lambda: rows.write((2, 0), one)),
        (GrowthError, lambda: rows.read((0, 2**31))),
        (NegativeIndexError, lambda: rows.write((0, -1), one)),
        (NegativeIndexError, lambda: rows.read((slice(-1, 2),))),
        (SliceRangeError, lambda: rows.read((slice(2, 1),))),
        (SliceRangeError, lambda: rows.read((slice(0, 3),))),
        (ShapeError, lambda: rows.write((0, 0), mx.zeros((1, 2)))),
        (ShapeError, lambda: rows.write((0, 0), mx.zeros(3))),
    ]
    for error, refused in refusals:
        with pytest.raises(error):
            refused()
    with pytest.raises(GrowthError, match="index i of A is @fixed to 2 entries, got index 5"):
        rows.read((5, 0))


def test_a_count_may_equal_its_limit() -> None:
    matrix = table(auto=("r",), fixed=(("r", 4),))
    assert matrix.read((4,)).shape == (6,)
    with pytest.raises(GrowthError, match="index r of A is @fixed to a count of 4, got 5"):
        matrix.read((5,))


def test_an_impossible_index_is_refused_at_once() -> None:
    rows = table(indices=("i",))
    with pytest.raises(GrowthError, match="this machine has"):
        Table(Layout("A", DTYPES["f32"], (2**20,), indices=("i",)), Journal()).write((2**30,), mx.zeros(2**20))
    assert rows.sizes == [0]


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.range])
def test_counting_wraps_as_the_dtype_does(name: str) -> None:
    dtype = DTYPES[name]
    low, high = dtype.range or (0, 0)
    scalar = Scalar(Layout("n", dtype, (), init=high), Journal())
    scalar.increment(1)
    assert scalar.index() == low == scalar.read().item()
    scalar.increment(-3)
    assert scalar.index() == high - 2
    scalar.reset()
    assert scalar.read().dtype == dtype.mlx
    assert scalar.index() == high == scalar.read().item()


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_floats_count_in_their_own_precision(name: str) -> None:
    with mx.stream(mx.cpu):
        scalar = Scalar(Layout("n", DTYPES[name], (), init=0.5), Journal())
        scalar.increment(2)
        scalar.increment(-1)
        assert scalar.read().dtype == DTYPES[name].mlx
        assert scalar.read().item() == 1.5


def test_appending_copies_nothing() -> None:
    rows = Table(Layout("A", DTYPES["f32"], (16,), indices=("i",)), journal := Journal())
    rows.write((4095,), mx.zeros(16))
    rows.write((4096,), mx.zeros(16))
    mx.eval(journal.arrays())
    lane = rows._lanes[()]
    address = np.asarray(lane._array).ctypes.data
    for i in range(4097, 4105):
        journal.begin()
        rows.write((i,), mx.full(16, i, dtype=mx.float32))
        tail = rows.read((slice(i - 1, i + 1),))
        mx.eval(journal.arrays(), tail)
        assert tail[:, 0].tolist() == [i - 1 if i > 4097 else 0, i]
        assert np.asarray(lane._array).ctypes.data == address
        del tail
