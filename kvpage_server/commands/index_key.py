"""`kv:{req}:index`, the read-only key with the page keys of a request.

It exists while the request has a page, and is a set. It can't be written and has no TTL. KEYS and SCAN do not list it:
it is a view of keys that they list anyway. SCAN with TYPE set lists only these keys, one for each request.
"""

from __future__ import annotations

import re

from kvpage_server.commands.arguments import WRONG_TYPE
from kvpage_server.commands.specs import Spec
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
    """Return whether `key` is the index key of a request that has a page that has not expired."""
    req_id = request_of(key)
    return req_id is not None and keyspace.listing.has_pages(req_id)


def names_index(spec: Spec, words: Command) -> bool:
    """Return whether one of a command's keys is an index key. `words` are all words, and `spec.keys` has fixed
    positions.
    """
    first, last, step = spec.keys
    for key in (words[first],) if first == last else words[first : last + 1 or None : step]:
        if type(key) is bytes and key.endswith(TAIL) and _KEY.match(key):
            return True
    return False


def refuse_to_write(spec: Spec, words: Command) -> None:
    """Raise ReplyError if one of the keys of a command that writes is an index key, which is read-only."""
    if names_index(spec, words):
        raise ReplyError(READ_ONLY)


def refuse_as_string(keyspace: Keyspace, key: bytes) -> None:
    """Raise ReplyError (WRONGTYPE) if `key` is the index key of a request that has a page: it is a set, not a
    string.
    """
    if key.endswith(TAIL) and lists_pages(keyspace, key):
        raise ReplyError(WRONG_TYPE)
