"""Instances on the page server: a resume returns the saved state, only changes are written, and no intermediate state
is visible.
"""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

from proxy import start_proxy
from servers import RunningServer
from waiting import until

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import redis
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from engine.persistent import Executor, Model, PersistentStore, Simulator, parse
from engine.persistent.errors import ConflictError, DamagedError, NoInstanceError, StoreError, WrongProgramError
from engine.persistent.graph import DTYPES
from kvpage_server.client import Page, PageClient
from kvpage_server.page import DType as PageDType
from kvpage_server.page import PageKey

RING = """
dynamic { x: f32[D]; }
persistent {
    n: i64 @init(0);
    mass: f32 @init(0.5);
    last(i): f32[D] @table @fixed(i=4);
    all(i): bf16[2, D] @table @init(1.0);
    sum: f32[D];
    M(r): f32[D, 2] @auto_dim(r);
    C(l, r): u16[1] @table @auto_dim(r);
}
volatile { old: f32[D]; m: f32[D, 2]; c: u16[1]; b: bf16[D]; row: bf16[1, D]; two: bf16[2, D]; one: u16 @init(7); }
block entry {
    cache.read sum >> old;
    op add(old, x) >> old;
    cache.write old >> sum;
    cache.write x >> last[n % 4];
    op cast(x) >> b;
    op reshape(b, shape=[1, D]) >> row;
    op concat(row, row) >> two;
    cache.write two >> all[2 * n];
    cache.read M[n] >> m;
    op fill(m, value=3.0) >> m;
    cache.write m >> M[n];
    cache.read C[n % 2, n] >> c;
    op add(c, one) >> c;
    cache.write c >> C[n % 2, n];
    cache.increment n;
    cache.increment 2 mass;
    return;
}
"""
D = 5


@pytest.fixture
def store(server: RunningServer, client: redis.Redis) -> Iterator[PersistentStore]:
    store = PersistentStore(server.url)
    yield store
    store.close()


def simulator(store: PersistentStore | None, text: str = RING, **sizes: int) -> Simulator:
    return Simulator(Model({"D": D} | sizes), parse(text), store=store)


def x(step: int) -> mx.array:
    return mx.array(np.random.default_rng(step).random(D, np.float32))


def advance(run: Executor, steps: int) -> Executor:
    for _ in range(steps):
        run.insert(x=x(run.steps))
        run.step()
    return run


def state(run: Executor) -> dict[str, tuple[Any, bytes]]:
    """All of persistent memory, with which entries were written and how long everything is."""
    found: dict[str, Any] = {}
    for name in [*run.memory.scalars, *run.memory.tables]:
        array = run.fetch(name)
        found[name] = array.shape, bytes(memoryview(np.asarray(array.reshape(-1).view(mx.uint8))))
    for name, table in run.memory.tables.items():
        found[f"{name}'s"] = sorted(table.entries()), table.sizes, table.counts
    return found


def reference(steps: int) -> dict[str, Any]:
    """The state of an instance that nobody ever stopped."""
    return state(advance(simulator(None).make_executor(), steps))


def goes_on_after_a_save(store: PersistentStore, run: Executor, before: int, saved: bool) -> None:
    """Check an instance "cut" that had `before` steps: it has one more, or none if the save was interrupted."""
    there = simulator(store).resume("cut")
    assert there.steps in ((before + 1,) if saved else (before, before + 1))
    assert state(there) == reference(there.steps)
    advance(run, 1).save()  # the same executor goes on, whatever became of the last save
    assert state(simulator(store).resume("cut")) == reference(before + 2)


def pages(client: redis.Redis) -> set[bytes]:
    return set(client.scan_iter(match="kv:*", count=1000))


def test_a_resume_finds_saved_state_of_every_kind(store: PersistentStore, client: redis.Redis) -> None:
    run = simulator(store).make_executor("ring")
    for steps in (0, 1, 2, 6, 7):
        advance(run, steps - run.steps)
        run.save()
        run = simulator(store).resume("ring")
        assert run.steps == steps
        assert state(run) == reference(steps)
    assert state(advance(run, 3)) == reference(10)


