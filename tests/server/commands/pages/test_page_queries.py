"""Queries and deletions of pages, by page and by request; all in small steps."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import redis
from servers import RunningServer, start_server
from stored_pages import Here, ask, held, set_block, set_page

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.dispatch.run import run
from kvpage_server.commands.families.pages.page import PAGES_PER_STEP
from kvpage_server.commands.families.pages.request import fit_one_step
from kvpage_server.commands.specs import WORDS_PER_STEP, find
from kvpage_server.core import Argument
from kvpage_server.page import unix_ms
from kvpage_server.resp import encode
from kvpage_server.store.memory.index import Block

# -- KVPAGEMEXISTS, KVPAGESTAT -------------------------------------------------------------------------------------


def test_blob_created_beyond_signed_64_bits_is_no_page(client: redis.Redis) -> None:
    """RESP has no integer for that time: the client of a KVPAGESTAT could not read the reply."""
    set_page(client)
    blob = bytearray(client.get("kv:r:0:0:0:0"))
    blob[39] |= 0x80
    client.set("kv:r:0:0:0:0", bytes(blob))
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.execute_command("KVPAGESTAT", "r", 0, 0, 0, 0)
    assert client.ping()


def test_existence_of_many_pages_is_returned_in_order(client: redis.Redis) -> None:
    client.config_resetstat()
    set_page(client, head=1)
    set_page(client, head=3)
    client.set("kv:r:0:4:0:0", "a plain string is no page")
    names = [word for head in (3, 2, 1, 3, 4) for word in ("r", 0, head, 0, 0)]
    assert client.execute_command("KVPAGEMEXISTS", 5, *names) == [1, 0, 1, 1, 0]
    many = [word for head in range(1000) for word in ("r", 0, head, 0, 0)]
    assert client.execute_command("KVPAGEMEXISTS", 1000, *many) == [int(head in (1, 3)) for head in range(1000)]
    with pytest.raises(redis.ResponseError, match="page_id must be an integer between 0 and 4294967295, got 'x'"):
        client.execute_command("KVPAGEMEXISTS", 1001, *many, "r", 0, 0, "x", 0)
    assert client.info("stats")["keyspace_hits"] == 0  # to ask is no use


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((2, "r", 0, 0, 0, 0), "KVPAGEMEXISTS with N = 2 takes 10 arguments after N, 5 a page, got 5"),
        ((0, "r", 0, 0, 0, 0), "N must be an integer between 1 and 4294967295, got '0'"),
        ((2, "r", 0, 0, 0, 0, "r", 0, 0, 0, 6), "kv_type must be an integer between 0 and 5, got '6'"),
    ],
)
def test_a_bad_batch_is_refused_by_name(client: redis.Redis, words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command("KVPAGEMEXISTS", *words)


def test_a_pages_stat_has_its_header_and_ttl(client: redis.Redis, tier: str) -> None:
    before = unix_ms()
    client.execute_command("KVPAGESET", "test_req_001", 5, 8, 42, 1, 1, 128, 64, 3600, "BLOB_DATA")
    page = ask(client, "KVPAGESTAT", "test_req_001", 5, 8, 42, 1)
    created, left = page.pop("created_ms"), page.pop("ttl_left_ms")
    assert before <= created <= unix_ms()
    assert 3_590_000 < left <= 3_600_000
    assert page == {
        "dtype": 1,
        "page_size": 128,
        "head_dim": 64,
        "layer": 5,
        "head": 8,
        "page": 42,
        "type": 1,
        "bytes": 9,
        "checksum": "6eb8ae2d4003f5e4",
        "ttl": 3600,
        "lease_left_ms": 0,
        "pinned": 0,
        "kept_until_ms": 0,
        "kept_by": "",
        "tier": tier,
        "coded_size": 0,
    }
    client.persist("kv:test_req_001:5:8:42:1")
    assert ask(client, "KVPAGESTAT", "test_req_001", 5, 8, 42, 1)["ttl_left_ms"] == -1


def test_a_value_that_is_no_page_has_no_stat(client: redis.Redis) -> None:
    assert client.execute_command("KVPAGESTAT", "r", 0, 0, 0, 0) is None
    client.set("kv:r:0:0:0:0", "plain")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.execute_command("KVPAGESTAT", "r", 0, 0, 0, 0)


def test_in_resp2_a_map_is_a_flat_array(server: RunningServer, client: redis.Redis) -> None:
    set_page(client)
    with server.client(protocol=2) as old:
        assert old.execute_command("KVPAGESTAT", "r", 0, 0, 0, 0)[:2] == [b"dtype", 3]
        assert old.execute_command("KVPAGEVERIFY", "r") == [b"checked", 1, b"unchecked", 0, b"corrupt", []]
        assert old.execute_command("KVPAGEINDEX", "r")[0][:4] == [b"page", 0, b"pages", 1]
        assert old.smembers("kv:r:index") == {b"kv:r:0:0:0:0"}


# -- KVPAGEDEL, KVPAGEINDEX ----------------------------------------------------------------------------------------


def test_a_request_is_deleted_whole_and_nothing_else(client: redis.Redis) -> None:
    for page in range(5):
        set_block(client, "r", page)
    set_block(client, "r2", 0)
    client.set("kv:r:0:0:9:0", "plain")
    assert client.execute_command("KVPAGEDEL", "r") == 20
    assert client.execute_command("KVPAGEDEL", "r") == 0
    assert held(client, "r") == []
    assert held(client, "r2") == [0]
    assert client.get("kv:r:0:0:9:0") == b"plain"
    assert client.dbsize() == 5


def test_blocks_of_a_request_are_deleted(client: redis.Redis) -> None:
    for page in range(5):
        set_block(client, "r", page)
    assert client.execute_command("KVPAGEDEL", "r", 3, 1, 3, 77) == 8
    assert held(client, "r") == [0, 2, 4]


def test_pages_that_have_expired_are_neither_counted_nor_listed(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    set_block(client, "r", 1)
    client.pexpire("kv:r:0:1:0:1", 30)
    for key in client.smembers("kv:r:index"):
        if key.split(b":")[4] == b"1":
            client.pexpire(key, 30)
    time.sleep(0.05)
    assert [(block[b"page"], block[b"pages"]) for block in client.execute_command("KVPAGEINDEX", "r")] == [(0, 3)]
    assert client.execute_command("KVPAGEDEL", "r") == 3


def test_the_index_lists_the_pages_of_each_block(client: redis.Redis) -> None:
    set_block(client, "r", 3, size=200)
    set_page(client, page=10, layer=4, head=70, kv_type=5)
    first, second = client.execute_command("KVPAGEINDEX", "r")
    assert first == {b"page": 3, b"pages": 4, b"layers": 1, b"heads": 2, b"planes": [0, 1], b"complete": 1}
    assert second == {b"page": 10, b"pages": 1, b"layers": 5, b"heads": 71, b"planes": [5], b"complete": 0}
    sized, _ = client.execute_command("KVPAGEINDEX", "r", "withsizes")
    assert sized[b"bytes"] == 800
    assert 800 < sized[b"memory"] < 2000
    assert client.execute_command("KVPAGEINDEX", "nobody") == []
    with pytest.raises(redis.ResponseError, match="syntax error"):
        client.execute_command("KVPAGEINDEX", "r", "SIZES")


def test_a_deletion_in_a_transaction_precedes_the_next_command(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    with client.pipeline() as transaction:
        transaction.execute_command("KVPAGEDEL", "r")
        transaction.execute_command("KVPAGESET", "r", 0, 0, 5, 0, 3, 1, 1, 0, "x")
        transaction.execute_command("KVPAGEVERIFY", "r")
        removed, _, verified = transaction.execute()
    assert removed == 4
    assert verified[b"checked"] == 1
    assert held(client, "r") == [5]


def test_commands_without_replies_are_executed(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r", 0)
    with server.connect() as sock:
        sock.sendall(b"CLIENT REPLY OFF\r\nKVPAGEDEL r\r\nKVPAGEMSET 1 s 0 0 0 0 3 1 1 0 x\r\nKVPAGEVERIFY s\r\n")
        sock.sendall(b"CLIENT REPLY ON\r\n")
        assert sock.recv(1000) == b"+OK\r\n"
    assert held(client, "r") == []
    assert held(client, "s") == [0]


# -- KVPAGEVERIFY --------------------------------------------------------------------------------------------------


def test_intact_pages_verify(client: redis.Redis) -> None:
    for page in range(3):
        set_block(client, "r", page)
    set_page(client, page=3, body=random.Random(1).randbytes(3_000_000))
    assert ask(client, "KVPAGEVERIFY", "r") == {"checked": 13, "unchecked": 0, "corrupt": []}
    assert ask(client, "KVPAGEVERIFY", "r", 1, 3, 9) == {"checked": 5, "unchecked": 0, "corrupt": []}
    assert ask(client, "KVPAGEVERIFY", "nobody") == {"checked": 0, "unchecked": 0, "corrupt": []}


def test_pages_without_a_checksum_are_not_called_intact() -> None:
    with start_server("--page-checksums", "no") as server, server.client() as client:
        set_block(client, "r", 0)
        assert ask(client, "KVPAGEVERIFY", "r") == {"checked": 0, "unchecked": 4, "corrupt": []}


@pytest.mark.parametrize(
    "damage",
    [lambda slot: slot.body, lambda slot: slot.header],
    ids=["body", "header"],
)
def test_a_flipped_bit_is_found_and_the_page_is_removed(damage: Any) -> None:
    here = Here()
    for head in range(3):
        here.call("KVPAGESET", "r", 0, head, 0, 0, 3, 1, 1000, 0, bytes(1000))
    slot = here.keyspace.contents.find(b"kv:r:0:1:0:0")
    damage(slot)[3] ^= 0x10
    reply = here.call("KVPAGEVERIFY", "r")
    assert (
        reply == b"*6\r\n$7\r\nchecked\r\n:3\r\n$9\r\nunchecked\r\n:0\r\n$7\r\ncorrupt\r\n*1\r\n$12\r\nkv:r:0:1:0:0\r\n"
    )
    assert here.call("KVPAGEGET", "r", 0, 1, 0, 0) == b"$-1\r\n"
    assert here.call("KVBLOCKGET", "r", 0) == b"$-1\r\n"
    assert b"corrupt" in here.call("KVPAGEWHY", "r", 0, 1, 0, 0)
    assert here.call("KVPAGEVERIFY", "r").startswith(b"*6\r\n$7\r\nchecked\r\n:2\r\n")


# -- others are served meanwhile -----------------------------------------------------------------------------------

TRIES = 5  # a step that is long is so each time; one in which this machine did something else is not


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "line",
    ["KVPAGEVERIFY large", "KVPAGEVERIFY r", "KVPAGEINDEX r WITHSIZES", "SMEMBERS kv:r:index", "KVPAGEDEL r"],
)
def test_work_on_a_large_request_is_done_in_small_steps(line: str) -> None:
    assert any(longest_step(line) < 0.05 for _ in range(TRIES))  # seconds of this processor


def longest_step(line: str) -> float:
    here = Here()
    here.call("KVPAGESET", "large", 0, 0, 0, 0, 3, 1, 1, 0, bytes(64 * 1024 * 1024))
    for page in range(200):
        here.call("KVBLOCKSET", "r", page, 4, 10, 1, 0, 1, 0, 3, 1, bytes(40))
    words = list[Argument](line.encode().split())
    stream = run(here.client, find(words), words)
    took, steps = [time.thread_time()], 0
    for item in stream.items:
        encode(item, 3, [])
        took.append(time.thread_time())
        steps += 1
    assert steps > 50
    return max(after - before for before, after in pairwise(took))


def steps_of(here: Here, words: list[Any]) -> Iterator[tuple[float, bytes]]:
    """Yield the output of each step of a reply, and its seconds of CPU time."""
    stream, began = run(here.client, find(words), words), time.thread_time()
    for item in stream.items:
        pieces: list[Any] = []
        encode(item, 2, pieces)
        took = time.thread_time() - began
        yield took, b"".join(piece if isinstance(piece, bytes) else bytes(piece.view) for piece in pieces)
        began = time.thread_time()


def test_a_block_of_very_many_pages_is_deleted_in_small_steps() -> None:
    here, count = Here(), 8000
    described = [word for i in range(count) for word in (b"r", b"%d" % i, b"0", b"0", b"0", *b"8 1 1 0 x".split())]
    assert b"".join(part for _, part in steps_of(here, [b"KVPAGEMSET", b"%d" % count, *described])) == b"+OK\r\n"
    steps = [part for _, part in steps_of(here, [b"KVPAGEDEL", b"r"])]
    assert len(steps) > count // 512
    assert b"".join(steps) == b":%d\r\n" % count
    assert b"deleted" in here.call("KVPAGEWHY", "r")
    assert len(here.keyspace) == 0


def test_an_unchanged_block_is_not_checked_again() -> None:
    here, count = Here(), 2000
    described = [word for i in range(count) for word in (b"r", b"%d" % i, *b"0 0 0 8 1 1 0 x".split())]
    here.call("KVPAGEMSET", count, *described)

    def steps() -> int:
        *before, answer = (part for _, part in steps_of(here, [b"KVBLOCKEXISTS", b"r", b"0"]))
        assert answer == b":%d\r\n" % (here.call("KVBLOCKGET", "r", 0) != b"$-1\r\n")
        return len(before)

    assert steps() > count // 512
    assert steps() == 0
    here.call("KVPAGESET", "r", 0, 0, 0, 0, 8, 1, 2, 0, b"xx")
    assert steps() > count // 512


def test_removals_of_many_blocks_are_compared_in_steps() -> None:
    here, count = Here(), 2000
    described = [word for i in range(count) for word in (b"r", b"0", b"0", b"%d" % i, b"0", *b"8 1 1 0 x".split())]
    here.call("KVPAGEMSET", count, *described)
    here.call("KVPAGEDEL", "r")
    steps = [part for _, part in steps_of(here, [b"KVPAGEWHY", b"r"])]
    assert len(steps) > count // 512
    assert b"deleted" in b"".join(steps)


def test_a_block_stored_during_its_deletion_is_whole() -> None:
    here, count = Here(), 2000
    described = [word for i in range(count) for word in (b"r", b"%d" % i, b"0", b"0", b"0", *b"8 1 1 0 x".split())]
    here.call("KVPAGEMSET", count, *described)
    deleting = steps_of(here, [b"KVPAGEDEL", b"r"])
    part = next(deleting)[1]
    while here.keyspace.reader.block(b"r", 0).pages == count:
        part += next(deleting)[1]
    assert here.call("KVBLOCKSET", "r", 0, count, 1, 1, 0, 1, 0, 8, 1, bytes(count)) == b"+OK\r\n"
    part += b"".join(words for _, words in deleting)
    assert 0 < int(part.removeprefix(b":")) < count
    assert here.call("KVBLOCKGET", "r", 0) == b"$%d\r\n%b\r\n" % (count, bytes(count))


def test_a_batch_is_not_refused_after_a_part_of_it() -> None:
    """Another client stores a block that cannot be split while a batch with pages of it is stored in steps."""
    count = 1200
    names = [
        (b"other", b"0", b"0", b"%d" % i, b"0") if i % 2 else (b"r", b"%d" % i, *b"0 0 0".split()) for i in range(count)
    ]
    batch = [b"KVPAGEMSET", b"%d" % count, *(word for name in names for word in (*name, *b"8 1 1 0 x".split()))]
    large = ("KVBLOCKSET", "r", 0, 9000, 1, 1, 0, 1, 0, 8, 1, bytes(9000))
    answers = set()
    for at in range(1, len([*steps_of(Here(), batch)])):
        here = Here()
        steps = steps_of(here, batch)
        answer = b"".join(next(steps)[1] for _ in range(at))
        begun = len(here.keyspace)
        here.call(*large)
        answer += b"".join(part for _, part in steps)
        answers.add(answer[:4])
        assert answer == b"+OK\r\n" if begun else answer[:4] in (b"+OK\r", b"-ERR")
        assert here.call("SCARD", "kv:other:index") == b":%d\r\n" % (count // 2 if answer[:1] == b"+" else 0)
        assert here.call("KVBLOCKGET", "r", 0) == b"$9000\r\n%b\r\n" % bytes(9000)
    assert b"+OK\r" in answers


def test_scard_counts_the_pages_of_one_moment() -> None:
    """Other clients add a page to a block, and a block, while the blocks of a long request are visited; then, FLUSHALL
    removes all blocks.
    """
    here, count = Here(), 1100
    described = [word for i in range(count) for word in (b"r", b"0", b"0", b"%d" % i, b"0", *b"8 1 1 0 x".split())]
    here.call("KVPAGEMSET", count, *described)
    counting = steps_of(here, [b"SCARD", b"kv:r:index"])
    next(counting)
    for page, kv_type in ((count - 1, 1), (count, 0)):
        here.call("KVPAGESET", "r", 0, 0, page, kv_type, 8, 1, 1, 0, b"x")
    assert [*counting][-1][1] == b":%d\r\n" % (count + 2)
    counting = steps_of(here, [b"SCARD", b"kv:r:index"])
    next(counting)
    next(steps_of(here, [b"FLUSHALL"]))
    here.call("KVPAGESET", "r", 0, 0, 0, 0, 8, 1, 1, 0, b"x")
    assert [*counting][-1][1] == b":1\r\n"


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("order", ["a block", "a block each", "a block stored whole", "absent", "every other absent"])
def test_a_large_batch_is_worked_on_in_small_steps(order: str) -> None:
    # The fifth longest: a table of keys that grows takes a few milliseconds, now and then.
    assert any(sorted(seconds_of_steps(order))[-5] < 0.05 for _ in range(TRIES))


def seconds_of_steps(order: str) -> list[float]:
    here, count = Here(), 8192
    names = [(b"r", i // 128, i // 2 % 64, i if order == "a block each" else 0, i % 2) for i in range(count)]
    words_of = [[req, *(b"%d" % number for number in numbers)] for req, *numbers in names]
    took = []
    if order == "a block stored whole":
        here.call("KVBLOCKSET", "r", 0, 64, 64, 1, 0, 2, 0, 3, 4, 1, 3, 4, bytes(count * 4))
    elif order != "absent":
        some = [words for i, words in enumerate(words_of) if order != "every other absent" or i % 2]
        described = [word for words in some for word in (*words, b"3", b"1", b"4", b"60", b"body")]
        for _ in range(2):
            steps = list(steps_of(here, [b"KVPAGEMSET", b"%d" % len(some), *described]))
            assert b"".join(part for _, part in steps) == b"+OK\r\n"
            took += [seconds for seconds, _ in steps]
    for command in (b"KVPAGEMGET", b"KVPAGEMEXISTS"):
        steps = list(steps_of(here, [command, b"%d" % count, *(word for words in words_of for word in words)]))
        assert len(steps) > count // PAGES_PER_STEP
        took += [seconds for seconds, _ in steps]
    if order == "a block":
        took += [seconds for seconds, _ in steps_of(here, [b"KVBLOCKGET", b"r", b"0"])]
    return took


def test_a_block_changed_during_a_read_has_its_current_state() -> None:
    here = Here()
    for layer in range(40):
        for head in range(50):
            here.call("KVPAGESET", "r", layer, head, 0, 0, 3, 1, 4, 0, b"old.")
    steps = steps_of(here, [b"KVBLOCKGET", b"r", b"0"])
    next(steps)
    here.call("KVPAGESET", "r", 0, 0, 0, 0, 3, 1, 4, 0, b"new.")
    assert b"".join(part for _, part in steps) == b"$8000\r\nnew.%b\r\n" % (b"old." * 1999)
    steps = steps_of(here, [b"KVBLOCKGET", b"r", b"0"])
    next(steps)
    here.call("KVPAGEDEL", "r")
    assert b"".join(part for _, part in steps) == b"$-1\r\n"


def test_named_blocks_that_take_long_are_no_small_work() -> None:
    """A block with an overdue page takes a step of its own; others are handled together."""
    here = Here()
    for page in range(2):
        here.call("KVPAGESET", "r", 0, 0, page, 0, 3, 1, 4, 1000, b"body")
    here.keyspace.index.of(b"r")[1].soonest = 1
    assert fit_one_step(here.client, b"r", [b"0", b"7"])
    assert not fit_one_step(here.client, b"r", [b"0", b"1"])
    assert not fit_one_step(here.client, b"r")
    assert not fit_one_step(here.client, b"r", [b"0"] * WORDS_PER_STEP)


def test_expired_pages_are_passed_over_once() -> None:
    """The next question about a request begins with the block that had a page."""
    here = Here()
    contents, listing, visited = here.keyspace.contents, here.keyspace.listing, list[int]()
    for page in range(100):
        here.call("KVPAGESET", "r", 0, 0, page, 0, 3, 1, 4, 1000, b"body")
        if page < 99:
            contents.catalogue.entries[b"kv:r:0:0:%d:0" % page].expires = 1
            contents.index.of(b"r")[page].soonest = 1
    has_unexpired = contents.has_unexpired

    def noted(block: Block) -> bool:
        visited.append(block.page)
        return has_unexpired(block)

    contents.has_unexpired = noted  # type: ignore[method-assign]
    for _ in range(2):
        assert listing.has_pages(b"r")
        visited.append(-1)
    assert visited[visited.index(-1) :] == [-1, 99, -1]
    contents.index.of(b"r")[99].soonest = contents.catalogue.entries[b"kv:r:0:0:99:0"].expires = 1
    assert not listing.has_pages(b"r")
