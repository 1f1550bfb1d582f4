"""A store that an older version has written is opened: a value of every kind exists, and is unchanged.

`stored_before/kvpage.lmdb.tar.xz` was written by a server with `appendfsync always` that was stopped in order.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from archives import unpack
from servers import start_server

STORED = next(parent for parent in Path(__file__).parents if parent.name == "tests") / "stored_before"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    unpack(STORED / "kvpage.lmdb.tar.xz", tmp_path)
    return tmp_path


@pytest.fixture
def client(directory: Path) -> Iterator[redis.Redis]:
    with start_server("--store", "tiered", directory=directory) as server, server.client() as client:
        yield client


def test_values_of_an_older_version_exist(client: redis.Redis) -> None:
    check(client)
    assert client.dbsize() == 39


def test_it_is_still_there_after_it_was_changed_and_stopped(directory: Path) -> None:
    with start_server("--store", "tiered", directory=directory) as server, server.client() as client:
        client.execute_command("KVPAGESET", "singles", 7, 0, 0, 0, 8, 1, 4, 0, b"more")
        client.execute_command("KVPAGESET", "whole", 0, 0, 5, 0, 8, 1, 4, 0, b"next")
        assert client.persist("later")
    kept = directory / "kept"
    kept.mkdir()
    shutil.move(directory / "kvpage.lmdb", kept / "kvpage.lmdb")
    with start_server("--store", "tiered", directory=kept) as server, server.client() as client:
        assert client.ttl("later") == -1
        client.expire("later", 1000)
        check(client)
        assert client.execute_command("KVPAGEGET", "singles", 7, 0, 0, 0) == b"more"
        assert client.execute_command("KVPAGEGET", "whole", 0, 0, 5, 0) == b"next"


def check(client: redis.Redis) -> None:
    """Check that all stored values are unchanged."""
    for page in range(2):  # single pages of two blocks
        for i in range(8):
            layer, head, kind = i >> 2, i >> 1 & 1, i & 1
            found = client.execute_command("KVPAGEGET", "singles", layer, head, page, kind)
            assert found == bytes([page, layer, head, kind]) * 24
    assert client.execute_command("KVPAGEGET", "expiring", 0, 0, 7, 0) == b"e" * 32
    assert client.ttl("kv:expiring:0:0:7:0") > 3_000_000_000
    assert client.execute_command("KVPAGEGET", "r" * 256, 65535, 65535, 4294967295, 5) == b"p" * 16
    assert client.execute_command("KVPAGEGET", "empty-body", 0, 0, 0, 0) == b""
    # blocks stored whole, one that expires, and one that was split afterwards
    assert client.execute_command("KVBLOCKGET", "whole", 3) == random.Random(5).randbytes(1024)
    assert client.execute_command("KVBLOCKGET", "whole", 4) == random.Random(6).randbytes(128)
    assert client.ttl("kv:whole:0:0:4:0") > 3_000_000_000
    assert client.execute_command("KVBLOCKGET", "split", 0) == random.Random(7).randbytes(256)[:128] + b"s" * 128
    # strings: short, empty, long, in several pieces, under the key of a page, under long keys, one that expires
    assert [client.get(key) for key in ("short", "empty", "long")] == [b"value", b"", b"L" * 2000]
    assert client.get("pieces") == bytes(300_000)
    assert client.get("kv:stray:0:0:0:0") == b"no page"
    assert client.get("k" * 700) == b"under a long key"
    assert client.get("kv:" + "r" * 256 + ":1:2:3:4") == b"a long page key"
    assert client.get("counter") == b"42"
    assert client.get("later") == b"x"
    assert client.ttl("later") > 900
    checked = client.execute_command("KVPAGEVERIFY", "singles", 1)
    assert checked[b"checked"] == 8
