"""The compiled core. It can be imported where it was built."""

from kvpage_server.core.native.bodies import Bodies
from kvpage_server.core.native.calls import Callee, Caller
from kvpage_server.core.native.digests import digest, fill_digests
from kvpage_server.core.native.frames import Parser, Scratch
from kvpage_server.core.native.gather import Outbox
from kvpage_server.core.native.memory import Memory
from kvpage_server.core.native.outgoing import Outgoing
from kvpage_server.core.native.page_keys import PageKeys
from kvpage_server.core.native.pages import NewPages, PageNames, PageSet, look_up
from kvpage_server.core.native.sent_pages import Chunk, SentPages
from kvpage_server.core.native.slots import Arena, Part, Slot
from kvpage_server.core.native.uses import enter, use_again
from kvpage_server.core.native.words import Words
from kvpage_server.core.python import AT_ONCE, Columns

__all__ = [
    "AT_ONCE",
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
    "look_up",
    "use_again",
]