def test_only_changes_are_written_and_replaced_pages_deleted(store: PersistentStore, client: redis.Redis) -> None:
    run = advance(simulator(store).make_executor("ring"), 6)
    first = run.save()
    assert first.pages == len(pages(client)) == 4 + 6 + 1 + 1 + 2
    assert run.save().pages == 0
    assert advance(run, 1).save().pages == 5  # an entry each of last, all and C, and sum and M
    assert len(pages(client)) == 15
    run = simulator(store).resume("ring")
    assert run.save().pages == 0
    assert advance(run, 1).save().pages == 5
    assert state(simulator(store).resume("ring")) == reference(8)


ACTIONS = {
    "write": "cache.write x >> K[l, t];",
    "look": "cache.read K[l, t] >> k;",
    "forget": "cache.reset K[l, t];",
    "forget_lane": "cache.reset K[l];",
    "forget_all": "cache.reset K; cache.reset C;",
    "grow": "cache.read M[t] >> m; op fill(m, value=2.0) >> m; cache.write m >> M;",
    "shrink": "cache.reset M;",
    "cell": "cache.read C[l, t] >> c; op add(c, one) >> c; cache.write c >> C[l];",
    "count": "cache.increment 100 n; cache.decrement 3 f;",
}
ANYTHING = f"""
dynamic {{ l: i32; t: i32; x: f32[D]; {"".join(f"is_{name}: bool; " for name in ACTIONS)} }}
volatile {{ k: f32[D]; m: f32[D, 2]; c: u16[1]; one: u16 @init(1); }}
persistent {{
    K(l, t): f32[D] @table;
    M(r): f32[D, 2] @auto_dim(r);
    C(l, r): u16[1] @table @auto_dim(r) @init(3);
    n: u8;
    f: f16;
}}
block nothing {{ return; }}
block entry {{ {"".join(f"branch is_{name} {name} nothing; " for name in ACTIONS)} }}
{"".join(f"block {name} {{ {statements} }} " for name, statements in ACTIONS.items())}
"""
histories = st.lists(
    st.tuples(st.sampled_from([*ACTIONS, "save", "resume"]), st.integers(0, 2), st.integers(0, 5), st.integers(0, 9)),
    max_size=20,
)


@settings(max_examples=20)
@given(histories)
def test_any_changes_between_saves_are_resumed(server: RunningServer, history: list[tuple[str, int, int, int]]) -> None:
    with server.client() as direct:
        direct.flushall()
        store = PersistentStore(server.url)
        stopped = simulator(store, ANYTHING)
        run, never_stopped = stopped.make_executor("any"), simulator(None, ANYTHING).make_executor()
        run.save()
        for action, lane, index, value in history:
            if action in ("save", "resume"):
                run.save()
                run = stopped.resume("any") if action == "resume" else run
                written = sum(1 for table in run.memory.tables.values() for _ in table.entries())
                assert len(pages(direct)) == written
            else:
                for executor in (run, never_stopped):
                    executor.insert({f"is_{name}": name == action for name in ACTIONS})
                    executor.insert(l=lane, t=index, x=mx.full(D, float(value)))
                    executor.step()
            assert state(run) == state(never_stopped)
        store.close()


def test_rewriting_the_same_bytes_is_no_change(store: PersistentStore, client: redis.Redis) -> None:
    text = """
    persistent { W: f32[D] @init(1.0); }
    volatile { w: f32[D]; }
    block entry { cache.read W >> w; cache.write w >> W; }
    """
    run = simulator(store, text).make_executor("same")
    run.step()
    assert run.save().pages == 1
    run.step()
    assert run.save().pages == 0


def test_reset_entries_are_deleted_on_the_server(store: PersistentStore, client: redis.Redis) -> None:
    text = """
    dynamic { forget: bool; } volatile { x: f32[D]; }
    persistent { K(l, t): f32[D] @table; t: i32; }
    block entry {
        branch forget reset write;
        return;
    }
    block write { loop lanes (l in 0..2) { cache.write x >> K[l, t]; } cache.increment t; return; }
    block reset { cache.reset K[0, 1]; cache.reset K[1]; return; }
    """
    run = simulator(store, text).make_executor("k")
    for forget, left in ((False, 2), (False, 4), (True, 1), (False, 3)):
        run.insert(forget=forget)
        run.step()
        run.save()
        assert len(pages(client)) == left
        assert state(simulator(store, text).resume("k")) == state(run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_restored_bit_by_bit(store: PersistentStore, client: redis.Redis, dtype: str) -> None:
    text = f"""
    dynamic {{ x: {dtype}[2, D]; s: {dtype}; }}
    persistent {{ A(i): {dtype}[2, D] @table; W: {dtype}[2, D]; n: {dtype}; E(i): {dtype} @table; }}
    block entry {{ cache.write x >> A[1]; cache.write x >> W; cache.write s >> n; cache.write s >> E[0]; }}
    """
    with mx.stream(mx.cpu):
        bits = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, 2 * D * 8, np.uint8)
        wanted = mx.array(bits[: 2 * D * DTYPES[dtype].itemsize]).view(DTYPES[dtype].mlx).reshape(2, D)
        run = simulator(store, text).make_executor("typed")
        run.insert(x=wanted, s=wanted[0, 0])
        run.step()
        run.save()
        again = simulator(store, text).resume("typed")
        assert state(again) == state(run)
        for name, found in (("A", again.fetch("A")[1]), ("W", again.fetch("W"))):
            assert mx.array_equal(found.view(mx.uint8), wanted.view(mx.uint8)), name


