"""How tensors are named: by the keys that they hold.

``kv:{req_id}:{layer}:{head}:{page}:{kv_type}``  a page, as its key is spelt
``kv:{req_id}:*:*:{page}:{kv_type}``             a plane of a block, as the pattern that its keys match
``string:{key}``                                 a plain string

Keys are bytes and names are text: a byte that is not part of UTF-8, and ``%`` itself, is written ``%XX``.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

_FOREIGN = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of bytes that are no UTF-8


def text_of(raw: bytes) -> str:
    """Bytes as text, readable where they are UTF-8. `bytes_of` is its inverse."""
    text = raw.replace(b"%", b"%25").decode("utf-8", "surrogateescape")
    return _FOREIGN.sub(lambda found: f"%{ord(found[0]) - 0xDC00:02X}", text)


def bytes_of(text: str) -> bytes:
    """The bytes that a text stands for."""
    return unquote_to_bytes(text)


def plane_name(req_id: bytes, page: int, kv_type: int) -> str:
    """The name of a plane's tensor."""
    return f"kv:{text_of(req_id)}:*:*:{page}:{kv_type}"


def string_name(key: bytes) -> str:
    """The name of a plain string's tensor."""
    return f"string:{text_of(key)}"
