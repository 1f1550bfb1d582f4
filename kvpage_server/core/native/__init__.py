"""The compiled core. It can be imported where it was built."""

from kvpage_server.core.native.frames import Parser, Scratch
from kvpage_server.core.native.slots import Arena, Part, Slot
from kvpage_server.core.native.words import Words
from kvpage_server.core.python import MOST_SPARE, SPARE_FOR

__all__ = [
    "MOST_SPARE",
    "SPARE_FOR",
    "Arena",
    "Parser",
    "Part",
    "Scratch",
    "Slot",
    "Words",
]
