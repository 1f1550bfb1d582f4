"""Contexts of a model with states: restored after the furthest state that is stored with all blocks before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from block_pages import page_bodies
from homes import Home, homes_and_tiers
from pools import pool_of
from servers import start_server

# isort: split
import mlx.core as mx
import pytest

from engine.caches import ArraysLayer, FullLayer
from engine.memory.blocks import AgentBlocks, Arrays, KVBlock
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec, Shapes
from engine.tiers.pages import PageTier
from engine.tiers.server.manifest import BlockPlace, ContextManifest
from kvpage_server.page import DType, Plane

BLOCK = 8
ROWS = FullLayer((2, 2), (Plane(0, DType.FLOAT32, 4), Plane(1, DType.FLOAT32, 4)))
STATE = ArraysLayer((Plane(0, DType.FLOAT32, 4),), ((1, 2, 4),))
TOKENS = tuple(range(3, 93))  # eleven blocks and two tokens
STATES = (13, *range(BLOCK, 89, BLOCK), 45, 47, 90)


def spec_of(*layers: FullLayer | ArraysLayer) -> ModelCacheSpec:
    return ModelCacheSpec(
        model_id="hybrid",
        block_tokens=BLOCK,
        layers=layers,
        nesting=(None,) * len(layers),
        vocab_size=100,
        context=None,
        fingerprint=0x77 + len(layers),
        batches=False,
    )


SPECS = {"rows and states": spec_of(ROWS, STATE), "states alone": spec_of(STATE)}
SPEC = SPECS["rows and states"]

pool = pool_of(256)
home, _, _ = homes_and_tiers()


@pytest.fixture(params=SPECS)
def tier(request: pytest.FixtureRequest, home: Home, pool: BlockPool) -> Iterator[PageTier]:
    tier = PageTier(home.url, SPECS[request.param], pool, deadline=40)
    yield tier
    tier.close()


def arrays(shapes: Shapes, seed: int) -> Arrays:
    found = [
        tuple((mx.arange(kept.nbytes // 4).reshape(kept.shape) + 1000 * seed + i).astype(mx.float32) for kept in layer)
        for i, layer in enumerate(shapes)
    ]
    mx.eval(found)
    return tuple(found)


def context(spec: ModelCacheSpec, states: Sequence[int] = STATES, count: int = len(TOKENS)) -> AgentBlocks:
    """A context outside of any pool, with states after the positions `states`."""
    blocks = []
    for i, start in enumerate(range(0, count, BLOCK)):
        end = min(start + BLOCK, count)
        block = KVBlock(i, end - start, arrays(spec.token_shapes(end - start), start))
        for position in states:
            if start < position <= end:
                block = block.with_state(position - start, arrays(spec.state_shapes(position), 500 + position))
        blocks.append(block)
    return AgentBlocks("alice", TOKENS[:count], tuple(blocks), spec.fingerprint)


def reached(tier: PageTier, tokens: tuple[int, ...] | None = None, agent_id: str = "alice") -> int:
    """Load, and return how many tokens need not be computed. All of their bytes are the right ones."""
    spec = tier._remote.spec
    fetch = tier.fetch(agent_id, tokens, named=tokens is None)
    loaded = fetch.result()
    if loaded is None:
        return 0
    whole = context(spec, count=len(loaded))
    assert loaded.tokens == whole.tokens
    for found, wanted in zip(loaded.blocks, whole.blocks, strict=True):
        assert bodies(found.layers) == bodies(wanted.layers)
    found, start = loaded.blocks[-1], len(loaded) - loaded.blocks[-1].tokens
    assert {start + after: bodies(state) for after, state in found.states.items()} == {
        fetch.reach: bodies(arrays(spec.state_shapes(fetch.reach), 500 + fetch.reach))
    }
    tier._remote.pool.free(loaded.block_ids, agent_id)
    return fetch.reach


def bodies(of: Arrays) -> list[bytes]:
    return [bytes(body) for body in page_bodies(of)]


def places(tier: PageTier) -> dict[int, tuple[BlockPlace, BlockPlace]]:
    """Return the block and the state of each position of STATES."""
    spec, together = tier._remote.spec, tier._layout.together
    manifest = ContextManifest.of("alice", TOKENS, spec, STATES)
    blocks = manifest.places(spec, together)
    states = [*(block.state() for block in blocks), *manifest.inner_places(spec, together)]
    return {state.end: (blocks[(state.end - 1) // BLOCK], state) for state in states}


def lose(tier: PageTier, *lost: BlockPlace) -> None:
    """Delete the pages of blocks or states, as an eviction does. Their seals stay."""
    words = tier._connection.server.words
    raw_commands = [words.delete(place.block[0], (place.block[1],)) for place in lost]
    tier.loop.run(tier._connection.server.ask(raw_commands))


def asked(tier: PageTier, home: Home) -> int:
    """Return the number of requests to servers so far."""
    several = tier._connection.server._several
    return several.peers.round_trips if several else home.clients[0].info()["total_commands_processed"]


def test_a_context_is_restored_after_its_last_state(tier: PageTier) -> None:
    assert tier.save(context(tier._remote.spec))
    assert reached(tier) == 90
    assert reached(tier, TOKENS, "bob") == 88  # a token is left to compute
    assert reached(tier, (*TOKENS, 1), "bob") == 90
    assert reached(tier, (*TOKENS[:46], 1, 2, 3), "bob") == 45
    assert not tier.misses


@pytest.mark.parametrize(
    ("lost", "left"), [((90,), 88), ((90, 88, 80), 72), ((90, 88, 80, 72, 64, 56, 48), 47), ((47, 90, 56), 88)]
)
def test_the_next_state_is_used_if_the_last_ones_are_lost(tier: PageTier, lost: tuple[int, ...], left: int) -> None:
    assert tier.save(context(tier._remote.spec))
    lose(tier, *(places(tier)[position][1] for position in lost))
    assert reached(tier) == left
    assert reached(tier, (*TOKENS, 1), "bob") == left
    assert tier.misses == {"gap": 2}


def test_another_writer_of_a_block_keeps_its_states(tier: PageTier) -> None:
    """An engine that has restored a prompt after one state does not have the others."""
    spec = tier._remote.spec
    for count, states in ((86, (13, 45, 82, 84)), (86, (47,)), (87, (87,))):
        assert tier.publish(context(spec, states, count))
    for state in (13, 45, 47, 82, 84, 87):
        assert reached(tier, (*TOKENS[:state], 1), "bob") == state
    lose(tier, places(tier)[47][1])
    assert tier.publish(context(spec, (87,), 87))
    assert reached(tier, (*TOKENS[:47], 1), "bob") == 45
    assert not tier.unsaved


def stored_states(home: Home) -> int:
    return sum(len(client.keys("state:*")) for client in home.clients)


def test_a_later_save_keeps_the_states_before_it(tier: PageTier, home: Home) -> None:
    """A save by an engine that has restored a context after one state does not delete the others."""
    spec = tier._remote.spec
    for count, states in ((86, (13, 45, 82, 84)), (86, (47,)), (87, (86,))):
        assert tier.save(context(spec, states, count))
    for state in (13, 45, 47, 82, 84, 86):
        assert reached(tier, (*TOKENS[:state], 1), "bob") == reached(tier, (*TOKENS[:state], 1)) == state
    before = stored_states(home)
    assert tier.save(replace(context(spec, (45,), 47), tokens=(*TOKENS[:45], 1, 2)))
    assert stored_states(home) < before  # without those after the tokens in common
    assert not tier.unsaved


def test_states_of_an_earlier_turn_stay_in_records(tier: PageTier) -> None:
    """The full blocks of a turn are published before its answer is saved, and the states in them were stored before."""
    spec = tier._remote.spec
    first = replace(context(spec, (45,), 47), tokens=(*TOKENS[:45], 1, 2))  # without the thoughts of its answer, say
    assert tier.save(first)
    assert tier.publish(context(spec, (45,), 86), label=None, answering=True)
    assert tier.save(context(spec, (45, 86), 87))
    assert reached(tier, (*TOKENS[:46], 1), "bob") == 45


@pytest.mark.parametrize("tier", ["rows and states"], indirect=True)
def test_a_state_behind_a_lost_block_is_not_used(tier: PageTier) -> None:
    assert tier.save(context(SPEC))
    lose(tier, places(tier)[56][0])
    assert reached(tier) == 48
    assert reached(tier, (*TOKENS, 1), "bob") == 48
    lose(tier, places(tier)[8][0])
    assert reached(tier) == reached(tier, TOKENS, "bob") == 0


@pytest.mark.parametrize("tier", ["rows and states"], indirect=True)
def test_lost_states_cost_one_more_lookup(tier: PageTier, home: Home) -> None:
    """Not one for each: after the first, one without a lease finds out which are there."""
    assert tier.save(context(SPEC))
    reached(tier)

    def requests() -> int:
        before = asked(tier, home)
        reached(tier, TOKENS, "bob")
        return asked(tier, home) - before

    usual = requests()
    lose(tier, *(places(tier)[position][1] for position in (88, 80, 72, 64, 56)))
    assert requests() - usual <= 3 * len(home.clients)


@pytest.mark.parametrize("home", ["one server"], indirect=True)
@pytest.mark.parametrize("tier", ["rows and states"], indirect=True)
def test_one_command_leases_blocks_and_one_state(tier: PageTier, home: Home) -> None:
    assert tier.save(context(SPEC))
    lose(tier, places(tier)[88][1])
    (server,) = home.clients
    reached(tier, TOKENS[:84], "bob")
    server.config_resetstat()
    assert reached(tier, TOKENS[:84], "bob") == 80
    stats = server.info("commandstats")
    assert stats["cmdstat_kvpageprefix"]["calls"] == 1
    assert stats["cmdstat_mget"]["calls"] == 1

    def is_leased(place: BlockPlace) -> bool:
        name, page = place.block
        return bool(server.execute_command("KVPAGESTAT", name, 0, 0, page, 0)[b"lease_left_ms"] > 0)

    for position in range(BLOCK, 81, BLOCK):
        block, state = places(tier)[position]
        assert (is_leased(block), is_leased(state)) == (True, position == 80)


def test_a_context_is_loaded_without_room_for_leases(pool: BlockPool) -> None:
    with start_server("--maxmemory", "1mb") as small, small.client() as client:
        tier = PageTier(small.url, SPEC, pool, deadline=40)
        assert tier.save(context(SPEC))
        for page in range(600):
            client.execute_command("KVPAGESET", "full", 0, 0, page, 0, 8, 1, 1000, 0, bytes(1000))
        assert client.execute_command("KVPAGELEASE", "full", 60_000) < 600
        assert reached(tier) == 90
        assert not tier.misses
        tier.close()
