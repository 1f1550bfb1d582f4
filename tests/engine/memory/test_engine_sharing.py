"""Reuse between the clients of a tenant: `--share none`, `system` or `all`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
from contexts import BLOCK, SPEC, is_true, made, some_tokens
from engine_models import letter_tokenizer
from pools import pool_of
from servers import RunningServer

from engine.chains import Share, Sharing, unnamed_agent
from engine.memory.blocks import block_names
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.startup import sharing
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore

HEAD, MARK = (1, 2), (3, 4, 5)
SYSTEM = (*HEAD, *some_tokens(1, 30), *MARK)
PROMPT = (*SYSTEM, *some_tokens(2, 40))
CLIENTS = ["alice", "bob", unnamed_agent("one"), unnamed_agent("one"), unnamed_agent("other"), "carol@acme"]

pool = pool_of(1024)


def spec_of(share: Share) -> ModelCacheSpec:
    return replace(SPEC, sharing=Sharing(share, HEAD, MARK) if share == "system" else Sharing(share))


@pytest.fixture(params=["none", "system", "all"])
def spec(request: pytest.FixtureRequest) -> ModelCacheSpec:
    return spec_of(request.param)


@pytest.fixture
def stores(spec: ModelCacheSpec, server: RunningServer, pool: BlockPool) -> Iterator[list[AgentCacheStore]]:
    """The stores of two engines on the emptied server."""
    with server.client() as client:
        client.flushall()
    stores = [AgentCacheStore(spec, pool, pages=PageTier(server.url, spec, pool)) for _ in range(2)]
    yield stores
    for store in stores:
        store.close()


def found(store: AgentCacheStore, pool: BlockPool, agent_id: str, tokens: tuple[int, ...]) -> int:
    loaded = store.begin_load(agent_id, tokens, named=not agent_id.startswith("anon-")).result()
    if loaded.blocks:
        assert is_true(loaded.blocks)
        pool.free(loaded.blocks.block_ids, agent_id)
    return loaded.reach


@pytest.mark.parametrize("engine", [0, 1], ids=["in memory", "on the page server"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "without a name"])
def test_a_client_reuses_its_own_and_shared_blocks(
    stores: list[AgentCacheStore], pool: BlockPool, spec: ModelCacheSpec, engine: int, named: bool
) -> None:
    agent = "alice" if named else unnamed_agent("one")
    context = made(pool, agent, PROMPT)
    (stores[0].save if named else stores[0].publish)(context)
    pool.free(context.block_ids, agent)
    stores[0].flush_dirty()
    own = "alice" if named else unnamed_agent("one")
    assert found(stores[engine], pool, own, (*PROMPT, 7)) == len(PROMPT)
    shared = {"none": 0, "system": len(SYSTEM) // BLOCK * BLOCK, "all": len(PROMPT)}[spec.sharing.share]
    assert found(stores[engine], pool, "bob", (*PROMPT, 7)) == shared
    assert found(stores[engine], pool, unnamed_agent("other"), (*PROMPT, 8)) == shared
    assert found(stores[engine], pool, "alice@acme", (*PROMPT, 7)) == 0


def test_another_rule_is_the_reason_of_a_miss(server: RunningServer, pool: BlockPool) -> None:
    context = made(pool, "alice", PROMPT)
    tiers = [PageTier(server.url, spec_of(share), pool) for share in ("none", "all", "system")]
    assert tiers[0].save(context)
    pool.free(context.block_ids, "alice")
    for tier in tiers[1:]:
        assert tier.load("alice") is None
        assert tier.misses == {"share": 1}
    for tier in tiers:
        tier.close()


@hypothesis.given(
    share=st.sampled_from(["none", "system", "all"]),
    head=st.sampled_from([HEAD, ()]),
    texts=st.lists(st.lists(st.sampled_from([3, 4, 5, 6]), max_size=40), min_size=1, max_size=3),
    agent=st.sampled_from(CLIENTS),
    cut=st.integers(0, 60),
)
def test_block_names_do_not_depend_on_later_tokens(
    share: Share, head: tuple[int, ...], texts: list[list[int]], agent: str, cut: int
) -> None:
    """So a prompt, its answer and the part of it that was received have the same names for the same blocks."""
    spec = spec_of(share)
    tokens = (*head, *(token for text in texts for token in text))
    names = block_names(tokens, spec, agent)
    part = block_names(tokens[:cut], spec, agent)
    full = min(cut, len(tokens)) // BLOCK
    assert part[:full] == names[:full]


@hypothesis.given(share=st.sampled_from(["none", "system"]), pair=st.permutations(CLIENTS), text=st.integers(0, 9))
def test_clients_have_no_private_block_in_common(share: Share, pair: list[str], text: int) -> None:
    one, other, *_ = pair
    prompt = (*SYSTEM, *some_tokens(text, 30))
    common = set(block_names(prompt, spec_of(share), one)) & set(block_names(prompt, spec_of(share), other))
    same = {one, other} == set(CLIENTS[2:4])
    shared = len(SYSTEM) // BLOCK if share == "system" and "carol@acme" not in (one, other) else 0
    assert len(common) == (-(-len(prompt) // BLOCK) if same else shared)
    raw = prompt[1:]  # a text that does not begin with a system message
    common = set(block_names(raw, spec_of(share), one)) & set(block_names(raw, spec_of(share), other))
    assert bool(common) == same


def test_a_fork_reuses_its_agents_context_in_memory_and_on_disk(stores: list[AgentCacheStore], pool: BlockPool) -> None:
    context = made(pool, "alice", PROMPT)
    stores[0].save(context)
    pool.free(context.block_ids, "alice")
    stores[0].flush_dirty()
    assert stores[0].fork("alice", "near")
    stores[0].flush_dirty()
    assert stores[1].fork("alice", "far")
    for agent in ("near", "far"):
        for store in stores:
            assert found(store, pool, agent, (*PROMPT, 7)) == len(PROMPT)
    assert stores[1].fork("far", "farther")
    assert found(stores[1], pool, "farther", (*PROMPT, 7)) == len(PROMPT)


def test_a_template_marks_the_end_of_the_system_message() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</' + m.role + '>' }}{% endfor %}"
    )
    found = sharing("system", tokenizer)
    tokens = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    )
    assert tuple(tokens[: len(found.head)]) == found.head
    assert tokenizer.decode(list(found.head)) == "<system>"
    assert tokenizer.decode(list(found.mark)).startswith("</system>")
    assert sharing("none", tokenizer) == Sharing("none")
    for template in ("{{ raise_exception('no system') }}", "{{ messages[-1].content }}", "{{ 9**(9**9) }}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="--share system needs a chat template"):
            sharing("system", tokenizer)
