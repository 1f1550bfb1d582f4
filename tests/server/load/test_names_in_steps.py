"""Long names are compared with patterns in steps, and each comparison costs O(name).

Measured in processor time of a server in this process, as in `test_stalls`.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from turns import Turns, measured
from wire import encode_command

from kvpage_server.core import NAME

PATTERN = b"*" + b"[ab]" * 60 + b"c*"
LONGEST = 0.04  # seconds of a turn, for slow machines; usually 6 ms. With other costs, the commands take 0.3 to 4 s


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    with measured() as turns:
        yield turns


def is_short(
    turns: Turns, before: list[list[bytes]], words: list[bytes], *crowd: list[list[bytes]], limit: float = LONGEST
) -> bool:
    with ExitStack() as stack:
        for said in crowd:
            turns.join(stack, b"".join(map(encode_command, said)))
        said = b"".join(map(encode_command, before))
        return turns.takes_short_turns(said, encode_command(words), limit)


def names(count: int, size: int) -> list[list[bytes]]:
    return [[b"SET", b"a" * size + b"%d" % i, b""] for i in range(count)]


@pytest.mark.parametrize("command", [[b"SCAN", b"0", b"MATCH", PATTERN, b"COUNT", b"1000"], [b"KEYS", PATTERN]])
def test_long_keys_are_compared_in_steps(turns: Turns, command: list[bytes]) -> None:
    assert is_short(turns, [[b"FLUSHALL"], *names(200, 200_000)], command)


def test_removed_keys_are_compared_in_steps(turns: Turns) -> None:
    removed = [[b"DEL", name] for _, name, _ in names(1000, 480)]
    before = [[b"FLUSHALL"], *names(1000, 480), *removed]
    assert is_short(turns, before, [b"KVLOST", PATTERN])


def test_long_channels_are_compared_in_steps(turns: Turns) -> None:
    crowd = [[b"SUBSCRIBE", b"a" * 1_000_000 + b"%d" % i] for i in range(20)]
    assert is_short(turns, [], [b"PUBSUB", b"CHANNELS", PATTERN], crowd)


def test_a_long_channel_is_compared_with_patterns_in_steps(turns: Turns) -> None:
    patterns = [[b"PSUBSCRIBE", b"%d" % i + PATTERN[1:]] for i in range(100)]
    patterns += [[b"PSUBSCRIBE", b"*" + PATTERN[5 * i :]] for i in range(1, 60)]
    assert is_short(turns, [], [b"PUBLISH", b"a" * 1_000_000, b"m"], patterns)


def test_a_message_of_a_long_channel_is_counted_and_arrives(turns: Turns) -> None:
    channel = b"a" * 1_000_000 + b"c"
    with ExitStack() as stack:
        turns.join(stack, b"".join(map(encode_command, [[b"PSUBSCRIBE", PATTERN, b"*c", b"*b", b"a*"]])))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", turns.server.port), timeout=60))
        sock.sendall(encode_command([b"PUBLISH", channel, b"m"]))
        assert sock.recv(100) == b":3\r\n"


def test_events_of_many_keys_are_compared_with_patterns_in_steps(turns: Turns) -> None:
    patterns = [[b"PSUBSCRIBE", b"*" + b"a" * 500 + b"b%d*" % i] for i in range(1000)]
    values = [word for _, key, value in names(400, 500) for word in (key, value)]
    before = [[b"CONFIG", b"SET", b"notify-keyspace-events", b"KEA"]]
    assert is_short(turns, before, [b"MSET", *values], patterns)
    turns.cost(b"", encode_command([b"CONFIG", b"SET", b"notify-keyspace-events", b""]))


def test_lengths_are_sorted_in_steps(turns: Turns) -> None:
    count = 100_000
    needs = random.Random(1).sample(range(1, count + 1), count)
    page = b"KVPAGESET s 0 0 0 0 8 1 1 0 x".split()
    states = [word for need in needs for word in (b"s", b"0", b"%d" % need)]
    words = [b"KVPAGEPREFIX", b"1", b"0", b"%d" % count, *[b"s", b"0"] * count]
    assert is_short(turns, [page], [*words, b"LENGTHS", b"%d" % count, *states])


@pytest.mark.parametrize("name", [b"client", b"acl"])
def test_many_descriptions_of_a_container_are_a_short_turn(turns: Turns, name: bytes) -> None:
    assert is_short(turns, [], [b"COMMAND", b"INFO", *[name] * 1000])


@pytest.mark.parametrize("container", [[], [b"client"]])
def test_a_long_unknown_name_is_a_short_turn(turns: Turns, container: list[bytes]) -> None:
    assert is_short(turns, [], [*container, b"x" * (4 << 20)], limit=LONGEST / 8)


@pytest.mark.parametrize(
    "words",
    [
        [b"CLIENT", b"SETINFO", b"\xff", b"1"],
        [b"ACL", b"CAT", b"\xff"],
        [b"ACL", b"DRYRUN", b"\xff", b"GET", b"k"],
        [b"ACL", b"SETUSER", b"user", b"\xff"],
        [b"CONFIG", b"SET", b"\xff", b"1"],
        pytest.param([b"KVLOST", b"\\a"], marks=pytest.mark.skipif(NAME == "python", reason="unquoted by the core")),
    ],
    ids=lambda words: b" ".join(words[:2]).decode(),
)
def test_a_long_word_with_strange_bytes_is_a_short_turn(turns: Turns, words: list[bytes]) -> None:
    """Usually 5 ms; if the whole word is escaped for an error message, or unquoted in Python, 0.5 to 2.8 s."""
    strange = max(words, key=lambda word: word in (b"\xff", b"\\a"))
    assert is_short(turns, [], [word * (2 << 20) if word is strange else word for word in words])


def test_a_very_long_unknown_name_is_cut_in_the_error(turns: Turns) -> None:
    with socket.create_connection(("127.0.0.1", turns.server.port), timeout=60) as sock:
        sock.sendall(encode_command([b"x" * (5 << 20), b"a"]))
        assert sock.recv(300) == b"-ERR unknown command '%b', with args beginning with: 'a' \r\n" % (b"x" * 128)
