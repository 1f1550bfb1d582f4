"""The tier below vLLM's offloading with a stub of vLLM's manager, on a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from kvpage_connectors.vllm_tier import KvpageTier, identity_of
from proxy import start_proxy
from servers import RunningServer, start_server
from stub_manager import SIZE, Manager, chunk, manager_on, spec
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from waiting import until

from kvpage_server.page import VERSION


@pytest.fixture
def manager(server: RunningServer, client: redis.Redis) -> Iterator[Manager]:
    with manager_on(server.url) as manager:
        yield manager


def test_another_engine_restores_stored_chunks(manager: Manager, server: RunningServer) -> None:
    assert manager.store("abc").success
    with manager_on(server.url) as other:
        assert other.lookup("abcd") == "abc"
        good, result = other.load("abc")
        assert (good, result.success, result.transfer_bytes) == ("abc", True, 3 * SIZE)


def test_the_first_lookup_is_answered_later(manager: Manager) -> None:
    manager.store("a")
    assert manager.tier.lookup(chunk("a"), ReqContext("r")) is LookupResult.RETRY
    assert manager.lookup("a") == "a"


def test_chunks_behind_a_missing_one_are_missed(manager: Manager) -> None:
    manager.store("ac")
    assert manager.lookup("abc") == "a"


def test_a_request_is_one_command(server: RunningServer, client: redis.Redis) -> None:
    before = calls(client)
    with manager_on(server.url, threads=2) as manager:
        manager.store("abcdefgh")
        assert manager.lookup("abcdefgh") == "abcdefgh"
    assert calls(client) == before + 3 + 1  # each thread asks once, to connect


def calls(client: redis.Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_kvpageprefix", {"calls": 0})["calls"])


def test_groups_have_chunks_of_their_own(manager: Manager) -> None:
    manager.store("ab", group=0)
    manager.store("a", group=1)
    assert manager.lookup("ab", group=1) == "a"
    assert manager.load("a", group=1)[0] == "a"
    assert manager.load("b", group=0)[0] == "b"


def test_a_lost_chunk_is_a_miss_until_the_end(manager: Manager, client: redis.Redis) -> None:
    """Delete a chunk between lookup and load: the others arrive, and the request asks for it no more."""
    manager.store("abc")
    context = ReqContext("r")
    keys = [chunk(name) for name in "abc"]
    while LookupResult.RETRY in [manager.tier.lookup(key, context) for key in keys]:
        manager.step()
    (key,) = client.scan_iter(f"*{keys[1][:-4].hex()}*")
    client.delete(key)
    good, result = manager.load("abc", "r")
    assert good == "ac"
    assert not result.success
    assert [manager.tier.lookup(key, context) for key in keys] == [
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.HIT,
    ]
    assert manager.tier.reasons.counts["load", "absent"] == 1


def test_a_changed_byte_is_a_miss(manager: Manager, server: RunningServer) -> None:
    manager.store("abc")
    with start_proxy(server.port) as proxy, manager_on(proxy.url, threads=1) as other:
        assert other.load("a")[0] == "a"
        proxy._passed, proxy.flip_at = 0, SIZE + SIZE // 2
        assert len(other.load("abc")[0]) == 2
        assert other.tier.reasons.counts["load", "checksum"] == 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lambda blob: b"short", "size"), (lambda blob: blob[:4] + bytes([VERSION + 1]) + blob[5:], "header")],
    ids=["size", "version"],
)
def test_a_chunk_of_another_size_or_version_is_a_miss(
    manager: Manager, client: redis.Redis, damage: Callable[[bytes], bytes], reason: str
) -> None:
    manager.store("a")
    (key,) = client.scan_iter(f"*{chunk('a')[:-4].hex()}*")
    client.set(key, damage(client.get(key)))
    assert manager.load("a")[0] == ""
    assert {*manager.tier.reasons.counts} == {("load", reason)}


def test_a_server_that_is_away_is_a_miss() -> None:
    with start_server() as server, manager_on(server.url) as manager:
        manager.store("a")
        server.stop()
        assert manager.lookup("a") == ""
        assert manager.load("a")[0] == ""
        assert not manager.store("b").success


def test_a_slow_server_is_a_miss_after_the_deadline(manager: Manager, server: RunningServer) -> None:
    manager.store("a")
    with start_proxy(server.port) as proxy, manager_on(proxy.url, lookup_seconds=1, transfer_seconds=1) as other:
        proxy.hold = 30
        began = time.monotonic()
        assert other.lookup("a") == ""
        assert other.load("a")[0] == ""
        assert time.monotonic() - began < 20
        assert {reason for _, reason in other.tier.reasons.counts} <= {"deadline", "away"}


def test_a_full_store_is_counted() -> None:
    options = "--maxmemory", "1mb", "--maxmemory-policy", "noeviction"
    with start_server(*options) as server, manager_on(server.url) as manager:
        while manager.store("abcdefgh", str(manager.jobs)).success:
            manager.tier.drain_jobs()  # new names
        assert {*manager.tier.reasons.counts} == {("save", "oom")}


def test_a_wrong_password_is_counted() -> None:
    with (
        start_server("--requirepass", "right") as server,
        manager_on(server.url.replace("//", "//:wrong@")) as manager,
    ):
        assert manager.lookup("a") == ""
        assert {reason for _, reason in manager.tier.reasons.counts} == {"wrongpass"}


def test_a_reset_gives_chunks_new_names(manager: Manager) -> None:
    """Look up a chunk after vLLM has reset its cache, because the weights may have changed."""
    manager.store("a")
    manager.tier.drain_jobs()
    assert manager.lookup("a") == ""


def test_chunks_of_a_finished_request_are_linked(manager: Manager, client: redis.Redis) -> None:
    """Finish a request, after which the server knows which chunk extends which."""
    before = calls(client)
    manager.store("abc", "r")
    manager.tier.on_request_finished(ReqContext("r"))
    end = time.monotonic() + 60
    while calls(client) == before:
        assert time.monotonic() < end
    assert manager.tier._requests == {}


def test_a_request_retains_its_chunks(manager: Manager, client: redis.Redis) -> None:
    """Finish requests with a parameter that is valid, and ones with parameters that are not."""
    context = ReqContext("store", {"kvpage_retain_seconds": 600})
    manager.tier.touch([], context)
    manager.store("ab")
    manager.tier.touch([chunk("a"), chunk("b")], context)
    name = b"".join(client.scan_iter(f"*{chunk('b')[:-4].hex()}*")).split(b":")[1].decode()
    until(lambda: any(lease_of(client, name)), "a lease", within=60)
    for wrong in (-1, 1e9, "600", None):
        manager.tier.touch([chunk("a")], ReqContext("r", {"kvpage_retain_seconds": wrong}))
    assert manager.tier.reasons.counts["touch", "ValueError"] == 4


def hint(**payload: Any) -> Any:
    """Return a KvHintsEnvelope with two actions, the first of which is for another tier."""
    kinds = {"another.retain": {"seconds": -1}, "retain": payload}
    actions = [SimpleNamespace(action_type=kind, action_version="1", payload=kinds[kind]) for kind in kinds]
    return SimpleNamespace(actions=actions)


def params(*actions: tuple[str, dict[str, Any]], version: str = "1") -> dict[str, Any]:
    """Return a request's `kv_transfer_params` with actions, each a type and a payload."""
    found = [
        {"action_id": str(i), "action_type": kind, "action_version": version, "payload": payload}
        for i, (kind, payload) in enumerate(actions)
    ]
    return {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": found}}


def test_hints_retain_blocks_and_requests(manager: Manager, client: redis.Redis) -> None:
    manager.store("abc")
    hashes = {name: chunk(name)[:-4].hex() for name in "abc"}
    names = {name: next(client.scan_iter(f"*{hashes[name]}*")).split(b":")[1].decode() for name in "abc"}
    manager.tier.on_new_request(ReqContext("r", None, hint(seconds=600, block_hashes=[hashes["a"], hashes["b"]])))
    until(lambda: lease_of(client, names["a"]) and lease_of(client, names["b"]), "leases of blocks", within=60)
    assert not lease_of(client, names["c"])
    manager.tier.touch([chunk("c")], ReqContext("r", None, hint(seconds=600)))
    until(lambda: bool(lease_of(client, names["c"])), "a lease of a request's chunk", within=60)
    blocks = [hashes["a"]]
    for wrong in (
        {"seconds": 1, "block_hashes": ["xyz"]},
        {"block_hashes": blocks},
        {"seconds": 4000, "block_hashes": blocks},
    ):
        manager.tier.on_new_request(ReqContext("r", None, hint(**wrong)))
    assert manager.tier.reasons.counts == {("on_new_request", "ValueError"): 3}


def test_a_session_is_pinned_until_it_is_unpinned(manager: Manager, client: redis.Redis) -> None:
    """Two requests belong to a session. Later ones pin it, retain it and unpin it."""

    def send(name: str, kind: str, version: str = "1", **payload: Any) -> None:
        manager.tier.on_new_request(ReqContext(name, params((kind, payload), ("another", {}), version=version)))

    for number, names in enumerate(("ab", "c")):
        context = ReqContext(str(number), {"kvpage_session": "s"})
        manager.tier.on_new_request(context)
        manager.tier.touch([], context)
        manager.store(names, str(number))
        manager.tier.on_request_finished(context)
    manager.store("d")
    names = {name: client.keys(f"*{chunk(name)[:-4].hex()}*")[0].split(b":")[1].decode() for name in "abcd"}
    send("old", "pin", "0", session_id="s")
    send("pin", "pin", session_id="s")
    until(lambda: [is_pinned(client, names[name]) for name in "abcd"] == [True, True, True, False], "pins", within=60)
    send("retain", "retain", session_id="s", seconds=600)
    until(lambda: bool(lease_of(client, names["c"])), "a lease of the session", within=60)
    send("unpin", "unpin", session_id="s")
    until(lambda: not any(is_pinned(client, name) for name in names.values()), "no pins", within=60)
    send("unknown", "pin", session_id="another")
    assert manager.tier.reasons.counts == {}


def test_a_request_pins_its_own_chunks(manager: Manager, client: redis.Redis) -> None:
    context = ReqContext("r", params(("pin", {})))
    manager.tier.on_new_request(context)
    manager.store("a")
    manager.tier.touch([chunk("a")], context)
    name = client.keys("*")[0].split(b":")[1].decode()
    assert not is_pinned(client, name)
    manager.tier.on_request_finished(context)
    until(lambda: is_pinned(client, name), "a pin", within=60)


def is_pinned(client: redis.Redis, name: str) -> bool:
    return bool(dict(stat(client, name)).get(b"pinned"))


def lease_of(client: redis.Redis, name: str) -> list[int]:
    return [int(value) for field, value in stat(client, name) if b"lease" in field and int(value) > 0]


def stat(client: redis.Redis, name: str) -> Iterable[tuple[bytes, Any]]:
    found = client.execute_command("KVPAGESTAT", name, 0, 0, 0, 0)
    return found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)


