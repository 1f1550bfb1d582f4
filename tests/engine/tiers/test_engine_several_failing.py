"""Several servers that fail, or that the engine's list names wrongly: pages are lost, never an answer.

Losses are counted with their reason, no call exceeds a deadline, and a restarted server is used again.
"""

from __future__ import annotations

import asyncio
import re
import signal
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from contexts import BLOCK, SPEC, made, some_tokens
from homes import Home, home_of
from pools import pool_of
from servers import RunningServer, free_port, start_server
from test_engine_several import TOKENS, found, save
from waiting import eventually, until

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import SLOTS, Cluster
from engine.pool import BlockPool
from engine.tiers import flush, metrics
from engine.tiers.pages import PageTier
from engine.tiers.server import reference_marks
from engine.tiers.server.block_writer import Saved
from engine.tiers.server.connection import State
from engine.tiers.server.manifest import manifest_key
from engine.tiers.store import AgentCacheStore

pool = pool_of(256)


# -- unavailable servers -----------------------------------------------------------------------------------------------


def partly_in(lost: redis.Redis, home: Home, tier: PageTier) -> tuple[tuple[int, ...], int]:
    """A saved context that has blocks in `lost`, and the position of the first of them. Ports decide which has."""
    for seed in count(100):
        tokens = some_tokens(seed, len(TOKENS))
        assert save(tier, tokens=tokens)
        for i, block in enumerate(home.tagged(tokens, SPEC)):
            if lost in home.having(f"seal:{block}"):
                return tokens, i
    raise AssertionError


def test_an_unavailable_server_costs_its_pages_only(pool: BlockPool) -> None:
    """It is killed, and restarts empty."""
    port = free_port()
    with start_server() as one, ExitStack() as stack:
        lost = stack.enter_context(start_server(port=port, killed=True))
        with home_of([one, lost]) as home:
            tier = PageTier(home.url, SPEC, pool, deadline=40)
            context, first = partly_in(home.clients[1], home, tier)
            lost.process.kill()
            lost.process.wait()
            others = [some_tokens(seed, 9 * BLOCK) for seed in range(30, 42)]
            for _ in range(2):
                assert found(tier, "alice", context) == first * BLOCK
                assert tier.misses.pop("gone")
                assert save(tier, tokens=context)  # of existing blocks
            for i, tokens in enumerate(others):
                saved = save(tier, f"agent{i}", tokens)
                assert saved
                assert found(tier, "anybody", tokens) == BLOCK * (saved.blocks_written + saved.blocks_present)
                assert saved.whole == (tier.tokens_of(f"agent{i}") == len(tokens))
            assert tier.unsaved.keys() == {"gone"}
            assert tier.breaker.state == State.CLOSED
            stack.close()
            with start_server(port=port):
                assert save(tier, tokens=context)
                assert found(tier) == len(context)
            tier.close()


def test_saves_are_completed_after_an_outage_of_one_server(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flush, "INCOMPLETE_SECONDS", 0.1)
    monkeypatch.setattr(metrics, "EVERY_SECONDS", 0.1)
    port = free_port()
    with start_server() as one, ExitStack() as stack:
        lost = stack.enter_context(start_server(port=port, killed=True))
        url = f"redis://127.0.0.1:{one.port},redis://127.0.0.1:{port}"
        pages = PageTier(url, SPEC, pool, deadline=20)
        pages.do_in_background(lambda connection: metrics.publish_statistics(connection, lambda: "{}"))
        store = AgentCacheStore(SPEC, pool, pages=pages)
        with lost.client() as client:
            until(lambda: "cmdstat_publish" in client.info("commandstats"), "a heartbeat")
        lost.process.kill()
        lost.process.wait()
        agents = {f"agent{seed}": some_tokens(seed, 9 * BLOCK) for seed in range(12)}
        for agent, tokens in agents.items():
            context = made(pool, agent, tokens)
            store.save(context)
            pool.free(context.block_ids, agent)
        store.flush_dirty()
        figures = store.metrics()
        assert figures.dirty_agents > 0
        assert figures.page.saves == len(agents) - figures.dirty_agents
        assert figures.unsaved["page"] >= figures.dirty_agents
        assert store.save_failures == {"page": "gone"}
        assert "written to the page server again" not in caplog.text
        until(lambda: store.outage, "an outage of one server")
        assert (store.outage and store.outage.reason) == "down"
        stack.close()
        with start_server(port=port):
            until(lambda: not store.metrics().dirty_agents, "every context is saved")
            until(lambda: store.outage is None, "the end of the outage")
            until(lambda: "contexts are written to the page server again" in caplog.text, "the log")
            assert store.save_failures == {}
            events = re.findall(r"(lost connection|connected again) to the page server at (\S+)", caplog.text)
            assert events == [(event, f"redis://127.0.0.1:{port}") for event in ("lost connection", "connected again")]
            assert caplog.text.count("contexts cannot be written to the page server (gone)") == 1
            assert caplog.text.count("contexts are written to the page server again") == 1
            tier = PageTier(url, SPEC, pool, deadline=20)
            assert all(tier.tokens_of(agent) == len(tokens) for agent, tokens in agents.items())
            tier.close()
        assert store.close() == 0  # it does not know whether the server that has ended has lost contexts


