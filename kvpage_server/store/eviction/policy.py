"""Which unit is evicted when memory is full. A unit is a whole block of pages, or a string's key.

Reading or writing any page of a block is a use of the block. Policies know units and the order of their uses, not their
sizes: the owner asks for victims as long as it needs room.
"""

from __future__ import annotations

from kvpage_server.store.memory.index import Block

Unit = Block | bytes

BURST = 2  # seconds; closer uses count as one, since a block is written and read page by page


def name_of(unit: Unit) -> int:
    """The name under which a unit is remembered when it is gone; the same when it comes back."""
    return hash((unit.req_id, unit.page)) if isinstance(unit, Block) else hash(unit)
