"""Pages on their way out: words and bodies in turn, made for some pages at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from kvpage_server.core.python.gather import AT_ONCE
from kvpage_server.core.python.memory import Memory
from kvpage_server.page import MAX_U32, DType, PageKey, checksum, pack_header


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


PAGES_AT_ONCE = 1024  # pages in a chunk
_ITEMSIZES = {int(dtype): dtype.itemsize for dtype in DType}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text and bodies in turn, ending with text; `stop` is where the pages end that it was made from."""

    pieces: list[bytes | memoryview]
    stop: int


class SentPages:
    """Pages to be written, each a key, a body, dtype, page_size and head_dim."""

    def __init__(self, pages: Sequence[tuple[PageKey, Buffer, int, int, int]]) -> None:
        """Raises Unusable for a body that can't be sent."""
        self.names = PageKeys([page[0] for page in pages])
        self.bodies = Memory([page[1] for page in pages])
        self.shapes = [page[2:] for page in pages]

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, part: slice) -> SentPages:
        """Neighbours, still held together with all the others."""
        some = SentPages(())
        some.names, some.bodies, some.shapes = self.names[part], self.bodies[part], self.shapes[part]
        return some

    def misfit(self) -> int:
        """The first whose body is not as long as its shape says, or whose shape is none; -1 if there is none."""
        for i, ((dtype, page_size, head_dim), nbytes) in enumerate(zip(self.shapes, self.bodies.sizes(), strict=True)):
            if not (0 < page_size <= MAX_U32 and 0 < head_dim <= MAX_U32 and nbytes <= MAX_U32):
                return i
            if dtype not in _ITEMSIZES or page_size * head_dim * _ITEMSIZES[dtype] != nbytes:
                return i
        return -1

    def as_words(self, start: int, ttl: int) -> Chunk:
        """The arguments of a page command that writes, of some pages from `start` on."""
        pieces: list[bytes | memoryview] = []
        stop = self._stop(start)
        before = b""
        for name, shape, body in self._some(start, stop):
            pieces += [b"%b%b%b$%d\r\n" % (before, words_of(name), spelt(*shape, ttl), len(body)), body]
            before = b"\r\n"
        pieces.append(before)
        return Chunk(pieces, stop)

    def as_blobs(self, start: int, before: bytes, after: bytes, ttl: int, created: int) -> Chunk:
        """Keys and blobs of some pages from `start` on, with the same text before and after each."""
        pieces: list[bytes | memoryview] = []
        stop = self._stop(start)
        between = before
        for name, (dtype, page_size, head_dim), body in self._some(start, stop):
            about = dtype, name.kv_type, page_size, head_dim, name.layer, name.head, name.page
            header = pack_header(*about, created, ttl, len(body), checksum(body))
            key = spelt(bytes(name))
            pieces += [b"%b%b$%d\r\n%b" % (between, key, len(header) + len(body), header), body]
            between = after + before
        pieces.append(after)
        return Chunk(pieces, stop)

    def _some(self, start: int, stop: int) -> zip[tuple[PageKey, tuple[int, int, int], memoryview]]:
        part = slice(start, stop)
        return zip(self.names.names[part], self.shapes[part], self.bodies.views()[part], strict=True)

    def _stop(self, start: int) -> int:
        """Where a chunk from `start` on ends."""
        nbytes = 0
        for stop in range(start, min(start + PAGES_AT_ONCE, len(self))):
            if nbytes >= AT_ONCE:
                return stop
            nbytes += len(self.bodies.views()[stop])
        return min(start + PAGES_AT_ONCE, len(self))
