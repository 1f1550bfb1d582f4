"""Short arguments in groups that are framed alike: what frames them is compared at once, they are cut from between.

The arguments of a batch come in groups, and most groups have words as long as those of the group before. So what stands
between the words of many groups is known to the byte: their text is masked and compared as one number, and where the
first difference is says how many groups were as expected. The more were alike, the more are tried, and where few are
no more is, so that little is looked at in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct

CRLF = b"\r\n"
DECLARED = {b"$%d" % length: length for length in range(1000)}
TRUST = 32  # times as many groups as were alike so far are tried together
_HEAD = 1024  # bytes that are looked at for a group
_LEAST = 8  # groups that have to be alike for others to be tried


class Framed:
    """Groups of words of those `sizes`: where in a group they stand.

    With a `body` of so many bytes behind them, which is not in the text: its length and CRLF are, and it is a word of
    no bytes.
    """

    def __init__(self, sizes: tuple[int, ...], body: int | None = None) -> None:
        lengths = sizes if body is None else (*sizes, body)
        frames = [b"$%d\r\n" % length for length in lengths]
        frames[1:] = [CRLF + frame for frame in frames[1:]]
        there = [*zip(frames, (*sizes, 0), strict=False), (CRLF, 0)]  # what frames a word, and the bytes of the word
        self.size = sum(len(frame) + size for frame, size in there)
        self._words = Struct("".join(f"{len(frame)}x{size}s" for frame, size in there[:-1]) + f"{len(CRLF)}x")
        self._frames = b"".join(frame + bytes(size) for frame, size in there)
        self._mask = b"".join(b"\xff" * len(frame) + bytes(size) for frame, size in there)

    def words(self, text: bytes) -> list[bytes]:
        """The words of the first groups in a text of whole ones, as far as they are framed as expected."""
        count = len(text) // self.size
        found = int.from_bytes(text, "little") & _repeated(self._mask, count)
        if wrong := found ^ _repeated(self._frames, count):
            first = (wrong & -wrong).bit_length() - 1 >> 3
            text = text[: first // self.size * self.size]
        return list(chain.from_iterable(self._words.iter_unpack(text)))


@lru_cache(64)
def _repeated(text: bytes, count: int) -> int:
    """As a number: so many bytes are masked and compared soonest as one."""
    return int.from_bytes(text * count, "little")


framed = lru_cache(256)(Framed)


def take(data: bytes, pos: int, width: int, most: int) -> tuple[list[bytes], int]:
    """The words of up to `most` groups of `width` from `pos` on, and where what was not taken begins.

    Taken are whole groups, as long as every declared length is the true one and short, and most groups are like the one
    before them.
    """
    words: list[bytes] = []
    alike = _LEAST
    while most > 0 and alike >= _LEAST and (group := _next_of(data, pos, width)):
        words += group
        like, alike = framed(tuple(map(len, group))), 1
        pos, most = pos + like.size, most - 1
        while count := min(most, TRUST * alike, (len(data) - pos) // like.size):
            found = like.words(data[pos : pos + count * like.size])
            words += found
            groups = len(found) // width
            alike, pos, most = alike + groups, pos + groups * like.size, most - groups
            if groups < count:
                break
    return words, pos


def _next_of(data: bytes, pos: int, width: int) -> Sequence[bytes] | None:
    """The words of one group; None when it is not whole, or not of short words."""
    lines = data[pos : pos + _HEAD].split(CRLF, 2 * width)
    if len(lines) <= 2 * width:
        return None
    words = lines[1:-1:2]
    return words if list(map(DECLARED.get, lines[:-1:2])) == list(map(len, words)) else None
