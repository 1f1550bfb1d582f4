"""Partial blocks of contexts: on the page server, any engine finds them to the token."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from contexts import BLOCK, SPEC, is_true, made, some_tokens
from homes import Home, homes_and_tiers
from pools import pool_of
from proxy import start_proxy
from servers import RunningServer
from test_kvpage_cli import kvpage
from waiting import PATIENCE

from engine.memory.blocks import block_names
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server import tails
from engine.tiers.server.block_writer import Saved

TOKENS = some_tokens(31, 60)

pool = pool_of(4096)
home, tier, other = homes_and_tiers()


def publish(
    tier: PageTier, tokens: tuple[int, ...], agent_id: str = "anon", label: str | None = "", answering: bool = False
) -> Saved | None:
    context = made(tier._remote.pool, agent_id, tokens)
    try:
        return tier.publish(context, label=label, answering=answering)
    finally:
        tier._remote.pool.free(context.block_ids, agent_id)


def reached(tier: PageTier, tokens: tuple[int, ...], agent_id: str = "anon", beyond: int = 0) -> int:
    """How many tokens of a prompt are found. They are the right ones."""
    fetch = tier.fetch(agent_id, tokens, named=False, beyond=beyond)
    loaded = fetch.result()
    if loaded is None:
        return 0
    assert is_true(loaded)
    tier._remote.pool.free(loaded.block_ids, agent_id)
    assert loaded.reusable_for(SPEC, tokens) == fetch.reach
    return fetch.reach


def tails_of(home: Home) -> dict[str, list[tuple[int, ...]]]:
    """The tokens of all tails, by the keys of their records."""
    keys = home.keys("tails:*")
    return {key: [tail.tokens for tail in tails.parse(home.ask(key, "GET", key), key, SPEC)] for key in keys}


@pytest.mark.parametrize("count", [1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 50])
def test_a_context_is_found_to_the_token(tier: PageTier, other: PageTier, count: int) -> None:
    publish(tier, TOKENS[:count])
    assert reached(other, TOKENS) == count
    assert reached(other, TOKENS[:count]) == count - 1
    if count > 1:
        assert reached(other, (*TOKENS[: count - 1], 95, 95)) == count - 1
    assert reached(other, TOKENS, "anon@acme") == 0
    assert not tier.unsaved


def test_a_partial_block_is_deleted_for_a_longer_or_full_one(tier: PageTier, home: Home) -> None:
    for count in (1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 3, 2 * BLOCK + 1, 2 * BLOCK + 4):
        publish(tier, TOKENS[:count])
        assert home.blocks() == set(home.tagged(TOKENS[:count], SPEC))
        assert reached(tier, TOKENS) == count
    blocks = [TOKENS[start : start + BLOCK] for start in (0, 0, BLOCK)]
    assert sorted(tails_of(home).values()) == sorted([[block] for block in (*blocks, TOKENS[2 * BLOCK : count])])
    publish(tier, TOKENS[: 2 * BLOCK + 2])
    assert home.blocks() == set(home.tagged(TOKENS[:count], SPEC)), "a longer one is stored"


def test_contexts_that_diverge_are_all_found(tier: PageTier, other: PageTier) -> None:
    rng = random.Random(1)
    contexts = [(*TOKENS[: rng.choice((4, 12, 13, 19))], *some_tokens(seed, rng.randint(1, 9))) for seed in range(12)]
    for context in contexts:
        publish(tier, context)
    for context in contexts:
        assert reached(other, (*context, 95)) == len(context)


def test_a_record_has_the_newest_blocks_and_others_are_deleted(
    tier: PageTier,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One-time prompts that begin alike take no more and no more room."""
    monkeypatch.setattr(tails, "MOST_TAILS", 3)
    for first in (TOKENS[:1], TOKENS[:2], TOKENS[: BLOCK + 1]):
        home.flush()
        contexts = [(*first, *some_tokens(seed, 4)) for seed in range(6)]
        for context in contexts:
            publish(tier, context)
        newest = contexts[-3:]
        assert [reached(tier, (*context, 95)) for context in newest] == [len(context) for context in newest]
        if len(first) != 1:  # with one token in common they are in records of their own, too
            wanted = {name for context in newest for name in home.tagged(context, SPEC)}
            assert home.blocks() == wanted
        assert all(len(found) <= 3 for found in tails_of(home).values())


def test_a_block_that_an_agents_context_needs_is_not_deleted(tier: PageTier, home: Home) -> None:
    context = made(tier._remote.pool, "alice", TOKENS[:13])
    tier.save(context)
    publish(tier, TOKENS[:13])
    publish(tier, TOKENS[:15])
    loaded = tier.load("alice")
    assert loaded
    assert loaded.tokens == TOKENS[:13]
    for held in (context, loaded):
        tier._remote.pool.free(held.block_ids, "alice")


