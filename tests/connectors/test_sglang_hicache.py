"""The backend of SGLang's HiCache with stubs of its host pools, on a real server."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from documents import ROOT, blocks
from kvpage_connectors import sglang_hicache
from kvpage_connectors.jobs import Jobs
from kvpage_connectors.sglang_hicache import KvpageHiCache
from proxy import start_proxy
from servers import RunningServer, start_server
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from stub_pool import TOKENS, MHATokenToKVPoolHost, Pool, States, Tensor, backend, config, hashes, indices
from waiting import until

from kvpage_server.page import VERSION, DType

MAMBA = "mamba"


@pytest.fixture
def pool() -> Pool:
    found = Pool()
    found.fill(1)
    return found


@pytest.fixture
def writer(server: RunningServer, client: redis.Redis, pool: Pool) -> Iterator[KvpageHiCache]:
    with backend(server.url, pool) as found:
        yield found


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_another_engine_restores_pages(server: RunningServer, client: redis.Redis, layout: str) -> None:
    """Store a batch of 128 pages, and restore it at other places."""
    first, second, keys = Pool(layout), Pool(layout), hashes(128)
    first.fill(2)
    with backend(server.url, first) as one, backend(server.url, second) as other:
        assert other.batch_exists(keys) == 0
        assert one.batch_set_v1(keys, indices(*range(128))) == [True] * 128
        assert other.batch_exists([*keys, "missing"]) == 128
        assert other.exists(keys[5])
        assert other.batch_get_v1([*keys[:6], "missing"], indices(*range(20, 27))) == [True] * 6 + [False]
        assert all(np.array_equal(second.page(20 + i), first.page(i)) for i in range(6))
        assert not other.reasons.counts[("load", "deadline")]


def test_the_configuration_and_rights_of_the_page_suffice(pool: Pool) -> None:
    """Use docs/sglang.md: its JSON names the backend, and its user may do all that the backend does."""
    (example,) = map(json.loads, blocks("docs/sglang.md", "json"))
    assert getattr(importlib.import_module(example["module_path"]), example["class_name"]) is KvpageHiCache
    assert example["interface_v1"] == 1
    text = (ROOT / "docs/sglang.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"redis-cli -p 9221 (ACL SETUSER .*)", text)
    for option, default in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE):
        assert float(default) == inspect.signature(Jobs).parameters[option].default
    asked = [PoolTransfer(PoolName.MAMBA, keys=hashes(1), hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    with start_server() as server, server.client() as client:
        client.execute_command(*shlex.split(line))
        with backend(f"redis://sglang:secret@127.0.0.1:{server.port}", pool, States()) as one:
            assert one.batch_set_v1(hashes(2), indices(0, 1)) == [True, True]
            assert one.batch_get_v1(hashes(2), indices(2, 3)) == [True, True]
            assert one.batch_exists_v2(hashes(2), asked).extra_pool_hit_pages == {"kv": 2}
            assert not one.reasons.counts


def test_a_page_is_pages_of_its_pieces(writer: KvpageHiCache, client: redis.Redis, pool: Pool) -> None:
    writer.batch_set_v1(hashes(1), indices(7))
    (name,) = {key.split(b":")[1] for key in client.scan_iter("kv:*") if not key.endswith(b":index")}
    assert name.startswith(b"sglang.kv-page_first.")
    assert name.endswith(b".0-0-0." + hashes(1)[0].encode())
    for plane in (0, 1):
        assert client.execute_command("KVPAGEGET", name, 0, 0, 0, plane) == pool.page(7)[plane].tobytes()
        found = client.execute_command("KVPAGESTAT", name, 0, 0, 0, plane)
        shape = int(DType.FLOAT16), TOKENS, pool.page(7)[plane].size // TOKENS
        assert (found[b"dtype"], found[b"page_size"], found[b"head_dim"]) == shape


@pytest.mark.parametrize(
    "change",
    [
        {"extra": {"weights": "w2"}},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2, "pp_rank": 1},
        {"attn_cp_size": 2, "attn_cp_rank": 1},
        {"pool": Pool("layer_first")},
        {"pool": Pool(dtype="torch.bfloat16")},
        {"extra": {"interface_v1": 0}},
    ],
    ids=["weights", "tp", "rank", "stage", "context", "layout", "dtype", "flat"],
)
def test_another_engine_finds_nothing(writer: KvpageHiCache, server: RunningServer, change: dict[str, Any]) -> None:
    writer.batch_set_v1(hashes(2), indices(0, 1))
    pool = change.pop("pool", Pool())
    with backend(server.url, pool, **change) as other:
        assert other.batch_exists(hashes(2)) == 0


def test_ranks_share_pages_of_a_replicated_cache(server: RunningServer, client: redis.Redis, pool: Pool) -> None:
    with (
        backend(server.url, pool, is_mla_model=True, tp_size=2) as one,
        backend(server.url, Pool(), is_mla_model=True, tp_size=2, tp_rank=1) as other,
    ):
        one.batch_set_v1(hashes(2), indices(0, 1))
        assert other.batch_exists(hashes(2)) == 2


def test_ranks_have_states_of_their_own_beside_mla(server: RunningServer, client: redis.Redis, pool: Pool) -> None:
    kept = [PoolTransfer(PoolName.MAMBA, indices(4, tokens=1), keys=hashes(1))]
    with (
        backend(server.url, pool, States(), is_mla_model=True, tp_size=2) as one,
        backend(server.url, Pool(), States(), is_mla_model=True, tp_size=2, tp_rank=1) as other,
    ):
        assert one.batch_set_v2(kept) == {MAMBA: [True]}
        assert other.batch_get_v2(kept) == {MAMBA: [False]}


@pytest.mark.parametrize(
    ("name", "side", "found"),
    [("indexer", Pool, True), ("draft", Pool, True), ("draft", MHATokenToKVPoolHost, False)],
    ids=["indexer", "draft", "heads of a draft"],
)
def test_only_one_rank_writes_other_pools_beside_mla(
    server: RunningServer, client: redis.Redis, pool: Pool, name: str, side: type[Pool], found: bool
) -> None:
    """SGLang writes pools that all ranks have from the first rank. A draft model's heads differ."""
    kept = [PoolTransfer(PoolName(name), indices(4), keys=hashes(1))]
    with (
        backend(server.url, pool, is_mla_model=True, tp_size=2) as one,
        backend(server.url, Pool(), is_mla_model=True, tp_size=2, tp_rank=1) as other,
    ):
        for each in (one, other):
            each.register_mem_host_pool_v2(side(), name)
        assert one.batch_set_v2(kept) == {name: [True]}
        assert other.batch_get_v2(kept) == {name: [found]}