def test_tensors_without_elements_need_no_page(store: PersistentStore, client: redis.Redis) -> None:
    text = """
    dynamic { x: f32[0, D]; }
    persistent { A(i): f32[0, D] @table; W: f32[0, D]; }
    block entry { cache.write x >> A[2]; cache.write x >> W; }
    """
    run = simulator(store, text).make_executor("empty")
    run.insert(x=mx.zeros((0, D)))
    run.step()
    assert run.save().pages == 0
    assert state(simulator(store, text).resume("empty")) == state(run)


def test_nothing_is_stored_of_an_unknown_instance(store: PersistentStore, client: redis.Redis) -> None:
    with pytest.raises(NoInstanceError, match="nothing is stored of instance nobody"):
        simulator(store).resume("nobody")
    with pytest.raises(StoreError, match="an instance's name is"):
        simulator(store).make_executor("no:body")
    with pytest.raises(StoreError, match="this simulator has no store"):
        simulator(None).make_executor("a")
    with pytest.raises(StoreError, match="has no instance to save"):
        simulator(store).make_executor().save()


@pytest.mark.parametrize("change", ["graph", "size", "model"])
def test_another_programs_instance_is_refused(store: PersistentStore, client: redis.Redis, change: str) -> None:
    advance(simulator(store).make_executor("mine"), 1).save()
    tensors = {"unused": mx.zeros(1)} if change == "model" else {}
    sizes = {"D": 6 if change == "size" else D}
    text = RING.replace("@init(0.5)", "@init(0.25)") if change == "graph" else RING
    other = Simulator(Model(sizes, tensors), parse(text), store=store)
    with pytest.raises(WrongProgramError, match="another graph, other sizes or another model"):
        other.resume("mine")
    with pytest.raises(WrongProgramError):
        other.make_executor("mine").save()
    assert state(simulator(store).resume("mine")) == reference(1)


def test_layout_and_comments_are_no_part_of_a_program(store: PersistentStore, client: redis.Redis) -> None:
    advance(simulator(store).make_executor("mine"), 2).save()
    assert simulator(store, "// the same\n" + RING.replace("\n", "\n  ")).resume("mine").steps == 2


def test_two_continuations_of_one_state_cannot_both_be_saved(store: PersistentStore, client: redis.Redis) -> None:
    advance(simulator(store).make_executor("one"), 2).save()
    first, second = (simulator(store).resume("one") for _ in range(2))
    advance(first, 1).save()
    with pytest.raises(ConflictError, match="was saved by somebody else"):
        advance(second, 1).save()
    with pytest.raises(ConflictError, match="is stored already: resume it"):
        advance(simulator(store).make_executor("one"), 1).save()
    assert state(simulator(store).resume("one")) == reference(3)


def test_missing_and_changed_pages_are_errors(store: PersistentStore, client: redis.Redis) -> None:
    advance(simulator(store).make_executor("hurt"), 3).save()
    (page,) = [page for page in pages(client) if page.endswith(b":2:0")][:1]
    blob = client.get(page)
    assert isinstance(blob, bytes)
    with pytest.raises(redis.ResponseError, match="does not match the checksum"):
        client.set(page, blob[:-1] + bytes([blob[-1] ^ 1]))
    client.delete(page)
    with pytest.raises(DamagedError, match="is gone, or not what was written"):
        simulator(store).resume("hurt")


