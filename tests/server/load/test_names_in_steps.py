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
from wire import Wire, encode_command

from kvpage_server.core import NAME
from kvpage_server.glob import LONGEST_COMPARED

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
    """Patterns that do not end with a star match channels of up to 8 KiB."""
    with ExitStack() as stack:
        turns.join(stack, b"".join(map(encode_command, [[b"PSUBSCRIBE", b"*[ab]a*c*", b"*c", b"*", b"?a*", b"a*"]])))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", turns.server.port), timeout=60))
        for size, found in ((LONGEST_COMPARED, 5), (LONGEST_COMPARED + 1, 3), (1_000_000, 3)):
            sock.sendall(encode_command([b"PUBLISH", b"a" * (size - 1) + b"c", b"m"]))
            assert sock.recv(100) == b":%d\r\n" % found


def test_the_longest_channel_costs_little_for_each_pattern(turns: Turns) -> None:
    with ExitStack() as stack:
        turns.join(stack, encode_command([b"PSUBSCRIBE", *(b"*x%d*" % i for i in range(1000))]))
        publish = encode_command([b"PUBLISH", b"a" * (4 << 20), b"m"])
        assert min(turns.cost(b"", publish).total for _ in range(5)) < 0.5  # usually 10 ms; 3.5 s if all was compared


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


RULES = [b"~*x%d*" % i for i in range(500)]


@pytest.mark.parametrize(
    "words",
    [
        [b"GET", b"k" * (4 << 20)],
        [b"EXISTS", *(b"%d" % i + b"k" * 8000 for i in range(500))],
        [b"EXISTS", *(b"%d" % i + b"k" * 2000 for i in range(2000))],
        [b"KVPAGEMEXISTS", b"200", *[b"r" * (1 << 18)] * 1000],
        [b"KVBLOCKMGET", b"500", *[b"r" * (1 << 18)] * 1000],
        [b"SET", b"k", b"v", *[b"x" * (1 << 18)] * 1000],
    ],
    ids=["one", "long", "many", "pages", "blocks", "options"],
)
def test_rights_for_long_names_are_checked_in_steps(turns: Turns, words: list[bytes]) -> None:
    """Usually 6 ms; 0.3 to 1.2 s if all bytes of all names are compared with all patterns, or copied, in one step."""
    made = [b"ACL", b"SETUSER", b"user", b"on", b"nopass", b"+@all", *RULES]
    assert is_short(turns, [made, [b"AUTH", b"user", b"x"]], words)


@pytest.mark.parametrize("end", [b"DISCARD", b"EXEC"])
def test_rights_in_a_transaction_are_checked_in_steps(turns: Turns, end: bytes) -> None:
    """Usually 6 ms; 0.4 s if a command that is queued, or that EXEC runs, is compared with all patterns in one step."""
    made = [b"ACL", b"SETUSER", b"user", b"on", b"nopass", b"+@all", *RULES, b"~*kkk*"]
    before = b"".join(map(encode_command, [made, [b"AUTH", b"user", b"x"]]))
    words = [b"EXISTS", *(b"k%d" % i + b"k" * 2000 for i in range(300))]
    command = b"".join(map(encode_command, [[b"MULTI"], words, [end]]))
    assert turns.takes_short_turns(before, command, LONGEST)


def test_a_refused_name_in_a_transaction_aborts_it(turns: Turns) -> None:
    made = [b"ACL", b"SETUSER", b"user", b"on", b"nopass", b"+@all", *RULES, b"~*kkk*"]
    keys = [b"k%d" % i + b"k" * 2000 for i in range(100)]  # compared in several steps
    with Wire(turns.server.port) as wire:
        assert wire.ask(*made) == b"+OK\r\n"
        assert wire.ask(b"AUTH", b"user", b"x") == b"+OK\r\n"
        assert wire.ask(b"MULTI") == b"+OK\r\n"
        assert wire.ask(b"EXISTS", *keys) == b"+QUEUED\r\n"
        assert wire.ask(b"EXISTS", *keys, b"other") == b"-NOPERM No permissions to access a key\r\n"
        assert wire.ask(b"EXEC").startswith(b"-EXECABORT")
        assert wire.ask(b"MULTI") == b"+OK\r\n"
        assert wire.ask(b"EXISTS", *keys) == b"+QUEUED\r\n"
        with Wire(turns.server.port) as other:
            assert other.ask(b"ACL", b"SETUSER", b"user", b"resetkeys", b"~other") == b"+OK\r\n"
        assert b"ACLs rules changed" in wire.ask(b"EXEC")


@pytest.mark.parametrize("name", [b"loglevel", b"maxmemory", b"notify-keyspace-events", b"quota"])
@pytest.mark.parametrize("value", [b"\xff", b"a", b"a* 1gb "], ids=["bytes", "letters", "words"])
def test_a_long_value_of_a_parameter_is_a_short_turn(turns: Turns, name: bytes, value: bytes) -> None:
    """Usually 1 ms; 5 to 180 ms if all of it is decoded and parsed before it is refused."""
    words = [b"CONFIG", b"SET", name, value * ((4 << 20) // len(value))]
    assert is_short(turns, [], words, limit=LONGEST / 8)


@pytest.mark.parametrize(
    "words", [[b"DEL"], [b"MSETNX"], [b"MSET"], [b"EXISTS"], [b"MGET"], [b"WATCH"]], ids=lambda words: words[0].decode()
)
@pytest.mark.parametrize("size", [8000, 4 << 20])
def test_all_names_of_a_command_together_are_bounded(turns: Turns, words: list[bytes], size: int) -> None:
    """Usually 1 to 6 ms, and four times that if a command may have 16 MiB of names."""
    count, pair = max((4 << 20) // size, 1), words[0].startswith(b"MSET")
    keys = [b"%03d" % i + b"k" * (size - 3) for i in range(min(count, 500))]
    values = [word for key in keys for word in (key, b"v")]
    before = [[b"FLUSHALL"], [b"MSET", *values]]
    assert is_short(turns, before, [*words, *(values if pair else keys)], limit=LONGEST / 2)
