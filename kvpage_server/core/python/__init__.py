"""The core in plain Python: what the compiled one does is what this does."""

from kvpage_server.core.python.gather import AT_ONCE, Outbox
from kvpage_server.core.python.slots import MOST_SPARE, SPARE_FOR, Arena, Part, Slot

__all__ = ["AT_ONCE", "MOST_SPARE", "SPARE_FOR", "Arena", "Outbox", "Part", "Slot"]
