"""The compiled core, with the names of the reference implementation. The import fails if it was not built."""

# ruff: noqa: F401

from kvpage_server.core.native.bodies import Bodies
from kvpage_server.core.native.calls import Callee, Caller
from kvpage_server.core.native.coding import decode_matrix, encode_array, encode_matrix
from kvpage_server.core.native.digests import copy_hashed, digest, fill_digests
from kvpage_server.core.native.frames import Parser, Scratch
from kvpage_server.core.native.gather import Outbox
from kvpage_server.core.native.matching import Glob, literal
from kvpage_server.core.native.memory import Memory
from kvpage_server.core.native.outgoing import Outgoing
from kvpage_server.core.native.page_keys import PageKeys
from kvpage_server.core.native.pages import BlockChanges, NewPages, PageNames, PageSet, changed_blocks, filled, look_up
from kvpage_server.core.native.sent_pages import Chunk, SentPages
from kvpage_server.core.native.slots import Arena, Part, Slot
from kvpage_server.core.native.uses import enter, touch_many
from kvpage_server.core.native.words import Words
from kvpage_server.core.python import LONGEST_PART, LONGEST_PATTERN, Columns, __all__
