"""Inputs for both cores, by seed: commands of every kind, almost valid ones, and edge cases."""

from __future__ import annotations

import random

from mutations import Frames
from wire import encode_command

LENGTHS = (0, 1, 2, 63, 64, 65, 511, 512, 513, 1023, 4096, 5000, 16_384, 65_537, 131_072, 131_073, 299_999)
NUMBERS = (
    *(b"0 -0 00 +1 -1 5 6 16 17 255 256 65535 65536 4294967295 4294967296 1e3 0x10 99999999999999999999".split()),
    *(b"9223372036854775807 9223372036854775808 -9223372036854775808 18446744073709551616".split()),
    *(b"", b" 1", b"1 ", b"\0", b"\xd9\xa1"),
)
REQUESTS = (
    b"r",
    b"r2",
    b"x" * 255,
    b"x" * 256,
    b"x" * 257,
    b"",
    b"a:b",
    b"a b",
    b"\x7f",
    b"\xff\xfe",
    b"{seg}hash",
    b"a\0",
)


class Inputs:
    """`next()` is an input for `both.differ`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.frames = Frames(seed)

    def next(self) -> bytes:
        rng = self.rng
        steps = bytes(rng.choice((1, 2, 5, 15, 60, 128, 254, 255)) for _ in range(rng.randrange(6)))
        kinds = (self.frames.well_framed, self.frames.broken, self._pages, self._names, self._many, self._numbers)
        sent = b"".join(rng.choice(kinds)() for _ in range(rng.randrange(1, 9)))
        if rng.random() < 0.3:
            sent = self._damaged(sent)
        return bytes((rng.randrange(256), len(steps), *steps)) + sent

    def _pages(self) -> bytes:
        rng, size = self.rng, self.rng.choice(LENGTHS[:-3])
        request, page = rng.choice(REQUESTS[:3]), rng.randrange(3)
        words = [rng.choice((b"KVPAGEMSET", b"BATCH", b"OTHER")), b"n"]
        for place in range(rng.choice((1, 2, 5, 30))):
            body = rng.randbytes(size if rng.random() < 0.8 else rng.choice(LENGTHS[:10]))
            shape = (place // 4, place % 4, page, place % 2, 1, max(len(body) // 128, 1), 64, rng.choice((0, 0, 1, 60)))
            words += [request, *(b"%d" % number for number in shape), body]
        if rng.random() < 0.4:
            self._spoil(words)
        return encode_command(words)

    def _names(self) -> bytes:
        rng = self.rng
        words = [b"KVPAGEMGET", b"n"]
        for place in range(rng.choice((1, 3, 12, 300))):
            words += [
                rng.choice(REQUESTS[:2]),
                *(b"%d" % n for n in (place // 4, place % 4, rng.randrange(3), place % 2)),
            ]
        if rng.random() < 0.4:
            self._spoil(words)
        return encode_command(words)

    def _spoil(self, words: list[bytes]) -> None:
        for _ in range(self.rng.randrange(1, 3)):
            place = self.rng.randrange(1, len(words))
            words[place] = self.rng.choice((*NUMBERS, *REQUESTS, bytes(700)))
        if self.rng.random() < 0.3:
            del words[self.rng.randrange(1, len(words)) :]

    def _many(self) -> bytes:
        rng = self.rng
        count = rng.choice((63, 64, 65, 66, 500, 1999, 2000, 2001))
        return encode_command(
            [rng.choice((b"", b"w" * 600, b"%d" % place)) if rng.random() < 0.1 else b"k" for place in range(count)]
        )

    def _numbers(self) -> bytes:
        """Counts and lengths that are none, or nearly."""
        rng = self.rng
        number = rng.choice((*NUMBERS, b"2147483647", b"2147483648", b"300000", b"300001", b"1" * 70_000))
        return (
            rng.choice(
                (
                    b"*%b\r\n",
                    b"*1\r\n$%b\r\n",
                    b"*2\r\n$4\r\nECHO\r\n$%b\r\nab\r\n",
                    b"$%b\r\n",
                    b"%b\r\n",
                    b"*1\r\n:%b\r\n",
                )
            )
            % number
        )

    def _damaged(self, sent: bytes) -> bytes:
        rng, damaged = self.rng, bytearray(sent)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(damaged) + 1)
            damaged[place : place + rng.randrange(3)] = rng.choice(
                (b"", b"\r\n", b"\n", b"$", b"*", b"\0", rng.randbytes(3))
            )
        return bytes(damaged)
