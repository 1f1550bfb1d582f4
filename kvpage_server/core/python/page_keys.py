"""The names of pages in columns, and how they are spelt."""

from __future__ import annotations

from collections.abc import Sequence

from kvpage_server.page import PageKey


def spelt(*words: bytes | int) -> bytes:
    """Words of a command as they go over the wire."""
    texts = [word if isinstance(word, bytes) else b"%d" % word for word in words]
    return b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts])


class PageKeys:
    """Of pages, in the order that they were given in."""

    def __init__(self, keys: Sequence[PageKey]) -> None:
        self.names = [*keys]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, part: slice) -> PageKeys:
        """Neighbours."""
        return PageKeys(self.names[part])

    def words(self) -> bytes:
        """The five words of each, as page commands take them: req_id, layer, head, page, kv_type."""
        return b"".join(map(words_of, self.names))

    def keys(self) -> bytes:
        """The key of each, one word."""
        return spelt(*map(bytes, self.names))


def words_of(name: PageKey) -> bytes:
    """The five words of one."""
    return spelt(name.req_id, name.layer, name.head, name.page, name.kv_type)
