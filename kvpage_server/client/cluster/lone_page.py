"""Where a page lies that was written alone: in the slot of the block that it would belong to.

So whoever writes the block deletes the block's lone pages with one command that goes with it. If the request has
braces, a page has the key that it has everywhere. Otherwise that key would be in a slot of its own, so it gets braces:
`:` and four letters that are in the same slot as the block's key. No request's name has a `:`.

    kv:{chat}7:0:0:3:1       of a request with braces
    kv:{:BF@I}chat:0:0:3:1   without
"""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache
from typing import Any

import numpy as np

from kvpage_server.client.cluster.block_value import block_key
from kvpage_server.client.cluster.topology import SLOTS, has_tag, slot_of
from kvpage_server.client.page import BlockName
from kvpage_server.page import PageError, PageKey

_FIRST = 0x40  # of the 16 letters @ to O; four of them make a text for each slot
_BRACES = len(b"{:@@@@}")


def lone_request(name: BlockName) -> bytes:
    """The name of the request in the keys of a block's lone pages."""
    return name[0] if has_tag(name[0]) else b"{:%b}%b" % (_letters(slot_of(block_key(name))), name[0])


def lone_key(page: PageKey) -> bytes:
    about = lone_request((page.req_id, page.page)), page.layer, page.head, page.page, page.kv_type
    return b"kv:%b:%d:%d:%d:%d" % about


def lone_page(key: bytes) -> PageKey | None:
    """The page that has this key; None if none has."""
    before, braces = len(b"kv:"), _BRACES if key.startswith(b"kv:{:") else 0
    try:
        page = PageKey.parse(key[:before] + key[before + braces :])
    except PageError:
        return None
    return page if lone_key(page) == key else None


@lru_cache(SLOTS)
def _letters(slot: int) -> bytes:
    text = int(_texts()[slot])
    return bytes(_FIRST | text >> bits & 15 for bits in (12, 8, 4, 0))


@lru_cache(1)
def _texts() -> Any:
    """Of each slot the first text that is in it after a `:`, four bits a letter."""
    step = np.array([crc_hqx(bytes([byte]), 0) for byte in range(256)], np.uint16)
    letters = np.arange(_FIRST, _FIRST + 16, dtype=np.uint16)
    crcs = np.array([crc_hqx(b":", 0)], np.uint16)
    for _ in range(4):
        crcs = (crcs[:, None] << 8 ^ step[crcs[:, None] >> 8 ^ letters]).ravel()
    texts = np.empty(SLOTS, np.uint16)
    texts[crcs[::-1] % SLOTS] = np.arange(len(crcs))[::-1]  # of several the last one stays
    return texts
