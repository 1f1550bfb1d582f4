"""What knows bytes, slots and pages, and no command, user, policy or tier.

It is there twice: compiled, and in plain Python, for where it cannot be built. Both have the same names, and `NAME`
says which one this is: "native" or "python". KVPAGE_CORE=python asks for the plain one.
"""

from typing import TYPE_CHECKING

from kvpage_server.core.choice import NAME, REASON
from kvpage_server.core.protocol import Limits, ProtocolError
from kvpage_server.core.python.words import Argument, Command

if TYPE_CHECKING or NAME == "python":
    from kvpage_server.core.python import (
        AT_ONCE,
        Arena,
        Bodies,
        Callee,
        Caller,
        Chunk,
        Columns,
        Memory,
        NewPages,
        Outbox,
        Outgoing,
        PageKeys,
        PageNames,
        PageSet,
        Parser,
        Part,
        Scratch,
        SentPages,
        Slot,
        Words,
        digest,
        enter,
        fill_digests,
        look_up,
        use_again,
    )
else:
    from kvpage_server.core.native import (
        AT_ONCE,
        Arena,
        Bodies,
        Callee,
        Caller,
        Chunk,
        Columns,
        Memory,
        NewPages,
        Outbox,
        Outgoing,
        PageKeys,
        PageNames,
        PageSet,
        Parser,
        Part,
        Scratch,
        SentPages,
        Slot,
        Words,
        digest,
        enter,
        fill_digests,
        look_up,
        use_again,
    )

__all__ = [
    "AT_ONCE",
    "NAME",
    "REASON",
    "Arena",
    "Argument",
    "Bodies",
    "Callee",
    "Caller",
    "Chunk",
    "Columns",
    "Command",
    "Limits",
    "Memory",
    "NewPages",
    "Outbox",
    "Outgoing",
    "PageKeys",
    "PageNames",
    "PageSet",
    "Parser",
    "Part",
    "ProtocolError",
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
