"""KVPAGEPREFIX, leases and pins: protection from eviction, its duration and its limit."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import start_server, with_constants
from stored_pages import Here, ask, fill, held, prefix, set_block, set_page, small_store
from wire import parse

from kvpage_server.commands.dispatch.run import run
from kvpage_server.commands.specs import find
from kvpage_server.core.arguments import PageName
from kvpage_server.page import PageKey, unix_ms
from kvpage_server.resp import Stream
from kvpage_server.store.eviction.leases import Bytes, Leases
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms


def test_a_prefix_ends_at_the_first_block_that_is_not_complete(client: redis.Redis) -> None:
    for page in (0, 1, 2, 4):
        set_block(client, "r", page)
    names = [word for page in range(6) for word in ("r", page)]
    assert prefix(client, *names) == 3
    assert prefix(client, *names[:4]) == 2
    assert prefix(client, *names[6:]) == 0
    assert prefix(client, *names, pages=5) == 0
    client.delete("kv:r:0:1:1:1")
    assert prefix(client, *names) == 1


def test_a_prefix_of_content_hashes_spans_many_requests(client: redis.Redis) -> None:
    for req in "abc":
        set_block(client, req, 0)
    assert prefix(client, "a", 0, "b", 0, "c", 0, "d", 0) == 3


def test_a_prefix_counts_no_block_of_which_a_page_has_expired(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    set_block(client, "r", 1)
    assert prefix(client, "r", 0, "r", 1) == 2
    client.pexpire("kv:r:0:0:1:0", 10)
    time.sleep(0.02)
    assert prefix(client, "r", 0, "r", 1) == 1


def set_state(client: redis.Redis, req: str, page: int) -> None:
    """A block of one page."""
    client.execute_command("KVBLOCKSET", req, page, 1, 1, 1, 0, 1, 0, 3, 100, bytes(100))


def lengths(client: redis.Redis, blocks: int, *states: tuple[str, int, int], lease_ms: int = 0) -> list[int]:
    names = [word for page in range(blocks) for word in ("r", page)]
    words = ["LENGTHS", len(states), *(word for state in states for word in state)]
    return list(client.execute_command("KVPAGEPREFIX", 4, lease_ms, blocks, *names, *words))


def test_lengths_have_all_blocks_and_states(client: redis.Redis) -> None:
    for page in (0, 1, 2, 4):
        set_block(client, "r", page)
    for page in (1, 2, 3, 5):
        set_state(client, "state", page)
    states = [("state", page, page) for page in range(1, 6)]
    assert lengths(client, 5, *states) == [1, 2, 3]
    assert lengths(client, 5, *reversed(states)) == [1, 2, 3]
    assert lengths(client, 5, *states, ("window", 0, 2), ("window", 1, 3)) == [1]
    set_state(client, "window", 1)
    assert lengths(client, 5, *states, ("window", 0, 2), ("window", 1, 3)) == [1, 3]
    assert lengths(client, 2, *states) == [1, 2]
    assert lengths(client, 5, ("state", 5, 5)) == []


def test_a_state_is_complete_if_its_pages_fit_together(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    set_page(client, "state", layer=1)
    assert lengths(client, 1, ("state", 0, 1)) == []
    set_page(client, "state", layer=0)
    is_block = client.execute_command("KVBLOCKEXISTS", "state", 0)  # a cluster has no blocks of single pages
    assert lengths(client, 1, ("state", 0, 1)) == [1] * is_block


def test_only_the_longest_length_is_leased(client: redis.Redis) -> None:
    for page in range(4):
        set_block(client, "r", page)
        set_state(client, "state", page)
    assert lengths(client, 4, ("state", 0, 2), ("state", 1, 3), ("none", 0, 4), lease_ms=3_600_000) == [2, 3]
    stats = [ask(client, "KVPAGESTAT", req, 0, 0, page, 0) for req in ("r", "state") for page in range(4)]
    assert [stat["lease_left_ms"] > 0 for stat in stats] == [True] * 3 + [False] * 2 + [True] + [False] * 2


def test_lengths_that_cannot_be_leased_are_omitted() -> None:
    with small_store() as client:
        pages = range(8)
        for page in pages:
            set_block(client, "r", page, size=5000)
            set_state(client, "state", page)
        states = [("state", page, page + 1) for page in pages]
        all_of_them = lengths(client, 8, *states)
        leased = lengths(client, 8, *states, lease_ms=60_000)
        assert leased == all_of_them[: len(leased)]
        assert len(leased) < len(all_of_them)
        fill(client)
        assert held(client, "r")[: len(leased)] == list(pages)[: len(leased)]
        assert leased[-1] - 1 in held(client, "state")


def leased_blocks(client: redis.Redis) -> int:
    return int(client.info("kvpage")["leased_or_pinned"])


def test_a_length_that_does_not_fit_leases_nothing() -> None:
    with small_store() as client:
        for page in range(8):
            set_block(client, "r", page, size=5000)  # six of them fit into the room for leases
        for page in (0, 1):
            set_state(client, "state", page)
        assert lengths(client, 8, ("state", 0, 2), ("state", 1, 8)) == [2, 8]
        assert lengths(client, 8, ("state", 1, 8), lease_ms=60_000) == []
        assert leased_blocks(client) == 0
        assert lengths(client, 8, ("state", 0, 2), ("state", 1, 8), lease_ms=60_000) == [2]
        assert leased_blocks(client) == 3


def test_room_that_blocks_took_is_free_for_a_shorter_length() -> None:
    with small_store() as client:
        for page in range(6):
            set_block(client, "r", page, size=5000)
        for page in (0, 1):
            set_block(client, "state", page, size=5000)
        assert lengths(client, 6, ("state", 0, 5), ("state", 1, 6), lease_ms=60_000) == [5]
        assert leased_blocks(client) == 6


def steps_of(here: Here, *given: Any) -> Iterator[Any]:
    """Run a command up to its first step, if it has steps, and return the others."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in given]
    reply = run(here.client, find(words), list(words))
    return iter(reply.items) if isinstance(reply, Stream) else iter(())


