"""Contexts on the page server: shared by content, complete or not there at all, and never a wrong byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from block_pages import page_bodies, pages
from engine_models import letter_tokenizer, tiny_llama
from pools import pool_of
from servers import RunningServer

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import redis
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from engine.chains import chain_hashes
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks, BlockError, IncompatibleBlocksError, block_names
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier
from engine.tiers.server.block_writer import Saved
from engine.tiers.server.fetch import Receiver
from engine.tiers.server.manifest import manifest_key, sealed
from kvpage_server.page import PageKey

MODEL = tiny_llama()
SPEC = ModelCacheSpec.probe(MODEL, letter_tokenizer(), model_id="tiny")
TOKENS = tuple(np.random.default_rng(4).integers(0, 96, 700).tolist())
BLOCK = 256 * SPEC.token_nbytes
ORDER = pages(SPEC.token_shapes(256))
MANIFEST = manifest_key("alice", SPEC.fingerprint)


pool = pool_of(32)


@pytest.fixture
def tier(server: RunningServer, client: redis.Redis, pool: BlockPool) -> Iterator[PageTier]:
    tier = PageTier(server.url, SPEC, pool)
    yield tier
    tier.close()


@cache
def context(tokens: tuple[int, ...] = TOKENS, agent_id: str = "alice") -> AgentBlocks:
    """A context as an engine leaves it, outside of any pool. Beginnings of TOKENS have the same bits in all of them."""
    computed = TOKENS if tokens == TOKENS[: len(tokens)] else tokens
    cache = make_prompt_cache(MODEL)
    mx.eval(MODEL(mx.array([computed]), cache=cache))
    trim_prompt_cache(cache, len(computed) - len(tokens))
    blocks = kvcache.extract(SPEC, cache, range(SPEC.blocks_for(len(tokens))), len(tokens))
    return AgentBlocks(agent_id, tokens, blocks, SPEC.fingerprint)


def same(loaded: AgentBlocks | None, saved: AgentBlocks, count: int) -> bool:
    """Return whether a load has the first `count` tokens of the saved context, bit for bit."""
    if loaded is None or loaded.tokens != saved.tokens[:count]:
        return False
    loaded.validate(SPEC)
    pages, wanted = (
        [bytes(page) for block in of.blocks for page in page_bodies(block.layers)] for of in (loaded, saved)
    )
    return all(whole.startswith(page) for page, whole in zip(pages, wanted, strict=False))


def held(pool: BlockPool, loaded: AgentBlocks | None) -> int:
    """Free a loaded context; return its number of tokens."""
    if loaded is None:
        return 0
    pool.free(loaded.block_ids)
    return len(loaded)


def resealed(manifest: Any) -> bytes:
    return sealed(json.dumps(manifest).encode(), MANIFEST)


def page_keys(name: str) -> list[bytes]:
    return [bytes(PageKey(name.encode(), at.layer, at.head, 0, at.plane.kv_type)) for at in ORDER]


def test_a_saved_context_is_loaded_bit_by_bit(tier: PageTier, pool: BlockPool) -> None:
    assert tier.save(context()) == Saved(3, 0, 700 * SPEC.token_nbytes)
    loaded = tier.load("alice")
    assert same(loaded, context(), 700)
    assert pool.available_blocks == 32 - 3
    held(pool, loaded)
    assert not tier.misses
    assert not tier.unsaved


@pytest.mark.parametrize("count", [1, 256, 257, 512])
def test_contexts_of_every_length_are_restored(tier: PageTier, pool: BlockPool, count: int) -> None:
    tier.save(context(TOKENS[:count]))
    loaded = tier.load("alice")
    assert same(loaded, context(), count)
    held(pool, loaded)


def test_saving_again_writes_nothing(tier: PageTier) -> None:
    whole = context()
    tier.save(whole)
    assert tier.save(whole) == Saved(0, 3, 0)


def test_a_second_turn_writes_new_blocks_and_drops_its_old_tail(
    tier: PageTier, client: redis.Redis, pool: BlockPool
) -> None:
    tier.save(context(TOKENS[:300]))
    tier.save(context(TOKENS[:600]))
    old = block_names(TOKENS[:300], SPEC)[1]
    assert client.exists(*page_keys(old), f"seal:{old}", f"refs:{old}") == 0
    records = 4  # two of the first block
    assert client.dbsize() == 3 * (len(ORDER) + 2) + 1 + records
    loaded = tier.load("alice")
    assert same(loaded, context(), 600)
    held(pool, loaded)


def test_another_agent_with_the_same_beginning_shares_its_blocks(tier: PageTier, pool: BlockPool) -> None:
    """No manifest of bob's is needed: full blocks are found by their tokens, others by their records."""
    tier.save(context())
    other = (*TOKENS[:530], *TOKENS[:100])
    found = tier.load("bob", other)
    assert same(found, context(), 700)
    assert found
    assert found.reusable_for(SPEC, other) == 530
    assert found.agent_id == "bob"
    held(pool, found)
    assert tier.save(context(other, "bob")) == Saved(1, 2, 118 * SPEC.token_nbytes)


