"""The compiled core. It can be imported where it was built."""

from kvpage_server.core.native.frames import Parser, Scratch
from kvpage_server.core.native.gather import Outbox
from kvpage_server.core.native.pages import NewPages, PageNames, PageSet, look_up
from kvpage_server.core.native.slots import Arena, Part, Slot
from kvpage_server.core.native.words import Words
from kvpage_server.core.python import AT_ONCE, MOST_SPARE, SPARE_FOR

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
