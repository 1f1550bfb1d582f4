"""Persistent memory at run time: scalars, tables with their entries, and the journal, which undoes a failed step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import add

import mlx.core as mx

from .errors import GrowthError, NegativeIndexError, ShapeError, SliceRangeError
from .graph import DType

# -- The undo log of a step: every change to persistent memory records how to undo it ----------------------------------


class Journal:
    """Undo log of one step, and the arrays that MLX has to evaluate at its end. Every change is recorded here."""

    def __init__(self) -> None:
        self.step = 0
        self._undo: list[Callable[[], None]] = []
        self._seen: set[Hashable] = set()
        self._pending: dict[Hashable, Callable[[], mx.array | None]] = {}

    def begin(self) -> None:
        """Make all changes final, and begin the log of the next step."""
        self.step += 1
        self._undo.clear()
        self._seen.clear()
        self._pending.clear()

    def record(self, undo: Callable[[], None]) -> None:
        """Add a function that undoes a change. `rollback` calls these functions in reverse order."""
        self._undo.append(undo)

    def first(self, what: Hashable) -> bool:
        """Note a change of `what`. Return whether it is the first one in this step, which has to be recorded."""
        if what in self._seen:
            return False
        self._seen.add(what)
        return True

    def pending(self, what: Hashable, array: Callable[[], mx.array | None]) -> None:
        """Note that the array of `what` has to be evaluated at the end of the step, when `array` is called to return
        it.

        A later call for the same `what` replaces this one.
        """
        self._pending[what] = array

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate at the end of the step."""
        return [found for array in self._pending.values() if (found := array()) is not None]

    def rollback(self) -> None:
        """Undo all changes since `begin`, the last one first."""
        for undo in reversed(self._undo):
            undo()
        arrays = self.arrays()
        self.begin()
        mx.eval(arrays)


# -- Lanes: the entries along a table's last index, in one array -------------------------------------------------------
#
# The array of a lane has a capacity, which doubles when it is exceeded, so n appends cost O(n). A slice of the array is
# a view. MLX changes an array in place if it has no other reference, so an entry must be written before views are
# taken. Steps usually write an entry and then read slices, and the views are dropped when the next step begins. If a
# view still exists at a write, MLX copies the array once, and the view keeps the old data.

Literal = bool | int | float | None
MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Lane:
    """The entries of a table along its last index, in one growing array. All have the same shape; some are written."""

    def __init__(self, dtype: DType, shape: tuple[int, ...], init: Literal, journal: Journal) -> None:
        self._dtype = dtype
        self._shape = shape
        self._init = init
        self._journal = journal
        self._array = self._fill(0)  # [capacity, *shape]; unwritten entries have the init value
        self._written = bytearray()  # a byte for each entry of the array: 1 if it is written
        self._changed_in = -1  # the journal's step of the last change

    def written(self, index: int) -> bool:
        return index < len(self._written) and bool(self._written[index])

    def indices(self) -> list[int]:
        """Return the indices of the written entries."""
        return [index for index, written in enumerate(self._written) if written]

    def entry(self, index: int) -> mx.array:
        """Return one entry: a copy, or the init value if it was not written."""
        if not self.written(index):
            return self._dtype.full(self._shape, self._init)
        return self._array[index] if self._changed_in == self._journal.step else self._copy(index)

    def slice(self, start: int, stop: int) -> mx.array:
        """Return the entries from `start` up to, but not including, `stop`, ``[stop - start, *shape]``.

        It is a view unless `stop` is beyond the capacity.
        """
        room = len(self._written)
        if stop <= room:
            return self._array[start:stop]
        if start >= room:
            return self._fill(stop - start)
        return mx.concatenate([self._array[start:], self._fill(stop - room)])

    def put(self, index: int, value: mx.array) -> None:
        self._reserve(index + 1)
        journal = self._journal
        if journal.first((self, index)):
            before = self._copy(index) if self.written(index) else None
            journal.record(lambda: self._restore(index, before))
        self._changed_in = journal.step
        self._set(index, value)
        self._written[index] = 1
        journal.pending(self, lambda: self._array)

    def clear(self, index: int) -> None:
        if self.written(index):
            self.put(index, self._dtype.full(self._shape, self._init))
            self._written[index] = 0

    def load(self, start: int, values: mx.array) -> None:
        """Set consecutive entries ``[n, *shape]`` from `start` on, without a record in the journal. Called when an
        instance is loaded.
        """
        self._reserve(start + len(values))
        self._array[start : start + len(values)] = values
        self._written[start : start + len(values)] = b"\1" * len(values)

    def _fill(self, count: int) -> mx.array:
        return self._dtype.full((count, *self._shape), self._init)

    def _copy(self, index: int) -> mx.array:
        """Return an evaluated copy of an entry. A view would prevent a change of the array in place."""
        copy = self._array[index]  # a gather, which copies
        mx.eval(copy)
        return copy

    def _set(self, index: int, value: mx.array) -> None:
        self._array[index : index + 1] = mx.expand_dims(value, 0)

    def _restore(self, index: int, before: mx.array | None) -> None:
        self._set(index, self._dtype.full(self._shape, self._init) if before is None else before)
        self._written[index] = before is not None

    def _reserve(self, count: int) -> None:
        room = len(self._written)
        if count > room:
            more = max(count, 2 * room) - room
            if (nbytes := (room + more) * math.prod(self._shape) * self._dtype.itemsize) > MEMORY_BYTES:
                raise GrowthError(f"{count} entries would take {nbytes} bytes, this machine has {MEMORY_BYTES}")
            self._array = mx.concatenate([self._array, self._fill(more)])
            self._written.extend(bytes(more))


