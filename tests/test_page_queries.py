"""What a store tells of its pages and does to them: index, deletion, protection, verification, and why one is gone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import redis
from servers import RunningServer, start_server

from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.dispatch import run
from kvpage_server.commands.registry import TABLE, find
from kvpage_server.config import Config
from kvpage_server.page import PageKey, unix_ms
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import Piece, encode
from kvpage_server.store.ghost import Ghosts
from kvpage_server.store.index import Block
from kvpage_server.store.lease import Guards
from kvpage_server.store.memory import Keyspace, PageName

Reply = dict[str, Any]


def set_page(client: redis.Redis, req: str = "r", page: int = 0, *, body: bytes = b"x" * 100, **at: Any) -> None:
    name = (req, at.get("layer", 0), at.get("head", 0), page, at.get("kv_type", 0))
    client.execute_command("KVPAGESET", *name, 3, 1, len(body), at.get("ttl", 0), body)


def set_block(client: redis.Redis, req: str, page: int, size: int = 100, ttl: int = 0) -> None:
    """A block of four pages of `size` bytes: one layer, two heads, K and V."""
    client.execute_command("KVBLOCKSET", req, page, 1, 2, 1, ttl, 2, 0, 3, size, 1, 3, size, bytes(4 * size))


def ask(client: redis.Redis, *words: Any) -> Reply:
    """The reply, a map."""
    reply = client.execute_command(*words)
    return {name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in reply.items()}


def held(client: redis.Redis, req: str) -> list[int]:
    """The page ids of a request's blocks."""
    return [block[b"page"] for block in client.execute_command("KVPAGEINDEX", req)]


# -- KVPAGEMEXISTS, KVPAGESTAT -------------------------------------------------------------------------------------


def test_existence_of_many_pages_is_told_in_order(client: redis.Redis) -> None:
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


def test_a_page_tells_its_header_and_its_life(client: redis.Redis) -> None:
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
        "tier": "memory",
    }
    client.persist("kv:test_req_001:5:8:42:1")
    assert ask(client, "KVPAGESTAT", "test_req_001", 5, 8, 42, 1)["ttl_left_ms"] == -1


def test_what_is_no_page_has_no_stat(client: redis.Redis) -> None:
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


def test_the_index_tells_what_each_block_holds(client: redis.Redis) -> None:
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


