"""`kv:{req}:index`, the read-only key with the page keys of a request.

It exists while the request has a page, and is a set. It can't be written and has no TTL. KEYS and SCAN do not list it:
it is a view of keys that they list anyway. SCAN with TYPE set lists only these keys, one for each request.
"""

from __future__ import annotations

import re

from kvpage_server.commands.arguments import WRONG_TYPE
from kvpage_server.commands.table import Spec
from kvpage_server.core import Command
from kvpage_server.resp import ReplyError
from kvpage_server.store.keyspace import Keyspace

READ_ONLY = "ERR an index key is read-only: it lists the pages that its request has"
TAIL = b":index"
_KEY = re.compile(rb"kv:([^\x00-\x20\x7f:]{1,256}):index\Z")
_DERIVED = re.compile(rb"kv:([^\x00-\x20\x7f:]{1,256}):(?:index)?\Z")


def request_of(key: bytes) -> bytes | None:
    """Return the request id in an index key; None for any other key."""
    found = _KEY.match(key)
    return found[1] if found else None


def derived_from(key: bytes) -> bytes | None:
    """Return the request id in a key that changes with the request's pages; None for any other key.

    These are the index key, and `kv:{req}:`, which stands for all keys of the request.
    """
    found = _DERIVED.match(key)
    return found[1] if found else None


def lists_pages(keyspace: Keyspace, key: bytes) -> bool:
    """Return whether `key` is the index of a request that has a page."""
    req_id = request_of(key)
    return req_id is not None and keyspace.listing.has_pages(req_id)


def names_index(spec: Spec, words: Command) -> bool:
    """Return whether a command's keys, which are at fixed positions, include an index key."""
    first, last, step = spec.keys
    for key in (words[first],) if first == last else words[first : last + 1 or None : step]:
        if type(key) is bytes and key.endswith(TAIL) and _KEY.match(key):
            return True
    return False


def refuse_to_write(spec: Spec, words: Command) -> None:
    """Raise ReplyError if a command would write to an index key."""
    if names_index(spec, words):
        raise ReplyError(READ_ONLY)


def refuse_as_string(keyspace: Keyspace, key: bytes) -> None:
    """Raise ReplyError (WRONGTYPE) if a key is the index of a request that has a page."""
    if key.endswith(TAIL) and lists_pages(keyspace, key):
        raise ReplyError(WRONG_TYPE)
