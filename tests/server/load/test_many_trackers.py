"""Changes of keys that many clients track: the messages of one command take no long turn of the loop.

Measured in processor time of a server in this process, as in `test_stalls`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from turns import Turns, measured
from waiting import until
from wire import Wire, encode_command, parse

from kvpage_server.commands.notifying import tracking
from kvpage_server.net.session import Session

TRACK = [[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON"]]
LONGEST = 0.05  # seconds of a turn, for slow machines; usually 9 to 16 ms. Without limits both take 0.13 to 0.17 s
TRIES = 5  # a long turn is long each time, unless this machine did something else


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    with measured() as turns:
        yield turns


def change_is_short(turns: Turns, keys: list[bytes], trackers: int) -> bool:
    """Return whether an MSET of keys that clients track takes short turns."""
    said = b"".join(map(encode_command, [*TRACK, [b"MGET", *keys]]))
    words = encode_command([b"MSET", *(word for key in keys for word in (key, b"value"))])

    def longest() -> float:
        with ExitStack() as stack:
            for _ in range(trackers):
                turns.join(stack, said)
            return turns.cost(b"", words).longest

    return any(longest() < LONGEST for _ in range(TRIES))


def test_many_keys_of_many_trackers_change_in_a_short_turn(turns: Turns) -> None:
    assert change_is_short(turns, [b"key%d" % number for number in range(500)], 60)


def test_long_keys_of_many_trackers_change_in_a_short_turn(turns: Turns) -> None:
    assert change_is_short(turns, [b"%d" % number + bytes(200_000) for number in range(30)], 60)


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


def test_very_many_read_keys_are_noted_in_steps(turns: Turns) -> None:
    count = 30_000
    names = [word for number in range(count) for word in (b"r%d" % number, b"0")]
    words = encode_command([b"KVPAGEPREFIX", b"1", b"0", b"%d" % count, *names])
    track = b"".join(map(encode_command, TRACK))
    assert turns.takes_short_turns(track, words, LONGEST, TRIES)


@pytest.mark.parametrize("transaction", [False, True])
def test_every_name_of_a_long_command_is_noted(turns: Turns, transaction: bool) -> None:
    names = [b"r%d" % number for number in range(2000)]
    words = [b"KVPAGEPREFIX", b"1", b"0", b"2000", *(word for name in names for word in (name, b"0"))]
    with Wire(turns.server.port) as reader, Wire(turns.server.port) as writer:
        commands = [*TRACK, *([[b"MULTI"], words, [b"EXEC"]] if transaction else [words])]
        reader.send(b"".join(map(encode_command, commands)))
        for _ in commands:
            last = reader.reply()
        assert last == (b"*1\r\n:0\r\n" if transaction else b":0\r\n")
        for name in names[::667]:
            writer.ask(b"KVPAGESET", name, *b"0 0 0 0 1 1 1 0 a".split())
            assert list(invalidated(reader)) == [[b"kv:%b:" % name]]
        writer.ask(b"FLUSHALL")


def test_one_key_of_very_many_trackers_changes_in_short_turns(turns: Turns) -> None:
    """In one turn, messages to 2,000 clients take 34 ms; their preparation takes 4 ms."""
    said = b"".join(map(encode_command, [*TRACK, [b"GET", b"key"]]))

    def longest() -> float:
        with ExitStack() as stack:
            for _ in range(2000):
                turns.join(stack, said)
            cost = turns.cost(b"", encode_command([b"SET", b"key", b"value"]))
            return cost.longest / cost.total

    assert any(longest() < 0.4 for _ in range(TRIES))


@pytest.mark.parametrize("mode", [[], [b"BCAST"]], ids=["noted", "broadcast"])
def test_messages_of_several_turns_precede_later_replies(
    turns: Turns, monkeypatch: pytest.MonkeyPatch, mode: list[bytes]
) -> None:
    """Each is sent in a turn of its own. Nobody reads the new value before it, and after the writer's reply all have
    one.
    """
    monkeypatch.setattr(tracking, "_TURN", 0)
    with ExitStack() as stack:
        trackers = [stack.enter_context(Wire(turns.server.port)) for _ in range(40)]
        writer = stack.enter_context(Wire(turns.server.port))
        for wire in [*trackers, writer]:
            wire.send(b"".join(map(encode_command, [TRACK[0], [*TRACK[1], *mode]])))
            wire.reply()
            wire.reply()
        for number in range(30):
            for wire in [*trackers, writer]:
                wire.ask(b"GET", b"key")
            value = b"%d" % number
            writer.send(encode_command([b"SET", b"key", value]) + encode_command([b"GET", b"key"]))
            for wire in trackers[::2]:
                wire.send(encode_command([b"GET", b"key"]))
            assert writer.reply() == b"+OK\r\n"
            for wire in trackers[::2]:
                first = wire.reply()
                is_old = first.startswith(b"$")
                assert is_old or (
                    parse(first)[1] == [b"key"] and wire.reply() == b"$%d\r\n%b\r\n" % (len(value), value)
                )
                if is_old:
                    assert first != b"$%d\r\n%b\r\n" % (len(value), value)
                    wire.reply()
            for wire in trackers[1::2]:
                assert list(invalidated(wire)) == [[b"key"]]
            own = [writer.reply() for _ in range(2)]
            assert sorted(frame[:1] for frame in own) == [b"$", b">"]


def test_a_command_in_steps_does_not_hold_others_back(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that waits for messages runs before the command's next step, which causes messages again."""
    hold, run = Session._hold, Session._run
    held, most = Counter[Session](), [0]

    def note_hold(session: Session, *, first: bool) -> None:
        held[session] += first
        most[0] = max(most[0], held[session])
        hold(session, first=first)

    def note_run(session: Session) -> None:
        before = held[session]
        run(session)
        if held[session] == before:
            del held[session]

    blocks = [word for page in range(3000) for word in (b"steps", b"0", b"0", b"%d" % page, *b"0 1 1 1 0 a".split())]
    with ExitStack() as stack:
        writer, other, *trackers = [stack.enter_context(Wire(turns.server.port)) for _ in range(22)]
        writer.ask(b"KVPAGEMSET", b"3000", *blocks)
        for wire in trackers:
            wire.send(b"".join(map(encode_command, [TRACK[0], [*TRACK[1], b"BCAST"]])))
            wire.reply()
            wire.reply()
        monkeypatch.setattr(tracking, "_TURN", 0)
        monkeypatch.setattr(Session, "_hold", note_hold)
        monkeypatch.setattr(Session, "_run", note_run)
        writer.send(encode_command([b"KVPAGEDEL", b"steps"]))
        for _ in range(100):
            other.ask(b"PING")
        assert writer.reply() == b":3000\r\n"
    assert most[0] <= 1
