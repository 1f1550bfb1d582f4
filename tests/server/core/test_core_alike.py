"""Both cores behave identically: commands, errors, pages and replies, for any input and any split.

`make fuzz` goes on with it, guided by coverage and in a build that sees misuse of memory.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

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


def test_both_cores_match_the_same_names() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        letters = rng.choice([b"ab*?", b"abc-^[]\\*?", b"aAbZz[]-^*?\\@`{\x80\xff", bytes(range(256))])
        pattern = bytes(rng.choices(letters, k=rng.choice([rng.randrange(12), rng.randrange(300)])))
        if not rng.randrange(4):  # a long part between two stars
            pattern = b"*" + b"a" * rng.randrange(58, 70) + rng.choice([b"b", b"ab", b"?", b"[ab]"]) + b"*" + pattern
        ignore_case = not rng.randrange(3)
        assert CORES[0].literal(pattern) == CORES[1].literal(pattern)
        made = [compiled(core, pattern, ignore_case) for core in CORES]
        if isinstance(made[0], str) or isinstance(made[1], str):
            assert made[0] == made[1], pattern
            continue
        for _ in range(5):
            name = bytes(rng.choice(b"ab") if byte in b"*?" else byte for byte in pattern)
            name = rng.choice([bytes(rng.choices(letters, k=rng.randrange(20))), name])
            name = letters[:1] * rng.choice([0, 0, 1, 90, 5000, 31_000]) + name + b"ab" * rng.randrange(3)
            assert made[0].matches(name) == made[1].matches(name), (pattern, name)


def compiled(core: Any, pattern: bytes, ignore_case: bool) -> python.Glob | str:
    """Return a core's compiled pattern, or its error."""
    try:
        glob: python.Glob = core.Glob(pattern, ignore_case)
    except ValueError as error:
        return str(error)
    return glob


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
