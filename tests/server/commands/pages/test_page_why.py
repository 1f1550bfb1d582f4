"""Why a page is not there: KVPAGEWHY, the misses counted by reason, and the ghosts that both know it from."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import redis
from servers import start_server
from stored_pages import ask, fill, held, prefix, set_block, set_page, small_store

from kvpage_server.page import unix_ms
from kvpage_server.store.disk.database import FILE
from kvpage_server.store.eviction.ghosts import Ghosts
from kvpage_server.store.memory.index import Block


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


def test_why_gives_the_last_reason_of_each_page(client: redis.Redis) -> None:
    page, neighbours = ("r", 0, 0, 0, 0), ("kv:r:0:1:0:0", "kv:r:0:2:0:0")
    for head in range(3):
        set_page(client, head=head)
    client.delete("kv:r:0:0:0:0")
    set_page(client)
    client.pexpire("kv:r:0:0:0:0", 10)
    time.sleep(0.02)
    expired = ask(client, "KVPAGEWHY", *page)
    assert expired["reason"] == "expired"
    time.sleep(0.002)
    client.delete(neighbours[0])
    assert ask(client, "KVPAGEWHY", *page) == expired
    set_page(client, head=1)
    client.execute_command("KVPAGEDEL", "r")
    assert ask(client, "KVPAGEWHY", *page) == expired
    assert ask(client, "KVPAGEWHY", "r", 0, 2, 0, 0)["reason"] == "deleted"


def test_why_gives_time_and_policy_of_an_eviction() -> None:
    with small_store() as client:
        set_block(client, "r", 0)
        fill(client)
        why = ask(client, "KVPAGEWHY", "r", 0, 1, 0, 1)
        assert (why["reason"], why["policy"]) == ("evicted", "allkeys-prefix")
        assert unix_ms() - 60_000 < why["at"] <= unix_ms()
        assert ask(client, "KVPAGEWHY", "r")["reason"] == "evicted"
        assert ask(client, "KVPAGEWHY", "r", 0, 2, 0, 1)["reason"] == "never stored"


def test_pages_that_do_not_fit_together_are_no_readable_block(client: redis.Redis) -> None:
    for head, body in enumerate((b"12345678", b"1234")):
        client.execute_command("KVPAGESET", "r", 0, head, 0, 0, 3, 1, 8, 0, body)
    assert ask(client, "KVPAGEWHY", "r") == {"reason": "stored", "blocks": 1}
    assert client.execute_command("KVPAGEPREFIX", 2, 0, 1, "r", 0) == 1
    assert client.execute_command("KVBLOCKGET", "r", 0) is None
    assert client.execute_command("KVBLOCKEXISTS", "r", 0) == 0
    assert client.execute_command("KVPAGEINDEX", "r")[0][b"complete"] == 0


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
        assert client.info("stats")["keyspace_misses"] == sum(misses().values())


def test_every_reason_is_reported_and_counted(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(5000)
    options = ("--store", "tiered", "--maxmemory", "256kb", "--quota", "kv:tenant.*", "2kb", "--scrub-rate", "0")
    with start_server(*options, directory=tmp_path) as server, server.client() as client:
        set_page(client, "corrupt", body=body)
    database = tmp_path / FILE
    at = database.read_bytes().index(body[:1000])
    with database.open("r+b") as file:
        file.seek(at)
        file.write(bytes([body[0] ^ 1]))
    with start_server(*options, "--maxdisk", "16mb", directory=tmp_path) as server, server.client() as client:
        client.execute_command("KVPAGEPIN", "corrupt")
        set_page(client, "evicted")
        for i in range(14):
            client.set(f"large:{i}", bytes(1 << 20))
        set_page(client, "expired")
        set_page(client, "overwritten")
        client.set("kv:overwritten:0:0:0:0", "plain")
        client.delete("kv:overwritten:0:0:0:0")
        set_page(client, "deleted")
        client.execute_command("KVPAGEDEL", "deleted")
        set_block(client, "hole", 1)
        set_page(client, "incomplete", layer=1)
        for page in range(4):
            set_block(client, "tenant.x", page, size=200)
        client.pexpire("kv:expired:0:0:0:0", 50)  # one that is over when it is given is a deletion
        time.sleep(0.06)
        missing = "never-stored", "expired", "evicted", "overwritten", "deleted", "corrupt"
        for req in missing:
            assert client.execute_command("KVPAGEGET", req, 0, 0, 0, 0) is None
            assert ask(client, "KVPAGEWHY", req, 0, 0, 0, 0)["reason"] == req.replace("-", " ")
        gone = min(set(range(4)) - set(held(client, "tenant.x")))
        assert client.execute_command("KVPAGEGET", "tenant.x", 0, 0, gone, 0) is None
        why = ask(client, "KVPAGEWHY", "tenant.x", 0, 0, gone, 0)
        assert (why["reason"], why["quota"]) == ("over quota", "kv:tenant.*")
        assert client.execute_command("KVBLOCKGET", "incomplete", 0) is None
        assert prefix(client, "hole", 0, "hole", 1) == 0
        assert ask(client, "KVPAGEWHY", "hole")["reason"] == "hole"
        counted = client.info("kvpage")
        reasons = ("expired", "evicted", "overwritten", "deleted", "corrupt", "over_quota", "incomplete", "hole")
        assert {reason: counted[f"page_misses_{reason}"] for reason in reasons} == dict.fromkeys(reasons, 1)
        assert counted["page_misses_never_stored"] == 2


def test_a_removed_page_has_one_reason_its_last() -> None:
    """After removals in any order. The number of ghosts is bounded."""
    luck, reasons = random.Random(1), ("expired", "evicted", "over quota", "deleted", "overwritten", "corrupt")
    ghosts, last = Ghosts(), dict[tuple[int, int], str]()
    for _ in range(2000):
        block, reason = Block(b"r", 0), luck.choice(reasons)
        for _ in range(luck.randint(1, 6)):
            layer, head = luck.randrange(3), luck.randrange(70)
            block.add(layer, head, 0)
            last[layer, head] = reason
        ghosts.remember(block, block.rows, reason)
        assert {page: ghosts.of_page(b"r", page[0], page[1], 0, 0).reason for page in last} == last
        kept = ghosts._blocks[b"r", 0].values()
        assert {ghost.reason for ghost in kept} == set(last.values())
        assert ghosts._rows == sum(len(ghost.rows) + 8 for ghost in kept)
        assert ghosts.of_block(b"r", 0).reason == reason


def test_ghosts_are_bounded_and_say_since_when_they_know() -> None:
    ghosts = Ghosts(most_rows=200)
    started = ghosts.since
    for page in range(1000):
        block = Block(b"r%d" % (page % 10), page)
        for head, kv_type in ((0, 0), (1, 0), (0, 1), (1, 1)):
            block.add(0, head, kv_type)
        ghosts.remember(block, block.rows, "evicted", "allkeys-lru")
        assert len(ghosts) <= 20
        time.sleep(0.0001)
    assert ghosts.of_page(b"r9", 0, 1, 999, 1).reason == "evicted"
    assert ghosts.of_page(b"r9", 0, 2, 999, 1) is None
    assert ghosts.of_block(b"r9", 899) is None
    assert ghosts.count(b"r3")
    assert ghosts.since > started
    assert ghosts.nbytes <= 100 * 200 + 10 * len(b"r3")


def test_memory_of_removed_blocks_is_counted() -> None:
    ghosts, counted = Ghosts(most_rows=9 * 20), [0]
    for page in range(30):
        block = Block(b"%03d" % page + b"r" * 200, 0)
        block.add(0, 0, 0)
        ghosts.remember(block, block.rows, "evicted")
        counted.append(ghosts.nbytes)
        assert (counted[-1] > counted[-2] + 200) == (page < 20)
    assert counted[20] == counted[-1]
    ghosts.clear()
    assert ghosts.nbytes == 0
