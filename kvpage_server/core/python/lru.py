"""Queues of units in columns: inserts and uses of a whole batch at a time.

A unit has a place, and at it a field in each column. A queue is a ring of places, linked in two columns, which begins
and ends with a place of its own. The owner defines the queues, and the queue of each unit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

SLOT_BITS = 7  # a slot of time: 2**7 new units


class Columns(NamedTuple):
    """A field of every place each. Times are in seconds, or the number of units inserted until then."""

    before: array[int]  # neighbours in the queue; 0 when it is in none
    after: array[int]
    queue: array[int]  # where it belongs
    at: array[int]  # last use, in seconds
    counted: array[int]  # last use that counted, in seconds
    last: array[int]  # last use, as a number of inserted units
    uses: array[int]
    parent: array[int]  # the place of the unit that it extends
    children: array[int]  # how many extend it


def touch_many(
    places: dict[Any, int], columns: Columns, units: Sequence[Any], now: int, time: int, since: int
) -> tuple[list[Any], list[Any], list[tuple[int, int, int]]]:
    """Units are used again: each becomes the last of its queue, unless its last use that counted is `since` or older.

    Return the unknown units; the units before `since`, which are not moved; and the moves as (queue, slot of time,
    count in a row).
    """
    new: list[Any] = []
    due: list[Any] = []
    moved: list[tuple[int, int, int]] = []
    for unit in units:
        place = places.get(unit)
        if place is None:
            new.append(unit)
        elif columns.counted[place] <= since:
            due.append(unit)
        else:
            queue, slot = columns.queue[place], columns.last[place] >> SLOT_BITS
            _unlink(columns, place)
            _link_last(columns, place, queue)
            columns.at[place], columns.last[place] = now, time
            same = moved and moved[-1][:2] == (queue, slot)
            moved.append((queue, slot, moved.pop()[2] + 1 if same else 1))
    return new, due, moved


def enter(
    places: dict[Any, int],
    units: list[Any],
    free: list[int],
    columns: Columns,
    new: Sequence[Any],
    queue: int,
    now: int,
    time: int,
) -> int:
    """Insert units at the end of a queue, one per tick from `time` on; return the last tick.

    They get places that are `free`, of which there are enough.
    """
    for unit in new:
        if unit in places:
            continue
        place = free.pop()
        places[unit], units[place] = place, unit
        time += 1
        columns.queue[place], columns.uses[place] = queue, 1
        columns.at[place] = columns.counted[place] = now
        columns.last[place] = time
        columns.parent[place] = columns.children[place] = 0
        _link_last(columns, place, queue)
    return time


def _link_last(columns: Columns, place: int, queue: int) -> None:
    last = columns.before[queue]
    columns.before[place], columns.after[place] = last, queue
    columns.after[last] = columns.before[queue] = place


def _unlink(columns: Columns, place: int) -> None:
    """Take a place out of its queue. A place in no queue is its own neighbour, so nothing changes."""
    before, after = columns.before[place], columns.after[place]
    columns.after[before], columns.before[after] = after, before
