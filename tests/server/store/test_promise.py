"""The reservation of a batch in steps is not available to others between its steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import RunningServer, start_server, with_constants
from stored_pages import Here
from wire import Wire, encode_command

from kvpage_server.commands.dispatch.checks import Postponed
from kvpage_server.commands.dispatch.run import run
from kvpage_server.commands.families.server.config import apply
from kvpage_server.commands.specs import find
from kvpage_server.core import NewPages
from kvpage_server.core.arguments import page_name
from kvpage_server.resp import Reply, ReplyError, Stream
from kvpage_server.store import contents, evict
from kvpage_server.store.evict import OverLimit, QuotaAccount, Reservation

PAGES = 1100  # three steps or more
SIZE = 1000
COUNTED = PAGES * (64 + SIZE)  # bytes in a quota


def page(req: str, number: int, size: int = SIZE) -> tuple[Any, ...]:
    return (req, 0, 0, number, 0, 8, 1, size, 0, bytes([number % 251]) * size)


def batch(req: str, count: int = PAGES, size: int = SIZE) -> list[bytes]:
    words = ("KVPAGEMSET", count, *(word for number in range(count) for word in page(req, number, size)))
    return [word if isinstance(word, bytes) else str(word).encode() for word in words]


# -- between the steps of one, in this process ---------------------------------------------------------------------


def tenant(limit: int, policy: str = "noeviction") -> Here:
    here = Here(policy=policy)
    here.server.config.change("quota", f"kv:t* {limit}")
    apply(here.server, ["quota"])
    return here


def begin(here: Here, words: list[bytes]) -> Iterator[Reply]:
    reply = run(here.client, find(words), words)
    assert type(reply) is Stream
    return reply.items


def go_on(here: Here, steps: Iterator[Reply], pages: int = 1) -> None:
    """Until so many pages more are there."""
    there = len(here.keyspace)
    while len(here.keyspace) < there + pages:
        assert next(steps) == ()


def last(steps: Iterator[Reply]) -> Reply:
    return [step for step in steps if step != ()][-1]


def free(here: Here, limit: int) -> int:
    """The bytes that a value of the tenant's may take now, found by trying."""
    few, many = 0, limit + 1
    while many - few > 1:
        size = (few + many) // 2
        fits = here.call("SET", "kv:t:x", b"x" * size).startswith(b"+")
        here.call("DEL", "kv:t:x")
        few, many = (size, many) if fits else (few, size)
    return few


def account(here: Here) -> QuotaAccount:
    [quota] = here.keyspace.eviction_order.quotas.all
    return here.keyspace.quotas.of[quota][0]


def reserved(here: Here) -> int:
    return account(here).reserved


