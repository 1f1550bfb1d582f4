"""One persistent tensor, or a table of them: how it is indexed, grows, is written and reset.

Three kinds in one, by what its declaration says:

* ``W: f32[D]``: no indices, one tensor.
* ``K(l, t): f16[H, Dh] @table``: a tensor for every (l, t). The last index runs along a `Lane`, a lane for each of the
  others. It is as long as the highest scalar index that was used, or as @fixed says from the start.
* ``M(r, c): f32[D, H] @auto_dim(r, c)``: a tensor whose dimensions are ``[D + count of r, H + count of c]``; with
  @table a table of such, which share their counts. Each is kept in the shape in which it was written, and padded with
  zeros when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import add

import mlx.core as mx

from engine.persistent.dtypes import DType
from engine.persistent.errors import GrowthError, NegativeIndexError, ShapeError, SliceRangeError
from engine.persistent.state.journal import Journal
from engine.persistent.state.lane import Lane, Literal

Selection = Sequence[int | slice]  # slices have no step; a stop below 0 counts from the end
Entry = tuple[int, ...]  # the table indices of one tensor
Shape = tuple[int, ...]
MAX_DIM = 2**31 - 1  # as MLX counts


@dataclass(frozen=True, slots=True)
class Layout:
    """What a declaration says, its sizes resolved."""

    name: str
    dtype: DType
    shape: Shape  # of a tensor, before auto_dim
    init: Literal = None
    indices: tuple[str, ...] = ()  # of the table
    auto: tuple[str, ...] = ()  # the i-th grows dimension i
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All indices, in the order in which they are given."""
        return self.indices + self.auto

    @property
    def is_scalar(self) -> bool:
        return not self.names and not self.shape

    def limit(self, index: str) -> int | None:
        """The limit that @fixed gives an index."""
        return dict(self.fixed).get(index)


class Table:
    """A persistent tensor or table. Every change can be undone until the journal begins its next step.

    How many indices a graph gives, where it may give slices, and the dtypes of what it writes were checked before.
    """

    def __init__(self, layout: Layout, journal: Journal) -> None:
        self.layout = layout
        self.dirty: set[Entry] = set()  # written or reset since the store last asked
        self._journal = journal
        self._limits = [layout.limit(index) for index in layout.names]
        self.load_lengths(self._first_sizes(), [0] * len(layout.auto))
        self._in_lanes = bool(layout.indices) and not layout.auto
        self._lanes: dict[Entry, Lane] = {}
        self._cells: dict[Entry, mx.array] = {}  # where there are no lanes

    def size(self, index: str) -> int:
        """The length along a table index, or the count of an auto_dim index."""
        if index in self.layout.auto:
            return self.counts[self.layout.auto.index(index)]
        return self.sizes[self.layout.indices.index(index)]

    # -- what graphs do ------------------------------------------------------------------------------------------------

    def read(self, selection: Selection) -> mx.array:
        """The tensors selected: an axis for each slice and for each table index not given, then a tensor's own.

        Scalar indices make the table long enough, and scalar auto_dim indices the tensors large enough; slices don't.
        Raises NegativeIndexError, SliceRangeError or GrowthError.
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
        """Write one tensor, of exactly the shape that it has once it has grown. Raises ShapeError, and as `read`."""
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
        """What was never written: all of it, also its length and counts, or the entries that begin with `selection`.

        Entries leave the table as long as it is. Raises NegativeIndexError, GrowthError.
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

    # -- what stores and listings ask ----------------------------------------------------------------------------------

    def entries(self, prefix: Entry = ()) -> Iterator[Entry]:
        """Those that were written, of those that begin with `prefix`."""
        for cell in self._cells:
            if cell[: len(prefix)] == prefix:
                yield cell
        for lane, held in self._lanes.items():
            if lane == prefix[:-1] and len(prefix) == len(self.layout.indices):
                yield from [prefix] if held.written(prefix[-1]) else []
            elif lane[: len(prefix)] == prefix:
                yield from ((*lane, index) for index in held.indices())

    def stored_runs(self, entries: Iterable[Entry]) -> Iterator[tuple[list[Entry], mx.array | None]]:
        """Runs of entries and their tensors ``[n, ...]``, None for those that are not written."""
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
        """Take entries from a store, ``[n, ...]``, from `first` on. For a table that nobody uses yet."""
        if self._in_lanes:
            self._lane(first[:-1]).load(first[-1], tensors)
        else:
            for i, tensor in enumerate(tensors):
                self._cells[(*first[:-1], first[-1] + i) if first else ()] = tensor

    def load_lengths(self, sizes: Sequence[int], counts: Sequence[int]) -> None:
        """Take its length along each index from a store."""
        self.sizes, self.counts = list(sizes), list(counts)
        self.shape = self._shape(counts)  # of one tensor, with all that has grown

    def nbytes(self) -> int:
        """Bytes of the entries that were written."""
        if not self._in_lanes:
            return sum(cell.nbytes for cell in self._cells.values())
        return self.layout.dtype.itemsize * prod(self.shape) * sum(len(lane.indices()) for lane in self._lanes.values())

    # -- indices -------------------------------------------------------------------------------------------------------

    def _first_sizes(self) -> list[int]:
        return [limit or 0 for limit in self._limits[: len(self.layout.indices)]]

    def _scalars(self, selection: Selection) -> Entry:
        return tuple([index for index in selection if isinstance(index, int)])

    def _within(self, name: str, index: int | slice, size: int) -> int | slice:
        """An index with its ends filled in. Raises NegativeIndexError or SliceRangeError."""
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
        """The sizes with which there are such entries. Raises NegativeIndexError or GrowthError."""
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
        """The counts once scalars have been used. Raises NegativeIndexError or GrowthError."""
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
        """The tensors of `axes` from ``entry`` on."""
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
    """Sorted indices, cut where one is missing."""
    for _, run in groupby(enumerate(indices), lambda at: at[1] - at[0]):
        yield [index for _, index in run]