def test_a_full_server_keeps_failing_until_it_takes_all(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other server takes contexts meanwhile."""
    monkeypatch.setattr(flush, "RETRY_SECONDS", 0.1)
    with start_server() as one, start_server("--maxmemory-policy", "noeviction") as full, full.client() as client:
        pages = PageTier(f"redis://127.0.0.1:{one.port},redis://127.0.0.1:{full.port}", SPEC, pool, deadline=20)
        store = AgentCacheStore(SPEC, pool, pages=pages)
        client.config_set("maxmemory", 1)
        figures = store.metrics()
        for seed in count():  # until both servers have a part of some context, which ports decide
            context = made(pool, f"agent{seed}", some_tokens(seed, BLOCK))
            store.save(context)
            pool.free(context.block_ids, context.agent_id)
            store.flush_dirty()
            figures = store.metrics()
            if seed >= 8 and figures.dirty_agents and figures.page.saves:
                break
        assert figures.page.saves == seed + 1 - figures.dirty_agents
        assert store.save_failures == {"page": "full"}
        assert caplog.text.count("contexts cannot be written to the page server (full)") == 1
        assert "contexts are written to the page server again" not in caplog.text
        client.config_set("maxmemory", 0)
        until(lambda: not store.metrics().dirty_agents, "every context is saved")
        assert store.save_failures == {}
        until(lambda: caplog.text.count("contexts are written to the page server again") == 1, "the end in the log")
        for seed in range(8):  # its block is found for prompts that end otherwise
            diverging = (*some_tokens(seed, BLOCK)[:-1], 96)
            assert found(pages, "anybody", diverging) == BLOCK
        store.close()


def test_a_server_with_another_password_costs_its_pages_only(pool: BlockPool) -> None:
    with start_server() as one, start_server() as locked, locked.client() as client:
        tier = PageTier(f"redis://127.0.0.1:{one.port},redis://127.0.0.1:{locked.port}", SPEC, pool, deadline=40)
        client.config_set("requirepass", "secret")
        tokens = {f"agent{seed}": some_tokens(seed, BLOCK) for seed in range(64)}
        saved = {agent: save(tier, agent, some) for agent, some in tokens.items()}
        whole = {agent for agent, result in saved.items() if result and result.whole}
        assert 0 < len(whole) < len(tokens)
        assert set(tier.agents()) == whole
        assert tier.unsaved == {"gone": len(tokens) - len(whole)}
        assert all(found(tier, agent, tokens[agent]) == BLOCK for agent in whole)
        client.config_set("requirepass", "")
        for agent, some in tokens.items():
            again = save(tier, agent, some)
            assert again
            assert again.whole
        tier.close()


def test_agents_deleted_in_a_save_stay_deleted_in_an_outage(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server with the mark of the deletion refuses everything before the save has read it again."""
    replace_manifest = reference_marks._replace_manifest
    with start_server() as one, start_server() as locked, locked.client() as client:
        url = f"redis://127.0.0.1:{one.port},redis://127.0.0.1:{locked.port}"
        deleting, tier = PageTier(url, SPEC, pool, deadline=40), PageTier(url, SPEC, pool, deadline=40)

        async def after_a_deletion(connection: Any, key: str, manifest: bytes | None) -> bytes | None:
            if manifest is None or connection is not tier._connection:
                return await replace_manifest(connection, key, manifest)
            assert await asyncio.to_thread(deleting.delete, key.split(":")[-2])
            replaced = await replace_manifest(connection, key, manifest)
            client.config_set("requirepass", "secret")
            client.client_kill_filter(_type="normal", skipme=True)
            return replaced

        results = set()
        for seed in range(24):
            context = made(pool, f"agent{seed}", some_tokens(seed, BLOCK))
            assert deleting.save(context)
            if not client.exists(manifest_key(context.agent_id, SPEC.fingerprint)):  # else it cannot be deleted again
                with monkeypatch.context() as patched:
                    patched.setattr(reference_marks, "_replace_manifest", after_a_deletion)
                    saved = tier.save(context)
                results.add(saved and saved.whole)
                client.config_set("requirepass", "")
                assert context.agent_id not in tier.agents()
            pool.free(context.block_ids, context.agent_id)
        assert results == {True, False}, "the marks are on both servers"
        deleting.close()
        tier.close()


def test_deleted_agents_stay_deleted_while_a_server_is_away(pool: BlockPool) -> None:
    """The marks of some deletions are on a server that refuses everything meanwhile."""
    with start_server() as one, start_server() as locked, locked.client() as client:
        url = f"redis://127.0.0.1:{one.port},redis://127.0.0.1:{locked.port}"
        deleting = PageTier(url, SPEC, pool, deadline=40)
        contexts = [made(pool, f"agent{seed}", some_tokens(seed, BLOCK)) for seed in range(48)]
        for context in contexts:
            assert deleting.save(context)
            assert deleting.delete(context.agent_id)
        deleting.close()
        client.config_set("requirepass", "secret")
        tier = PageTier(url, SPEC, pool, deadline=40)
        away = [tier.save(context, idle=60) for context in contexts]  # those of an engine that used them before
        assert len({saved and saved.whole for saved in away}) == 2
        assert not tier.agents()
        client.config_set("requirepass", "")
        assert [tier.save(context, idle=60) for context in contexts] == [Saved(0, 0, 0)] * len(contexts)
        assert not tier.agents()
        for context in contexts:
            pool.free(context.block_ids, context.agent_id)
        tier.close()


def test_a_silent_node_costs_its_pages_within_the_deadline(masters: Cluster, pool: BlockPool) -> None:
    with home_of(cluster=masters) as home:
        home.flush()
        tier = PageTier(home.url, SPEC, pool, deadline=8)
        assert save(tier)
        stopped = home.having(f"seal:{home.tagged(TOKENS, SPEC)[4]}")[0]
        node = masters.masters[[id(client) for client in home.clients].index(id(stopped))]
        node.signal(signal.SIGSTOP)
        try:
            assert found(tier, "alice", TOKENS) <= 4 * BLOCK
            assert set(tier.misses) <= {"gone", "gap"}
            assert tier.breaker.state == State.CLOSED
        finally:
            node.signal(signal.SIGCONT)
        assert eventually(lambda: found(tier, "alice", TOKENS) == len(TOKENS))
        tier.close()


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_cluster_that_starts_later_is_found(pool: BlockPool) -> None:
    port = free_port()
    tier = PageTier(f"valkey-cluster://127.0.0.1:{port}", SPEC, pool, deadline=2)
    assert found(tier, "alice", TOKENS) == 0
    assert save(tier) is None
    assert tier.agents() == []
    assert (tier.misses, tier.unsaved) == ({"down": 1}, {"down": 1})
    with tempfile.TemporaryDirectory() as directory:
        node = valkey_cluster._start(
            Path(directory, "node"), port, free_port(), ["--cluster-require-full-coverage", "no"]
        )
        try:
            until(lambda: node.log.count("Ready to accept"))
            for first in (0, SLOTS // 2):
                before = sum(tier.unsaved.values())
                saved = save(tier)  # none, or half of the slots, are served
                assert saved is None or not saved.whole
                assert found(tier, "alice", TOKENS) < len(TOKENS)
                assert sum(tier.unsaved.values()) == before + 1
                node.ask("CLUSTER", "ADDSLOTSRANGE", first, first + SLOTS // 2 - 1)
            assert eventually(lambda: (saved := save(tier)) and saved.whole)
            assert found(tier) == len(TOKENS)
        finally:
            valkey_cluster._end([node])
    tier.close()


def test_a_user_without_rights_on_a_cluster_saves_nothing(masters: Cluster, pool: BlockPool) -> None:
    with home_of(cluster=masters) as home:
        home.flush()
        whole = PageTier(home.url, SPEC, pool, deadline=40)
        assert save(whole)
        for node in masters.masters:
            node.ask("ACL", "SETUSER", "engine", "on", ">secret", "~*", "+@all", "-set")
        for user, password in (("engine", "secret"), ("engine", "wrong")):
            url = f"valkey-cluster://{user}:{password}@{masters.addresses}"
            tier = PageTier(url, SPEC, pool, deadline=40)
            assert save(tier, "bob", TOKENS[::-1]) is None
            assert tier.unsaved == {"refused": 1}
            assert found(tier) == (len(TOKENS) if password == "secret" else 0)
            tier.close()
        whole.close()


def test_the_rights_that_are_documented_are_enough(masters: Cluster, pool: BlockPool) -> None:
    text = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    named = re.findall(r"`([^`]+)`", text.partition("user needs the keys")[2].partition("Other keys")[0])
    rules = ["~" + name if "*" in name else "+" + name for name in named]
    with home_of(cluster=masters) as home:
        home.flush()
        for node in masters.masters:
            node.ask("ACL", "SETUSER", "modest", "on", ">secret", "+@read", "+@write", *rules)
            node.ask("ACL", "LOG", "RESET")
        tier = PageTier(f"valkey-cluster://modest:secret@{masters.addresses}", SPEC, pool, deadline=40)
        for agent, tokens in (("alice", TOKENS[: 3 * BLOCK]), ("alice", TOKENS), ("bob", TOKENS)):
            assert save(tier, agent, tokens)
            assert found(tier, agent, tokens) == len(tokens)
        assert tier.loop.run(tier.claim("name", 10))
        assert tier.loop.run(tier.renew("name", 20))
        assert tier.loop.run(tier.release("name"))
        assert tier.delete("alice")
        assert tier.delete("bob")
        assert home.keys() == {"refs:deleted:alice", "refs:deleted:bob"}
        tier.close()
        log = [one for node in masters.masters for one in node.ask("ACL", "LOG")]
        assert {one[one.index(b"object") + 1] for one in log} <= {b"client|setinfo"}


def test_a_server_without_cluster_mode_is_refused_unchanged(
    server: RunningServer, masters: Cluster, pool: BlockPool
) -> None:
    tier = PageTier(f"valkey-cluster://127.0.0.1:{server.port}", SPEC, pool)
    assert save(tier) is None
    assert found(tier, "alice", TOKENS) == 0
    assert (tier.misses, tier.unsaved) == ({"refused": 1}, {"refused": 1})
    tier.close()
    with home_of(cluster=masters) as home:
        home.flush()
        tier = PageTier(home.url, SPEC, pool, deadline=40)
        assert save(tier)
        block, own = home.tagged(TOKENS, SPEC)[4], home.keys()
        client = home.having(f"seal:{block}")[0]
        client.delete(f"kv:{block}:block:0", f"refs:{block}")
        client.rpush(f"kv:{block}:block:0", "somebody's list")
        assert found(tier, "alice", TOKENS) == 0
        assert tier.misses == {"refused": 1}
        client.set(f"{{{block[1:33]}}}:theirs", "kept")
        assert tier.delete("alice")
        assert home.keys() - own == {f"{{{block[1:33]}}}:theirs", "refs:deleted:alice"}
        tier.close()


@pytest.mark.parametrize("url", ["redis://a:1,redis://a:1", "valkey-cluster://a:1,", "redis://a:1,b:2"])
def test_an_invalid_url_is_refused_before_any_request(url: str, pool: BlockPool) -> None:
    with pytest.raises(ValueError, match=r"named 2 times|has no host|several servers are"):
        PageTier(url, SPEC, pool)
