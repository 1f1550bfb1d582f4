"""The arguments of a batch, received many at a time: some short ones and a long one, again and again.

A command of many pages has the same number of short arguments before each body, and bodies of one length. What comes of
it is received into one piece of memory, as much as the socket has, and taken apart there: a body stays where it is,
between its own length and its CRLF, so that it is a bulk string as it lies. Anything that is not like what came before
ends the run, and is left to the parser.

Groups that are alike to the byte's length are taken together: what stands around their bodies is gathered and taken
apart as `groups` does.

Costs: O(1) and no copy a body; what the run leaves is at most one group, or what is not like the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, Protocol, TypeGuard, cast

from kvpage_server.page import checksum
from kvpage_server.resp.groups import CRLF, DECLARED, TRUST, Framed

if TYPE_CHECKING:
    from kvpage_server.resp.parser import Argument, Bulk

LEAST_BEFORE = 64  # bytes of short arguments before a body's length: what a slab wants of them for itself
_HEAD = 192  # bytes that are looked at for what stands before a body; longer ones end the run


class Slab(Protocol):
    """Memory for a run."""

    view: memoryview

    def cut(self, starts: range, size: int, digests: Iterable[int]) -> Sequence[Bulk]:
        """Bulks whose bodies lie there: `LEAST_BEFORE` bytes, its length and its CRLF around each are its own, too."""

    def close(self) -> None:
        """Nothing more is cut from it."""


class BrokenRun(Exception):
    """A body without its CRLF."""


class Layout:
    """Groups of arguments of those sizes, each with a body of `length` behind them: where in its bytes they stand."""

    def __init__(self, sizes: tuple[int, ...], length: int) -> None:
        self._framed = Framed(sizes, length)
        self.before = self._framed.size - len(CRLF)  # bytes before a body
        self.size = self._framed.size + length
        self._around = Struct(f"{self.before}s{length}x{len(CRLF)}s")  # a body

    def opens(self, before: memoryview) -> bool:
        """Whether this is what stands before a body."""
        return bool(self._framed.words(bytes(before) + CRLF))

    def words(self, groups: memoryview) -> list[bytes]:
        """The arguments of the first groups, as far as they are framed alike; nothing in place of a body."""
        return self._framed.words(b"".join(chain.from_iterable(self._around.iter_unpack(groups))))


_layout = lru_cache(256)(Layout)


def may_repeat(words: Sequence[Argument]) -> TypeGuard[Sequence[bytes]]:
    """Whether there is a run of groups like this, by the short arguments of one."""
    if any(type(word) is not bytes for word in words):
        return False
    return LEAST_BEFORE <= _room_of(map(len, cast("Sequence[bytes]", words))) < _HEAD


def group_size(sizes: Iterable[int], length: int) -> int:
    """Bytes of a group: arguments of those sizes, and a body of `length` behind them."""
    return _layout(tuple(sizes), length).size


def _room_of(sizes: Iterable[int]) -> int:
    """Bytes before a body's frame, with CRLF, of arguments of those sizes."""
    return sum(len(b"$%d\r\n\r\n" % size) + size for size in sizes)