def test_a_sound_page_of_another_time_is_an_error_too(
    server: RunningServer, store: PersistentStore, client: redis.Redis
) -> None:
    run = advance(simulator(store).make_executor("old"), 4)
    run.save()
    (page,) = [page for page in pages(client) if page.endswith(b":3:0") and len(client.get(page) or b"") == 64 + 4 * D]
    older = PageKey.parse(page)
    with PageClient(server.url) as direct:
        direct.set_page(Page(older, memoryview(np.zeros(D, np.float32)), PageDType.FLOAT32, 1, D))
    with pytest.raises(DamagedError, match="not those that its manifest was written for"):
        simulator(store).resume("old")


def test_a_manifest_that_was_changed_is_an_error(store: PersistentStore, client: redis.Redis) -> None:
    advance(simulator(store).make_executor("old"), 1).save()
    manifest = client.get("persistent:old")
    assert isinstance(manifest, bytes)
    client.set("persistent:old", manifest.replace(b'"steps":1', b'"steps":2'))
    with pytest.raises(DamagedError, match="its manifest is not what was written"):
        simulator(store).resume("old")


def test_deleting_an_instance_leaves_nothing(store: PersistentStore, client: redis.Redis) -> None:
    advance(simulator(store).make_executor("gone"), 2).save()
    assert store.delete("gone")
    assert client.dbsize() == 0
    assert not store.delete("gone")
    assert not store.delete("no instance's name")


def test_an_instance_with_a_damaged_manifest_can_be_deleted(store: PersistentStore, client: redis.Redis) -> None:
    advance(simulator(store).make_executor("torn"), 1).save()
    for manifest in (b"", b"torn", client.get("persistent:torn")[:-1], _digested(b"[]"), _digested(b"[" * 100_000)):
        client.set("persistent:torn", manifest)
        with pytest.raises(DamagedError):
            simulator(store).resume("torn")
        assert store.delete("torn")
        assert not client.exists("persistent:torn")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("steps",), "x"),
        (("steps",), -1),
        (("next_lane",), 2**63),
        (("pair",), 3),
        (("birth",), "x"),
        (("scalars",), []),
        (("scalars", "n"), 2**63),
        (("scalars", "n"), True),
        (("scalars", "mass"), "00"),
        (("scalars", "mass"), None),
        (("tables",), {}),
        (("tables", "all", "sizes"), [2]),
        (("tables", "all", "sizes"), [5, 5]),
        (("tables", "all", "sizes"), None),
        (("tables", "all", "lanes", 0, "number"), 2**32),
        (("tables", "all", "lanes", 0, "prefix"), [0]),
        (("tables", "all", "lanes", 0, "runs"), [[0, 1, 6]]),
        (("tables", "all", "lanes", 0, "runs"), [[3, 0, 0]]),
        (("tables", "all", "lanes", 0, "runs"), [[2, 3, 0], [0, 1, 0]]),
        (("tables", "all", "lanes", 0, "runs"), [[0, 2**31, 0]]),
        (("tables", "all", "lanes", 0, "shapes"), [[0, [7]]]),
        (("tables", "M", "counts"), [2**31 - 1]),
        (("tables", "M", "lanes", 0, "shapes"), [[0, [1, 2, 3]]]),
        (("tables", "C", "lanes", 0, "prefix"), [9]),
    ],
)
def test_a_manifest_with_a_wrong_field_is_damaged(
    store: PersistentStore, client: redis.Redis, path: tuple[str | int, ...], value: Any
) -> None:
    advance(simulator(store).make_executor("odd"), 3).save()
    manifest = json.loads(client.get("persistent:odd")[17:])
    *to, last = path
    reduce(operator.getitem, to, manifest)[last] = value
    client.set("persistent:odd", _digested(json.dumps(manifest).encode()))
    with pytest.raises(DamagedError, match="instance odd: its manifest makes no sense"):
        simulator(store).resume("odd")


def test_a_short_manifest_cannot_name_a_billion_entries(store: PersistentStore, client: redis.Redis) -> None:
    """The first page that is missing ends the read, before there is an object for each entry."""
    advance(simulator(store).make_executor("long"), 3).save()
    manifest = json.loads(client.get("persistent:long")[17:])
    manifest["tables"]["all"] |= {"sizes": [2**31 - 1]}
    manifest["tables"]["all"]["lanes"][0]["runs"] = [[0, 2**31 - 1, 0]]
    client.set("persistent:long", _digested(json.dumps(manifest).encode()))
    begun = time.monotonic()
    with pytest.raises(DamagedError, match=r"the page of all\[1\] is gone"):
        simulator(store).resume("long")
    assert time.monotonic() - begun < 5


