"""Almost valid frames: commands of every kind with a wrong word or byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from random_commands import INTEGERS, KEYS, NO_INTEGERS, ODD_WORDS, VALUES, Commands
from wire import encode_command

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.specs import TABLE, Spec
from kvpage_server.page import decode_page

Words = list[bytes]

# These end or delay connections, or change rights and permitted data: then no reply could be predicted.
_LEFT_OUT = frozenset(
    (
        *("shutdown", "quit", "client|kill", "client|pause", "config|set", "acl|setuser", "acl|deluser", "acl|load"),
        *("auth", "hello", "slowlog|get", "command", "command|docs", "command|info"),  # the last are long, and known
    )
)
_REQUESTS = (b"r", b"s", b"request-with-a-longer-name")
_SIZES = (0, 1, 4, 64, 1000, 1024, 4095, 4096, 5000, 16_384, 70_000)


def specs() -> list[Spec]:
    return [spec for spec in TABLE.values() if spec.name not in _LEFT_OUT]


class Frames:
    """`well_framed()` is a command whose frame is right, `broken()` some bytes that mostly are none."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._commands = Commands(self._rng, specs())
        self._families: list[Callable[[], Words]] = [
            *(self._pages, self._pages_set, self._blocks, self._block_set, self._protected, self._strings, self._many),
        ]

    def well_framed(self) -> bytes:
        """A command, one word of which may be another."""
        rng = self._rng
        words = self._commands.next() if rng.random() < 0.4 else rng.choice(self._families)()
        if rng.random() < 0.3:
            place = rng.randrange(len(words))
            words[place : place + rng.randrange(2)] = [self._odd_word(words[place])]
        return encode_command(words)

    def _odd_word(self, word: bytes) -> bytes:
        rng = self._rng
        if rng.random() < 0.4 and word:
            at = rng.randrange(len(word))
            return word[:at] + rng.randbytes(rng.randrange(3)) + word[at + rng.randrange(2) :]
        return rng.choice([*ODD_WORDS, *INTEGERS, *NO_INTEGERS, *KEYS, *VALUES])

    def broken(self) -> bytes:
        """A command whose bytes were changed, cut, doubled or swapped somewhere."""
        rng, data = self._rng, bytearray(self.well_framed())
        for _ in range(rng.randrange(1, 4)):
            at, size = rng.randrange(len(data) + 1), rng.randrange(1, 9)
            change = rng.randrange(5)
            if change == 0:
                data[at : at + 1] = rng.randbytes(1)
            elif change == 1:
                del data[at : at + size]
            elif change == 2:
                data[at:at] = data[at : at + size]
            elif change == 3:
                data[at:at] = rng.choice([b"\r\n", b"$", b"*", b"-1", b"$5\r\n", b"9" * size, b"\0", b"*3\r\n"])
            else:
                del data[at:]
        return bytes(data)

    # -- families --------------------------------------------------------------------------------------------------

    def _name(self) -> Words:
        rng = self._rng
        numbers = (rng.randrange(3), rng.randrange(3), rng.randrange(40), rng.randrange(2))
        return [rng.choice(_REQUESTS), *(b"%d" % number for number in numbers)]

    def _page(self) -> Words:
        size = self._rng.choice(_SIZES)
        ttl = self._rng.choice([b"0", b"0", b"1", b"100"])
        return [*self._name(), b"8", b"1", b"%d" % max(size, 1), ttl, self._rng.randbytes(size)]

    def _pages(self) -> Words:
        rng, one = self._rng, self._rng.choice([b"KVPAGEGET", b"KVPAGEEXISTS", b"KVPAGESTAT", b"KVPAGEWHY"])
        if rng.random() < 0.4:
            return [one, *self._name()]
        count = rng.choice([1, 2, 7, 30, 300])
        many = rng.choice([b"KVPAGEMGET", b"KVPAGEMEXISTS"])
        return [many, b"%d" % count, *(word for _ in range(count) for word in self._name())]

    def _pages_set(self) -> Words:
        if self._rng.random() < 0.5:
            return [b"KVPAGESET", *self._page()]
        count, alike = self._rng.choice([1, 2, 9, 40]), self._page()
        pages = [[*self._name(), *alike[5:]] if self._rng.random() < 0.9 else self._page() for _ in range(count)]
        return [b"KVPAGEMSET", b"%d" % count, *(word for page in pages for word in page)]

    def _block(self) -> Words:
        return [self._rng.choice(_REQUESTS), b"%d" % self._rng.randrange(40)]

    def _blocks(self) -> Words:
        rng = self._rng
        if rng.random() < 0.5:
            return [rng.choice([b"KVBLOCKGET", b"KVBLOCKEXISTS"]), *self._block()]
        count = rng.choice([1, 3, 20])
        head = rng.choice([[b"KVBLOCKMGET"], [b"KVPAGEPREFIX", b"4", b"50"]])
        return [*head, b"%d" % count, *(word for _ in range(count) for word in self._block())]

    def _block_set(self) -> Words:
        rng = self._rng
        layers, heads, dim = rng.randrange(1, 4), rng.randrange(1, 4), rng.choice([1, 16, 1000])
        counts = [b"%d" % number for number in (layers, heads, 1)]
        planes = [b"2", b"0", b"8", b"%d" % dim, b"1", b"8", b"%d" % dim]
        return [b"KVBLOCKSET", *self._block(), *counts, b"0", *planes, rng.randbytes(2 * layers * heads * dim)]

    def _protected(self) -> Words:
        rng = self._rng
        pages = [b"%d" % rng.randrange(40) for _ in range(rng.randrange(3))]
        head = rng.choice([[b"KVPAGEPIN"], [b"KVPAGEUNPIN"], [b"KVPAGEDEL"], [b"KVPAGEVERIFY"], [b"KVPAGEINDEX"]])
        if rng.random() < 0.2:
            return [b"KVPAGELEASE", rng.choice(_REQUESTS), b"100", *pages]
        return [*head, rng.choice(_REQUESTS), *([] if head == [b"KVPAGEINDEX"] else pages)]

    def _strings(self) -> Words:
        rng, key = self._rng, self._key()
        value = rng.choice([rng.randbytes(rng.choice(_SIZES)), b"%d" % rng.randrange(100), self._blob(key)])
        return rng.choice([[b"SET", key, value], [b"GET", key], [b"GETRANGE", key, b"0", b"100"], [b"DEL", key]])

    def _key(self) -> bytes:
        return b"kv:" + b":".join(self._name()) if self._rng.random() < 0.5 else b"key%d" % self._rng.randrange(300)

    def _blob(self, key: bytes) -> bytes:
        """Return a page as a string, usually not under its own key."""
        body = bytes(64)
        blob = b"KVPG" + bytes([2, 8]) + bytes(58) + body
        assert len(blob) == 128
        try:
            decode_page(blob)
        except ValueError:
            return blob
        return blob

    def _many(self) -> Words:
        rng, count = self._rng, self._rng.choice([600, 1100, 1500])
        keys = [self._key() for _ in range(count)]
        command = rng.choice(
            [b"DEL", b"EXISTS", b"TOUCH", b"MGET", b"UNLINK", b"MSET", b"WATCH", b"SUBSCRIBE", b"PING"]
        )
        if command == b"MSET":
            return [command, *(word for key in keys for word in (key, b"v" * rng.choice([1, 2000])))]
        return [command, *keys]


def batches(frames: Frames, count: int, size: int) -> Iterator[bytes]:
    """So many well-framed commands, `size` at a time."""
    for start in range(0, count, size):
        yield b"".join(frames.well_framed() for _ in range(min(size, count - start)))
