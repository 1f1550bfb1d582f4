"""An upgrade: a store and a dump that commit 6d4debb2 has written are opened, and have the same values.

`stored_before/store_and_dump.tar.xz` has both. Cold files of engines are in tests/engine/test_engine_stored_before.py,
and a store of an older commit is in test_tiered_stored_before.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import redis
from archives import unpack
from servers import start_server
from test_kvpage_cli import kvpage
from test_tiered_stored_before import STORED

YEARS = 3_000_000_000  # seconds


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    unpack(STORED / "store_and_dump.tar.xz", tmp_path)
    return tmp_path


def check(client: redis.Redis) -> None:
    """Check all values."""
    assert client.dbsize() == 26
    for page in range(2):
        assert client.execute_command("KVBLOCKGET", "whole", page) == random.Random(page).randbytes(512)
    assert client.ttl("kv:whole:0:0:0:0") == -1
    assert client.ttl("kv:whole:0:0:1:0") > YEARS
    assert client.execute_command("KVBLOCKGET", "split", 0) == random.Random(2).randbytes(256)[:128] + b"s" * 128
    for i in range(4):
        assert client.execute_command("KVPAGEGET", "single", i >> 1, i & 1, 3, 0) == bytes([i]) * 64
    assert client.mget("string", "long", b"manifest:al\xffice") == [b"value", b"L" * 2000, b"bytes"]
    assert client.ttl("later") > YEARS
    for request in ("whole", "split", "single"):
        verified = client.execute_command("KVPAGEVERIFY", request)
        assert (verified[b"corrupt"], verified[b"unchecked"]) == ([], 0)


def test_a_store_of_an_earlier_commit_is_opened(stored: Path) -> None:
    for _ in range(2):  # and again, after this version has stopped it
        with start_server("--store", "tiered", directory=stored) as server, server.client() as client:
            check(client)


def test_a_dump_of_an_earlier_commit_is_restored(stored: Path) -> None:
    code, shown, errors = kvpage("inspect", str(stored / "dump"), "--verify")
    assert (code, errors) == (0, ""), shown
    with start_server() as server, server.client() as client:
        code, shown, errors = kvpage("restore", str(stored / "dump"), url=server.url)
        assert (code, errors) == (0, ""), shown
        assert "22 pages and 4 strings" in shown
        check(client)
