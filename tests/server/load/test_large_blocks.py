"""Blocks of 131,072 pages that are stored whole: their commands and messages take no long turn of the loop.

Measured in processor time of a server in this process, as in `test_stalls`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from turns import Turns, measured
from wire import encode_command

LAYERS, HEADS = 65536, 2
PAGES = LAYERS * HEADS
BLOCK = [b"KVBLOCKSET", b"mine.big", b"0", b"%d" % LAYERS, b"%d" % HEADS, b"1", b"0", b"1", b"0", b"3", b"1"]
STORE = [*BLOCK, bytes(PAGES)]
OWNER, OTHER = [b"AUTH", b"owner", b"word"], [b"AUTH", b"other", b"word"]
LONGEST = 0.03  # seconds of a turn, for slow machines; usually 5 ms. Without steps all of these take 0.1 to 1.5 s


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    users = [
        [b"ACL", b"SETUSER", name, b"on", b">word", b"~kv:" + keys + b".*", b"&*", b"+@all"]
        for name, keys in ((b"owner", b"mine"), (b"other", b"theirs"))
    ]
    with measured() as turns, ExitStack() as stack:
        turns.join(stack, b"".join(map(encode_command, users)))
        yield turns


def is_short(turns: Turns, before: list[list[bytes]], words: list[bytes], *crowd: list[list[bytes]]) -> bool:
    """Return whether a command takes short turns while a crowd of other connections is there."""
    with ExitStack() as stack:
        for said in crowd:
            turns.join(stack, b"".join(map(encode_command, said)))
        return turns.takes_short_turns(b"".join(map(encode_command, before)), encode_command(words), LONGEST)


@pytest.mark.parametrize("user", [[], [OWNER], [OTHER]], ids=["everybody", "owner", "other tenant"])
@pytest.mark.parametrize("command", ["SCAN 0", "KEYS *", "KEYS *nothing*", "RANDOMKEY", "DBSIZE"])
def test_keys_of_a_large_block_are_listed_in_steps(turns: Turns, user: list[list[bytes]], command: str) -> None:
    before = [[b"FLUSHALL"], STORE, *user]
    assert is_short(turns, before, command.encode().split())


TRACK = [b"CLIENT", b"TRACKING", b"ON"]
TRACK_PREFIXES = [  # 1,000 prefixes in two commands of 30 clients each
    [
        [*TRACK, b"BCAST", *(w for at in range(first, first + 500) for w in (b"PREFIX", b"kv:mine.big:%d:" % at))]
        for first in (client * 1000, client * 1000 + 500)
    ]
    for client in range(30)
]
PAGE_NAMES = [word for at in range(2000) for word in (b"mine.big", b"%d" % (at // 2), b"%d" % (at % 2), b"0", b"0")]


@pytest.mark.parametrize(
    "crowd",
    [
        [[[b"HELLO", b"3"], OWNER, [*TRACK, b"BCAST"]]],
        [[[b"HELLO", b"3"], OWNER, [*TRACK, b"BCAST", b"PREFIX", b"kv:mine.big:7"]]],
        [[[b"HELLO", b"3"], OTHER, [*TRACK, b"BCAST"]]] * 8,
        [[[b"HELLO", b"3"], OWNER, *commands] for commands in TRACK_PREFIXES],
        [[[b"HELLO", b"3"], OWNER, TRACK, [b"KVBLOCKGET", b"mine.big", b"0"]]],
        [[[b"HELLO", b"3"], OWNER, TRACK, [b"KVPAGEMGET", b"2000", *PAGE_NAMES]]],
        [[OWNER, [b"WATCH", b"kv:mine.big:7:0:0:0", b"other"]]],
    ],
    ids=[
        "broadcast",
        "broadcast to a longer prefix",
        "other tenants",
        "to many prefixes",
        "reader of the block",
        "of pages",
        "watcher",
    ],
)
@pytest.mark.parametrize("words", [STORE, [b"KVPAGEDEL", b"mine.big"]], ids=["stored", "deleted"])
def test_changes_of_a_large_block_are_reported_in_short_turns(
    turns: Turns, crowd: list[list[list[bytes]]], words: list[bytes]
) -> None:
    assert is_short(turns, [[b"FLUSHALL"], STORE, [b"SET", b"other", b"key"]], words, *crowd)


@pytest.mark.parametrize("classes", [b"KEA", b"Kx"])
@pytest.mark.parametrize("words", [STORE, [b"KVPAGEDEL", b"mine.big"]], ids=["stored", "deleted"])
def test_events_of_a_large_block_are_published_in_steps(turns: Turns, classes: bytes, words: list[bytes]) -> None:
    with ExitStack() as stack:
        turns.join(stack, encode_command([b"CONFIG", b"SET", b"notify-keyspace-events", classes]))
        stack.callback(turns.join, stack, encode_command([b"CONFIG", b"SET", b"notify-keyspace-events", b""]))
        subscriber = [[b"PSUBSCRIBE", b"__keyspace@0__:kv:mine.big:7:*"]]
        assert is_short(turns, [[b"FLUSHALL"], STORE], words, subscriber)
