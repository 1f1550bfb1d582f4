"""A client with CLIENT NO-TOUCH changes nothing: values on disk stay there, and the order of eviction is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import with_constants
from test_tiered import BLOCK, SHAPE, body, disk_info, settle, tiered
from waiting import eventually, until

LONG = body(100_000, 7)
PROMPT = with_constants("kvpage_server.store.disk.write_behind", LONGEST=1.0)
PAGES = [body(20_000, seed) for seed in range(4)]
WHOLE = body(BLOCK, 9)


def fill(client: redis.Redis) -> None:
    """Something of every kind: a block stored whole, one page by page, a long string and one where a page would be."""
    client.execute_command("KVBLOCKSET", "whole", 0, *SHAPE, WHOLE)
    for head, page in enumerate(PAGES):
        client.execute_command("KVPAGESET", "single", head // 2, head % 2, 0, 0, 1, 1, 10_000, 0, page)
    client.set("long", LONG)
    client.set("kv:single:0:0:7:0", LONG)
    settle(client)


@pytest.fixture(scope="module")
def looker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """Yield a client of a restarted store, so that all values are on disk only and idle."""
    directory = tmp_path_factory.mktemp("store")
    with tiered(directory) as (_, client):
        fill(client)
    with tiered(directory) as (_, client):
        client.execute_command("CLIENT", "NO-TOUCH", "ON")
        until(lambda: client.object("idletime", "long") >= 2, "the value to be idle")
        yield client


def tiers(client: redis.Redis) -> list[Any]:
    return [client.execute_command("KVPAGESTAT", req, 0, 0, 0, 0)[b"tier"] for req in ("whole", "single")]


QUESTIONS: list[tuple[list[Any], Any]] = [
    (["GET", "long"], LONG),
    (["GETRANGE", "long", 5, 99], LONG[5:100]),
    (["MGET", "long", "nothing", "kv:single:0:0:7:0"], [LONG, None, LONG]),
    (["KVPAGEGET", "single", 0, 1, 0, 0], PAGES[1]),
    (["KVPAGEGET", "whole", 0, 1, 0, 0], WHOLE[BLOCK // 4 : BLOCK // 2]),
    (["KVPAGEMGET", 2, "single", 0, 0, 0, 0, "single", 1, 1, 0, 0], [PAGES[0], PAGES[3]]),
    (["KVPAGEMGET", 2, "single", 0, 0, 0, 0, "single", 0, 0, 7, 0], [PAGES[0], None]),
    (["KVPAGEMGET", 1, "whole", 1, 1, 0, 0], [WHOLE[-BLOCK // 4 :]]),
    (["KVBLOCKGET", "whole", 0], WHOLE),
    (["KVBLOCKGET", "single", 0], b"".join(PAGES)),
    (["KVBLOCKMGET", 3, "whole", 0, "single", 0, "whole", 1], [WHOLE, b"".join(PAGES), None]),
    (["KVPAGEVERIFY", "single", 0], {b"checked": 4, b"unchecked": 0, b"corrupt": []}),
    (["KVPAGEVERIFY", "whole"], {b"checked": 4, b"unchecked": 0, b"corrupt": []}),
    (["EXISTS", "long", "kv:whole:0:0:0:0"], 2),
    (["STRLEN", "long"], len(LONG)),
]


@pytest.mark.parametrize(
    ("words", "answer"), QUESTIONS, ids=lambda part: part[0] if type(part) is list and type(part[0]) is str else ""
)
def test_a_look_is_answered_and_leaves_everything_on_disk(looker: redis.Redis, words: list[Any], answer: Any) -> None:
    used, idle = looker.info("memory")["used_memory"], looker.object("idletime", "long")
    assert looker.execute_command(*words) == answer
    assert eventually(lambda: looker.info("memory")["used_memory"] == used)
    assert tiers(looker) == [b"disk", b"disk"]
    assert looker.object("idletime", "long") >= idle
    assert looker.object("idletime", "kv:whole:0:0:0:0") >= 2


def test_a_page_of_a_block_on_disk_is_described_without_a_load(looker: redis.Redis) -> None:
    before = disk_info(looker)["disk_fetched"]
    received = looker.execute_command("KVPAGESTAT", "whole", 0, 1, 0, 0)
    assert (received[b"tier"], received[b"bytes"], received[b"checksum"]) == (b"disk", BLOCK // 4, None)
    assert looker.execute_command("KVPAGESTAT", "single", 0, 1, 0, 0)[b"checksum"]
    assert disk_info(looker)["disk_fetched"] == before


def test_a_use_loads_a_value_that_another_client_only_looks_at(tmp_path: Path) -> None:
    with tiered(tmp_path) as (_, client):
        fill(client)
    with tiered(tmp_path) as (server, client), server.client() as looker:
        looker.execute_command("CLIENT", "NO-TOUCH", "ON")
        until(lambda: looker.object("idletime", "long") >= 2, "the value to be idle")
        assert looker.set("kv:single:0:0:7:0", b"x", get=True) == LONG  # a write is no look
        assert [looker.get("long"), client.get("long"), looker.get("long")] == [LONG] * 3
        assert client.object("idletime", "long") < looker.object("idletime", "kv:whole:0:0:0:0")
        assert client.execute_command("KVBLOCKGET", "whole", 0) == WHOLE
        assert tiers(looker) == [b"memory", b"disk"]
        looker.execute_command("KVPAGESET", "whole", 0, 0, 0, 0, 1, 1, 10, 0, b"y" * 20)  # splits the block
        assert client.execute_command("KVPAGEGET", "whole", 0, 1, 0, 0) == WHOLE[BLOCK // 4 : BLOCK // 2]
        assert client.execute_command("KVPAGESTAT", "whole", 0, 1, 0, 0)[b"checksum"]


def test_a_block_is_found_after_a_look_at_its_pages(looker: redis.Redis) -> None:
    """The pages of the block are still in memory for the first command when the second one runs."""
    with looker.pipeline(transaction=False) as pipe:
        pipe.execute_command("KVPAGEMGET", 1, "whole", 1, 1, 0, 0)
        pipe.execute_command("KVBLOCKMGET", 2, "whole", 0, "whole", 1)
        pipe.execute_command("KVPAGEGET", "whole", 1, 1, 0, 0)
        pipe.execute_command("KVBLOCKGET", "whole", 0)
        assert pipe.execute() == [[WHOLE[-BLOCK // 4 :]], [WHOLE, None], WHOLE[-BLOCK // 4 :], WHOLE]


def test_a_look_promises_nothing(tmp_path: Path) -> None:
    with tiered(tmp_path, "--maxmemory", "10mb") as (server, client), server.client() as looker:
        looker.execute_command("CLIENT", "NO-TOUCH", "ON")
        client.set("long", LONG)
        assert looker.exists("long")
        assert client.info("kvpage")["leased_or_pinned_bytes"] == 0
        assert client.exists("long")
        assert client.info("kvpage")["leased_or_pinned_bytes"] > 0