@pytest.mark.parametrize("end", ["deleted", "replaced", "forked"])
def test_no_tokens_of_a_former_context_stay_in_records(tier: PageTier, home: Home, end: str) -> None:
    """Nor those of a prompt whose answer was cancelled, so that only its full blocks were written."""

    def save(tokens: tuple[int, ...], agent_id: str) -> None:
        context = made(tier._remote.pool, agent_id, tokens)
        assert tier.save(context)
        tier._remote.pool.free(context.block_ids, agent_id)

    other = some_tokens(32, 21)
    if end == "forked":
        save(other, "bob")
    save(TOKENS[:21], "alice")
    publish(tier, (*TOKENS[:BLOCK], *some_tokens(33, 2 * BLOCK)), "alice", None, answering=True)
    if end == "deleted":
        assert tier.delete("alice")
    elif end == "forked":
        assert tier.fork("bob", "alice")
    else:
        save(other, "alice")
    left = () if end == "deleted" else other
    found = {tokens for tails in tails_of(home).values() for tokens in tails}
    assert found == {left[start : start + BLOCK] for start in range(0, len(left), BLOCK)}
    assert home.blocks() == set(home.tagged(left, SPEC))


def test_a_cancelled_prompt_is_found_until_the_next_answer(tier: PageTier, other: PageTier) -> None:
    publish(tier, TOKENS[: 2 * BLOCK], "alice", None, answering=True)
    assert reached(other, TOKENS) == 2 * BLOCK


@pytest.mark.parametrize("end", ["deleted", "replaced"])
@pytest.mark.parametrize("first", ["unnamed", "hint", "cancelled"])
def test_a_cancelled_prompt_leaves_an_equal_context(tier: PageTier, other: PageTier, first: str, end: str) -> None:
    """Whichever of both was written first."""
    label = None if first == "hint" else ""
    unnamed, cancelled = ("anon", label), ("alice", None)
    for agent_id, label in (cancelled, unnamed) if first == "cancelled" else (unnamed, cancelled):
        publish(tier, TOKENS[: 2 * BLOCK], agent_id, label, answering=agent_id == "alice")
    if end == "deleted":
        tier.delete("alice")
    else:
        context = made(tier._remote.pool, "alice", some_tokens(32, 21))
        tier.save(context)
        tier._remote.pool.free(context.block_ids, "alice")
    assert reached(other, TOKENS) == 2 * BLOCK


def test_blocks_that_a_hint_has_saved_outlast_the_next_answer(tier: PageTier, other: PageTier) -> None:
    """They are no prompt of an answer that was cancelled."""
    publish(tier, TOKENS[: 2 * BLOCK], "alice", None)
    context = made(tier._remote.pool, "alice", some_tokens(32, 21))
    tier.save(context)
    tier._remote.pool.free(context.block_ids, "alice")
    assert reached(other, TOKENS) == 2 * BLOCK


def test_nothing_is_fetched_that_memory_has(tier: PageTier) -> None:
    publish(tier, TOKENS[:21])
    for beyond, expected in ((20, 21), (21, 0), (30, 0)):
        fetch = tier.fetch("anon", TOKENS, beyond=beyond, named=False)
        loaded = fetch.result()
        assert fetch.reach == expected
        if loaded:
            tier._remote.pool.free(loaded.block_ids, "anon")


def test_a_damaged_record_is_a_counted_miss_and_is_written_anew(tier: PageTier, home: Home) -> None:
    publish(tier, TOKENS[:13])
    publish(tier, (*TOKENS[:11], 95))
    key = f"tails:{block_names(TOKENS, SPEC)[0]}"
    raw = home.ask(key, "GET", key)
    _, _, body = raw.partition(b" ")
    elsewhere = tails.sealed(body, "tails:" + 32 * "0")
    model = tails.sealed(body.replace(f"{SPEC.fingerprint:016x}".encode(), 16 * b"0"), key)
    shape = tails.sealed(body.replace(b'"states": []', b'"states": [[9, "a"]]'), key)
    for damaged in (b"", b"{}", raw[:-9], raw[:40] + bytes([raw[40] ^ 1]) + raw[41:], elsewhere, model, shape, body):
        home.ask(key, "SET", key, damaged)
        before = tier.misses["tails"]
        assert reached(tier, TOKENS) == BLOCK
        assert tier.misses["tails"] == before + 1
    publish(tier, TOKENS[:14])
    assert reached(tier, TOKENS) == 14


def test_a_record_may_have_blocks_that_do_not_belong_there(tier: PageTier, home: Home) -> None:
    publish(tier, TOKENS[:5])
    for key in home.keys("tails:*"):
        others = [tails.Tail(tokens, "f" * 16, ()) for tokens in ((9,), (TOKENS[0] + 1, 1, 2), TOKENS[:1], TOKENS[:3])]
        home.ask(key, "SET", key, tails.dump(others, key, SPEC)[0])
    assert reached(tier, TOKENS) == 0
    publish(tier, TOKENS[:6])
    assert reached(tier, TOKENS) == 6


def test_a_damaged_partial_block_is_a_counted_miss(tier: PageTier, home: Home) -> None:
    publish(tier, TOKENS[:13])
    *_, last = home.tagged(TOKENS[:13], SPEC)
    home.turn_a_bit(last)
    assert reached(tier, TOKENS) == BLOCK
    assert tier.misses == {"checksum": 1}
    publish(tier, TOKENS[:13])
    assert reached(tier, TOKENS) == 13, "it was written again"


