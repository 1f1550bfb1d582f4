"""Lifetimes: KVPAGEKEEP protects values until an end, also after a restart. Each tenant has a share."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import start_server
from stored_pages import ask, fill, held, set_block, small_store

from kvpage_server.app import _open_store
from kvpage_server.client import PageClient
from kvpage_server.configuration.config import from_arguments
from kvpage_server.page import unix_ms
from kvpage_server.store.disk.database import Disk
from kvpage_server.store.disk.lmdb_file import DiskError, DiskFull

TIERED = ("--store", "tiered", "--appendfsync", "always")
SMALL_DISK = (*TIERED, "--maxdisk", "16mb", "--maxmemory", "8mb")


def key(req: str, page: int = 0) -> str:
    return f"kv:{req}:0:0:{page}:0"


def keep(client: redis.Redis, *keys: str, seconds: float = 3600, tenant: str = "", tenants: int = 1) -> list[Any]:
    count, until, why = client.execute_command("KVPAGEKEEP", tenant, tenants, seconds, *keys)
    assert (until > unix_ms()) is bool(count)
    return [count, why.decode()]


def set_large(client: redis.Redis, req: str, size: int = 100_000) -> None:
    client.execute_command("KVBLOCKSET", req, 0, 1, 1, 1, 0, 1, 0, 3, size, bytes(size))


def fill_until_evicted(client: redis.Redis) -> None:
    """Write blocks until one is evicted."""
    for page in range(100):
        if client.info("stats")["evicted_keys"]:
            return
        set_block(client, "filler", page, size=800)


def fill_disk(client: redis.Redis, name: str, times: int) -> None:
    """Write `times` the room of the disk of SMALL_DISK."""
    for i in range(times * 160):
        set_large(client, f"{name}{i}")


def test_kept_blocks_and_strings_survive_ten_times_the_memory() -> None:
    with small_store() as client:
        for page in range(4):
            set_block(client, "r", page, size=800)
            client.set(f"seal:{page}", "digest")
        client.set("long", bytes(3000))
        assert keep(client, *(key("r", page) for page in range(3)), "seal:0", "long") == [5, ""]
        fill(client, 700)
        assert held(client, "r") == [0, 1, 2]
        assert client.mget("seal:0", "seal:1", "long") == [b"digest", None, bytes(3000)]


def test_a_block_is_evicted_first_after_its_lifetime() -> None:
    with small_store() as client:
        for page in range(3):
            set_block(client, "r", page, size=800)
        keep(client, key("r", 0), key("r", 1), seconds=1)
        keep(client, key("r", 2))
        time.sleep(1.1)
        fill_until_evicted(client)
        assert held(client, "r") == [0, 2]
        set_block(client, "other", 0, size=800)
        assert held(client, "r") == [2]
        assert client.info("kvpage")["kept"] == 1


def test_a_block_used_after_its_lifetime_is_not_evicted_first() -> None:
    with small_store() as client:
        set_block(client, "r", 0, size=800)
        keep(client, key("r"), seconds=1)
        time.sleep(2.2)  # the policy counts uses in seconds
        set_block(client, "other", 0, size=800)
        client.execute_command("KVBLOCKGET", "r", 0)
        fill_until_evicted(client)
        assert held(client, "r") == [0]


def test_a_lifetime_is_prolonged_and_never_shortened(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    keep(client, key("r"), seconds=1000, tenant="a")
    keep(client, key("r"), seconds=10, tenant="b")
    block = ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)
    assert abs(block["kept_until_ms"] - unix_ms() - 1_000_000) < 5000
    assert block["kept_by"] == "a"
    keep(client, key("r"), seconds=2000, tenant="b")
    assert ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["kept_by"] == "b"
    assert client.info("kvpage")["kept0"]["tenant"] == "b"
    keep(client, key("r"), seconds=3000, tenant="a,bytes=0\\x2c")
    kept = client.info("kvpage")["kept0"]
    assert kept["tenant"] == r"a\x2cbytes\x3d0\\x2c"
    assert kept["bytes"] > 0
    client.execute_command("KVPAGEDEL", "r")
    assert client.info("kvpage")["kept"] == 0
    assert client.info("kvpage")["leased_or_pinned_bytes"] == 0


def test_lifetimes_begin_anew_with_0_seconds(client: redis.Redis) -> None:
    def in_time(until: int, seconds: int) -> bool:
        return renewed <= until - 1000 * seconds <= unix_ms()

    for page in range(3):
        set_block(client, "r", page)
    keep(client, key("r", 0), seconds=1000, tenant="a")
    keep(client, key("r", 1), seconds=60, tenant="a")
    time.sleep(0.01)
    renewed = unix_ms()
    count, until, _ = client.execute_command("KVPAGEKEEP", "a", 1, 5, key("r", 0))
    assert in_time(until, 1000)
    assert in_time(ask(client, "KVPAGESTAT", "r", 0, 0, 0, 0)["kept_until_ms"], 1000)
    keys = [key("r", page) for page in range(3)]
    count, until, why = client.execute_command("KVPAGEKEEP", "b", 1, 0, *keys)
    assert (count, why) == (2, b"not kept")
    assert in_time(until, 60)
    assert ask(client, "KVPAGESTAT", "r", 0, 0, 1, 0)["kept_by"] == "a"
    assert client.execute_command("KVPAGEKEEP", "b", 1, 0, "nothing") == [0, 0, b"absent"]


def test_lifetimes_leases_and_pins_take_half_of_memory() -> None:
    with small_store() as client:
        for page in range(50):
            set_block(client, "r", page, size=800)
        pages = held(client, "r")
        assert client.execute_command("KVPAGEPIN", "r", *pages[:10]) == 10
        count, why = keep(client, *(key("r", page) for page in pages[10:]))
        assert 0 < count < len(pages) - 10
        assert why.startswith("leases, pins and lifetimes may take 131072 bytes together, half of maxmemory: ")
        assert client.info("kvpage")["leased_or_pinned"] == 10 + count
        assert keep(client, "nothing", key("r", pages[10])) == [0, "absent"]


def test_each_tenant_may_keep_an_equal_share() -> None:
    with small_store() as client:
        for page in range(50):
            set_block(client, "r", page, size=800)
        keys = [key("r", page) for page in held(client, "r")]
        first, why = keep(client, *keys, tenant="a", tenants=2)
        assert why == "the share of the tenant, one of 2, is used up"
        second, _ = keep(client, *keys[first:], tenant="b", tenants=2)
        assert second in (first, first + 1)
        info = client.info("kvpage")
        assert info["kept0"] | {"bytes": 0} == {"values": first, "bytes": 0, "tenant": "a"}
        assert info["kept0"]["bytes"] <= 64 * 1024
        assert info["kept1"]["values"] == second


def test_a_new_value_of_a_kept_string_stays_kept() -> None:
    with small_store() as client:
        client.set("a", "short")
        client.set("b", bytes(1000))
        assert keep(client, "a", "b") == [2, ""]
        client.set("a", bytes(2000))
        client.set("b", "short")
        client.set("a", bytes(3000))
        assert client.info("kvpage")["kept"] == 2
        fill(client)
        assert client.mget("a", "b") == [bytes(3000), b"short"]
        client.set("a", bytes(200_000))  # more than may be kept
        assert client.info("kvpage")["kept"] == 1
        client.delete("b")
        assert client.info("kvpage")["kept"] == client.info("kvpage")["leased_or_pinned_bytes"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("t" * 129, 1, 1, "k"), "tenant must have at most 128 bytes, got 129"),
        (("", 0, 1, "k"), "tenants must be an integer between 1 and 1000000"),
        (("", 1, -1, "k"), "seconds must be an integer between 0 and 86400"),
        (("", 1, 86401, "k"), "seconds must be an integer between 0 and 86400"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(client: redis.Redis, words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command("KVPAGEKEEP", *words)


def test_many_keys_are_kept_in_steps(client: redis.Redis) -> None:
    client.mset({f"k{i}": i for i in range(3000)})
    assert keep(client, *(f"k{i}" for i in range(3000))) == [3000, ""]
    assert client.info("kvpage")["kept"] == 3000


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_lifetime_survives_a_restart(tmp_path: Path, end: signal.Signals) -> None:
    long = "r" * 250 + "{x}"
    with (
        start_server(*SMALL_DISK, directory=tmp_path, killed=end == signal.SIGKILL) as server,
        server.client() as client,
    ):
        for req in ("a", "b", long):
            set_large(client, req)
        client.execute_command("KVPAGESET", "single", 0, 0, 0, 0, 3, 1, 6, 0, "a page")
        client.set("text", "short")
        assert keep(client, key("a"), key(long), key("single"), "text", tenant="me") == [4, ""]
        until = ask(client, "KVPAGESTAT", "a", 0, 0, 0, 0)["kept_until_ms"]
        server.stop(end)
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        assert client.info("kvpage")["kept"] == 4
        stat = ask(client, "KVPAGESTAT", "a", 0, 0, 0, 0)
        assert (stat["kept_until_ms"], stat["kept_by"]) == (until, "me")
        _, until, _ = client.execute_command("KVPAGEKEEP", "", 1, 0, key("a"))
        assert abs(until - unix_ms() - 3_600_000) < 5000, "a lifetime that begins anew has its length"
        fill_disk(client, "x", 3)
        assert [client.exists(key(req)) for req in ("a", "b", long, "single")] == [1, 0, 1, 1]
        assert client.info("kvpage")["disk_evicted"] > 0


def test_a_lifetime_that_ended_before_a_restart_is_evicted_first(tmp_path: Path) -> None:
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        fill_disk(client, "x", 1)
        first, last = "x100", "x159"
        keep(client, key(last), seconds=1)
        keep(client, key(first), seconds=1000)
    time.sleep(1)
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        set_large(client, "new1")
        set_large(client, "new2")
        assert [client.exists(key(req)) for req in (first, last)] == [1, 0]
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        assert client.info("kvpage")["kept"] == 1


def test_lifetimes_go_on_after_a_restart_with_lower_limits(tmp_path: Path) -> None:
    large = (*TIERED, "--maxdisk", "64mb", "--maxmemory", "32mb")
    reqs = [f"r{number}" for number in range(100)]
    with start_server(*large, directory=tmp_path) as server, server.client() as client:
        for req in reqs:
            set_large(client, req)
        assert keep(client, *map(key, reqs)) == [100, ""]
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        info = client.info("everything")
        assert info["kept"] == 100
        assert info["kept_bytes"] > info["maxdisk_for_values"] / 2
        set_large(client, "others")
        assert keep(client, key("others"))[0] == 0
        fill_disk(client, "x", 1)
    with start_server(*large, directory=tmp_path) as server, server.client() as client:
        assert client.info("kvpage")["kept"] == client.exists(*map(key, reqs)) == 100


@pytest.mark.parametrize("refusal", [DiskError("Input/output error"), DiskFull("No space left on device")])
def test_a_start_does_not_need_to_write_lifetimes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: Exception
) -> None:
    """It writes earlier ends if the wall clock was set back."""
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        set_large(client, "a")
        assert keep(client, key("a")) == [1, ""]

    def refuse(disk: Disk, changes: object) -> None:
        raise refusal

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvpage_server.store.keyspace.unix_ms", lambda: unix_ms() - 60_000)
    with monkeypatch.context() as refusing:
        refusing.setattr(Disk, "write", refuse)
        keyspace = _open_store(from_arguments(list(SMALL_DISK)))
    assert len(keyspace.contents.leases) == 1
    assert f"the ends of lifetimes cannot be written: {refusal}" in caplog.text
    assert keyspace.tier is not None
    keyspace.tier.disk.close()


def test_a_flush_ends_all_lifetimes(tmp_path: Path) -> None:
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        set_large(client, "a")
        keep(client, key("a"))
        client.flushall()
        set_large(client, "a")
        assert client.info("kvpage")["kept"] == 0
    with start_server(*SMALL_DISK, directory=tmp_path) as server, server.client() as client:
        assert client.info("kvpage")["kept"] == 0


def test_both_clients_keep_values(client: redis.Redis) -> None:
    set_block(client, "r", 0)
    port = client.connection_pool.connection_kwargs["port"]
    with PageClient(f"redis://127.0.0.1:{port}") as pages:
        kept = pages.keep([key("r").encode(), b"nothing"], 60, tenant="me")
        assert (kept.keys, kept.why) == (1, "absent")
        assert abs(kept.until - unix_ms() - 60_000) < 5000
        assert pages.keep([], 60).keys == 0
