"""Which pages a block has, as rows of bits: one bit a head, in rows of up to 64 heads of a (layer, plane).

That is a few bytes a page where models have eight heads, and enough to spell every page's key. Rows are numbered by
layer, plane and head: the order of a block's body.
"""

from __future__ import annotations

from kvpage_server.page import MAX_HEAD, MAX_KV_TYPE

TYPES = MAX_KV_TYPE + 1
ROW_HEADS = 64
GROUPS = (MAX_HEAD + 1) // ROW_HEADS  # rows that the heads of one (layer, plane) may take


def row_of(layer: int, head: int, kv_type: int) -> int:
    """The row of a page."""
    return (layer * TYPES + kv_type) * GROUPS + head // ROW_HEADS


def bit_of(head: int) -> int:
    """The bit of a page in its row."""
    return 1 << head % ROW_HEADS