def test_a_deletion_in_a_transaction_is_over_before_the_next_command(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    with client.pipeline() as transaction:
        transaction.execute_command("KVPAGEDEL", "r")
        transaction.execute_command("KVPAGESET", "r", 0, 0, 5, 0, 3, 1, 1, 0, "x")
        transaction.execute_command("KVPAGEVERIFY", "r")
        removed, _, verified = transaction.execute()
    assert removed == 4
    assert verified[b"checked"] == 1
    assert held(client, "r") == [5]


def test_a_client_that_wants_no_replies_is_obeyed_all_the_same(server: RunningServer, client: redis.Redis) -> None:
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


class Here:
    """A server's state and one client of it in this process, so that a test can reach the memory of a page."""

    def __init__(self, **options: Any) -> None:
        self.keyspace = Keyspace(**options)
        self.server = Server(Config(), self.keyspace, lambda: None)
        self.client = Client(self.server, "test", "test", connection=None)  # type: ignore[arg-type]

    def call(self, *given: Any) -> bytes:
        """The reply as it goes over the wire, in RESP2."""
        words = [word if isinstance(word, bytes) else str(word).encode() for word in given]
        pieces: list[Piece] = []
        encode(run(self.client, find(words), list(words)), 2, pieces)
        return b"".join(piece if isinstance(piece, bytes) else bytes(piece.view) for piece in pieces)


@pytest.mark.parametrize(
    "damage",
    [lambda slot: slot.body, lambda slot: slot.header],
    ids=["body", "header"],
)
def test_a_flipped_bit_is_found_and_the_page_is_gone(damage: Any) -> None:
    here = Here()
    for head in range(3):
        here.call("KVPAGESET", "r", 0, head, 0, 0, 3, 1, 1000, 0, bytes(1000))
    slot = here.keyspace.find(b"kv:r:0:1:0:0")
    damage(slot)[3] ^= 0x10
    reply = here.call("KVPAGEVERIFY", "r")
    assert (
        reply == b"*6\r\n$7\r\nchecked\r\n:3\r\n$9\r\nunchecked\r\n:0\r\n$7\r\ncorrupt\r\n*1\r\n$12\r\nkv:r:0:1:0:0\r\n"
    )
    assert here.call("KVPAGEGET", "r", 0, 1, 0, 0) == b"$-1\r\n"
    assert here.call("KVBLOCKGET", "r", 0) == b"$-1\r\n"
    assert b"corrupt" in here.call("KVPAGEWHY", "r", 0, 1, 0, 0)
    assert here.call("KVPAGEVERIFY", "r").startswith(b"*6\r\n$7\r\nchecked\r\n:2\r\n")


# -- KVPAGEPREFIX, leases and pins ---------------------------------------------------------------------------------


def prefix(client: redis.Redis, *names: Any, pages: int = 4, lease_ms: int = 0) -> int:
    return int(client.execute_command("KVPAGEPREFIX", pages, lease_ms, len(names) // 2, *names))


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


def test_a_prefix_of_content_hashes_goes_through_many_requests(client: redis.Redis) -> None:
    for req in "abc":
        set_block(client, req, 0)
    assert prefix(client, "a", 0, "b", 0, "c", 0, "d", 0) == 3


def test_a_prefix_counts_no_block_of_which_a_page_has_expired(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    set_block(client, "r", 1)
    client.pexpire("kv:r:0:0:1:0", 20)
    assert prefix(client, "r", 0, "r", 1) == 2
    time.sleep(0.03)
    assert prefix(client, "r", 0, "r", 1) == 1


def test_exactly_what_a_prefix_counts_is_leased(client: redis.Redis) -> None:
    for page in (0, 1, 3):
        set_block(client, "r", page)
    assert prefix(client, *[word for page in range(4) for word in ("r", page)], lease_ms=30_000) == 2
    leases = [ask(client, "KVPAGESTAT", "r", 0, 0, page, 0)["lease_left_ms"] for page in (0, 1, 3)]
    assert [lease > 29_000 for lease in leases] == [True, True, False]
    assert client.info("kvpage")["leased_or_pinned"] == 2


@contextmanager
def small_store() -> Iterator[redis.Redis]:
    """Room for some 60 blocks, half of which may be protected."""
    with start_server("--maxmemory", "256kb") as server, server.client() as client:
        yield client


def fill(client: redis.Redis, blocks: int = 200) -> None:
    """Write more than there is room for."""
    for page in range(blocks):
        set_block(client, "filler", page, size=800)


def test_eviction_spares_what_is_leased_until_the_lease_is_over() -> None:
    with small_store() as client:
        for page in range(4):
            set_block(client, "r", page, size=800)
        assert client.execute_command("KVPAGELEASE", "r", 400, 0, 1) == 2
        fill(client)
        assert held(client, "r") == [0, 1]
        assert client.info("stats")["evicted_keys"] > 0
        time.sleep(0.41)
        fill(client)
        assert held(client, "r") == []


def test_eviction_spares_what_is_pinned_until_it_is_unpinned() -> None:
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
    for lease_ms in (20_000, 50, 1):
        assert client.execute_command("KVPAGELEASE", "r", lease_ms) == 1
    assert ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["lease_left_ms"] > 19_000
    client.execute_command("KVPAGELEASE", "r", 3_600_000)
    assert ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["lease_left_ms"] > 3_590_000


def test_no_more_than_half_of_the_memory_can_be_protected() -> None:
    with small_store() as client:
        for page in range(50):
            set_block(client, "r", page, size=800)
        pages = held(client, "r")
        assert client.execute_command("KVPAGELEASE", "r", 60_000) < len(pages)
        leased = client.info("kvpage")["leased_or_pinned"]
        assert 120_000 < client.info("kvpage")["leased_or_pinned_bytes"] <= 128 * 1024
        names = [word for page in pages for word in ("r", page)]
        assert prefix(client, *names, lease_ms=1000) == leased  # what it counts can be relied upon
        assert prefix(client, *names) == len(pages)
        with pytest.raises(
            redis.ResponseError, match="leases and pins may take 131072 bytes together, half of max"
        ):
            client.execute_command("KVPAGEPIN", "r")
        assert client.execute_command("KVPAGEPIN", "r", pages[0]) == 1  # it counts already
        fill(client)
        assert held(client, "r") == pages[:leased]
        assert client.info("memory")["used_memory"] < 260 * 1024  # a block more: room is made before one is written


def test_what_is_protected_counts_as_it_grows(client: redis.Redis) -> None:
    set_page(client, body=bytes(1000))
    client.execute_command("KVPAGEPIN", "r")
    before = client.info("kvpage")["leased_or_pinned_bytes"]
    set_page(client, layer=1, body=bytes(1000))
    assert client.info("kvpage")["leased_or_pinned_bytes"] == 2 * before
    client.delete("kv:r:0:0:0:0")
    assert client.info("kvpage")["leased_or_pinned_bytes"] == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("KVPAGEPREFIX", 0, 0, 1, "r", 0), "pages_per_block must be an integer between 1 and"),
        (("KVPAGEPREFIX", 1, 3_600_001, 1, "r", 0), "lease_ms must be an integer between 0 and 3600000, got '3600001'"),
        (("KVPAGEPREFIX", 1, 0, 2, "r", 0), "KVPAGEPREFIX with N = 2 takes 4 arguments after N, 2 a block, got 2"),
        (("KVPAGEPREFIX", 1, 0, 1, "r:", 0), "req_id must be"),
        (("KVPAGELEASE", "r", 0), "lease_ms must be an integer between 1 and 3600000, got '0'"),
        (("KVPAGELEASE", "r", 10, "x"), "page_id must be an integer"),
        (("KVPAGEPIN", "r", -1), "page_id must be an integer"),
        (("KVPAGEUNPIN", "a b"), "req_id must be"),
        (("KVPAGEDEL", "r", 2**32), "page_id must be an integer"),
        (("KVPAGEVERIFY", ""), "req_id must be"),
        (("KVPAGEWHY", "r", 0, 0), "KVPAGEWHY takes a req, or the five arguments that name a page"),
    ],
)
def test_bad_arguments_are_refused_by_name(client: redis.Redis, words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command(*words)


# -- KVPAGEWHY -----------------------------------------------------------------------------------------------------


def test_why_a_page_is_not_there(client: redis.Redis) -> None:
    name = ("r", 0, 0, 0, 0)
    never = ask(client, "KVPAGEWHY", *name)
    assert never["reason"] == "never stored"
    assert unix_ms() - 60_000 < never["since"] <= unix_ms()
    set_page(client)
    assert ask(client, "KVPAGEWHY", *name) == {"reason": "stored"}
    client.delete("kv:r:0:0:0:0")
    deleted = ask(client, "KVPAGEWHY", *name)
    assert deleted["reason"] == "deleted"
    assert unix_ms() - 60_000 < deleted["at"] <= unix_ms()
    set_page(client)
    client.pexpire("kv:r:0:0:0:0", 10)
    time.sleep(0.02)
    assert ask(client, "KVPAGEWHY", *name)["reason"] == "expired"
    set_page(client)
    client.set("kv:r:0:0:0:0", "plain")
    client.delete("kv:r:0:0:0:0")
    assert ask(client, "KVPAGEWHY", *name)["reason"] == "overwritten"
    assert ask(client, "KVPAGEWHY", "r", 1, 0, 0, 0)["reason"] == "never stored"
    client.set("kv:r:0:0:0:0", "plain")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.execute_command("KVPAGEWHY", *name)


def test_why_tells_eviction_when_and_by_which_policy() -> None:
    with small_store() as client:
        set_block(client, "r", 0)
        fill(client)
        why = ask(client, "KVPAGEWHY", "r", 0, 1, 0, 1)
        assert (why["reason"], why["policy"]) == ("evicted", "allkeys-lru")
        assert unix_ms() - 60_000 < why["at"] <= unix_ms()
        assert ask(client, "KVPAGEWHY", "r")["reason"] == "evicted"
        assert ask(client, "KVPAGEWHY", "r", 0, 2, 0, 1)["reason"] == "never stored"


def test_why_finds_the_first_hole_of_a_request(client: redis.Redis) -> None:
    assert ask(client, "KVPAGEWHY", "r")["reason"] == "never stored"
    for page in range(5):
        set_block(client, "r", page)
    assert ask(client, "KVPAGEWHY", "r") == {"reason": "stored", "blocks": 5}
    client.execute_command("KVPAGEDEL", "r", 4)
    hole = ask(client, "KVPAGEWHY", "r")
    assert (hole["reason"], hole["block"], hole["cause"]) == ("hole", 4, "deleted")
    client.delete("kv:r:0:1:2:1")
    hole = ask(client, "KVPAGEWHY", "r")
    assert (hole["reason"], hole["block"], hole["cause"]) == ("hole", 2, "deleted")
    set_page(client, page=1, layer=1)
    hole = ask(client, "KVPAGEWHY", "r")
    assert (hole["reason"], hole["block"], hole["cause"]) == ("hole", 1, "incomplete")
    assert "since" in hole
    set_page(client, req="late", page=3)
    hole = ask(client, "KVPAGEWHY", "late")
    assert (hole["reason"], hole["block"], hole["cause"]) == ("hole", 0, "never stored")
    client.flushall()
    assert ask(client, "KVPAGEWHY", "r")["reason"] == "never stored"


def test_misses_are_counted_by_reason() -> None:
    with start_server() as server, server.client() as client:

        def misses() -> dict[str, int]:
            named = {name: n for name, n in client.info("kvpage").items() if name.startswith("page_misses_") and n}
            return {name.removeprefix("page_misses_"): n for name, n in named.items()}

        set_block(client, "r", 0)
        set_block(client, "r", 2)
        client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0)
        assert misses() == {}
        client.execute_command("KVPAGEGET", "r", 0, 0, 1, 0)
        client.delete("kv:r:0:0:0:0")
        client.execute_command("KVPAGEMGET", 3, *("r", 0, 0, 0, 0), *("r", 0, 1, 0, 0), *("x", 0, 0, 0, 0))
        assert misses() == {"never_stored": 2, "deleted": 1}
        client.execute_command("KVBLOCKGET", "r", 0)
        client.execute_command("KVBLOCKMGET", 2, "r", 2, "r", 3)
        assert misses() == {"never_stored": 3, "deleted": 2}
        set_page(client, page=2, layer=1)
        client.execute_command("KVBLOCKGET", "r", 2)
        assert misses() == {"never_stored": 3, "deleted": 2, "incomplete": 1}
        prefix(client, "r", 1, "r", 0, "x", 0, "r", 2, pages=5)
        assert misses() == {"never_stored": 4, "deleted": 2, "incomplete": 1, "hole": 1}


def test_ghosts_are_bounded_and_say_since_when_they_know() -> None:
    ghosts = Ghosts(most_rows=200)
    started = ghosts.since
    for page in range(1000):
        block = Block(b"r%d" % (page % 10), page)
        block.rows = {0: 0b11, 1024: 0b11}
        ghosts.block_went(block, "evicted", "allkeys-lru")
        assert len(ghosts) <= 20
        time.sleep(0.0001)
    assert ghosts.of_page(b"r9", 0, 1, 999, 1).reason == "evicted"
    assert ghosts.of_page(b"r9", 0, 2, 999, 1) is None
    assert ghosts.of_block(b"r9", 899) is None
    assert ghosts.of_request(b"r3") is not None
    assert ghosts.since > started


# -- kv:{req}:index ------------------------------------------------------------------------------------------------


def test_a_request_s_index_is_a_set_of_its_page_keys(client: redis.Redis) -> None:
    assert client.type("kv:r:index") == b"none"
    assert client.exists("kv:r:index") == 0
    assert client.ttl("kv:r:index") == -2
    assert client.smembers("kv:r:index") == set()
    assert client.get("kv:r:index") is None
    set_block(client, "r", 0)
    set_block(client, "r", 5)
    set_page(client, req="r2")
    client.set("kv:r:0:0:9:0", "plain")
    keys = {bytes(PageKey(b"r", 0, head, page, kv_type)) for head in (0, 1) for page in (0, 5) for kv_type in (0, 1)}
    assert client.smembers("kv:r:index") == keys
    assert client.scard("kv:r:index") == 8
    assert client.type("kv:r:index") == b"set"
    assert client.exists("kv:r:index", "kv:r2:index", "kv:r3:index") == 2
    assert client.ttl("kv:r:index") == -1
    for key in keys:
        assert client.sismember("kv:r:index", key) == 1
    for key in ("kv:r:0:0:9:0", "kv:r2:0:0:0:0", "kv:r:0:0:1:0", "kv:r:index", ""):
        assert client.sismember("kv:r:index", key) == 0


def test_an_index_is_scanned_block_by_block(client: redis.Redis) -> None:
    for page in range(20):
        set_block(client, "r", page)
    assert set(client.sscan_iter("kv:r:index", count=7)) == client.smembers("kv:r:index")
    cursor, keys = client.sscan("kv:r:index", count=7)
    assert cursor
    assert len(keys) == 8
    client.execute_command("KVPAGEDEL", "r", 0, 1, 2)  # what goes or comes meanwhile does not disturb the rest
    set_block(client, "r", 30)
    rest = set()
    while cursor:
        cursor, keys = client.sscan("kv:r:index", cursor, count=7)
        rest |= set(keys)
    assert rest >= {bytes(PageKey(b"r", 0, 0, page, 0)) for page in range(3, 20)}
    assert client.sscan("kv:r:index", match="*:1:*:1", count=1000) == (
        0,
        [bytes(PageKey(b"r", 0, 1, page, 1)) for page in (*range(3, 20), 30)],
    )
    with pytest.raises(redis.ResponseError, match="syntax error"):
        client.execute_command("SSCAN", "kv:r:index", 0, "TYPE", "string")
    with pytest.raises(redis.ResponseError, match="invalid cursor"):
        client.execute_command("SSCAN", "kv:r:index", "x")


def test_requests_are_listed_by_their_index_keys_which_no_other_scan_shows(client: redis.Redis) -> None:
    for number in range(250):
        set_page(client, req=f"r{number}")
    assert set(client.scan_iter(_type="set")) == {b"kv:r%d:index" % number for number in range(250)}
    assert set(client.scan_iter(_type="set", match="kv:r1?:*")) == {b"kv:r1%d:index" % digit for digit in range(10)}
    assert not [key for key in client.scan_iter() if key.endswith(b"index")]
    assert client.keys("*:index") == []
    assert client.dbsize() == 250


WRITES = sorted(name for name, spec in TABLE.items() if "write" in spec.flags and spec.keys[0])


@pytest.mark.parametrize("name", WRITES)
def test_no_command_writes_an_index_key(client: redis.Redis, name: str) -> None:
    set_page(client)
    spec = TABLE[name]
    words = name.split("|") + ["1"] * (abs(spec.arity) - spec.words)
    words[spec.keys[0]] = "kv:r:index"
    with pytest.raises(redis.ResponseError, match="an index key is read-only"):
        client.execute_command(*words)
    assert client.smembers("kv:r:index") == {b"kv:r:0:0:0:0"}
    words[spec.keys[0]] = "kv:not-there-yet:index"
    with pytest.raises(redis.ResponseError, match="an index key is read-only"):
        client.execute_command(*words)


def test_an_index_key_is_no_string(client: redis.Redis) -> None:
    set_page(client)
    for words in (("GET",), ("STRLEN",), ("GETRANGE", 0, 1), ("SUBSTR", 0, 1)):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.execute_command(words[0], "kv:r:index", *words[1:])
    assert client.mget("kv:r:index") == [None]  # as Redis answers for what is no string
    with pytest.raises(redis.ResponseError, match="an index key can't be watched"):
        client.execute_command("WATCH", "kv:r:index")
    client.set("plain", "x")
    for command in ("SMEMBERS", "SCARD"):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.execute_command(command, "plain")
    client.set("kv:a:b:index", "a key of another shape is a key like any other")
    assert client.get("kv:a:b:index")


# -- all of it together --------------------------------------------------------------------------------------------


def test_whatever_happens_to_pages_index_accounts_and_store_agree() -> None:
    """Random writes, deletions, expiries, evictions, leases and pins, checked against a walk through every key."""
    chance = random.Random(7)
    keyspace = Keyspace(maxmemory=60_000)
    for step in range(4000):
        req, page = chance.choice([b"a", b"b"]), chance.randrange(12)
        name = PageName(b"", req, chance.randrange(2), chance.choice([0, 1, 65]), page, chance.randrange(2))
        key = bytes(PageKey(*name[1:]))
        match chance.randrange(9):
            case 0 | 1 | 2 | 3:
                keyspace.make_room()
                slot = keyspace.arena.allocate(chance.choice([200, 900]))
                keyspace.set_page(name._replace(key=key), bytes(64), slot, chance.choice([0, 0, 0, unix_ms() + 3]))
            case 4:
                keyspace.set_string(key, b"plain")
            case 5:
                keyspace.delete(key)
            case 6:
                if keyspace.find(key):
                    keyspace.set_expiry(key, unix_ms() + chance.randrange(5))
            case 7:
                if block := keyspace.block(req, page):
                    if chance.random() < 0.5:
                        keyspace.guards.lease(block, block.footprint, unix_ms() + 5, keyspace.guardable)
                    else:
                        keyspace.guards.pin(block, block.footprint, keyspace.guardable)
            case _:
                if (block := keyspace.block(req, page)) and not keyspace.guards.unpin(block) and chance.random() < 0.2:
                    keyspace.remove_block(block, "del")
        if step % 20 == 0:
            time.sleep(0.006)  # until all is over that is going to expire
            check(keyspace)
    assert keyspace.counters.evicted > 100
    assert keyspace.counters.expired > 100


def check(keyspace: Keyspace) -> None:
    pages: dict[tuple[bytes, int], set[bytes]] = {}
    _, keys = keyspace.scan(0, 10_000)
    for key in keys:
        if keyspace.is_page(keyspace.find(key)):
            name = PageKey.parse(key)
            pages.setdefault((name.req_id, name.page), set()).add(key)
    blocks = [block for req in (b"a", b"b") for block in keyspace.blocks_of(req)]
    assert {(block.req_id, block.page): set(block.page_keys()) for block in blocks} == pages
    assert keyspace.index.blocks == len(blocks)
    keyspace.guards.settle(unix_ms())
    for block in blocks:
        assert block.pages == len(pages[block.req_id, block.page])
        assert block.footprint == sum(slot.footprint for slot in keyspace.slots_of(block))
        assert keyspace.guards.of(block).size in (0, block.footprint)
        full = block.layers * block.heads * len(block.planes) == block.pages
        assert block.is_full == full
    assert keyspace.guards.bytes == sum(keyspace.guards.of(block).size for block in blocks)


def test_a_lease_of_something_that_is_gone_protects_nothing() -> None:
    guards = Guards()
    assert guards.lease(b"key", 100, 50, most=150)
    assert not guards.lease(b"other", 100, 50, most=150)
    guards.removed(b"key")
    assert guards.bytes == 0
    assert guards.lease(b"key", 100, 80, most=150)
    guards.settle(60)
    assert guards.spares(b"key", 60)
    guards.settle(80)
    assert not guards.spares(b"key", 80)
    assert (guards.bytes, len(guards)) == (0, 0)


# -- others are served meanwhile -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["KVPAGEVERIFY large", "KVPAGEVERIFY r", "KVPAGEINDEX r WITHSIZES", "SMEMBERS kv:r:index", "KVPAGEDEL r"],
)
def test_work_on_a_large_request_is_done_in_small_steps(line: str) -> None:
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
    assert max(after - before for before, after in pairwise(took)) < 0.005  # seconds of this processor