class Run:
    """Groups of `short` short arguments and a body of `length` bytes, in a slab."""

    def __init__(self, slab: Slab, last: Sequence[bytes], length: int, begun: bytes, *, hashed: bool) -> None:
        """`last` are the short arguments of the group before, `begun` is what has arrived already.

        `hashed` says whether bulks are to have their digests.
        """
        self.short = len(last)
        self.length = length
        self._hashed = hashed
        self._digests: dict[int, int] = {}  # of bodies that were not taken yet, by where they start
        self._frame = b"\r\n$%d\r\n" % length
        self._sizes = list(map(len, last))  # of the short arguments of the last group
        self._layout = _layout(tuple(self._sizes), length)  # of it
        self._alike = 1  # so many groups were like it
        self.is_over = False  # what comes next is not like the others
        self._begin(slab, begun)

    def _begin(self, slab: Slab, begun: bytes) -> None:
        self._slab = slab
        self._view = slab.view
        self._view[: len(begun)] = begun
        self._filled = len(begun)
        self._pos = 0  # what is before it was taken
        self._digests.clear()
        self._needed = 0  # bytes that must have arrived for the next group to be whole, once its lengths are known

    def go_on(self, slab: Slab) -> None:
        """Be received into another slab from here on."""
        self._begin(slab, self.leave())

    @property
    def room(self) -> memoryview:
        """Where the next bytes belong: as far as whole groups have room."""
        end = len(self._view)
        return self._view[self._filled : end - (end - self._pos) % self._layout.size]

    @property
    def pending(self) -> int:
        """Bytes that have arrived and were not taken."""
        return self._filled - self._pos

    def arriving(self, count: int) -> None:
        """`count` bytes of the room are written: hash the bodies that are there, if what comes is like the last group.

        It is enough that the next body's frame is where it would be then: its digest is that of the bytes there.
        """
        if not self._hashed:
            return
        view, layout, digests = self._view, self._layout, self._digests
        first, last = self._pos + layout.before, self._filled + count - self.length
        for start in range(first + len(digests) * layout.size, last + 1, layout.size):
            if view[start - len(self._frame) : start] != self._frame:
                break
            digests[start] = self._digest_of(start)

    def received(self, count: int) -> None:
        """`count` bytes were written into the room."""
        self.arriving(count)
        self._filled += count

    def take(self, most: int) -> list[Argument]:
        """The arguments of up to `most` groups that have arrived whole. Raises BrokenRun."""
        taken: list[Argument] = []
        every = self.short + 1
        while most * every > len(taken) and self._filled >= self._needed:
            group = self._take_alike(most - len(taken) // every)
            if not group and self._filled >= self._needed:
                group = self._take_one()
            if not group:
                break
            taken += group
        return taken

    def _take_alike(self, most: int) -> list[Argument]:
        """The arguments of groups that have the lengths of the last; none when one of them has others."""
        layout, pos = self._layout, self._pos
        there = self._filled - pos
        if there < layout.size:
            if there >= layout.before and layout.opens(self._view[pos : pos + layout.before]):
                self._needed = pos + layout.size
            return []
        count = min(most, TRUST * self._alike, there // layout.size)
        every = self.short + 1
        words: list[Argument] = layout.words(self._view[pos : pos + count * layout.size])  # type: ignore[assignment]
        end = pos + len(words) // every * layout.size
        words[self.short :: every] = self._cut(range(pos + layout.before, end, layout.size))
        self._alike = self._alike + len(words) // every if words else 0
        self._pos = end
        return words

    def _take_one(self) -> list[Argument]:
        """The arguments of the next group; none when it has not arrived whole, or is not like the others."""
        view, pos, filled = self._view, self._pos, self._filled
        head = bytes(view[pos : min(pos + _HEAD, filled)])
        end = head.find(self._frame)
        if end < 0:
            self.is_over = len(head) == _HEAD or head.count(CRLF) > 2 * self.short  # another length is there
            return []
        lines = head[:end].split(CRLF)
        words: list[Argument] = lines[1::2]  # type: ignore[assignment]
        sizes = list(map(len, lines[1::2]))
        if len(words) != self.short or list(map(DECLARED.get, lines[::2])) != sizes or end + 2 < LEAST_BEFORE:
            self.is_over = True
            return []
        if self._sizes != sizes:
            before = self._layout
            self._sizes, self._layout, self._alike = sizes, _layout(tuple(sizes), self.length), 0
            if self._layout.size != before.size:  # else bodies are where they seemed to be
                self._digests.clear()
        start = pos + end + len(self._frame)
        stop = start + self.length
        if stop + len(CRLF) > filled:
            self._needed = stop + len(CRLF)
            return []
        if view[stop : stop + len(CRLF)] != CRLF:
            raise BrokenRun
        words += self._cut(range(start, stop, self.length))
        self._alike += 1
        self._pos = stop + len(CRLF)
        return words

    def _cut(self, starts: range) -> Sequence[Bulk]:
        """The bulks whose bodies start there."""
        digests = [0] * len(starts)
        if self._hashed:
            known = self._digests.pop
            digests = [known(start, 0) or self._digest_of(start) for start in starts]
        return self._slab.cut(starts, self.length, digests)

    def _digest_of(self, start: int) -> int:
        """The digest of the body that starts there."""
        return checksum(self._view[start : start + self.length])

    @property
    def group(self) -> int:
        """Bytes of the next group, if it is like the last."""
        return self._layout.size

    @property
    def is_full(self) -> bool:
        """Whether another group has no room."""
        return not self.room

    def leave(self) -> bytes:
        """End the run; what has arrived and was not taken."""
        self._slab.close()
        return bytes(self._view[self._pos : self._filled])
