"""The core in plain Python: what the compiled one does is what this does."""

from kvpage_server.core.python.bodies import Bodies
from kvpage_server.core.python.calls import Callee, Caller
from kvpage_server.core.python.digests import digest, fill_digests
from kvpage_server.core.python.frames import Parser, Scratch
from kvpage_server.core.python.gather import Outbox
from kvpage_server.core.python.memory import Memory
from kvpage_server.core.python.outgoing import Outgoing
from kvpage_server.core.python.pages import NewPages, PageNames, PageSet, filled, look_up
from kvpage_server.core.python.sent_pages import Chunk, PageKeys, SentPages
from kvpage_server.core.python.slots import Arena, Part, Slot
from kvpage_server.core.python.uses import Columns, enter, use_again
from kvpage_server.core.python.words import Words

__all__ = [
    "Arena",
    "Bodies",
    "Callee",
    "Caller",
    "Chunk",
    "Columns",
    "Memory",
    "NewPages",
    "Outbox",
    "Outgoing",
    "PageKeys",
    "PageNames",
    "PageSet",
    "Parser",
    "Part",
    "Scratch",
    "SentPages",
    "Slot",
    "Words",
    "digest",
    "enter",
    "fill_digests",
    "filled",
    "look_up",
    "use_again",
]
