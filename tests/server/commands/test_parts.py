"""Commands of very many words, which run in steps, have the same effect as in one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from servers import start_server
from wire import Error, Wire, parse

from kvpage_server.commands.specs import WORDS_PER_STEP

COUNT = WORDS_PER_STEP + 476  # more than run at once, and the last part is not a full one
KEYS = [b"k%d" % i for i in range(COUNT)]
VALUES = [b"%d " % i * 1000 for i in range(COUNT)]
UNREADABLE = Path(__file__).parents[2] / "support" / "unreadable.py"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory with values, which lie on disk alone when a server begins to use it."""
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        client.mset(dict(zip(KEYS, VALUES, strict=True)))
    return tmp_path


def test_values_that_lie_on_disk_alone_are_one_array(stored: Path) -> None:
    with start_server("--store", "tiered", directory=stored) as server, Wire(server.port) as wire:
        wire.ask(b"GET", KEYS[0])  # so that not all of the first part are fetched
        assert parse(wire.ask(b"MGET", *KEYS, b"absent")) == [*VALUES, None]
        assert wire.ask(b"PING") == b"+PONG\r\n"


def test_an_unreadable_value_is_an_error_in_its_place(stored: Path) -> None:
    switch = stored / "unreadable"
    with (
        start_server("--store", "tiered", directory=stored, program=[str(UNREADABLE)]) as server,
        Wire(server.port) as wire,
    ):
        first = parse(wire.ask(b"MGET", *KEYS[:200]))
        switch.touch()
        found = parse(wire.ask(b"MGET", *KEYS))
        assert wire.ask(b"PING") == b"+PONG\r\n"
        switch.unlink()
        assert parse(wire.ask(b"MGET", *KEYS)) == VALUES
    assert first == VALUES[:200]
    assert len(found) == COUNT
    assert found[:128] == VALUES[:128]  # a part that is in memory
    error = "ERR reading from disk failed: Input/output error"
    assert all(type(value) is Error and value == error for value in found[256:])


def test_keys_that_lie_on_disk_alone_are_counted_once_each(stored: Path) -> None:
    with start_server("--store", "tiered", directory=stored) as server, server.client() as client:
        assert client.exists(*KEYS, b"absent") == COUNT
        assert client.touch(*KEYS, b"absent") == COUNT
        assert client.delete(*KEYS, b"absent") == COUNT
        assert client.mset(dict(zip(KEYS, VALUES, strict=True)))
        assert client.mget(KEYS) == VALUES


def test_an_array_of_two_items_an_argument_is_one_array(client: redis.Redis) -> None:
    assert client.pubsub_numsub(*(key.decode() for key in KEYS)) == [(key, 0) for key in KEYS]
