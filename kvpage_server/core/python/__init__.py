"""The reference implementation of the core, in plain Python. It specifies the behaviour of the compiled core."""

from kvpage_server.core.python.bodies import (
    Bodies,
    Chunk,
    Memory,
    Outbox,
    PageKeys,
    SentPages,
    copy_hashed,
    digest,
    fill_digests,
)
from kvpage_server.core.python.calls import Callee, Caller
from kvpage_server.core.python.coding import (
    LONGEST_PART,
    LONGEST_PATTERN,
    Glob,
    decode_matrix,
    encode_array,
    encode_matrix,
    literal,
)
from kvpage_server.core.python.frames import Parser, Scratch, Words
from kvpage_server.core.python.lru import Columns, enter, touch_many
from kvpage_server.core.python.outgoing import Outgoing
from kvpage_server.core.python.pages import BlockChanges, NewPages, PageNames, PageSet, changed_blocks, filled, look_up
from kvpage_server.core.python.slots import Arena, Part, Slot

__all__ = [
    "LONGEST_PART",
    "LONGEST_PATTERN",
    "Arena",
    "BlockChanges",
    "Bodies",
    "Callee",
    "Caller",
    "Chunk",
    "Columns",
    "Glob",
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
    "changed_blocks",
    "copy_hashed",
    "decode_matrix",
    "digest",
    "encode_array",
    "encode_matrix",
    "enter",
    "fill_digests",
    "filled",
    "literal",
    "look_up",
    "touch_many",
]