# -- Tables: one persistent tensor, or several with indices ------------------------------------------------------------
#
# The declaration selects one of three kinds:
#
# * ``W: f32[D]``: one tensor without indices.
# * ``K(l, t): f16[H, Dh] @table``: a tensor for every (l, t). The last index selects an entry of a `Lane`, the others
#   select the lane. An index has the length that its highest scalar value requires, or always its limit of @fixed.
# * ``M(r, c): f32[D, H] @auto_dim(r, c)``: a tensor with the dimensions ``[D + count of r, H + count of c]``; with
#   @table a table of such tensors, which share the counts. Each tensor keeps the shape in which it was written, and is
#   padded with zeros when it is read.

Selection = Sequence[int | slice]  # slices have no step; a stop below 0 counts from the end
Entry = tuple[int, ...]  # the table indices of one tensor
Shape = tuple[int, ...]
MAX_DIM = 2**31 - 1  # the largest size in MLX


@dataclass(frozen=True, slots=True)
class Layout:
    """A persistent variable's declaration, with its sizes resolved."""

    name: str
    dtype: DType
    shape: Shape  # of a tensor, before auto_dim
    init: Literal = None
    indices: tuple[str, ...] = ()  # of the table
    auto: tuple[str, ...] = ()  # of auto_dim; the i-th index grows dimension i
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All indices in the order of an access: those of the table, then those of auto_dim."""
        return self.indices + self.auto

    @property
    def is_scalar(self) -> bool:
        return not self.names and not self.shape

    def limit(self, index: str) -> int | None:
        """Return the limit of @fixed for an index; None without one."""
        return dict(self.fixed).get(index)


class Table:
    """A persistent tensor, or a table of tensors by index. The journal can undo changes until its next `begin`.

    Methods do not check the number of indices, the positions of slices, and the dtypes of writes; the compiler has.
    """

    def __init__(self, layout: Layout, journal: Journal) -> None:
        self.layout = layout
        self.dirty: set[Entry] = set()  # written or reset since the last save
        self._journal = journal
        self._limits = [layout.limit(index) for index in layout.names]
        self.load_lengths(self._first_sizes(), [0] * len(layout.auto))
        self._in_lanes = bool(layout.indices) and not layout.auto
        self._lanes: dict[Entry, Lane] = {}
        self._cells: dict[Entry, mx.array] = {}  # the tensors, of a table without lanes

    def size(self, index: str) -> int:
        """Return the length along a table index, or the count (the number of added elements) of an auto_dim index."""
        if index in self.layout.auto:
            return self.counts[self.layout.auto.index(index)]
        return self.sizes[self.layout.indices.index(index)]

    # -- operations of graphs ------------------------------------------------------------------------------------------

    def read(self, selection: Selection) -> mx.array:
        """Return the selected tensors: an axis for each slice and each omitted table index, then the axes of a tensor.

        A scalar table index beyond the end lengthens the table, and a scalar auto_dim index beyond the end grows the
        tensors; a slice does neither. Raises NegativeIndexError, SliceRangeError or GrowthError.
        """
        layout, rank = self.layout, len(self.layout.indices)
        table, auto = selection[:rank], selection[rank:]
        sizes = self._lengthened([index if isinstance(index, int) else None for index in table])
        axes: list[int | slice] = [
            index if isinstance(index, int) else self._within(layout.indices[i], index, sizes[i])
            for i, index in enumerate(table)
        ]
        axes += [slice(0, size) for size in sizes[len(table) :]]
        if slice not in map(type, auto):
            self._set_lengths(sizes, self._grown(self._scalars(auto)))
            return self._gather(axes, ())
        spans = tuple(self._within(*given) for given in zip(layout.auto, auto, self.shape, strict=False))
        self._set_lengths(sizes, self.counts)
        entries = self._gather(axes, ())
        return entries[(slice(None),) * (entries.ndim - len(self.shape)) + spans]

    def write(self, selection: Selection, value: mx.array) -> None:
        """Write one tensor. It must have the shape of the table's tensors after growth to the indices in `selection`.

        Raises ShapeError, NegativeIndexError or GrowthError.
        """
        layout, rank = self.layout, len(self.layout.indices)
        entry, auto = self._scalars(selection[:rank]), self._scalars(selection[rank:])
        sizes, counts = self._lengthened(entry), self._grown(auto)
        shape = self.shape if counts is self.counts else self._shape(counts)
        if value.shape != shape:
            of = f"an entry of {layout.name}" if layout.indices else layout.name
            raise ShapeError(f"{of} has the shape {list(shape)}, got {list(value.shape)}")
        if self._in_lanes:
            self._lane(entry[:-1]).put(entry[-1], value)
        else:
            self._put(entry, value)
        self.dirty.add(entry)
        self._set_lengths(sizes, counts)

    def reset(self, selection: Selection = ()) -> None:
        """Return to the unwritten state: without `selection` the whole table, with its lengths and counts, otherwise
        the entries whose indices begin with `selection`, without a change of the table's length.

        Raises NegativeIndexError or GrowthError.
        """
        layout = self.layout
        prefix = self._scalars(selection)
        self._lengthened(prefix)
        if not prefix:
            self._set_lengths(self._first_sizes(), [0] * len(self.counts))
        for entry in [*self.entries(prefix)]:
            self.dirty.add(entry)
            if self._in_lanes and len(prefix) == len(layout.indices):
                self._lanes[entry[:-1]].clear(entry[-1])
        for cell in [cell for cell in self._cells if cell[: len(prefix)] == prefix]:
            self._put(cell, None)
        if len(prefix) < len(layout.indices):
            for lane in [lane for lane in self._lanes if lane[: len(prefix)] == prefix]:
                self._drop(lane)

    # -- queries of stores and listings --------------------------------------------------------------------------------

    def entries(self, prefix: Entry = ()) -> Iterator[Entry]:
        """Yield the indices of the written entries that begin with `prefix`."""
        for cell in self._cells:
            if cell[: len(prefix)] == prefix:
                yield cell
        for lane, held in self._lanes.items():
            if lane == prefix[:-1] and len(prefix) == len(self.layout.indices):
                yield from [prefix] if held.written(prefix[-1]) else []
            elif lane[: len(prefix)] == prefix:
                yield from ((*lane, index) for index in held.indices())

    def stored_runs(self, entries: Iterable[Entry]) -> Iterator[tuple[list[Entry], mx.array | None]]:
        """Group entries into runs of consecutive indices. Yield the indices of each run, and its tensors ``[n, ...]``,
        or None for a run of unwritten entries.
        """
        for written, several in groupby(sorted(entries), self._is_written):
            if not written:
                yield list(several), None
            elif not self._in_lanes:
                yield from (([entry], self._cells[entry][None]) for entry in several)
            else:
                for lane, members in groupby(several, lambda entry: entry[:-1]):
                    for run in _consecutive([entry[-1] for entry in members]):
                        tensors = self._lanes[lane].slice(run[0], run[-1] + 1)
                        yield [(*lane, index) for index in run], tensors

    def load(self, first: Entry, tensors: mx.array) -> None:
        """Set consecutive entries ``[n, ...]`` from `first` on, without a record in the journal. Called when an
        instance is loaded.
        """
        if self._in_lanes:
            self._lane(first[:-1]).load(first[-1], tensors)
        else:
            for i, tensor in enumerate(tensors):
                self._cells[(*first[:-1], first[-1] + i) if first else ()] = tensor

    def load_lengths(self, sizes: Sequence[int], counts: Sequence[int]) -> None:
        """Set the length along each table index, and the count of each auto_dim index, without a record in the
        journal.
        """
        self.sizes, self.counts = list(sizes), list(counts)
        self.shape = self._shape(counts)  # of one tensor, after growth

    def nbytes(self) -> int:
        """Return the number of bytes of the written entries."""
        if not self._in_lanes:
            return sum(cell.nbytes for cell in self._cells.values())
        return self.layout.dtype.itemsize * prod(self.shape) * sum(len(lane.indices()) for lane in self._lanes.values())

    # -- indices -------------------------------------------------------------------------------------------------------

    def _first_sizes(self) -> list[int]:
        return [limit or 0 for limit in self._limits[: len(self.layout.indices)]]

    def _scalars(self, selection: Selection) -> Entry:
        return tuple([index for index in selection if isinstance(index, int)])

    def _within(self, name: str, index: int | slice, size: int) -> int | slice:
        """Return an index, or a slice with both ends set, after a check against `size`.

        Raises NegativeIndexError or SliceRangeError.
        """
        where = f"index {name} of {self.layout.name}"
        if isinstance(index, int):
            self._check_positive(name, index)
            if index >= size:
                raise SliceRangeError(f"{where} is below {size}, got {index}")
            return index
        start = 0 if index.start is None else index.start
        stop = size if index.stop is None else index.stop
        if start < 0:
            raise NegativeIndexError(f"a slice of {where} starts at 0 or more, got {start}")
        if stop < 0:
            stop += size
        if not start <= stop <= size:
            given = f"{start}..{index.stop if index.stop is not None else ''}"
            raise SliceRangeError(f"{where} goes to {size}, the slice {given} from {start} to {stop}")
        return slice(start, stop)

    def _check_positive(self, name: str, index: int) -> None:
        if index < 0:
            raise NegativeIndexError(f"index {name} of {self.layout.name} is 0 or more, got {index}")

    def _lengthened(self, entry: Sequence[int | None]) -> list[int]:
        """Return the lengths along the table indices after growth to `entry`, in which None stands for a slice.

        Raises NegativeIndexError or GrowthError.
        """
        sizes = self.sizes
        for i, index in enumerate(entry):
            if index is None or 0 <= index < sizes[i]:
                continue
            name, limit = self.layout.indices[i], self._limits[i]
            self._check_positive(name, index)
            if limit is not None:
                raise GrowthError(f"index {name} of {self.layout.name} is @fixed to {limit} entries, got index {index}")
            if index >= MAX_DIM:
                raise GrowthError(f"index {name} of {self.layout.name} is below {MAX_DIM}, got {index}")
            sizes = [*sizes[:i], index + 1, *sizes[i + 1 :]]
        return sizes

    def _grown(self, auto: Sequence[int]) -> list[int]:
        """Return the counts of the auto_dim indices after growth to the scalars `auto`. Raises NegativeIndexError or
        GrowthError.
        """
        if not auto:
            return self.counts
        counts = list(self.counts)
        for i, count in enumerate(auto):
            name = self.layout.auto[i]
            self._check_positive(name, count)
            limit = self._limits[len(self.layout.indices) + i]
            if limit is not None and count > limit:
                raise GrowthError(f"index {name} of {self.layout.name} is @fixed to a count of {limit}, got {count}")
            if count + self.layout.shape[i] > MAX_DIM:
                raise GrowthError(f"a dimension is at most {MAX_DIM}, got {self.layout.name} with a count of {count}")
            counts[i] = max(counts[i], count)
        return counts

    def _shape(self, counts: Sequence[int]) -> Shape:
        base = self.layout.shape
        return (*map(add, base, counts), *base[len(counts) :])

    def _set_lengths(self, sizes: list[int], counts: list[int]) -> None:
        if sizes is not self.sizes or counts is not self.counts:
            before = self.sizes, self.counts
            self._journal.record(lambda: self.load_lengths(*before))
            self.load_lengths(sizes, counts)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _gather(self, axes: Sequence[int | slice], entry: Entry) -> mx.array:
        """Return the tensors that `axes` select. `entry` are the indices of the axes that were processed already."""
        depth = len(entry)
        if depth == len(axes):
            return self._lane_entry(entry) if self._in_lanes else self._cell(entry)
        axis = axes[depth]
        if isinstance(axis, int):
            return self._gather(axes, (*entry, axis))
        if self._in_lanes and depth == len(axes) - 1:
            lane = self._lanes.get(entry)
            return lane.slice(axis.start, axis.stop) if lane else self._initial((_len(axis), *self.shape))
        if not _len(axis):
            lengths = [_len(rest) for rest in axes[depth:] if isinstance(rest, slice)]
            return self._initial((*lengths, *self.shape))
        return mx.stack([self._gather(axes, (*entry, index)) for index in range(axis.start, axis.stop)])

    def _lane_entry(self, entry: Entry) -> mx.array:
        lane = self._lanes.get(entry[:-1])
        return lane.entry(entry[-1]) if lane else self._initial(self.shape)

    def _cell(self, entry: Entry) -> mx.array:
        cell = self._cells.get(entry)
        if cell is None:
            cell = self._initial(self.layout.shape)
        grown = [(0, now - then) for now, then in zip(self.shape, cell.shape, strict=True)]
        return mx.pad(cell, grown) if any(more for _, more in grown) else cell

    def _initial(self, shape: Shape) -> mx.array:
        return self.layout.dtype.full(shape, self.layout.init)

    def _is_written(self, entry: Entry) -> bool:
        if not self._in_lanes:
            return entry in self._cells
        return entry[:-1] in self._lanes and self._lanes[entry[:-1]].written(entry[-1])

    def _lane(self, prefix: Entry) -> Lane:
        lane = self._lanes.get(prefix)
        if lane is None:
            lane = self._lanes[prefix] = Lane(self.layout.dtype, self.shape, self.layout.init, self._journal)
            self._journal.record(lambda: self._lanes.__delitem__(prefix))
        return lane

    def _drop(self, prefix: Entry) -> None:
        lane = self._lanes.pop(prefix)
        self._journal.record(lambda: self._lanes.__setitem__(prefix, lane))

    def _put(self, entry: Entry, value: mx.array | None) -> None:
        before = self._cells.get(entry)
        self._journal.record(lambda: self._keep(entry, before))
        self._keep(entry, value)
        self._journal.pending((id(self), entry), lambda: self._cells.get(entry))

    def _keep(self, entry: Entry, value: mx.array | None) -> None:
        if value is None:
            self._cells.pop(entry, None)
        else:
            self._cells[entry] = value


def _len(axis: slice) -> int:
    return int(axis.stop - axis.start)


def _consecutive(indices: Sequence[int]) -> Iterator[list[int]]:
    """Group sorted indices into runs of consecutive ones."""
    for _, run in groupby(enumerate(indices), lambda at: at[1] - at[0]):
        yield [index for _, index in run]


# -- All persistent memory of one instance: its scalars, its tensors and its tables ------------------------------------


class Scalar:
    """One persistent number. Integers and bools are Python integers, because a step counts with them and uses them as
    indices.
    """

    def __init__(self, layout: Layout, journal: Journal) -> None:
        self.layout = layout
        self._journal = journal
        self._value: mx.array | int = self._initial()

    def read(self) -> mx.array:
        """Return the number, an array without dimensions."""
        return self._value if isinstance(self._value, mx.array) else self.layout.dtype.number(self._value)

    def index(self) -> int:
        assert isinstance(self._value, int)
        return self._value

    def write(self, value: mx.array) -> None:
        """Set the number to a value of its dtype. Raises ShapeError for a value with dimensions."""
        if value.shape:
            raise ShapeError(f"{self.layout.name} is a scalar, got the shape {list(value.shape)}")
        self._set(value if self.layout.dtype.is_float else value.item())  # type: ignore[arg-type]

    def increment(self, amount: int) -> None:
        """Add `amount`. Integers wrap."""
        dtype = self.layout.dtype
        if isinstance(self._value, mx.array):
            self._set(self._value + mx.array(float(amount), dtype=dtype.mlx))
        else:
            self._set(dtype.wrap(self._value + amount))

    def reset(self) -> None:
        """Set the number to the value of @init, or to zero."""
        self._set(self._initial())

    def load(self, value: mx.array | int) -> None:
        """Set the number, without a record in the journal."""
        self._value = value

    def _initial(self) -> mx.array | int:
        if self.layout.dtype.is_float:
            return self.layout.dtype.full((), self.layout.init)
        return self.layout.init or 0  # type: ignore[return-value]

    def _set(self, value: mx.array | int) -> None:
        before = self._value
        self._journal.record(lambda: self.load(before))
        self._value = value
        if isinstance(value, mx.array):
            self._journal.pending(self, lambda: self._value if isinstance(self._value, mx.array) else None)


class Memory:
    """All persistent variables of an instance, by name. `journal.rollback` undoes their changes since
    `journal.begin`.
    """

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.journal = Journal()
        self.scalars: dict[str, Scalar] = {}
        self.tables: dict[str, Table] = {}
        for layout in layouts:
            if layout.is_scalar:
                self.scalars[layout.name] = Scalar(layout, self.journal)
            else:
                self.tables[layout.name] = Table(layout, self.journal)

    def read(self, name: str) -> mx.array:
        """Return the whole variable."""
        return self.scalars[name].read() if name in self.scalars else self.tables[name].read(())
