"""Reasons of removed strings: KVLOST, misses of strings by reason, and the records behind both."""

from __future__ import annotations

import random
import time

import pytest
import redis
from servers import start_server
from stored_pages import ask, set_page

from kvpage_server.page import unix_ms
from kvpage_server.store.contents import LONGEST_KEY, LostStrings


def lost(client: redis.Redis, pattern: str | bytes, *words: object) -> dict[str, str]:
    """The reasons of removed strings, by key, the latest first."""
    strings = ask(client, "KVLOST", pattern, *words)["strings"]
    return {text(one[b"key"]): text(one[b"reason"]) for one in strings}


def text(raw: bytes) -> str:
    return raw.decode()


def test_a_deleted_and_an_expired_string_have_reasons(client: redis.Redis) -> None:
    client.mset({"chunk:1": "x", "chunk:2": "y" * 1000, "chunk:3": "z"})
    assert lost(client, "chunk:*") == {}
    client.delete("chunk:1")
    client.pexpire("chunk:2", 10)
    time.sleep(0.02)
    assert client.get("chunk:2") is None
    assert lost(client, "chunk:*") == {"chunk:2": "expired", "chunk:1": "deleted"}
    assert lost(client, "chunk:*", "COUNT", 1) == {"chunk:2": "expired"}
    (one,) = ask(client, "KVLOST", "chunk:1")["strings"]
    assert unix_ms() - 60_000 < one[b"at"] <= unix_ms()
    assert b"policy" not in one
    client.set("chunk:1", "again")
    assert lost(client, "chunk:*") == {"chunk:2": "expired"}
    client.flushall()
    assert ask(client, "KVLOST", "*") == {"since": pytest.approx(unix_ms(), abs=60_000), "strings": []}


def test_a_string_replaced_by_a_page_was_overwritten(client: redis.Redis) -> None:
    client.set("kv:r:0:0:0:0", "plain")
    set_page(client)
    client.delete("kv:r:0:0:0:0")
    assert lost(client, "*") == {"kv:r:0:0:0:0": "overwritten"}


def test_an_evicted_string_names_policy_and_limit_or_quota() -> None:
    value = random.Random(1).randbytes(10_000)
    options = ("--maxmemory", "1mb", "--maxmemory-policy", "allkeys-lru", "--quota", "tenant:*", "64kb")
    with start_server(*options) as server, server.client() as client:
        for number in range(20):
            client.set(f"tenant:{number:03}", value)
        (over,) = ask(client, "KVLOST", "tenant:000")["strings"]
        assert (over[b"reason"], over[b"quota"]) == (b"over quota", b"tenant:*")
        for number in range(300):
            client.set(f"chunk@{number:03}", value)
        (evicted,) = ask(client, "KVLOST", "chunk@000")["strings"]
        assert (evicted[b"reason"], evicted[b"policy"], evicted[b"limit"]) == (b"evicted", b"allkeys-lru", b"maxmemory")
        assert b"limit" not in over


def test_misses_of_strings_are_counted_by_reason() -> None:
    with start_server() as server, server.client() as client:

        def misses() -> dict[str, int]:
            named = {name: n for name, n in client.info("kvpage").items() if "_misses_" in name and n}
            assert sum(named.values()) == client.info("stats")["keyspace_misses"]
            return named

        client.mset({"a": "x", "b": "y"})
        client.delete("a")
        assert misses() == {}
        client.get("a")
        client.mget("a", "b", "never")
        client.strlen("never")
        assert misses() == {"string_misses_deleted": 2, "string_misses_never_stored": 2}
        set_page(client)
        client.delete("kv:r:0:0:0:0")
        client.get("kv:r:0:0:0:0")
        client.mget("kv:r:0:0:0:0", "kv:r:0:0:1:0")
        client.execute_command("KVPAGEGET", "r", 0, 0, 0, 0)
        of_strings = {"string_misses_deleted": 2, "string_misses_never_stored": 2}
        assert misses() == of_strings | {"page_misses_deleted": 3, "page_misses_never_stored": 1}
        client.config_resetstat()
        assert misses() == {}


def test_a_tenant_is_shown_the_losses_of_its_own_keys(client: redis.Redis) -> None:
    client.mset({"mine:1": "x", "theirs:1": "y"})
    client.delete("mine:1", "theirs:1")
    client.execute_command("ACL", "SETUSER", "tenant", "on", "nopass", "~mine:*", "+@all")
    client.execute_command("AUTH", "tenant", "")
    assert lost(client, "*") == {"mine:1": "deleted"}
    assert lost(client, "theirs:1") == {}


def test_patterns_and_literal_keys(client: redis.Redis) -> None:
    long = "k" * (LONGEST_KEY + 1)
    client.mset({"a*b": "1", "aXb": "2", long: "3"})
    client.delete("a*b", "aXb", long)
    assert lost(client, r"a\*b") == {"a*b": "deleted"}
    assert lost(client, "a*b") == {"aXb": "deleted", "a*b": "deleted"}
    assert lost(client, long) == {long: "deleted"}
    assert long not in lost(client, "k*")
    with pytest.raises(redis.ResponseError, match="count must be an integer between 1 and 1000, got '0'"):
        client.execute_command("KVLOST", "*", "COUNT", 0)
    with pytest.raises(redis.ResponseError, match="syntax error"):
        client.execute_command("KVLOST", "*", "COUNT")


def test_records_of_lost_strings_take_a_bounded_memory() -> None:
    losses = LostStrings(most_bytes=100_000)
    before = losses.since
    for number in range(10_000):
        losses.remember(b"%d" % number + b"k" * (number % 2000), "evicted", "allkeys-lru")
    assert losses.bytes <= 100_000
    assert len(losses) > 50
    assert losses.of(b"0") is None
    last = b"9999" + b"k" * (9999 % 2000)
    assert losses.of(last) is not None
    assert losses.since >= before
    for _ in range(3):
        losses.remember(last, "deleted")
    assert losses.of(last).reason == "deleted"
    losses.clear()
    assert (len(losses), losses.bytes) == (0, 0)