def test_a_missing_partial_block_is_a_counted_miss(tier: PageTier, home: Home) -> None:
    publish(tier, TOKENS[:13])
    *_, last = home.tagged(TOKENS[:13], SPEC)
    for key in home.keys(f"kv:{last}:*"):
        home.ask(key, "DEL", key)
    assert reached(tier, TOKENS) == BLOCK
    assert tier.misses == {"gap": 1}


def test_a_reader_finds_a_whole_block_or_none(server: RunningServer, client: redis.Redis, pool: BlockPool) -> None:
    """The writer's connection ends after ever more bytes of the answers, as if it was killed there."""
    reader = PageTier(server.url, SPEC, pool, deadline=PATIENCE)
    with start_proxy(server.port) as proxy:
        reaches = set()
        for cut in range(0, 2000, 23):
            client.flushall()
            proxy.cut_after = cut
            writer = PageTier(proxy.url, SPEC, pool, deadline=PATIENCE)
            publish(writer, TOKENS[:13])
            writer.close()
            reaches.add(found := reached(reader, TOKENS))
            assert found in (0, 8, 13)
            publish(reader, TOKENS[:14])
            assert reached(reader, TOKENS) == 14
    assert reaches == {0, 8, 13}
    reader.close()


def test_concurrent_writers_of_the_same_blocks_leave_all_found(home: Home, tier: PageTier, pool: BlockPool) -> None:
    rng = random.Random(5)
    grown = [(*TOKENS[: rng.choice((3, 12))], *some_tokens(seed, 20)) for seed in range(4)]
    contexts = [tokens[:count] for tokens in grown for count in (5, 9, 13, 15, 18, 21)]

    def write(seed: int) -> None:
        own = PageTier(home.url, SPEC, pool, deadline=PATIENCE)
        for context in random.Random(seed).sample(contexts, len(contexts)):
            publish(own, context, f"anon-{seed}")
            reached(own, (*context, 95), f"anon-{seed}")
        own.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, range(3)))
    for context in contexts:
        publish(tier, context)  # one of the others may have deleted a block that it needs
        assert reached(tier, (*context, 95)) == len(context)


def save(tier: PageTier, tokens: tuple[int, ...], agent_id: str = "alice") -> None:
    """Store a context as the engine does: its full blocks with its prompt, the others with its answer."""
    context = made(tier._remote.pool, agent_id, tokens)
    tier.publish(context, label=None)
    assert tier.save(context)
    tier._remote.pool.free(context.block_ids, agent_id)


@pytest.mark.parametrize("count", [2, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_the_context_of_an_agent_is_found_without_its_name(tier: PageTier, other: PageTier, count: int) -> None:
    save(tier, TOKENS[:count])
    assert reached(other, TOKENS) == count
    assert reached(other, (*TOKENS[: count - 1], 95, 95)) == count - 1
    assert reached(other, TOKENS, "anon@acme") == 0
    save(tier, TOKENS[: count + 3])
    assert reached(other, TOKENS) == count + 3
    save(tier, (*TOKENS[: count - 1], 95, 95))
    assert reached(other, TOKENS) == count - 1
    assert not tier.unsaved


def test_a_deleted_agent_leaves_nothing_in_records(tier: PageTier, home: Home) -> None:
    """Nor does a context that the agent's next one does not continue."""
    save(tier, TOKENS[: 3 * BLOCK + 5])
    save(tier, (*TOKENS[: BLOCK + 3], *some_tokens(7, 2 * BLOCK)))
    assert tier.delete("alice")
    seals = {f"seal:{name}" for name in home.tagged(TOKENS, SPEC)}
    assert home.keys() <= seals | {"refs:deleted:alice"}


def test_a_deleted_agent_leaves_the_contexts_of_others(tier: PageTier, other: PageTier) -> None:
    save(tier, TOKENS[: BLOCK + 5])
    tier.fork("alice", "bob")
    assert tier.delete("alice")
    assert reached(other, TOKENS) == BLOCK + 5
    assert tier.delete("bob")
    assert reached(other, TOKENS) == 0


def test_kvpage_shows_a_context_without_a_name_by_its_label(tier: PageTier, home: Home) -> None:
    publish(tier, TOKENS[:13], label="What is the capital of France?")
    publish(tier, TOKENS[:21], label="What is the capital of France?")
    publish(tier, some_tokens(3, 4))
    code, shown, errors = kvpage("ls", "--json", url=home.url)
    assert code == 0, errors
    requests = {request["label"]: request for request in json.loads(shown)["requests"]}
    assert requests["What is the capital of France?"]["blocks"] == 3
    assert requests[""]["blocks"] == 1
    code, shown, errors = kvpage("ls", url=home.url)
    assert "What is the capital of France?" in shown
    keys = home.keys("label:*")
    assert len(keys) == 3
    publish(tier, TOKENS[:22], label="Paris")
    assert len(home.keys("label:*")) == 3, "that of a deleted block is deleted"
