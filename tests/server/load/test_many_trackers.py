"""Changes of keys that many clients track: the messages of one command take no long turn of the loop.

Measured in processor time of a server in this process, as in `test_stalls`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from turns import Turns, measured
from waiting import until
from wire import Wire, encode_command, parse

TRACK = [[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON"]]
LONGEST = 0.05  # seconds of a turn, for slow machines; usually 9 to 16 ms. Without limits both take 0.13 to 0.17 s
TRIES = 5  # a long turn is long each time, unless this machine did something else


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    with measured() as turns:
        yield turns


def changed(turns: Turns, keys: list[bytes], trackers: int) -> float:
    """Return the seconds of the longest turn of an MSET of keys that clients track."""
    said = b"".join(map(encode_command, [*TRACK, [b"MGET", *keys]]))
    words = encode_command([b"MSET", *(word for key in keys for word in (key, b"value"))])
    longest = []
    for _ in range(TRIES):
        with ExitStack() as stack:
            for _ in range(trackers):
                turns.join(stack, said)
            longest.append(turns.cost(b"", words).longest)
    return min(longest)


def test_many_keys_of_many_trackers_change_in_a_short_turn(turns: Turns) -> None:
    assert changed(turns, [b"key%d" % number for number in range(500)], 60) < LONGEST


def test_long_keys_of_many_trackers_change_in_a_short_turn(turns: Turns) -> None:
    assert changed(turns, [b"%d" % number + bytes(200_000) for number in range(30)], 60) < LONGEST


@pytest.mark.parametrize(("count", "flush"), [(10, False), (30, True)])
def test_each_tracker_gets_all_keys_or_a_flush(turns: Turns, count: int, flush: bool) -> None:
    keys = [b"key%d" % number for number in range(500)]
    with ExitStack() as stack:
        trackers = [stack.enter_context(Wire(turns.server.port)) for _ in range(count)]
        for wire in trackers:
            wire.send(b"".join(map(encode_command, [*TRACK, [b"MGET", *keys]])))
            for _ in range(3):
                wire.reply()
        with Wire(turns.server.port) as writer:
            assert writer.ask(b"MSET", *(word for key in keys for word in (key, b"value"))) == b"+OK\r\n"
        received = [list(invalidated(wire)) for wire in trackers]
        assert all(names == ([None] if flush else [[key] for key in keys]) for names in received)
        until(lambda: turns.on_loop(lambda: turns.server.events.tracking.items) == 0)


def invalidated(wire: Wire) -> Iterator[list[bytes] | None]:
    """Yield the keys of each invalidation until now; None for all keys."""
    wire.send(encode_command([b"PING"]))
    while (frame := wire.reply()) != b"+PONG\r\n":
        yield parse(frame)[1]
