"""Whether a server still has what is in a file: asked by the pages' headers, without their bodies; strings are read."""

from __future__ import annotations

from itertools import chain, islice

from kvpage_server.page import checksum
from kvpage_server.snapshot.format.entries import FOREVER, PageTensor, String
from kvpage_server.snapshot.format.files import FileContents
from kvpage_server.snapshot.store import BATCH_BYTES, KEY_COSTS, RunningStore
from kvpage_server.system.batches import batches

_AT_ONCE = 1000  # pages asked about in one go
_SAME_MOMENT = 2000  # milliseconds: a block that was restored lives whole seconds


def is_unchanged(store: RunningStore, contents: FileContents) -> bool:
    """Whether the server has everything in a file, to the byte. For a page without a checksum this is unknown."""
    entries = [span.entry for span in contents.spans]
    pages = [entry for entry in entries if isinstance(entry, PageTensor)]
    strings = [entry for entry in entries if isinstance(entry, String)]
    expected = zip(
        chain.from_iterable(map(PageTensor.keys, pages)),
        chain.from_iterable(map(PageTensor.headers, pages)),
        chain.from_iterable(entry.ttl_left_ms for entry in pages),
        strict=True,
    )
    while some := list(islice(expected, _AT_ONCE)):
        found = store.headers([bytes(key) for key, _, _ in some])
        if len(found) != len(some):
            return False
        for (_, header, left), (_, head, expires) in zip(some, found, strict=True):
            if not header.checksum or head != bytes(header) or not _same_moment(contents, left, expires):
                return False
    for batch in batches(((entry, entry.size + KEY_COSTS) for entry in strings), BATCH_BYTES):
        found = store.values([entry.key for entry in batch])
        if len(found) != len(batch):
            return False
        for entry, (_, data, expires) in zip(batch, found, strict=True):
            if checksum(data) != entry.checksum or not _same_moment(contents, entry.left_ms, expires):
                return False
    return True


def _same_moment(contents: FileContents, left_ms: int, expires_ms: int) -> bool:
    """Whether a key with `left_ms` to live when the file was written has the same expiry now."""
    if FOREVER in (left_ms, expires_ms):
        return left_ms == expires_ms
    return abs(contents.of.dumped_ms + left_ms - expires_ms) <= _SAME_MOMENT
