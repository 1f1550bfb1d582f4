"""The compiled core. It can be imported where it was built."""

from kvpage_server.core.native.pages import NewPages, PageNames, PageSet, look_up
from kvpage_server.core.native.slots import Arena, Part, Slot
from kvpage_server.core.python import MOST_SPARE, SPARE_FOR

__all__ = ["MOST_SPARE", "SPARE_FOR", "Arena", "NewPages", "PageNames", "PageSet", "Part", "Slot", "look_up"]
