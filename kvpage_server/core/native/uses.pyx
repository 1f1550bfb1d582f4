"""Queues of units in columns. The reference implementation, `core/python/lru.py`, documents the functions.

Costs: for each unit one lookup in a dict, and a few writes to the columns, without Python objects.
"""

from cpython.dict cimport PyDict_SetItem
from cpython.object cimport PyObject

from kvpage_server.core.python.lru import SLOT_BITS as _SLOT_BITS

cdef extern from "Python.h":
    PyObject *PyDict_GetItemWithError(object, object) except? NULL

cdef int SLOT_BITS = _SLOT_BITS


cdef inline void link_last(int[::1] before, int[::1] after, int place, int queue) noexcept:
    """Insert a place at the end of a queue: before the queue's head in the ring."""
    cdef int last = before[queue]
    before[place], after[place] = last, queue
    after[last] = before[queue] = place


def touch_many(dict places not None, columns, list units not None, long long now, long long time, long long since):
    cdef int[::1] before = columns.before, after = columns.after
    cdef signed char[::1] queues = columns.queue
    cdef long long[::1] at = columns.at, counted = columns.counted, last = columns.last
    cdef list new = [], due = [], moved = []
    cdef PyObject *found
    cdef int place, queue, from_queue = 0
    cdef long long slot, from_slot = 0, count = 0
    for unit in units:
        found = PyDict_GetItemWithError(places, unit)
        if found == NULL:
            new.append(unit)
            continue
        place = <object>found
        if counted[place] <= since:
            due.append(unit)
            continue
        # Move the unit to the end of its queue.
        queue, slot = queues[place], last[place] >> SLOT_BITS
        after[before[place]], before[after[place]] = after[place], before[place]
        link_last(before, after, place, queue)
        at[place], last[place] = now, time
        # Count the move. Consecutive moves from the same queue and slot of time have one item.
        if count and (queue != from_queue or slot != from_slot):
            moved.append((from_queue, from_slot, count))
            count = 0
        from_queue, from_slot = queue, slot
        count += 1
    if count:
        moved.append((from_queue, from_slot, count))
    return new, due, moved


def enter(
    dict places not None,
    list units not None,
    list free not None,
    columns,
    list new not None,
    int queue,
    long long now,
    long long time,
):
    cdef int[::1] before = columns.before, after = columns.after, parent = columns.parent, children = columns.children
    cdef signed char[::1] queues = columns.queue
    cdef unsigned char[::1] uses = columns.uses
    cdef long long[::1] at = columns.at, counted = columns.counted, last = columns.last
    cdef int place
    for unit in new:
        if PyDict_GetItemWithError(places, unit) != NULL:
            continue
        number = free.pop()
        place = number
        PyDict_SetItem(places, unit, number)
        units[place] = unit
        time += 1
        queues[place], uses[place] = <signed char>queue, 1
        at[place] = counted[place] = now
        last[place] = time
        parent[place] = children[place] = 0
        link_last(before, after, place, queue)
    return time