def test_pages_of_another_format_are_not_found(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    """SGLang appends the format of a pool to the model's name."""
    (tmp_path / "model.safetensors").write_bytes(b"1")
    for name, tag in ((f"{tmp_path}", None), (f"{tmp_path}-fp4", "fp4")):
        pool = Pool()
        pool.storage_format_tag = tag
        with backend(server.url, pool, model=name, extra={"weights": None}) as one:
            assert one.batch_exists(hashes(1)) == 0
            assert one.batch_set_v1(hashes(1), indices(0)) == [True]


def test_flat_pages_of_another_layout_are_not_found(server: RunningServer, client: redis.Redis) -> None:
    flat = {"interface_v1": 0}
    with (
        backend(server.url, Pool("page_first"), extra=flat) as one,
        backend(server.url, Pool("layer_first"), extra=flat) as other,
    ):
        assert one.set("page", Tensor(np.zeros(100, np.float16)))
        assert (one.exists("page"), other.exists("page")) == (True, False)


def test_nothing_is_moved_at_once(writer: KvpageHiCache) -> None:
    assert writer.batch_get_v1([], indices()) == []
    assert writer.batch_set_v2([PoolTransfer(PoolName.KV, indices(), keys=[])]) == {"kv": []}


def test_a_model_is_known_by_its_weights(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    """Two folders with the same weights share pages, a model without a folder needs a name."""
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    found = []
    for name in "abc":
        with backend(server.url, Pool(), model=str(tmp_path / name), extra={"weights": None}) as one:
            found.append(one.batch_exists(hashes(2)))
            one.batch_set_v1(hashes(2), indices(0, 1))
    assert found == [0, 2, 0]
    with backend(server.url, Pool(), model="meta/llama", extra={"weights": None}) as one:
        assert one.batch_set_v1(hashes(2), indices(0, 1)) == [False, False]
        assert one.batch_exists(hashes(2)) == 0
        assert one.reasons.counts["register_mem_pool_host", "ValueError"] == 1


def test_states_restrict_the_lengths(server: RunningServer, client: redis.Redis, pool: Pool) -> None:
    """Store six pages, and states behind the second and fifth. A model can continue there only."""
    states, keys = States(), hashes(6)
    for buffer in states.buffers:
        buffer[:] = np.random.default_rng(3).random(buffer.shape)
    kept = [PoolTransfer(PoolName.MAMBA, indices(4, 9, tokens=1), keys=[keys[1], keys[4]])]
    asked = [PoolTransfer(PoolName.MAMBA, keys=[keys[-1]], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    new = States()
    with backend(server.url, pool, states) as one, backend(server.url, Pool(), new) as other:
        assert one.batch_set_v2([PoolTransfer(PoolName.KV, indices(*range(6)), keys=keys)]) == {"kv": [True] * 6}
        assert other.batch_exists_v2(keys, asked).kv_hit_pages == 0
        assert one.batch_set_v2(kept) == {MAMBA: [True, True]}
        found = other.batch_exists_v2(keys, asked)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])
        assert found.extra_pool_hit_pages == {"kv": 6, MAMBA: 5}
        assert other.batch_exists_v2(keys[:4], asked).restorable_prefix_pages == [2]
        loads = [PoolTransfer(PoolName.MAMBA, indices(0, 1, tokens=1), keys=[keys[4], keys[3]])]
        assert other.batch_get_v2(loads) == {MAMBA: [True, False]}
        assert all(np.array_equal(a[0], b[9]) for a, b in zip(new.buffers, states.buffers, strict=True))


def test_a_pool_for_all_pages_shortens_the_prefix(server: RunningServer, client: redis.Redis, pool: Pool) -> None:
    keys = hashes(4)
    with backend(server.url, pool, States()) as one:
        one.batch_set_v1(keys, indices(*range(4)))
        one.batch_set_v2([PoolTransfer(PoolName.MAMBA, indices(0, 1, 2, tokens=1), keys=keys[:3])])
        found = one.batch_exists_v2(keys, [PoolTransfer(PoolName.MAMBA)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
        assert one.batch_exists_v2(keys).restorable_prefix_pages == [1, 2, 3, 4]


def leased(client: redis.Redis) -> int:
    return int(client.info("kvpage")["leased_or_pinned"])


def test_only_usable_pages_are_leased(server: RunningServer, client: redis.Redis, pool: Pool) -> None:
    """Store six pages, of which one side pool has four. States are behind the second and the fifth."""
    keys, before = hashes(6), leased(client)
    states = [PoolTransfer(PoolName.MAMBA, keys=[keys[-1]], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    side = [PoolTransfer(PoolName.INDEXER)]
    with backend(server.url, pool, States()) as one:
        one.register_mem_host_pool_v2(pool, PoolName.INDEXER)
        one.batch_set_v1(keys, indices(*range(6)))
        one.batch_set_v2([PoolTransfer(PoolName.INDEXER, indices(*range(4)), keys=keys[:4])])
        assert one.batch_exists_v2(keys, states).kv_hit_pages == 0
        assert leased(client) == before
        one.batch_set_v2([PoolTransfer(PoolName.MAMBA, indices(0, 1, tokens=1), keys=[keys[1], keys[4]])])
        assert one.batch_exists_v2(keys, [*side, *states]).kv_hit_pages == 2
        assert leased(client) == before + 5, "two pages of two pools, and a state"
        assert one.batch_exists_v2(keys, side).kv_hit_pages == 4
        assert leased(client) == before + 9, "four pages of two pools, and the state"
        assert one.batch_exists_v2(keys, states).kv_hit_pages == 5
        assert leased(client) == before + 11


def test_flat_pages_are_moved_too(server: RunningServer, client: redis.Redis) -> None:
    """Without "interface_v1", SGLang copies pages to flat tensors."""
    value, target = np.arange(100, dtype=np.float16), np.zeros(100, np.float16)
    with backend(server.url, Pool(), extra={"interface_v1": 0}) as one:
        assert one.batch_set(hashes(2), [Tensor(value), Tensor(value + 1)])
        assert one.set("other", Tensor(value))
        assert one.batch_exists(hashes(3)) == 2
        targets = [Tensor(target), Tensor(np.zeros(100, np.float16)), Tensor(np.zeros(100, np.float16))]
        assert one.batch_get(hashes(3), targets) == [targets[0], targets[1], None]
        assert np.array_equal(target, value)
        assert one.get("missing", targets[0]) is None
        assert one.batch_set_v1(hashes(1), indices(0)) == [False]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lambda blob: b"no page", "size"), (lambda blob: blob[:4] + bytes([VERSION + 1]) + blob[5:], "header")],
    ids=["text", "version"],
)
def test_a_damaged_page_is_a_miss(writer: KvpageHiCache, client: redis.Redis, damage: Any, reason: str) -> None:
    writer.batch_set_v1(hashes(3), indices(0, 1, 2))
    (key,) = client.scan_iter(f"kv:*{hashes(3)[1]}:0:0:0:1")
    client.set(key, damage(client.get(key)))
    assert writer.batch_exists(hashes(3)) == 1
    assert writer.batch_get_v1(hashes(3), indices(3, 4, 5)) == [True, False, True]
    assert {*writer.reasons.counts} == {("load", reason)}


def test_wrong_arguments_are_misses(writer: KvpageHiCache) -> None:
    assert writer.batch_set_v1(hashes(2), indices(0)) == [False, False]
    assert writer.batch_set_v1(["a:b"], indices(0)) == [False]
    assert writer.batch_get_v2([PoolTransfer(PoolName.INDEXER, indices(0), keys=hashes(1))]) == {"indexer": [False]}
    groups = [PoolTransfer(PoolName.KV, hit_policy=PoolHitPolicy.BLOCK_GROUPS)]
    assert writer.batch_exists_v2(hashes(1), groups).kv_hit_pages == 0
    assert writer.batch_exists([]) == 0
    assert writer.get_stats() is None


def test_a_server_that_is_away_is_a_miss(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"redis://127.0.0.1:{bound.getsockname()[1]}"
    with backend(url, pool) as one:
        assert one.batch_exists(hashes(2)) == 0
        assert one.batch_get_v1(hashes(2), indices(0, 1)) == [False, False]
        assert one.batch_set_v1(hashes(2), indices(0, 1)) == [False, False]
        assert {reason for _, reason in one.reasons.counts} == {"away"}


def test_a_slow_server_is_a_miss_after_the_deadline(writer: KvpageHiCache, server: RunningServer, pool: Pool) -> None:
    writer.batch_set_v1(hashes(2), indices(0, 1))
    slow = {"lookup_seconds": 0.3, "transfer_seconds": 0.3}
    with start_proxy(server.port) as proxy, backend(proxy.url, Pool(), States(), extra=slow) as one:
        proxy.hold = 30
        began = time.monotonic()
        asked = [PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
        assert one.batch_exists_v2(hashes(2), asked).kv_hit_pages == 0
        assert one.batch_get_v1(hashes(2), indices(0, 1)) == [False, False]
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("call", ["exists", "get", "set"])
def test_all_pools_of_a_call_have_one_deadline(server: RunningServer, pool: Pool, call: str) -> None:
    slow = {"lookup_seconds": 2, "transfer_seconds": 2}
    with start_proxy(server.port) as proxy, backend(proxy.url, pool, extra=slow) as one:
        names = [PoolName.KV, PoolName.INDEXER, PoolName.DRAFT, PoolName.SWA]
        for name in names:
            one.register_mem_host_pool_v2(pool, name)
        proxy.hold = 30
        transfers = [PoolTransfer(name, indices(0), keys=hashes(1)) for name in names]
        began = time.monotonic()
        if call == "exists":
            assert one.batch_exists_v2(hashes(1), transfers).kv_hit_pages == 0
        else:
            move = one.batch_get_v2 if call == "get" else one.batch_set_v2
            assert move(transfers) == {str(name): [False] for name in names}
        assert time.monotonic() - began < 6  # with a deadline for each pool, it would be 8


def test_a_full_server_is_a_miss(pool: Pool) -> None:
    options = "--maxmemory", "1mb", "--maxmemory-policy", "noeviction"
    with start_server(*options) as server, backend(server.url, pool) as one:
        for chain in range(60):
            one.batch_set_v1(hashes(128, str(chain)), indices(*range(128)))
        assert one.reasons.counts["save", "oom"] >= 1


def test_clearing_gives_all_ranks_and_engines_new_names(server: RunningServer, client: redis.Redis) -> None:
    """Each rank clears. A page that one writes afterwards is found by all, also by an engine that starts later."""
    keys = hashes(2)
    with (
        backend(server.url, Pool(), is_mla_model=True, tp_size=2) as one,
        backend(server.url, Pool(), is_mla_model=True, tp_size=2, tp_rank=1) as other,
        backend(server.url, Pool(), extra={"weights": "w2"}) as another_model,
    ):
        for each in (one, another_model):
            each.batch_set_v1(keys, indices(0, 1))
        assert other.batch_exists(keys) == 2
        one.clear()
        other.clear()
        until(lambda: one.batch_exists(keys) == other.batch_exists(keys) == 0)
        assert another_model.batch_exists(keys) == 2
        until(lambda: one.batch_set_v1(keys, indices(0, 1)) == [True, True] and other.batch_exists(keys) == 2)
        with backend(server.url, Pool(), is_mla_model=True, tp_size=2) as later:
            assert later.batch_exists(keys) == 2


def test_clearing_on_one_rank_reaches_the_others(writer: KvpageHiCache, server: RunningServer) -> None:
    writer.batch_set_v1(hashes(2), indices(0, 1))
    with backend(server.url, Pool()) as other:
        assert other.batch_exists(hashes(2)) == 2
        writer.clear()
        assert writer.batch_exists(hashes(2)) == 0
        until(lambda: other.batch_exists(hashes(2)) == 0)


def test_names_stay_while_the_store_is_away(server: RunningServer, client: redis.Redis, pool: Pool) -> None:
    """A store that does not say when pages were cleared, is one whose pages were cleared when it last said so."""
    with start_proxy(server.port) as proxy, backend(proxy.url, pool, extra={"lookup_seconds": 0.5}) as one:

        def missed() -> int:
            return sum(count for (job, _), count in one.reasons.counts.items() if job == "clear")

        def is_cleared() -> bool:
            one.clear()
            assert one._cleared
            return one._cleared.mark(time.monotonic() + 30) != b""

        until(lambda: one.batch_set_v1(hashes(1), indices(0)) == [True])
        until(is_cleared)
        assert one._cleared
        before, missed_before = one._cleared.mark(time.monotonic() + 30), missed()
        proxy.hold = 1
        one._cleared._fresh_until = 0
        assert one._cleared.mark(time.monotonic() + 0.1) == before
        assert missed() == missed_before
        one.clear()
        assert missed() == missed_before + 1


def keys_of(server: RunningServer, pattern: str) -> list[bytes]:
    with server.client() as client:
        found: list[bytes] = [*client.scan_iter(pattern)]
        return found


def test_old_pages_stay_cleared_without_the_server_of_the_time() -> None:
    """Two servers share the pages, and one of them has the time of `clear`. Without it, a new engine finds nothing."""
    keys, places = hashes(16), indices(*range(16))
    with start_server() as first, start_server() as second:
        urls = f"{first.url},{second.url}"
        with backend(urls, Pool()) as one:
            assert one.batch_set_v1(keys, places) == [True] * 16
            one.clear()
        assert all(keys_of(server, "kv:sglang.kv*") for server in (first, second))
        (marked,) = (server for server in (first, second) if keys_of(server, "kv:sglang.cleared*"))
        marked.stop()
        with backend(urls, Pool()) as later:
            assert [later.batch_exists([key]) for key in keys] == [0] * 16
            assert later.batch_get_v1(keys, places) == [False] * 16


def test_another_version_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_hicache, "__version__", "0.6.0")
    with pytest.raises(RuntimeError, match=r"tried with SGLang 0\.5\.x, not with 0\.6\.0"):
        KvpageHiCache(config(""), {})


def test_an_invalid_option_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match="URL"):
        KvpageHiCache(config("http://x"), {})