def test_others_are_served_while_a_large_request_is_worked_on(server: RunningServer, client: redis.Redis) -> None:
    """400 MB are hashed, 40,000 pages listed and deleted: no PING waits for long. The best of some tries counts."""
    body = random.Random(3).randbytes(4 * 1024 * 1024)
    for page in range(100):
        client.execute_command("KVPAGESET", "large", 0, 0, page, 0, 3, 1, len(body), 0, body)
    best_of_tries(server, "KVPAGEVERIFY large")
    store_many(client)
    best_of_tries(server, "KVPAGEINDEX many WITHSIZES")
    best_of_tries(server, "SMEMBERS kv:many:index")
    best_of_tries(server, "KVPAGEDEL many", again=lambda: store_many(client))


def store_many(client: redis.Redis) -> None:
    """40,000 small pages in 1,000 blocks."""
    with client.pipeline(transaction=False) as pipeline:
        for page in range(1000):
            pipeline.execute_command("KVBLOCKSET", "many", page, 4, 10, 1, 0, 1, 0, 3, 1, bytes(40))
        pipeline.execute()


def best_of_tries(server: RunningServer, line: str, again: Callable[[], None] = lambda: None) -> None:
    """In one of five tries no PING takes 20 ms longer during a command than it does anyway, with all else going on."""
    waits = []
    for _ in range(5):
        anyway = longest_ping_during(server, None)
        waits.append(longest_ping_during(server, line) - anyway)
        if waits[-1] < 0.02:
            return
        again()
    raise AssertionError(f"PINGs waited {waits} seconds for {line}")


def longest_ping_during(server: RunningServer, line: str | None) -> float:
    """Seconds that the slowest PING took while another client's command ran, or in a tenth of a second."""

    def wait() -> None:  # parsing nothing: that would keep this process from measuring
        if line is None:
            time.sleep(0.1)
            return
        received = b""
        while not received.endswith(b"+PONG\r\n"):
            received = received[-16:] + busy.recv(1 << 20)

    slowest = 0.0
    with server.connect() as busy, server.connect() as other:
        waiting = threading.Thread(target=wait)
        waiting.start()
        if line is not None:
            busy.sendall(line.encode() + b"\r\nPING\r\n")
        while waiting.is_alive():
            started = time.monotonic()
            other.sendall(b"PING\r\n")
            assert other.recv(16) == b"+PONG\r\n"
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.001)
        waiting.join()
    return slowest
