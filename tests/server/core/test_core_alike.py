"""Both cores behave identically: commands, errors, pages and replies, for any input and any split.

`make fuzz` goes on with it, guided by coverage and in a build that sees misuse of memory.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
from cores import CORES
from fuzz.both import differ
from fuzz.streams import Inputs
from wire import encode_command

from kvpage_server.core import python

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="the compiled core was not built")


def inputs(seed: int, count: int) -> Iterator[bytes]:
    made = Inputs(seed)
    return (made.next() for _ in range(count))


@pytest.mark.parametrize("seed", range(8))
def test_both_cores_do_the_same(seed: int) -> None:
    for data in inputs(seed, 20):
        differ(data)


def test_both_cores_find_the_same_classes() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        masks, bit = bytes(rng.choices([0, 255, 3, 15, 170], k=2048)), rng.randrange(64)
        size, string = rng.randrange(1, 65 - bit), rng.randbytes(rng.randrange(300))
        start, end = sorted(rng.choices(range(len(string) + 1), k=2))
        where = masks, bit, size, string, start, end
        assert CORES[1].find_classes(*where) == python.find_classes(*where)


def test_both_cores_refuse_positions_outside() -> None:
    for where in ((bytes(2048), 60, 5, b"", 0, 0), (bytes(2047), 0, 1, b"", 0, 0), (bytes(2048), 0, 1, b"a", 0, 2)):
        for core in CORES:
            with pytest.raises(ValueError, match="positions are within"):
                core.find_classes(*where)


EMPTY = b"*100\r\n" + b"$0\r\n\r\n" * 100


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        EMPTY,
        EMPTY[:-200],
        encode_command([b"SET", b"k", b"v" * 5000])[:-10],
        encode_command([b"MSET", *[b"w" * 600] * 100])[:-700],
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$299999\r\n",
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$9223372036854775807\r\n",
        b"*-9223372036854775808\r\n*0\r\nPING\r\n",
        encode_command([b"SET", b"k", b"v" * 600])[:-2] + b"\n\r",
        b"*1\r\n$600\r\n" + b"x" * 602,
        b"$" * 70_000,
        b"*" + b"1" * 70_000,
    ],
)
def test_both_cores_do_the_same_at_the_edges(sent: bytes) -> None:
    for flags in range(16):
        for steps in (b"", b"\0", b"\1\17", b"\377"):
            if len(sent) < 2000 or steps not in (b"\0", b"\1\17"):
                differ(bytes((flags, len(steps))) + steps + sent)


@pytest.mark.parametrize(("module", "name", "wrong"), [("frames", "KEEP_FROM", 513), ("pages", "HEADER_SIZE", 65)])
def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch, module: str, name: str, wrong: int) -> None:
    monkeypatch.setattr(getattr(python, module), name, wrong)
    with pytest.raises(AssertionError, match=r"^step \d+: python "):
        deque(map(differ, inputs(0, 200)), maxlen=0)