def test_one_of_two_concurrent_batches_is_refused() -> None:
    here = tenant(COUNTED + COUNTED // 2)
    first, second = begin(here, batch("ta")), begin(here, batch("tb"))
    go_on(here, first)
    received = last(second)
    assert isinstance(received, ReplyError)
    assert "the quota of 'kv:t*'" in str(received)
    assert type(last(first)) is not ReplyError
    assert (len(here.keyspace), account(here).used, reserved(here)) == (PAGES, COUNTED, 0)


@pytest.mark.parametrize(
    "words",
    [("SET", "kv:t:x", b"x" * 5000), ("KVPAGESET", *page("tb", 0, 5000)), ("MSET", "kv:t:x", b"x" * 5000)],
    ids=["string", "page", "strings"],
)
def test_writes_between_the_steps_find_the_space_reserved(words: tuple[Any, ...]) -> None:
    here = tenant(COUNTED + 4000)
    steps = begin(here, batch("ta"))
    go_on(here, steps)
    assert here.call(*words).startswith(b"-OOM command not allowed when the quota of 'kv:t*'")
    assert here.call("SET", "kv:t:x", b"x" * 3000) == b"+OK\r\n"
    assert type(last(steps)) is not ReplyError


def test_the_same_room_is_left_at_every_step() -> None:
    limit = COUNTED + 10_000
    here = tenant(limit)
    for number in range(0, PAGES, 2):  # which the batch replaces
        here.call("KVPAGESET", *page("ta", number, 500))
    steps = begin(here, batch("ta"))
    go_on(here, steps)
    left = free(here, limit)
    assert left < 10_000
    for _ in range(4):
        next(steps)
        assert free(here, limit) == left
    assert type(last(steps)) is not ReplyError
    assert (free(here, limit), reserved(here)) == (left, 0)


def test_sizes_of_a_batch_are_computed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    here, sized = tenant(2 * COUNTED), list[bytes]()
    counted = evict.counted
    monkeypatch.setattr(evict, "counted", lambda key, *rest, **named: sized.append(key) or counted(key, *rest, **named))
    steps, most = begin(here, batch("ta")), 0
    for _ in steps:
        most = max(most, len(sized))
        sized.clear()
    assert 0 < most < PAGES // 2
    assert len(here.keyspace) == PAGES


def test_blocks_of_a_batch_are_forgotten_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here()
    growth = contents.BlockGrowth(here.keyspace.contents)
    for number in range(250):
        name = page_name([b"r%d" % number, b"0", b"0", b"0", b"0"])
        growth.add(NewPages.one(name, here.keyspace.arena.allocate(1), 0))
    monkeypatch.setattr(contents, "_BLOCKS_PER_FREE", 100)
    assert len([*growth.freed()]) == 3


def test_space_freed_by_a_batch_is_available() -> None:
    here = tenant(PAGES * (64 + 2000) + 500)
    for number in range(PAGES):
        here.call("KVPAGESET", *page("ta", number, 2000))
    steps = begin(here, batch("ta"))
    while here.keyspace.eviction_order.quotas.all[0].bytes == PAGES * (64 + 2000):
        next(steps)
    assert reserved(here) == 0
    assert last(steps)
    assert here.call("SET", "kv:t:x", b"x" * 500_000) == b"+OK\r\n"


@pytest.mark.parametrize("pages", [0, 1, 600])
def test_a_disconnected_clients_batch_releases_its_reservation(pages: int) -> None:
    here = tenant(COUNTED + 1000)
    steps = begin(here, batch("ta"))
    if pages:
        go_on(here, steps, pages)
        assert reserved(here) > 0
    there = len(here.keyspace)
    del steps
    assert reserved(here) == 0
    rest = PAGES - there
    assert here.call("KVPAGEMSET", *batch("tb", min(rest, 90))[1:]) == b"+OK\r\n"


def test_a_batch_that_is_refused_was_promised_nothing() -> None:
    here = tenant(COUNTED - 1)
    assert isinstance(last(begin(here, batch("ta"))), ReplyError)
    assert (len(here.keyspace), reserved(here)) == (0, 0)


def test_a_failed_batch_releases_its_reservation() -> None:
    here = tenant(COUNTED)
    steps = begin(here, batch("ta"))
    go_on(here, steps)
    here.keyspace.contents.set_pages = lambda _: (_ for _ in ()).throw(OverLimit(account(here)))  # type: ignore[method-assign]
    assert isinstance(last(steps), ReplyError)
    assert reserved(here) == 0


def test_a_quota_is_not_exceeded_by_a_reservation_alone() -> None:
    """Or its values would go first when memory is full."""
    here = tenant(COUNTED)
    steps = begin(here, batch("ta"))
    go_on(here, steps)
    full = account(here)
    here.server.config.change("quota", f"kv:t* {COUNTED}")
    assert (full.quota.is_over, full.evicts_above(1)) == (False, full.used - 1)


def test_a_batch_of_one_part_reserves_space_for_its_steps() -> None:
    """A block that was stored whole is split first, in steps of its own."""
    here = tenant(10_000)
    assert here.call("KVBLOCKSET", "ta", 0, 1, 2, 1, 0, 1, 0, 8, 100, bytes(200)) == b"+OK\r\n"
    steps = begin(here, batch("ta", 2))
    while not reserved(here):
        assert next(steps) == ()
    assert here.call("SET", "kv:t:x", b"x" * 9000).startswith(b"-OOM")
    assert type(last(steps)) is not ReplyError
    assert reserved(here) == 0


def test_index_of_a_quota_is_reserved_for_later_steps() -> None:
    here = tenant(COUNTED)
    steps = begin(here, batch("ta"))
    go_on(here, steps)
    [quota] = here.keyspace.eviction_order.quotas.all
    of_index = here.keyspace.quotas.of[quota][1]
    used, expected = of_index.used, of_index.used + of_index.reserved
    assert type(last(steps)) is not ReplyError
    assert used < of_index.used == pytest.approx(expected, rel=0.01)
    assert of_index.reserved == 0


def test_space_freed_by_a_part_is_not_reserved() -> None:
    space = account(tenant(COUNTED))
    with Reservation([{space: 5}, {space: -3}, {space: 2}]) as reservation:
        assert space.reserved == 7
        reservation.release_part()
        reservation.release_part()
        assert space.reserved == 2
    assert space.reserved == 0


# -- a write that evicts many units does so in steps -----------------------------------------------------------------

ROOM = 400_000  # bytes of the quota


def test_a_write_keeps_the_space_that_it_evicts_in_steps() -> None:
    here = tenant(ROOM, "allkeys-lru")
    for number in range(2000):
        here.call("SET", f"kv:t:{number}", b"x" * 300)
    calls, ended = 0, 2001
    while True:
        before = here.keyspace.counters.evicted
        try:
            assert here.call("SET", "kv:t:large", bytes(ROOM * 9 // 10)) == b"+OK\r\n"
            break
        except Postponed as postponed:
            assert reserved(here) > ROOM * 9 // 10
            for _ in range(2):  # others evict, too, before they store
                with suppress(Postponed):
                    here.call("SET", "kv:t:other", b"x" * 300)
                    ended += 1
            assert here.keyspace.counters.evicted <= before + 3 * evict.KEYS_PER_STEP
            postponed.room = None
            calls += 1
    assert calls
    assert sum(here.server.stats.calls["set"].histogram) == ended
    assert account(here).used <= ROOM
    assert reserved(here) == 0


def test_commands_that_evict_in_steps_reply_as_others() -> None:
    program = with_constants("kvpage_server.store.evict", KEYS_PER_STEP=5)
    options = ("--store", "memory", "--quota", "*", str(ROOM))
    with start_server(*options, program=program) as server, server.client() as client, Wire(server.port) as monitor:
        assert client.ping()
        assert monitor.ask(b"MONITOR") == b"+OK\r\n"
        large, half = bytes(ROOM * 3 // 4), bytes(ROOM * 3 // 8)
        block = ("KVBLOCKSET", "tb", 0, 1, 1, 1, 0, 1, 0, 8, len(large), large)
        writes: list[tuple[tuple[Any, ...], Any]] = [
            (("SET", "a", large), True),
            (("SET", "new", large, "GET"), None),
            (("GETSET", "new2", large), None),
            (("MSET", "b", half, "c", half), True),
            (("KVPAGESET", *page("tp", 0, len(large))), b"OK"),
            (("KVPAGEMSET", *batch("tm", 100, len(half) // 50)[1:]), b"OK"),
            (("KVPAGEMSET", *batch("tn", 200, len(half) // 100)[1:]), b"OK"),
            (block, b"OK"),
        ]
        for number, (words, expected) in enumerate(writes):
            client.mset({f"{number}:{i}": b"x" * 300 for i in range(500)})
            misses = client.info("stats")["keyspace_misses"]
            assert client.execute_command(*words) == expected, words[0]
            assert client.info("stats")["keyspace_misses"] - misses == (expected is None)
            shown = [monitor.reply().split(b'"')[1].decode() for _ in range(4)]
            assert shown == ["MSET", "INFO", words[0], "INFO"]
        client.mset({f"again:{i}": b"x" * 300 for i in range(500)})
        with client.pipeline() as transaction:
            transaction.set("a", large)
            transaction.execute_command(*block)
            transaction.execute_command(*writes[4][0])
            assert transaction.execute() == [True, b"OK", b"OK"]
        stats = client.info("commandstats")
        assert [stats[f"cmdstat_{name}"]["calls"] for name in ("kvpageset", "kvpagemset", "getset")] == [2, 2, 1]
        assert client.info("quotas")["quota0"]["bytes"] <= ROOM
        assert client.set("all", bytes(ROOM - 200))
        assert client.dbsize() == 1


# -- two clients of a server, at once ------------------------------------------------------------------------------


def at_once(server: RunningServer, batches: list[list[bytes]]) -> list[str]:
    """The replies to commands that end in the same moment, in the order of their words."""
    socks = [server.connect() for _ in batches]
    lines = [encode_command(words) for words in batches]
    for sock, line in zip(socks, lines, strict=True):
        sock.settimeout(60)
        sock.sendall(line[:-5000])
    server.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(len(socks)) as threads:  # unread bytes may fill a connection
        for sock, line in zip(socks, lines, strict=True):
            threads.submit(sock.sendall, line[-5000:])
        server.process.send_signal(signal.SIGCONT)
    received = [sock.makefile("rb").readline().decode() for sock in socks]
    for sock in socks:
        sock.close()
    return received


MANY, LONG = 4000, 7000  # 28 MB, which take several turns


def of_two_one_is_stored(server: RunningServer, client: redis.Redis, why: str) -> None:
    received = sorted(at_once(server, [batch("ta", MANY, LONG), batch("tb", MANY, LONG)]))
    assert received[0] == "+OK\r\n"
    assert received[1].startswith(f"-OOM command not allowed when {why}")
    assert client.dbsize() == MANY
    assert client.set("small", "value")


@pytest.mark.parametrize("mode", ["always", "everysec", "no"])
def test_two_batches_of_which_the_disk_takes_one(tmp_path: Path, mode: str) -> None:
    options = ("--store", "tiered", "--appendfsync", mode, "--maxdisk", "64mb", "--maxmemory-policy", "noeviction")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        of_two_one_is_stored(server, client, "used disk > 'maxdisk'")
        assert client.execute_command("SAVE")
        info = client.info("kvpage")
        assert (info["disk_failing"], info["disk_write_errors"]) == ("", 0)
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        assert client.dbsize() == MANY + 1


def test_two_batches_of_which_a_quota_takes_one() -> None:
    options = ("--maxmemory-policy", "noeviction", "--quota", "kv:t*", "40mb")
    with start_server(*options) as server, server.client() as client:
        of_two_one_is_stored(server, client, "the quota of 'kv:t*'")


def test_two_batches_of_which_memory_takes_one() -> None:
    options = ("--maxmemory-policy", "noeviction", "--maxmemory", "40mb")
    with start_server(*options) as server, server.client() as client:
        received = sorted(at_once(server, [batch("ta", MANY, LONG), batch("tb", MANY, LONG)]))
        assert [one[:4] for one in received] == ["+OK\r", "-OOM"]
        assert client.dbsize() == MANY


@pytest.mark.parametrize("quotas", ["", "kv:t* 1gb", "kv:u* 1mb kv:t* 2gb"])
@pytest.mark.parametrize("evicted", [0, 1])
def test_a_batch_that_waits_for_room_ignores_replaced_quotas(quotas: str, evicted: int) -> None:
    here = tenant(COUNTED, "allkeys-lru")
    here.server.config.change("maxmemory", "1gb")
    apply(here.server, ["maxmemory"])
    for number in range(PAGES):
        here.call("KVPAGESET", *page("ta", number))
    steps = begin(here, batch("tb"))
    while len(here.keyspace) > PAGES - evicted:
        assert next(steps) == ()
    here.server.config.change("quota", quotas)
    apply(here.server, ["quota"])
    there = [number for number in range(PAGES) if here.call("EXISTS", f"kv:ta:0:0:{number}:0") == b":1\r\n"]
    here.call("KVPAGEDEL", "ta")
    for number in there:  # the replaced quota knows blocks with the same names
        here.call("KVPAGESET", *page("ta", number))
    assert type(last(steps)) is not ReplyError
    assert len(here.keyspace) == len([*here.keyspace.eviction_order.units.victims()]) == PAGES + len(there)
