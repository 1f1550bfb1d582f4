"""Queues of evictable units (blocks and strings) in columns: one call inserts or touches a batch of units.

A unit has a *place*: an index into the columns, each of which has one field of every unit. A queue is a doubly linked
ring of places, with a place of its own as head. Place 0 stands for no place, and is its own neighbour. The policy
selects the queue of each unit: see `store/eviction/queues.py`. Costs: O(1) for each unit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

SLOT_BITS = 7  # a slot of time is 2**7 inserted units


class Columns(NamedTuple):
    """The columns, each with one field of every place.

    There are two clocks: monotonic seconds, and the number of units that were inserted so far.
    """

    before: array[int]  # place before it in its queue; 0 if it is in no queue
    after: array[int]  # place after it in its queue
    queue: array[int]  # head of the queue that the unit belongs to
    at: array[int]  # last use, in seconds
    counted: array[int]  # last use that was counted in `uses`, in seconds
    last: array[int]  # last use, as the number of units that were inserted until then
    uses: array[int]  # number of counted uses
    parent: array[int]  # place of the unit that this one extends; 0 for none
    children: array[int]  # number of units that extend this one


def touch_many(
    places: dict[Any, int], columns: Columns, units: Sequence[Any], now: int, time: int, since: int
) -> tuple[list[Any], list[Any], list[tuple[int, int, int]]]:
    """Move used units to the ends of their queues, except units that need a decision of the policy.

    `places` has the place of each unit. The use is at `now`, in seconds, and at `time`, in inserted units. A unit whose
    last counted use was at `since` seconds or before is not moved, because the policy has to count this use. Return
    three lists: the units without a place; the units that were not moved; and the moves as (head of the queue, slot of
    time of the use before, number of consecutive units). A slot of time has 2**SLOT_BITS inserted units.
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
    """Insert new units at the end of the queue with head `queue`, each with one use. Skip units that have a place.

    `places` has the place of each unit, and `units` the unit of each place. The places are taken from the end of
    `free`, which must have enough. `now` is in seconds. Each inserted unit increases `time` by one; return the last
    time.
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
    """Insert a place at the end of a queue: before the queue's head in the ring."""
    last = columns.before[queue]
    columns.before[place], columns.after[place] = last, queue
    columns.after[last] = columns.before[queue] = place


def _unlink(columns: Columns, place: int) -> None:
    """Remove a place from its queue. A place in no queue is not changed, because place 0 is its own neighbour."""
    before, after = columns.before[place], columns.after[place]
    columns.after[before], columns.before[after] = after, before