def _digested(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text


def test_an_interrupted_save_leaves_the_state_before(
    server: RunningServer, client: redis.Redis, store: PersistentStore
) -> None:
    """The connection is cut after every possible number of bytes of a save, in steps; the next save makes up for it."""
    advance(simulator(store).make_executor("cut"), 5).save()
    cut = 0
    with start_proxy(server.port) as proxy:
        while True:
            run = simulator(store).resume("cut")
            before = run.steps
            run._stored._store = broken = PersistentStore(proxy.url, deadline=5)  # type: ignore[union-attr]
            advance(run, 1)
            proxy.cut_after = cut
            try:
                run.save()
                saved = True
            except redis.RedisError:
                saved = False
            proxy.cut_after = None
            goes_on_after_a_save(store, run, before, saved)
            broken.close()
            if saved:
                break
            cut += 250


@pytest.mark.parametrize("published", [True, False])
def test_a_late_deletion_spares_pages_in_use_again(
    store: PersistentStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """The pages that a save replaces are deleted by the next one if the connection breaks, even if its own manifest
    seems to be lost.
    """
    run = advance(simulator(store).make_executor("late"), 1)
    run.save()
    with monkeypatch.context() as broken:
        broken.setattr(store.server, "delete", _disconnected)
        advance(run, 1).save()
    transaction = store.server.transaction
    with monkeypatch.context() as broken:
        if not published:
            broken.setattr(store.server, "transaction", lambda *given: _disconnected(transaction(*given)))
            with pytest.raises(redis.ConnectionError):
                advance(run, 1).save()
        else:
            advance(run, 1).save()
    assert state(simulator(store).resume("late")) == reference(3)
    run.save()
    assert state(simulator(store).resume("late")) == reference(3)


def _disconnected(_: object) -> None:
    raise redis.ConnectionError("broken")


@pytest.mark.parametrize("late", ["mset", "delete"])
def test_requests_without_an_answer_may_be_executed_late(
    store: PersistentStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The server hangs, for example, and goes on when the next save has ended."""
    run = advance(simulator(store).make_executor("late"), 6)
    run.save()
    delayed: list[Any] = []
    for saves in range(1, 5):
        advance(run, 1)
        with monkeypatch.context() as hanging:
            hanging.setattr(store.server, late, lambda given: _disconnected(delayed.append(given)))
            with pytest.raises(redis.ConnectionError) if late == "mset" else nullcontext():
                run.save()
        advance(run, 1).save()
        getattr(store.server, late)(delayed.pop())
        assert state(simulator(store).resume("late")) == reference(6 + 2 * saves)
    run.save()
    assert store.delete("late")
    assert not pages(client)


def test_a_process_that_was_stopped_does_not_damage_later_saves(
    server: RunningServer, store: PersistentStore, client: redis.Redis
) -> None:
    """It hangs at the beginning of a save. Another one resumes the instance meanwhile, and saves it many times."""
    run = advance(simulator(store).make_executor("moved"), 6)
    run.save()
    advance(run, 1)
    mset = store.server.mset

    def resumed(written: Any) -> None:
        store.server.mset = mset  # type: ignore[method-assign]
        other = simulator(store).resume("moved")
        for _ in range(3):
            advance(other, 1).save()
        mset(written)

    store.server.mset = resumed  # type: ignore[method-assign, assignment]
    with pytest.raises(ConflictError, match="was saved by somebody else"):
        run.save()
    assert state(simulator(store).resume("moved")) == reference(9)


def test_a_late_deletion_spares_a_new_instance_of_the_name(
    store: PersistentStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = advance(simulator(store).make_executor("again"), 2)
    old.save()
    delayed: list[bytes] = []
    with monkeypatch.context() as hanging:
        hanging.setattr(store.server, "delete_request", delayed.append)
        assert store.delete("again")
    with pytest.raises(ConflictError, match="instance again was deleted"):
        advance(old, 1).save()
    run = advance(simulator(store).make_executor("again"), 3)
    run.save()
    advance(run, 1).save()
    store.server.delete_request(*delayed)
    assert state(simulator(store).resume("again")) == reference(4)
    assert store.delete("again")
    assert not pages(client)


def test_an_instance_of_an_earlier_version_is_resumed(store: PersistentStore, client: redis.Redis) -> None:
    """It has no birth in its manifest and in the names of its pages."""
    run = advance(simulator(store).make_executor("before"), 2)
    run.save()
    manifest = json.loads(client.get("persistent:before")[17:])
    birth = manifest.pop("birth")
    manifest.pop("pair")
    client.set("persistent:before", _digested(json.dumps(manifest).encode()))
    for name in pages(client):
        client.set(name.replace(f".{birth}:".encode(), b":"), client.get(name))
        client.delete(name)
    assert len(pages(client)) > 2
    again = advance(simulator(store).resume("before"), 1)
    again.save()
    assert state(simulator(store).resume("before")) == reference(3)
    assert store.delete("before")
    assert not pages(client)


def test_pages_of_lost_saves_are_deleted(
    store: PersistentStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = advance(simulator(store).make_executor("kept"), 6)
    run.save()
    transaction = store.server.transaction
    for _ in range(7):
        advance(run, 1)
        for written in (False, True):  # the manifest
            with monkeypatch.context() as broken:
                lost = transaction if written else lambda *_: None
                broken.setattr(store.server, "transaction", lambda *given, lost=lost: _disconnected(lost(*given)))
                with pytest.raises(redis.ConnectionError):
                    run.save()
    run.save()
    kept = pages(client)
    advance(simulator(store).make_executor("straight"), 13).save()
    assert len(pages(client)) == 2 * len(kept)
    assert state(simulator(store).resume("kept")) == reference(13)


def test_a_reader_during_a_save_gets_one_whole_step(
    server: RunningServer, client: redis.Redis, store: PersistentStore
) -> None:
    steps, seen = 40, set()
    advance(simulator(store).make_executor("busy"), 1).save()

    def keep_saving() -> None:
        mine = PersistentStore(server.url)
        run = simulator(mine).resume("busy", autosave=1)
        for step in range(1, steps):
            advance(run, 1)
            time.sleep(step % 4 / 50)  # a reader may finish, or be overtaken
            until(lambda seen_by_now=step // 10: len(seen) >= seen_by_now, "a reader")
        mine.close()

    wanted = {}
    undisturbed = simulator(None).make_executor()
    for step in range(1, steps + 1):
        wanted[step] = state(advance(undisturbed, 1))
    writer = threading.Thread(target=keep_saving)
    writer.start()
    while steps not in seen:
        try:
            run = simulator(store).resume("busy")
        except ConflictError:
            continue
        assert state(run) == wanted[run.steps]
        seen.add(run.steps)
    writer.join()
    assert len(seen) > 2


def test_autosave_continues_without_a_server_and_catches_up(
    server: RunningServer, client: redis.Redis, store: PersistentStore, caplog: pytest.LogCaptureFixture
) -> None:
    with start_proxy(server.port) as proxy:
        remote = PersistentStore(proxy.url, deadline=5)
        run = simulator(remote).make_executor("auto", autosave=2)
        advance(run, 2)
        assert (run.unsaved, simulator(store).resume("auto").steps) == (0, 2)
        proxy.cut_after = 0
        advance(run, 4)
        assert (run.unsaved, simulator(store).resume("auto").steps) == (2, 2)
        proxy.cut_after = None
        advance(run, 2)
        assert run.unsaved == 0
        assert state(simulator(store).resume("auto")) == reference(8)
        remote.close()
    failed, again = (record.getMessage() for record in caplog.records)
    assert failed.startswith("step 4 cannot be saved; the next steps try again: ")
    assert again == "step 8 is saved again, after 2 failures"


def test_export_is_a_file_that_any_tool_reads(store: PersistentStore, tmp_path: Path) -> None:
    run = advance(simulator(store).make_executor("out"), 3)
    run.export(tmp_path / "state.safetensors")
    with safe_open(tmp_path / "state.safetensors", "np") as file:
        assert file.metadata()["steps"] == "3"
        assert file.get_tensor("last").shape == (4, D)
        assert np.array_equal(file.get_tensor("sum"), np.asarray(run.fetch("sum")))
        assert file.get_tensor("C").tolist() == np.asarray(run.fetch("C")).tolist()


def test_autosave_needs_an_instance(store: PersistentStore) -> None:
    with pytest.raises(ValueError, match="needs an instance"):
        simulator(store).make_executor(autosave=1)