STATES = [word for need in (2, 3, 5) for word in ("state", need, need)]
LENGTHS = ["KVPAGEPREFIX", 4, 60_000, 5, *(word for page in range(5) for word in ("r", page)), "LENGTHS", 3, *STATES]


def five_blocks_and_three_states() -> Here:
    here = Here()
    for req, pages in (("r", range(5)), ("state", (2, 3, 5))):
        for page in pages:
            here.call("KVBLOCKSET", req, page, 1, 2, 1, 0, 2, 0, 3, 100, 1, 3, 100, bytes(400))
    return here


def leased(here: Here) -> set[tuple[bytes, int]]:
    here.keyspace.leases.settle(monotonic_ms())
    blocks = (unit for unit in here.keyspace.leases.by_unit if isinstance(unit, Block))
    return {(block.req_id, block.page) for block in blocks}


def of_length(length: int) -> set[tuple[bytes, int]]:
    return {(b"r", page) for page in range(length)} | ({(b"state", length)} if length else set())


@pytest.mark.parametrize(
    ("change", "changed", "left"),
    [
        (("DEL", "kv:r:0:0:3:0"), (b"r", 3), [2, 3]),
        (("KVPAGESET", "r", 3, 0, 3, 0, 3, 1, 4, 0, "more"), (b"r", 3), [2, 3]),
        (("KVPAGEDEL", "r", 3), (b"r", 3), [2, 3]),
        (("DEL", "kv:state:0:1:5:1"), (b"state", 5), [2, 3]),
        (("KVPAGEDEL", "state"), (b"state", 5), []),
    ],
)
def test_a_block_that_changes_before_its_lease_is_omitted(
    change: tuple[Any, ...], changed: tuple[bytes, int], left: list[int]
) -> None:
    """At whatever step of the command it changes. Nothing but the longest length of the answer is leased."""
    answers = []
    for count in range(len([*steps_of(five_blocks_and_three_states(), *LENGTHS)])):
        here = five_blocks_and_three_states()
        steps = steps_of(here, *LENGTHS)
        for _ in range(count):
            next(steps)
        was_leased = changed in leased(here)
        [*steps_of(here, *change)]
        *_, reply = steps
        answer = parse(reply)
        answers.append(answer)
        assert answer == ([2, 3, 5] if was_leased else left)
        wanted = of_length(answer[-1] if answer else 0)
        assert leased(here) == {name for name in wanted if here.keyspace.index.block(*name)}
    assert left in answers