def test_metrics_have_results_and_bytes(manager: Manager) -> None:
    manager.store("a")
    manager.load("ab")
    stats = manager.tier.get_stats()
    assert stats is not None
    assert set(stats.data) == set(KvpageTier.build_metric_definitions({}))
    assert stats.data["vllm:kvpage_blocks"] == {("save", "ok"): 1, ("load", "ok"): 1, ("load", "absent"): 1}
    assert stats.data["vllm:kvpage_bytes"] == {("save",): SIZE, ("load",): SIZE}


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"layout": "LBHNC"}, {"tp": 2}, {"blocks": 2}], ids=lambda changes: str(changes)
)
def test_an_engine_with_another_property_finds_nothing(
    manager: Manager, server: RunningServer, changes: dict[str, Any]
) -> None:
    manager.store("a")
    with manager_on(server.url, changes) as other:
        assert other.lookup("a") == ""
    with manager_on(server.url, weights="4567") as other:
        assert other.lookup("a") == ""
    with manager_on(server.url) as other:
        assert other.lookup("a") == "a"


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    """Copy a model to another folder, then change its weights, then its settings."""
    digests = []
    for name, weights, settings in (("a", "w", "{}"), ("b", "w", "{}"), ("c", "x", "{}"), ("d", "w", "[]")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_text(weights, encoding="utf-8")
        (folder / "config.json").write_text(settings, encoding="utf-8")
        digests.append(identity_of(spec(model=str(folder)), None).digest)
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def test_a_model_without_a_folder_needs_a_name(server: RunningServer, client: redis.Redis) -> None:
    with pytest.raises(ValueError, match='set "weights"'):
        identity_of(spec(), None)
    with manager_on(server.url, weights=None) as manager:
        assert manager.lookup("a") == ""
        assert not manager.store("a").success
        assert client.dbsize() == 0
