"""Watched keys are forgotten in steps, so that the end of many connections delays no other client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from turns import Cost, Turns, measured
from waiting import until
from wire import encode_command

from kvpage_server.commands.notifying import events

CLIENTS, KEYS = 10, 8000
TRIES = 2
LONGEST = 0.03  # seconds of a turn; usually 5 ms, and 0.4 s if all keys are removed in one


def watch(client: int) -> bytes:
    """WATCH of KEYS keys, other ones for each client."""
    return b"".join(
        encode_command([b"WATCH", *(b"kv:r:%d:0:%d:0" % (client, key) for key in range(first, first + 1000))])
        for first in range(0, KEYS, 1000)
    )


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    with measured() as turns:
        yield turns


def watching(turns: Turns, stack: ExitStack) -> None:
    """Let CLIENTS connections watch KEYS keys each, as long as the stack is open."""
    for client in range(CLIENTS):
        turns.join(stack, watch(client))


def watches_no_key(turns: Turns) -> bool:
    return turns.on_loop(lambda: turns.server.keyspace.contents.on_event) is None


def test_many_ends_of_connections_are_short_turns(turns: Turns) -> None:
    def longest() -> float:
        with ExitStack() as stack:
            watching(turns, stack)
            turns.on_loop(turns.loop.forget)
        until(lambda: watches_no_key(turns))
        seconds: float = turns.on_loop(lambda: turns.loop.longest)
        return seconds

    assert any(longest() < LONGEST for _ in range(TRIES))


def test_unwatch_of_many_keys_is_a_short_turn(turns: Turns) -> None:
    assert turns.takes_short_turns(watch(0), encode_command([b"UNWATCH"]), LONGEST / 2, TRIES)


def test_flushall_with_many_watched_keys_is_a_short_turn(turns: Turns) -> None:
    with ExitStack() as stack:
        watching(turns, stack)
        assert min(turns.cost(b"", encode_command([b"FLUSHALL"])).longest for _ in range(TRIES)) < LONGEST


def test_watch_waits_while_many_keys_are_removed(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_LEFT", 0)
    with ExitStack() as stack:
        turns.join(stack, watch(0) + encode_command([b"UNWATCH"]) + encode_command([b"WATCH", b"another"]))
        assert turns.on_loop(lambda: turns.server.keyspace.contents.on_event) is not None
        assert not turns.on_loop(lambda: turns.server.events.has_many_left)


@pytest.mark.parametrize("command", ["WATCH kv:r:index", "KVPAGEWHY r", "SCARD kv:r:index"])
def test_overdue_pages_expire_one_block_in_a_step(command: str) -> None:
    cost = cost_with_overdue_blocks(command)
    assert 0.002 < cost.longest < cost.total / 2


@pytest.mark.parametrize("command", ["EXISTS", "TTL", "TYPE"])
def test_an_index_key_exists_with_the_first_page_in_time(command: str) -> None:
    assert cost_with_overdue_blocks(f"{command} kv:r:index").longest < 0.002  # usually 0.2 ms; 8 ms if pages expire


def cost_with_overdue_blocks(command: str) -> Cost:
    """The cost of a command if a page of each of six split blocks of request `r` is overdue."""
    with measured() as turns:
        before = list[list[bytes]]()
        for page in (b"%d" % number for number in range(6)):
            shape = [b"1024", b"8", b"1", b"0", b"1", b"0", b"8", b"1", bytes(1024 * 8)]
            before.append([b"KVBLOCKSET", b"r", page, *shape])
            before.append([b"KVPAGESET", b"r", b"0", b"0", page, b"0", b"8", b"1", b"1", b"0", b"x"])
        overdue = [[b"PEXPIRE", b"kv:r:0:1:%d:0" % page, b"1"] for page in range(6)]
        turns.cost(b"".join(map(encode_command, before + overdue)), encode_command([b"PING"]))
        time.sleep(0.1)
        return turns.cost(b"", encode_command(command.encode().split()))