def test_a_lease_of_another_client_is_not_undone() -> None:
    """Blocks are leased, and then the state is missing. Another client has leased a block meanwhile, for less time."""
    steps = len([*steps_of(five_blocks_and_three_states(), *LENGTHS)])
    for count in range(steps):
        here = five_blocks_and_three_states()
        doing = steps_of(here, *LENGTHS)
        for _ in range(count):
            next(doing)
        if (b"state", 5) in leased(here):
            break  # the answer is known
        here.call("KVPAGELEASE", "r", 9000, 4)
        here.call("DEL", "kv:state:0:0:5:0")
        *_, reply = doing
        assert parse(reply) == [2, 3]
        assert leased(here) == {*of_length(3), (b"r", 4)}
        last = here.keyspace.index.block(b"r", 4)
        assert last
        assert here.keyspace.leases.of(last).until > monotonic_ms() + 8000
    assert count > 2


def test_a_block_that_is_named_twice_stays_leased() -> None:
    with small_store() as client:
        set_block(client, "r", 0)
        set_state(client, "state", 0)
        set_block(client, "large", 0, size=40_000)  # too large for the room for leases
        words = ["KVPAGEPREFIX", 4, 60_000, 3, *["r", 0] * 3, "LENGTHS", 2, "state", 0, 2, "large", 0, 3]
        assert client.execute_command(*words) == [2]
        assert leased_blocks(client) == 2


def test_rights_are_needed_for_states_as_well(client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "reader", "on", "nopass", "~kv:r*", "+kvpageprefix")
    client.execute_command("AUTH", "reader", "")
    few = [("r", page, page + 1) for page in range(3)]
    many = [("r", page, page + 1) for page in range(1000)]
    for states in (few, many):
        assert lengths(client, len(states), *states) == []
        for at in range(0, len(states), 211):
            others = [*states[:at], ("other", 0, 1), *states[at + 1 :]]
            with pytest.raises(redis.exceptions.NoPermissionError):
                lengths(client, len(states), *others)


def test_exactly_the_counted_prefix_is_leased(client: redis.Redis) -> None:
    for page in (0, 1, 3):
        set_block(client, "r", page)
    assert prefix(client, *[word for page in range(4) for word in ("r", page)], lease_ms=3_600_000) == 2
    leases = [ask(client, "KVPAGESTAT", "r", 0, 0, page, 0)["lease_left_ms"] for page in (0, 1, 3)]
    assert [lease > 3_000_000 for lease in leases] == [True, True, False]
    assert client.info("kvpage")["leased_or_pinned"] == 2


def test_leased_blocks_are_not_evicted_until_the_lease_ends() -> None:
    with small_store() as client:
        for page in range(4):
            set_block(client, "r", page, size=800)
        assert client.execute_command("KVPAGELEASE", "r", 3_600_000, 0) == 1
        assert client.execute_command("KVPAGELEASE", "r", 20, 1) == 1
        time.sleep(0.03)
        fill(client)
        assert held(client, "r") == [0]
        assert client.info("stats")["evicted_keys"] > 0


def test_pinned_blocks_are_not_evicted_until_they_are_unpinned() -> None:
    with small_store() as client:
        for page in range(3):
            set_block(client, "r", page, size=800)
        assert client.execute_command("KVPAGEPIN", "r") == 3
        fill(client)
        assert held(client, "r") == [0, 1, 2]
        assert ask(client, "KVPAGESTAT", "r", 0, 0, 2, 0)["pinned"] == 1
        assert client.execute_command("KVPAGEUNPIN", "r", 2) == 1
        assert client.execute_command("KVPAGEUNPIN", "r", 2) == 0
        fill(client)
        assert held(client, "r") == [0, 1]


