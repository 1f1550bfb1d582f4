"""Contexts on a page server, on several side by side, and on a Valkey Cluster: the same is promised of all three."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from contexts import BLOCK, SPEC, is_true, made, some_tokens
from homes import Home, homes_and_tiers
from pools import pool_of
from test_kvpage_cli import kvpage
from waiting import until

from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server import block_writer
from engine.tiers.server.block_writer import Saved
from kvpage_server.client import AsyncPageClient, PageClient

TOKENS = some_tokens(24, 14 * BLOCK + 3)  # five segments, the last of them with a block that is not full
SEVERAL = ("side by side", "cluster")


pool = pool_of(256)
home, tier, other = homes_and_tiers()


def save(tier: PageTier, agent_id: str = "alice", tokens: tuple[int, ...] = TOKENS) -> Saved | None:
    context = made(tier._remote.pool, agent_id, tokens)
    try:
        return tier.save(context)
    finally:
        tier._remote.pool.free(context.block_ids, agent_id)


def found(tier: PageTier, agent_id: str = "alice", tokens: tuple[int, ...] | None = None) -> int:
    """How many tokens are found. They are the right ones."""
    loaded = tier.load(agent_id, tokens)
    if loaded is None:
        return 0
    assert is_true(loaded)
    tier._remote.pool.free(loaded.block_ids, agent_id)
    return len(loaded)


# -- the same everywhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, BLOCK, 5 * BLOCK, len(TOKENS)])
def test_contexts_of_every_length_are_restored_bit_by_bit(tier: PageTier, count: int) -> None:
    assert save(tier, tokens=TOKENS[:count]) == Saved(-(-count // BLOCK), 0, count * SPEC.token_nbytes)
    assert save(tier, tokens=TOKENS[:count]) == Saved(0, -(-count // BLOCK), 0)
    assert found(tier) == found(tier, tokens=TOKENS[:count]) == count
    assert not tier.misses
    assert not tier.unsaved


def test_common_prefixes_are_shared_and_found_by_tokens(tier: PageTier, other: PageTier) -> None:
    save(tier)
    longer = TOKENS[: 9 * BLOCK + 2] + some_tokens(1, 3 * BLOCK)
    for agent_id in ("bob", "alice"):
        assert found(other, agent_id, longer) == 10 * BLOCK  # with the block in which the two part
    saved = save(other, "bob", longer)
    assert saved
    assert (saved.blocks_written, saved.blocks_present) == (4, 9)
    assert found(tier, "bob") == len(longer)
    assert found(tier, "nobody", some_tokens(2, 50)) == 0


def test_looking_at_agents_is_no_use_of_them(home: Home, tier: PageTier) -> None:
    if home.cluster:
        pytest.skip("CLIENT NO-TOUCH is for one connection")
    assert save(tier)

    def idle() -> int:
        seen = (
            (client, key)
            for client in home.clients
            for kind in ("manifest", "seal")
            for key in client.keys(f"{kind}:*")
        )
        return min(client.object("idletime", key) for client, key in seen)

    until(lambda: idle() >= 1, "a second without a use")
    assert tier.has("alice")
    assert tier.tokens_of("alice") == len(TOKENS)
    assert tier.is_whole("alice")
    assert tier.why_removed("alice", TOKENS) is None
    assert idle() >= 1


def json_of(*words: str, url: str, expected: int = 0) -> dict[str, Any]:
    code, shown, errors = kvpage(*words, "--json", url=url)
    assert code == expected, errors
    looked: dict[str, Any] = json.loads(shown)
    return looked


def test_kvpage_shows_memory_by_agent_and_the_result_of_a_load(tier: PageTier, home: Home) -> None:
    save(tier)
    save(tier, "bob", TOKENS[: 9 * BLOCK])
    blocks = home.tagged(TOKENS, SPEC)
    looked = json_of("ls", url=home.url)
    assert {agent["agent"]: (agent["tokens"], agent["found_tokens"]) for agent in looked["agents"]} == {
        "alice": (len(TOKENS), len(TOKENS)),
        "bob": (9 * BLOCK, 9 * BLOCK),
    }
    assert [(each["agents"], each["tokens"]) for each in looked["shared"]] == [(["alice", "bob"], 9 * BLOCK)]
    assert {each["bytes"] for each in looked["agents"]} == {SPEC.token_nbytes * n for n in (len(TOKENS), 9 * BLOCK)}
    assert looked["requests"] == looked["unreachable"] == []
    assert [block["complete"] for block in json_of("ls", blocks[3], url=home.url)["blocks"]] == [True]
    with PageClient(home.url) as client:
        client.delete_request(blocks[4].encode(), [0])
    (context,) = json_of("why", "alice", url=home.url, expected=1)["contexts"]
    assert (context["found_tokens"], context["missing_blocks"]) == (4 * BLOCK, 1)
    assert [place["there"] for place in context["places"]] == [i != 4 for i in range(len(blocks))]
    assert context["places"][4]["why"] in ("deleted", "absent")
    (context,) = json_of("stat", "bob", url=home.url, expected=1)["contexts"]
    assert {place["agents"] for place in context["places"]} == {2}
    assert json_of("why", blocks[3], url=home.url)["reason"] == "stored"
    assert json_of("why", "{nobody}", url=home.url, expected=1)["reason"] in ("never stored", "absent")


def test_published_blocks_have_no_owner_and_are_found(tier: PageTier, home: Home) -> None:
    context = made(tier._remote.pool, "alice", TOKENS)
    assert tier.publish(context) == Saved(15, 0, len(TOKENS) * SPEC.token_nbytes)
    tier._remote.pool.free(context.block_ids, "alice")
    assert tier.agents() == []
    assert not home.keys("refs:*")
    assert found(tier, "bob", TOKENS) == len(TOKENS)
    names = [tagged[-32:] for tagged in home.tagged(TOKENS, SPEC)]
    assert tier.loop.run(tier.sealed(names[:14])) == 14
    assert tier.loop.run(tier.sealed(names[6:8], names[:6])) == 2


def test_a_second_turn_takes_its_old_tail_away(tier: PageTier, home: Home) -> None:
    for count in (3 * BLOCK + 2, 6 * BLOCK, 9 * BLOCK + 1):
        save(tier, tokens=TOKENS[:count])
        assert home.blocks() == set(home.tagged(TOKENS[:count], SPEC))
    assert found(tier) == 9 * BLOCK + 1


def test_forks_share_and_deletes_free_only_unshared_blocks(tier: PageTier, home: Home) -> None:
    save(tier)
    assert tier.fork("alice", "twin")
    assert tier.fork("twin", "twin")
    assert not tier.fork("nobody", "carol")
    longer = TOKENS[: 6 * BLOCK] + some_tokens(1, 20)
    save(tier, "twin", longer)
    assert tier.agents() == ["alice", "twin"]
    assert [tier.tokens_of(one) for one in ("alice", "twin", "bob")] == [len(TOKENS), len(longer), None]
    assert tier.delete("alice")
    assert not tier.delete("alice")
    assert home.blocks() == set(home.tagged(longer, SPEC))
    assert found(tier, "twin") == len(longer)
    assert tier.delete("twin")
    assert home.keys() == {"refs:deleted:alice", "refs:deleted:twin"}


def test_an_agent_deleted_during_a_save_is_not_stored(
    tier: PageTier, other: PageTier, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tier)
    write = block_writer.write
    deleted: list[bool | None] = []

    async def delete_before(connection: Any, *given: Any) -> Any:
        if not deleted:
            deleted.append(await asyncio.to_thread(other.delete, "alice"))
        return await write(connection, *given)

    monkeypatch.setattr(block_writer, "write", delete_before)
    assert save(tier) == Saved(0, 0, 0)
    assert deleted == [True]
    assert home.keys() == {"refs:deleted:alice"}
    assert save(tier)
    assert found(other) == len(TOKENS)


def test_one_engine_claims_a_block_until_it_releases_it(tier: PageTier, other: PageTier) -> None:
    assert tier.loop.run(tier.claim("name", 10))
    assert not other.loop.run(other.claim("name", 10))
    assert not other.loop.run(other.release("name"))
    assert tier.loop.run(tier.renew("name", 20))
    assert tier.loop.run(tier.release("name"))
    assert other.loop.run(other.claim("name", 10))
    assert not tier.unasked


@pytest.mark.parametrize("block", [0, 5, 14])
def test_a_flipped_bit_is_a_miss_and_the_next_save_repairs_it(tier: PageTier, home: Home, block: int) -> None:
    save(tier)
    home.turn_a_bit(home.tagged(TOKENS, SPEC)[block])
    assert found(tier) == block * BLOCK
    assert tier.misses == {"checksum": 1}
    save(tier)
    assert found(tier) == len(TOKENS)


def test_an_evicted_block_shortens_the_prefix_until_a_save(tier: PageTier, home: Home) -> None:
    save(tier)
    gone = home.tagged(TOKENS, SPEC)[6]
    for key in home.keys(f"kv:{gone}:*"):
        home.ask(key, "DEL", key)
    assert found(tier) == 6 * BLOCK
    assert tier.misses == {"gap": 1}
    saved = save(tier)
    assert saved
    assert saved.blocks_written == 1
    assert found(tier) == len(TOKENS)


def test_a_prompt_is_computed_by_one_engine_and_found_by_others(tier: PageTier, other: PageTier) -> None:
    """Engines that read and write at the same time find the stored blocks, and nothing else."""
    contexts = [TOKENS[: n * BLOCK + 3] for n in (2, 6, 13)] + [TOKENS[::-1][: 5 * BLOCK]]

    def work(engine: PageTier) -> None:
        for _ in range(4):
            for tokens in contexts:
                assert save(engine, "alice", tokens)
                found(engine, "alice")

    with ThreadPoolExecutor(2) as threads:
        for worker in [threads.submit(work, engine) for engine in (tier, other)]:
            worker.result()
    assert found(tier) == found(other, tokens=contexts[-1]) == 5 * BLOCK
    assert set(tier.misses) | set(other.misses) <= {"gap", "absent", "shape"}


def test_the_store_has_the_contexts_of_all_agents(tier: PageTier, other: PageTier, home: Home) -> None:
    """Random saves, forks and deletions by two engines, and a model of them: agent -> tokens."""
    random = np.random.default_rng(11)
    contexts = [TOKENS[:3], TOKENS[: 4 * BLOCK], TOKENS[: 6 * BLOCK + 1], TOKENS, TOKENS[::-1][: 9 * BLOCK + 5]]
    agents, kept = ["alice", "bob", "carol"], dict[str, tuple[int, ...]]()
    for step in range(40):
        engine = (tier, other)[step % 2]
        agent, another = map(str, random.choice(agents, 2))
        match random.integers(0, 4):
            case 0 | 1:
                kept[agent] = contexts[random.integers(0, len(contexts))]
                assert save(engine, agent, kept[agent])
            case 2:
                assert engine.fork(agent, another) == (agent in kept)
                if agent in kept:
                    kept[another] = kept[agent]
            case 3:
                assert engine.delete(agent) == (kept.pop(agent, None) is not None)
        named = [block for tokens in kept.values() for block in home.tagged(tokens, SPEC)]
        assert home.blocks() == set(named)
        counts = {block: int(home.ask(f"refs:{block}", "GET", f"refs:{block}")) for block in set(named)}
        assert counts == Counter(named)
    assert other.agents() == sorted(kept)
    assert {agent: found(tier, agent) for agent in kept} == {agent: len(tokens) for agent, tokens in kept.items()}
    assert not tier.misses


# -- several servers ---------------------------------------------------------------------------------------------------


def trips(tier: PageTier) -> int:
    several = tier._connection.server._several
    return several.peers.round_trips if several else 0


@pytest.mark.parametrize("home", SEVERAL, indirect=True)
def test_a_block_is_on_the_server_of_its_segment(tier: PageTier, home: Home) -> None:
    tokens = some_tokens(7, 64 * BLOCK)  # 17 segments: servers that are side by side have random names
    save(tier, tokens=tokens)
    names, wholes = home.tagged(tokens, SPEC), set()
    for i, block in enumerate(names):
        assert block.startswith("{" + names[i - (i - 1) % 4 if i else 0][-32:] + "}")
        keys = home.keys(f"*:{block}*")
        assert {f"seal:{block}", f"refs:{block}", f"refs:{block}:alice:{SPEC.fingerprint:016x}"} <= keys
        servers = {id(client) for key in keys for client in home.having(key)}
        assert len(servers) == 1
        wholes |= servers
    assert len(wholes) > 1


@pytest.mark.parametrize("home", SEVERAL, indirect=True)
def test_blocks_after_a_common_beginning_are_on_all_servers(tier: PageTier, home: Home) -> None:
    used = set()
    for seed in range(24):
        tokens = TOKENS[:BLOCK] + some_tokens(100 + seed, 3 * BLOCK)
        save(tier, f"agent-{seed}", tokens)
        (server,) = home.having(f"seal:{home.tagged(tokens, SPEC)[1]}")
        used.add(id(server))
    assert len(used) == len(home.clients)


@pytest.mark.parametrize("home", SEVERAL, indirect=True)
def test_a_lookup_asks_every_server_once_for_all_blocks(tier: PageTier, home: Home) -> None:
    tokens = some_tokens(5, 64 * BLOCK)
    save(tier, tokens=tokens)
    found(tier)  # has asked for the map, and connected
    before = trips(tier)
    blocks = tier.loop.run(tier.sealed([name[-32:] for name in home.tagged(tokens, SPEC)]))
    assert blocks == 64
    assert trips(tier) - before == len(home.clients)
    before = trips(tier)
    assert found(tier, "bob", tokens) == len(tokens)
    lookup_and_lease, chunks = 2 * len(home.clients), 17  # a chunk is a segment at most
    assert trips(tier) - before <= lookup_and_lease + chunks


@pytest.mark.parametrize("home", SEVERAL, indirect=True)
def test_a_killed_engine_leaves_a_manifest_with_its_blocks(
    home: Home, pool: BlockPool, other: PageTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is cancelled at its first request to a server, another save at its second request, and so on."""
    old, new = TOKENS[::-1][: 6 * BLOCK + 3], TOKENS[: 6 * BLOCK + 2]
    converse, left, tries = AsyncPageClient._lent, 0, Counter[bool]()

    def until_it_dies(self: AsyncPageClient, *args: Any) -> Any:
        nonlocal left
        if self is tier._connection.server:
            left -= 1
            if left < 0:
                raise asyncio.CancelledError
        return converse(self, *args)

    for step in itertools.count():
        tier = PageTier(home.url, SPEC, pool, deadline=40)
        assert save(other, tokens=old)
        monkeypatch.setattr(AsyncPageClient, "_lent", until_it_dies)
        left = step
        saved = None
        with suppress(CancelledError):
            saved = save(tier, tokens=new)
        monkeypatch.setattr(AsyncPageClient, "_lent", converse)
        tier.close()
        whole = saved is not None and saved.whole
        tries[whole] += 1
        loaded = other.load("alice")
        assert loaded
        assert is_true(loaded)
        assert loaded.tokens in ((new,) if whole else (old, new))
        pool.free(loaded.block_ids, "alice")
        if whole and left > 0:
            break
    assert tries[False] > 5
    assert tries[True]
    assert not other.misses
    assert save(other, tokens=new)
    assert found(other) == len(new)
    assert set(home.tagged(new, SPEC)) <= home.blocks()