def test_the_agents_own_tail_is_found_by_its_next_prompt(tier: PageTier, pool: BlockPool) -> None:
    tier.save(context())
    loaded = tier.load("alice", (*TOKENS, 1, 2, 3))
    assert same(loaded, context(), 700)
    held(pool, loaded)


@pytest.mark.parametrize(("parts_at", "found"), [(0, 0), (10, 256), (256, 256), (300, 512), (512, 512), (600, 700)])
def test_up_to_the_block_where_a_prompt_departs(tier: PageTier, pool: BlockPool, parts_at: int, found: int) -> None:
    """That block too: the rows before the parting are as good as any."""
    tier.save(context())
    prompt = (*TOKENS[:parts_at], *((token + 1) % 96 for token in TOKENS[parts_at:]))
    loaded = tier.load("alice", prompt)
    assert same(loaded, context(), found) or not found
    assert held(pool, loaded) == found


def test_a_longer_context_of_another_agent_is_preferred(tier: PageTier, pool: BlockPool) -> None:
    tier.save(context(TOKENS[:300]))
    tier.save(context(TOKENS, "bob"))
    loaded = tier.load("alice", TOKENS)
    assert same(loaded, context(), 700)
    held(pool, loaded)


def test_an_unknown_agent_is_a_miss(tier: PageTier) -> None:
    assert tier.load("nobody") is None
    assert tier.load("nobody", TOKENS) is None
    assert tier.load("nobody", ()) is None
    assert tier.misses == {"absent": 3}


@pytest.mark.parametrize(("block", "left"), [(0, 0), (1, 256), (2, 512)])
def test_a_missing_page_shortens_the_prefix_until_the_next_save(
    tier: PageTier, client: redis.Redis, pool: BlockPool, block: int, left: int
) -> None:
    whole = context()
    tier.save(whole)
    name = block_names(TOKENS, SPEC)[block]
    assert client.delete(page_keys(name)[5]) == 1
    assert held(pool, tier.load("alice")) == left
    assert tier.misses["gap"] == 1
    saved = tier.save(whole)
    assert saved
    assert saved.blocks_present == 2
    assert held(pool, tier.load("alice")) == 700


