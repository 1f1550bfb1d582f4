"""The core in plain Python: what the compiled one does is what this does."""

from kvpage_server.core.python.pages import NewPages, PageNames, PageSet, look_up
from kvpage_server.core.python.slots import MOST_SPARE, SPARE_FOR, Arena, Part, Slot

__all__ = ["MOST_SPARE", "SPARE_FOR", "Arena", "NewPages", "PageNames", "PageSet", "Part", "Slot", "look_up"]
