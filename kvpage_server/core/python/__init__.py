"""The core in plain Python: what the compiled one does is what this does."""

from kvpage_server.core.python.frames import Parser, Scratch
from kvpage_server.core.python.gather import AT_ONCE, Outbox
from kvpage_server.core.python.pages import NewPages, PageNames, PageSet, look_up
from kvpage_server.core.python.slots import MOST_SPARE, SPARE_FOR, Arena, Part, Slot
from kvpage_server.core.python.words import Words

__all__ = [
    "AT_ONCE",
    "MOST_SPARE",
    "SPARE_FOR",
    "Arena",
    "NewPages",
    "Outbox",
    "PageNames",
    "PageSet",
    "Parser",
    "Part",
    "Scratch",
    "Slot",
    "Words",
    "look_up",
]