def test_protection_is_from_eviction_alone(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    set_block(client, "r", 1, ttl=1)
    assert client.execute_command("KVPAGEPIN", "r") == 2
    assert client.execute_command("KVPAGEDEL", "r", 0) == 4
    time.sleep(1.01)
    assert held(client, "r") == []
    assert client.info("kvpage")["leased_or_pinned_bytes"] == 0
    set_block(client, "r", 0)
    assert ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["pinned"] == 0


def test_a_lease_is_prolonged_never_cut_short(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    for lease_ms in (1_800_000, 50, 1):
        assert client.execute_command("KVPAGELEASE", "r", lease_ms) == 1
    assert ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["lease_left_ms"] > 1_700_000
    client.execute_command("KVPAGELEASE", "r", 3_600_000)
    assert ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["lease_left_ms"] > 3_500_000


def test_no_more_than_half_of_the_memory_can_be_protected() -> None:
    with small_store() as client:
        for page in range(50):
            set_block(client, "r", page, size=800)
        pages = held(client, "r")
        assert client.execute_command("KVPAGELEASE", "r", 60_000) < len(pages)
        leased = client.info("kvpage")["leased_or_pinned"]
        assert 120_000 < client.info("kvpage")["leased_or_pinned_bytes"] <= 128 * 1024
        names = [word for page in pages for word in ("r", page)]
        assert prefix(client, *names, lease_ms=1000) == leased  # the count is reliable
        assert prefix(client, *names) == len(pages)
        with pytest.raises(
            redis.ResponseError, match="leases, pins and lifetimes may take 131072 bytes together, half of max"
        ):
            client.execute_command("KVPAGEPIN", "r")
        assert client.execute_command("KVPAGEPIN", "r", pages[0]) == 1  # it counts already
        fill(client)
        assert held(client, "r") == pages[:leased]
        assert client.info("memory")["used_memory"] < 260 * 1024  # a block more: room is made before one is written


def test_protected_memory_counts_as_it_grows(client: redis.Redis) -> None:
    set_page(client, body=bytes(1000))
    client.execute_command("KVPAGEPIN", "r")
    before = client.info("kvpage")["leased_or_pinned_bytes"]
    set_page(client, layer=1, body=bytes(1000))
    assert client.info("kvpage")["leased_or_pinned_bytes"] == 2 * before
    client.delete("kv:r:0:0:0:0")
    assert client.info("kvpage")["leased_or_pinned_bytes"] == before


@pytest.mark.parametrize("stored_whole", [True, False])
def test_a_replaced_page_is_no_growth_of_its_block(stored_whole: bool) -> None:
    """Half of the memory, which protected values may take, has room for one block of 30 KB."""
    page = [0, 8, 1, 10_000, 0, b"y" * 10_000]
    with start_server("--maxmemory", "80kb") as server, server.client() as client:
        if stored_whole:
            client.execute_command("KVBLOCKSET", "r", 0, 3, 1, 1, 0, 1, 0, 8, 10_000, b"x" * 30_000)
        else:
            for layer in range(3):
                client.execute_command("KVPAGESET", "r", layer, 0, 0, *page)
        assert client.execute_command("KVPAGEPIN", "r") == 1
        client.execute_command("KVPAGEMSET", 2, *2 * ["r", 0, 0, 0, *page])
        client.execute_command("KVPAGESET", "r", 1, 0, 0, *page)
        assert client.strlen("kv:r:1:0:0:0") > 10_000


@pytest.mark.parametrize("stored_whole", [True, False])
def test_a_replaced_block_on_disk_is_no_growth(stored_whole: bool, tmp_path: Path) -> None:
    """Half of the memory, which protected values may take, has room for one block of 30 KB, and "r" is on disk."""
    options = ("--store", "tiered", "--maxdisk", "64mb", "--maxmemory", "80kb")
    shape = [0, 3, 1, 1, 0, 1, 0, 8, 10_000]
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        if stored_whole:
            client.execute_command("KVBLOCKSET", "r", *shape, b"x" * 30_000)
        else:
            for layer in range(3):
                client.execute_command("KVPAGESET", "r", layer, 0, 0, 0, 8, 1, 10_000, 0, b"y" * 10_000)
        client.save()
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        assert client.execute_command("KVPAGEPIN", "r") == 1
        client.execute_command("KVBLOCKSET", "other", *shape, b"x" * 30_000)
        assert client.execute_command("KVPAGEPIN", "other") == 1
        client.execute_command("KVBLOCKSET", "r", *shape, b"z" * 30_000)
        assert client.execute_command("KVBLOCKGET", "r", 0) == b"z" * 30_000
        with pytest.raises(redis.OutOfMemoryError, match="leased, pinned and kept values take more than"):
            client.execute_command("KVBLOCKSET", "r", 0, 9, *shape[2:], b"z" * 90_000)


def test_a_new_page_that_is_named_twice_counts_once() -> None:
    page = ["r", 1, 0, 0, 0, 8, 1, 10_000, 0, b"y" * 10_000]
    with start_server("--maxmemory", "60kb") as server, server.client() as client:
        client.execute_command("KVPAGESET", "r", 0, *page[2:])
        client.execute_command("KVPAGEPIN", "r")
        client.execute_command("KVPAGEMSET", 3, *page, *page, *page)
        with pytest.raises(redis.OutOfMemoryError, match="leased, pinned and kept values take more than"):
            client.execute_command("KVPAGEMSET", 2, "r", 2, *page[2:], "r", 3, *page[2:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("KVPAGEPREFIX", 0, 0, 1, "r", 0), "pages_per_block must be an integer between 1 and"),
        (("KVPAGEPREFIX", 1, 3_600_001, 1, "r", 0), "lease_ms must be an integer between 0 and 3600000, got '3600001'"),
        (("KVPAGEPREFIX", 1, 0, 2, "r", 0), "KVPAGEPREFIX with N = 2 takes 4 arguments after N, 2 a block, got 2"),
        (("KVPAGEPREFIX", 1, 0, 1, "r:", 0), "req_id must be"),
        (("KVPAGEPREFIX", 1, 0, 1, "r", 0, "LENGTHS"), "M must be an integer between 1 and"),
        (("KVPAGEPREFIX", 1, 0, 1, "r", 0, "LENGTHS", 0), "M must be an integer between 1 and 4294967295, got '0'"),
        (
            ("KVPAGEPREFIX", 1, 0, 1, "r", 0, "lengths", 2, "s", 0, 1),
            "LENGTHS with M = 2 takes 6 arguments after M, 3 a state, got 3",
        ),
        (("KVPAGEPREFIX", 1, 0, 1, "r", 0, "LENGTHS", 1, "s", 0, 0), "need must be an integer between 1 and"),
        (("KVPAGEPREFIX", 1, 0, 1, "r", 0, "LENGTH", 1), "KVPAGEPREFIX with N = 1 takes 2 arguments after N"),
        (("KVPAGELEASE", "r", 0), "lease_ms must be an integer between 1 and 3600000, got '0'"),
        (("KVPAGELEASE", "r", 10, "x"), "page_id must be an integer"),
        (("KVPAGEDEL", "r", 2**32), "page_id must be an integer"),
    ],
)
def test_bad_arguments_are_refused_by_name(client: redis.Redis, words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("KVPAGEPIN", "r", -1), "page_id must be an integer"),
        (("KVPAGEUNPIN", "a b"), "req_id must be"),
        (("KVPAGEVERIFY", ""), "req_id must be"),
        (("KVPAGEWHY", "r", 0, 0), "KVPAGEWHY takes a req, or the five arguments that name a page"),
    ],
)
def test_bad_arguments_about_requests_are_refused_by_name(
    client: redis.Redis, words: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command(*words)


def test_index_accounts_and_store_agree_after_any_operations() -> None:
    """Random writes, deletions, expiries, evictions, leases and pins, checked against a walk through every key."""
    chance = random.Random(7)
    keyspace = Keyspace(maxmemory=60_000)
    for step in range(4000):
        req, page = chance.choice([b"a", b"b"]), chance.randrange(12)
        name = PageName(b"", req, chance.randrange(2), chance.choice([0, 1, 65]), page, chance.randrange(2))
        key = bytes(PageKey(*name[1:]))
        match chance.randrange(9):
            case 0 | 1 | 2 | 3:
                keyspace.memory.shrink()
                slot = keyspace.arena.allocate(chance.choice([200, 900]))
                keyspace.contents.set_page(
                    name._replace(key=key), bytes(64), slot, chance.choice([0, 0, 0, unix_ms() + 3])
                )
            case 4:
                keyspace.contents.set_string(key, b"plain")
            case 5:
                keyspace.contents.delete(key)
            case 6:
                if keyspace.contents.find(key):
                    keyspace.contents.set_expiry(key, unix_ms() + chance.randrange(5))
            case 7:
                if block := keyspace.reader.block(req, page):
                    if chance.random() < 0.5:
                        keyspace.protection.lease(block, 5)
                    else:
                        keyspace.protection.pin(block)
            case _:
                if (
                    (block := keyspace.reader.block(req, page))
                    and not keyspace.leases.unpin(block)
                    and chance.random() < 0.2
                ):
                    keyspace.contents.remove_block(block, "del")
        if step % 20 == 0:
            time.sleep(0.006)  # until all is over that is going to expire
            check(keyspace)
    assert keyspace.counters.evicted > 100
    assert keyspace.counters.expired > 100


def check(keyspace: Keyspace) -> None:
    pages: dict[tuple[bytes, int], set[bytes]] = {}
    keys = keyspace.listing.existing_keys(keyspace.listing.scan(0, 10_000).places)
    for key in keys:
        if is_page(keyspace.contents.find(key)):
            name = PageKey.parse(key)
            pages.setdefault((name.req_id, name.page), set()).add(key)
    blocks = [block for req in (b"a", b"b") for block in keyspace.listing.blocks_of(req)]
    assert {(block.req_id, block.page): set(block.page_keys()) for block in blocks} == pages
    assert keyspace.index.blocks == len(blocks)
    keyspace.leases.settle(monotonic_ms())
    for block in blocks:
        assert block.pages == len(pages[block.req_id, block.page])
        assert block.footprint == sum(page.footprint for page in keyspace.reader.pages_at(block.page_keys()))
        assert keyspace.leases.of(block).size in (0, block.footprint)
        layers, heads, planes = block.measure()
        full = layers * heads * len(planes) == block.pages
        assert block.is_full == full
    assert keyspace.leases.bytes == sum(keyspace.leases.of(block).size for block in blocks)


def test_protected_units_leave_room_in_the_index() -> None:
    program = with_constants("kvpage_server.store.evict", LEAST_INDEX=0)
    with start_server("--maxmemory", "1mb", program=program) as server, server.client() as client:
        for page in range(1500):
            set_page(client, "r", page, body=b"x")
        refused = (
            r"ERR leases, pins and lifetimes may take 524288 bytes together, half of what the index may take: \d+ more"
        )
        with pytest.raises(redis.ResponseError, match=refused[4:]):
            client.execute_command("KVPAGEPIN", "r")
        assert client.execute_command("KVPAGEPIN", "r", *range(1000, 1500)) == 500
        leased = client.execute_command("KVPAGELEASE", "r", 60_000, *range(900, 1000))
        assert leased == 100


def test_a_lease_of_a_missing_block_protects_nothing() -> None:
    guards = Leases(lambda unit: None)
    most = Bytes(150, 10_000)
    assert guards.lease(b"key", Bytes(100, 4096), 50, most)
    assert not guards.lease(b"other", Bytes(100, 4096), 50, most)
    assert not guards.lease(b"on disk", Bytes(0, 8192), 50, most)
    guards.removed(b"key")
    assert guards.bytes == 0
    assert guards.lease(b"on disk", Bytes(0, 8192), 50, most)
    guards.removed(b"on disk")
    assert guards.lease(b"key", Bytes(100, 0), 80, most)
    guards.settle(60)
    assert guards.spares(b"key", 60)
    guards.settle(80)
    assert not guards.spares(b"key", 80)
    assert (guards.bytes, len(guards)) == (0, 0)


def test_leases_of_deleted_units_take_little_memory() -> None:
    guards, size, most = Leases(lambda unit: None), Bytes(1, 1), Bytes(10**6, 10**6)
    assert guards.lease(b"stays", size, 3_600_000, most)
    tracemalloc.start()
    for number in range(10_000):
        assert guards.lease(b"key", size, 3_600_000 - number, most)
        guards.removed(b"key")
    assert tracemalloc.get_traced_memory()[0] < 1_000_000
    tracemalloc.stop()
    assert guards.spares(b"stays", 3_599_999)
    guards.settle(3_600_000)
    assert (guards.bytes, len(guards)) == (0, 0)


def test_only_the_last_lease_of_a_unit_can_be_undone() -> None:
    guards, size, most = Leases(lambda unit: None), Bytes(100, 0), Bytes(150, 10_000)

    def lease(until: int) -> tuple[int, tuple[int, int]]:
        before = guards.of(b"key").until, guards.of(b"key").ticket
        assert guards.lease(b"key", size, until, most)
        return guards.of(b"key").ticket, before

    first, second = lease(50), lease(80)
    guards.withdraw(b"key", *first)
    assert guards.spares(b"key", 60)
    guards.withdraw(b"key", *second)
    assert guards.spares(b"key", 40)
    assert not guards.spares(b"key", 60)
    guards.withdraw(b"key", *first)
    assert (guards.bytes, len(guards)) == (0, 0)
    other, longer = lease(50), lease(80)
    guards.settle(60)
    guards.withdraw(b"key", *longer)
    guards.settle(61)
    assert (guards.bytes, len(guards)) == (0, 0)
    guards.withdraw(b"key", *other)
    guards.pin(b"key", size, most)
    guards.withdraw(b"key", *lease(80))
    assert guards.of(b"key").pinned
