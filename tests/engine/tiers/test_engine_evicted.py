"""Contexts of agents where the disk of the page server is full: they lose their ends, and never their beginnings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from contexts import BLOCK, SPEC, made, some_tokens
from servers import start_server

# isort: split
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server.manifest import BlockPlace, ContextManifest

DISK = ("--store", "tiered", "--maxdisk", "16mb")  # of which 12 are for values
SHARED = some_tokens(0, 2 * BLOCK)  # the first two blocks of every agent
AGENTS, BLOCKS = 60, 40


def saved(tier: PageTier, agents: range) -> dict[str, list[BlockPlace]]:
    """Save a context for each of some agents, and load none. Returns the places of their blocks."""
    pool, places = BlockPool(BLOCKS + 2), dict[str, list[BlockPlace]]()
    for number in agents:
        agent, tokens = f"agent-{number}", (*SHARED, *some_tokens(number + 1, (BLOCKS - 2) * BLOCK))
        context = made(pool, agent, tokens)
        assert tier.save(context)
        pool.free(context.block_ids)
        places[agent] = ContextManifest.of(agent, tokens, SPEC).places(SPEC)
    return places


def usable(client: redis.Redis, places: list[BlockPlace]) -> Iterator[bool]:
    """Whether each block is stored and sealed."""
    for place in places:
        with client.pipeline(transaction=False) as pipe:
            pipe.execute_command("KVBLOCKEXISTS", *place.block)
            pipe.exists(place.seal)
            yield all(pipe.execute())


def test_after_a_restart_a_context_still_loses_its_end_first(tmp_path: Path) -> None:
    """The server does not know any more which block extends which: the times of their writing say it."""
    with start_server(*DISK, directory=tmp_path) as server:
        tier = PageTier(server.url, SPEC, BlockPool(1))
        try:
            places = saved(tier, range(1))
        finally:
            tier.close()
    with start_server(*DISK, directory=tmp_path) as server, server.client() as client:
        (before,) = places.values()
        for number in range(1000):
            client.set(f"other:{number}", bytes(100_000))
            left = [*usable(client, before)]
            if not all(left):
                break
        assert 0 < sum(left) < BLOCKS
        assert all(left[: sum(left)])


@pytest.mark.parametrize("maxmemory", ["0", "2mb"])
def test_contexts_that_were_never_loaded_lose_their_ends_first(tmp_path: Path, maxmemory: str) -> None:
    with start_server(*DISK, "--maxmemory", maxmemory, directory=tmp_path) as server, server.client() as client:
        tier = PageTier(server.url, SPEC, BlockPool(1))
        try:
            places = saved(tier, range(AGENTS))
        finally:
            tier.close()
        assert client.info("kvpage")["disk_evicted"] > 0
        left = {agent: [*usable(client, of_agent)] for agent, of_agent in places.items()}
        counts = {agent: sum(found) for agent, found in left.items()}
        holes = {agent: found for agent, found in left.items() if not all(found[: counts[agent]])}
        assert not holes
        assert min(counts.values()) >= 2, "the blocks that all share are there"
        assert counts[f"agent-{AGENTS - 1}"] == BLOCKS, "the context that was saved last is whole"
        gone = next(agent for agent, count in counts.items() if count < BLOCKS)
        why = client.execute_command("KVPAGEWHY", places[gone][-1].block[0])
        assert (why[b"reason"], why[b"policy"], why[b"limit"]) == (b"evicted", b"allkeys-prefix", b"maxdisk")