def test_a_block_without_its_seal_is_not_complete(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    tier.save(context())
    client.delete(f"seal:{block_names(TOKENS, SPEC)[1]}")
    assert held(pool, tier.load("alice")) == 256
    assert tier.misses == {"gap": 1}


def flip(client: redis.Redis, key: bytes) -> None:
    """Flip one bit of one value, with a matching checksum: no server could detect it."""
    _, req, layer, head, page, kv_type = key.split(b":")
    body = bytearray(client.execute_command("KVPAGEGET", req, layer, head, page, kv_type))
    body[100] ^= 1
    rows = len(body) // 64
    client.execute_command("KVPAGESET", req, layer, head, page, kv_type, 2, rows, 16, 0, bytes(body))


def swap(client: redis.Redis, a: bytes, b: bytes) -> None:
    bodies = [client.execute_command("KVPAGEGET", *key.split(b":")[1:]) for key in (a, b)]
    for key, body in zip((b, a), bodies, strict=True):
        _, *names = key.split(b":")
        client.execute_command("KVPAGESET", *names, 2, 256, 16, 0, body)


def test_a_flipped_bit_is_a_miss_and_the_next_save_heals_it(
    tier: PageTier, client: redis.Redis, pool: BlockPool
) -> None:
    whole = context()
    tier.save(whole)
    flip(client, page_keys(block_names(TOKENS, SPEC)[1])[7])
    for _ in range(2):  # records of blocks have the digest still
        assert held(pool, tier.load("alice", [*TOKENS, 1])) == 256
    assert tier.misses == {"checksum": 1, "gap": 1}
    tier.save(whole)
    loaded = tier.load("alice")
    assert same(loaded, context(), 700)
    held(pool, loaded)


def test_a_flipped_bit_in_a_tail_is_a_miss(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    tier.save(context())
    name = block_names(TOKENS, SPEC)[2]
    flip(client, page_keys(name)[0])
    assert held(pool, tier.load("alice")) == 512
    assert tier.misses == {"checksum": 1}


@pytest.mark.parametrize("other", [1, 2, 4, 15], ids=["another head's", "values for keys", "a layer's", "the last"])
def test_two_pages_swapped_are_a_miss(tier: PageTier, client: redis.Redis, pool: BlockPool, other: int) -> None:
    """Each is sound in itself, of the right shape, and in the wrong place."""
    tier.save(context())
    keys = page_keys(block_names(TOKENS, SPEC)[0])
    swap(client, keys[0], keys[other])
    assert tier.load("alice") is None
    assert tier.misses == {"checksum": 1}


def test_a_page_of_another_agents_context_is_a_miss(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    tier.save(context())
    others = tuple(reversed(TOKENS))
    tier.save(context(others, "bob"))
    swap(client, page_keys(block_names(TOKENS, SPEC)[0])[3], page_keys(block_names(others, SPEC)[0])[3])
    assert tier.load("alice") is None
    assert tier.load("bob") is None
    assert tier.misses == {"checksum": 2}


def test_a_foreign_block_under_a_blocks_name_is_a_miss(tier: PageTier, client: redis.Redis) -> None:
    """Pages and seal are all of one piece: only the name is wrong, and the digest knows the name."""
    tier.save(context())
    others = tuple(reversed(TOKENS))
    tier.save(context(others, "bob"))
    mine, theirs = block_names(TOKENS, SPEC)[0], block_names(others, SPEC)[0]
    for to, source in zip(page_keys(mine), page_keys(theirs), strict=True):
        swap(client, to, source)
    client.set(f"seal:{mine}", client.get(f"seal:{theirs}"))
    assert tier.load("alice") is None
    assert tier.misses == {"checksum": 1}


def test_a_block_in_another_shape_is_counted_as_shape(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    """It has as many bytes, in half as many rows, so that only the server can know."""
    tier.save(context())
    for key in page_keys(block_names(TOKENS, SPEC)[1]):
        names = key.split(b":")[1:]
        client.execute_command("KVPAGESET", *names, 2, 128, 32, 0, client.execute_command("KVPAGEGET", *names))
    assert held(pool, tier.load("alice")) == 256
    assert tier.misses == {"shape": 1}


def test_a_block_deleted_after_its_lease_is_a_gap(
    tier: PageTier, client: redis.Redis, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.save(context())
    receive = Receiver.receive

    async def deleted_before(self: Receiver) -> None:
        assert client.delete(*page_keys(block_names(TOKENS, SPEC)[1]))
        await receive(self)

    monkeypatch.setattr(Receiver, "receive", deleted_before)
    assert held(pool, tier.load("alice")) == 256
    assert tier.misses == {"gap": 1}


def test_a_page_of_another_length_is_a_miss(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    whole = context()
    tier.save(whole)
    key = page_keys(block_names(TOKENS, SPEC)[1])[2]
    client.execute_command("KVPAGESET", *key.split(b":")[1:], 2, 255, 16, 0, bytes(255 * 64))
    assert held(pool, tier.load("alice")) == 256
    assert tier.misses == {"shape": 1}
    tier.save(whole)
    assert held(pool, tier.load("alice")) == 700


def test_another_model_finds_nothing_of_ours(
    server: RunningServer, client: redis.Redis, tier: PageTier, pool: BlockPool
) -> None:
    """Same shapes, same tokens, other weights."""
    tier.save(context())
    other = ModelCacheSpec.probe(tiny_llama(seed=8), letter_tokenizer())
    theirs = PageTier(server.url, other, pool)
    assert theirs.load("alice") is None
    assert theirs.load("bob", TOKENS) is None
    assert theirs.misses == {"absent": 2}
    with pytest.raises(IncompatibleBlocksError):
        theirs.save(context())
    theirs.close()


def test_an_agent_has_a_context_of_every_model_that_answers_it(
    server: RunningServer, client: redis.Redis, tier: PageTier, pool: BlockPool
) -> None:
    """Two models on one store, which save in turns. Forks and lists are each one's own; deleting is for good."""
    other = ModelCacheSpec.probe(tiny_llama(seed=8), letter_tokenizer())
    theirs = PageTier(server.url, other, pool)
    for count in (300, 700):
        ours = context(TOKENS[:count])
        assert tier.save(ours)
        assert theirs.save(replace(ours, fingerprint=other.fingerprint))
        assert same(loaded := tier.load("alice"), ours, count)
        assert held(pool, loaded) == held(pool, theirs.load("alice")) == count
    assert theirs.fork("alice", "twin")
    assert (tier.agents(), theirs.agents()) == (["alice"], ["alice", "twin"])
    assert (tier.has("twin"), theirs.has("twin")) == (False, True)
    assert [one.tokens_of("alice") for one in (tier, theirs)] == [700, 700]
    assert tier.delete("alice")
    assert theirs.load("alice") is None
    assert held(pool, theirs.load("twin")) == 700
    assert theirs.delete("twin")
    assert {*client.keys()} == {b"refs:deleted:alice", b"refs:deleted:twin"}
    assert not tier.misses
    theirs.close()


@pytest.mark.parametrize("damage", [
    lambda manifest: b"",
    lambda manifest: b"\xff\xfe",
    lambda manifest: resealed([]),
    lambda manifest: resealed({}),
    lambda manifest: sealed(b"[" * 100_000, MANIFEST),
    lambda manifest: resealed({**manifest, "more": [[]] * 60_000}),
    lambda manifest: resealed({**manifest, "tokens": [0] * 4_100_000}),
    lambda manifest: json.dumps(manifest).encode(),
    lambda manifest: sealed(json.dumps(manifest).encode(), manifest_key("alic", SPEC.fingerprint)),
    lambda manifest: resealed({**manifest, "tokens": [float(token) for token in manifest["tokens"]]}),
    lambda manifest: resealed({**manifest, "tokens": 5}),
    lambda manifest: resealed({**manifest, "chain": None}),
    lambda manifest: resealed({**manifest, "tokens": manifest["tokens"][:-1]}),
    lambda manifest: resealed({**manifest, "tokens": [-1, *manifest["tokens"][1:]]}),
    lambda manifest: resealed({**manifest, "tokens": ["a", *manifest["tokens"][1:]]}),
    lambda manifest: resealed({**manifest, "chain": manifest["chain"][::-1]}),
    lambda manifest: resealed({**manifest, "format": 99}),
    lambda manifest: resealed({**manifest, "owner": None}),
    lambda manifest: resealed({**manifest, "owner": ["alice"]}),
], ids=["empty", "no text", "a list", "nothing in it", "too deep", "too many lists", "too many tokens",
        "no digest", "another agent's", "fractions",
        "no tokens", "no chain", "a token less", "a wrong token", "a letter for a token", "another chain",
        "another format", "no owner", "a list of owners"])  # fmt: skip
def test_an_invalid_manifest_is_a_miss_and_is_overwritten(
    tier: PageTier, client: redis.Redis, pool: BlockPool, damage: Callable[[dict[str, Any]], bytes]
) -> None:
    whole = context()
    tier.save(whole)
    client.set(MANIFEST, damage(json.loads(client.get(MANIFEST).partition(b" ")[2])))
    assert tier.load("alice") is None
    assert tier.misses == {"manifest": 1}
    tier.save(whole)
    assert held(pool, tier.load("alice")) == 700


def test_without_free_blocks_nothing_is_loaded(tier: PageTier, pool: BlockPool) -> None:
    tier.save(context())
    others = pool.allocate(30)
    assert tier.load("alice") is None
    assert tier.misses == {"pool": 1}
    pool.free(others)


def test_a_load_waits_for_memory_that_is_being_freed(tier: PageTier, pool: BlockPool) -> None:
    tier.save(context())
    others, asked = pool.allocate(30), []

    def frees() -> bool:
        asked.append(len(asked))
        if len(asked) == 3:
            pool.free(others)
        return True

    assert held(pool, tier.fetch("alice", frees=frees).result()) == 700
    assert not tier.misses


def test_only_fetched_blocks_are_leased(tier: PageTier, client: redis.Redis, pool: BlockPool) -> None:
    tier.save(context())
    held(pool, tier.load("alice", TOKENS[:300]))
    leases = [client.execute_command("KVPAGESTAT", name, 0, 0, 0, 0) for name in block_names(TOKENS, SPEC)]
    assert [0 < page[b"lease_left_ms"] <= 5000 for page in leases] == [True, True, False]


def test_an_agent_id_that_cannot_name_pages_is_refused(tier: PageTier) -> None:
    with pytest.raises(BlockError, match="an agent id is"):
        tier.load("a:b")


def test_stored_keys_can_be_read_by_hand(tier: PageTier, client: redis.Redis) -> None:
    tier.save(context())
    manifest = json.loads(client.get(MANIFEST).partition(b" ")[2])
    assert manifest["tokens"] == list(TOKENS)
    assert manifest["fingerprint"] == f"{SPEC.fingerprint:016x}"
    assert manifest["chain"][:2] == chain_hashes(SPEC.fingerprint, TOKENS, 256)
    assert [client.get(f"refs:{name}") for name in manifest["chain"]] == [b"1"] * 3
    page = client.execute_command("KVPAGEGET", manifest["chain"][0], 3, 1, 0, 1)
    assert (np.frombuffer(page, np.float32).reshape(256, 16) == np.array(context().blocks[0].layers[3][1])[1]).all()


def test_an_address_that_is_none_is_refused(pool: BlockPool) -> None:
    with pytest.raises(ValueError, match="begins with redis:"):
        PageTier("127.0.0.1:9221", SPEC, pool)
