"""Memory by agent: agents by name, with shared prefixes, from the manifests that engines write."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from contexts import SPEC, made, some_tokens
from servers import RunningServer, free_port, start_server
from test_kvpage_cli import kvpage
from waiting import until

# isort: split
import redis

from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server.manifest import ContextManifest, manifest_key
from kvpage_server.observe import memory_by_agent
from kvpage_server.observe.asking import ask
from kvpage_server.observe.context import context_of, pages_of
from kvpage_server.observe.memory_by_agent import Holdings, Known, LookLimits, holdings_of_store

SYSTEM = some_tokens(7, 24)  # the beginning of everybody's prompt: three blocks
TOOLS = some_tokens(8, 16)  # and of agents with tools: two more


class Engine:
    """The keys of an engine's save, without a model."""

    def __init__(self, url: str) -> None:
        self.pool = BlockPool(64)
        self.tier = PageTier(url, SPEC, self.pool)

    def save(self, agent: str, tokens: list[int]) -> None:
        context = made(self.pool, agent, tokens)
        assert self.tier.save(context)
        self.pool.free(context.block_ids)


@pytest.fixture
def engine(server: RunningServer, client: redis.Redis) -> Iterator[Engine]:
    engine = Engine(server.url)
    yield engine
    engine.tier.close()


@pytest.fixture
def three(engine: Engine) -> Engine:
    """Two of them have tools, and one of these is a tenant's."""
    engine.save("alice", [*SYSTEM, *TOOLS, *some_tokens(1, 12)])
    engine.save("bob", [*SYSTEM, *TOOLS, *some_tokens(2, 4)])
    engine.save("carol", [*SYSTEM, *some_tokens(3, 8)])
    return engine


def look(server: RunningServer, limits: LookLimits = LookLimits()) -> Holdings:  # noqa: B008
    with server.client(protocol=3) as client:
        return ask(client, holdings_of_store(limits))


def test_agents_are_known_by_name_model_tokens_and_time(server: RunningServer, three: Engine) -> None:
    holdings = look(server)
    assert [agent.agent_id for agent in holdings.agents] == ["alice", "bob", "carol"]
    alice = holdings.agents[0]
    assert (alice.tokens, alice.found, alice.missing) == (52, 52, 0)
    assert [block.tokens for block in alice.blocks] == [8, 8, 8, 8, 8, 8, 4]
    assert alice.manifest.model == SPEC.model_id
    assert time.time() - 60 < alice.manifest.saved_ms / 1000 <= time.time() + 1
    assert alice.manifest.created_ms == alice.manifest.saved_ms
    assert holdings.requests == ()
    assert holdings.cut == ()


def test_a_beginning_that_agents_share_is_counted_once(server: RunningServer, three: Engine) -> None:
    holdings = look(server)
    assert [(prefix.agents, prefix.tokens, prefix.blocks) for prefix in holdings.prefixes] == [
        (("alice", "bob", "carol"), 24, 3),
        (("alice", "bob"), 40, 5),
    ]
    everything = {block.name: block.bytes for agent in holdings.agents for block in agent.blocks}
    assert holdings.bytes == sum(everything.values())
    alice, bob, carol = holdings.agents
    shared = holdings.prefixes[1].bytes
    assert alice.bytes == shared + alice.own_bytes
    assert bob.bytes == shared + bob.own_bytes
    assert alice.bytes + bob.own_bytes + carol.own_bytes == holdings.bytes


def test_missing_blocks_are_shown_with_their_reason(server: RunningServer, client: redis.Redis, three: Engine) -> None:
    alice = look(server).agents[0]
    client.execute_command("KVPAGEDEL", alice.blocks[5].name)
    holdings = look(server)
    alice = next(agent for agent in holdings.agents if agent.agent_id == "alice")
    assert (alice.found, alice.missing) == (40, 1)
    with server.client(protocol=3) as asking:
        places = ask(asking, context_of(alice, holdings))
    assert [place.why for place in places] == ["", "", "", "", "", "deleted", ""]
    assert [len(place.agents) for place in places] == [3, 3, 3, 2, 2, 1, 1]
    assert {place.tier for place in places if place.block.complete} == {"memory"}


def test_the_pages_of_a_block_have_norms(server: RunningServer, three: Engine) -> None:
    block = look(server).agents[0].blocks[0]
    with server.client(protocol=3) as client:
        pages = ask(client, pages_of(block.name))
    assert pages is not None
    assert pages.tokens == 8
    assert pages.norms is not None
    assert pages.norms.shape == (pages.layers, len(pages.planes), pages.heads)
    assert (pages.norms >= 0).all()


def test_an_observer_reads_again_only_used_contexts(server: RunningServer, client: redis.Redis, three: Engine) -> None:
    """Else the hit ratio of a store that is looked at would be that of the looks."""
    known = Known()

    def reads() -> int:
        return int(client.info("stats")["keyspace_hits"])

    with server.client(protocol=3) as asking:
        asking.execute_command("CLIENT", "NO-TOUCH", "ON")
        until(lambda: client.object("idletime", min(client.keys("manifest:*"))) >= 4, "some idle seconds")
        before = reads()
        ask(asking, holdings_of_store(known=known))
        assert reads() > before
        before = reads()
        assert len(ask(asking, holdings_of_store(known=known)).agents) == 3
        assert reads() == before
        three.save("alice", some_tokens(1, 12))
        found = {agent.agent_id: agent.tokens for agent in ask(asking, holdings_of_store(known=known)).agents}
    assert found == {"alice": 12, "bob": 44, "carol": 32}


def test_an_observer_finds_changes_without_reading_every_key(
    server: RunningServer, client: redis.Redis, three: Engine
) -> None:
    client.mset({f"string-{number}": "x" for number in range(20_000)})
    for number in range(300):
        client.execute_command("KVPAGESET", f"request-{number}", 0, 0, 0, 0, 1, 8, 8, 0, bytes(128))
    known, commands = Known(), list[int]()
    with server.client(protocol=3) as asking:

        def look_on() -> Holdings:
            before = client.info("stats")["total_commands_processed"]
            holdings = ask(asking, holdings_of_store(known=known))
            commands.append(client.info("stats")["total_commands_processed"] - before)
            return holdings

        first = look_on()
        three.save("dave", [*SYSTEM, *some_tokens(4, 8)])
        client.delete(*client.keys("manifest:bob:*"))
        client.execute_command("KVPAGEDEL", "request-7")
        client.execute_command("KVPAGESET", "request-8", 0, 1, 0, 0, 1, 8, 8, 0, bytes(128))
        second = look_on()
        looks = [look_on() for _ in range(4)]
    assert {agent.agent_id for agent in first.agents} == {"alice", "bob", "carol"}
    assert {agent.agent_id for agent in second.agents} == {"alice", "carol", "dave"}
    assert (len(first.requests), len(second.requests), second.unreadable) == (300, 300, ())  # one of bob's blocks
    assert 2 in {request.pages for request in looks[-1].requests}
    assert commands[0] > 300
    assert max(commands[1:]) < 250


def test_an_observation_is_bounded_and_reports_that(server: RunningServer, three: Engine) -> None:
    assert [agent.agent_id for agent in look(server, LookLimits(agents=2)).agents] == ["alice", "bob"]
    assert look(server, LookLimits(agents=2)).cut == ("agents",)
    assert "blocks" in look(server, LookLimits(blocks=4)).cut


def test_junk_takes_no_agents_place(server: RunningServer, client: redis.Redis, three: Engine) -> None:
    for number in range(300):
        client.set(f"manifest:a-{number}:0", f"{number:016}junk")
    holdings = look(server, LookLimits(agents=3))
    assert [agent.agent_id for agent in holdings.agents] == ["alice", "bob", "carol"]
    assert (len(holdings.unreadable), holdings.cut) == (300, ())


def test_junk_is_known_and_read_again_when_it_has_changed(
    server: RunningServer, client: redis.Redis, three: Engine
) -> None:
    (key,) = client.keys("manifest:alice:*")
    raw, known = client.get(key), Known()
    client.set(key, b"junk")
    with server.client(protocol=3) as asking:
        for _ in range(2):
            assert ask(asking, holdings_of_store(known=known)).unreadable == (key,)
        client.set(key, raw)
        holdings = ask(asking, holdings_of_store(known=known))
    assert (len(holdings.agents), holdings.unreadable) == (3, ())


def test_a_look_counts_as_no_use(server: RunningServer, client: redis.Redis, three: Engine) -> None:
    (key,) = client.keys("manifest:alice:*")
    used = client.object("idletime", key)
    time.sleep(2.1)
    assert kvpage("ls", url=server.url)[0] == 0
    assert client.object("idletime", key) >= used + 2


def test_a_second_save_keeps_when_the_agent_began(server: RunningServer, engine: Engine) -> None:
    engine.save("alice", some_tokens(1, 12))
    (first,) = look(server).agents
    time.sleep(0.01)
    engine.save("alice", some_tokens(1, 20))
    (second,) = look(server).agents
    assert second.manifest.created_ms == first.manifest.created_ms
    assert second.manifest.saved_ms > first.manifest.saved_ms
    assert engine.tier.fork("alice", "twin")
    assert {agent.agent_id: agent.tokens for agent in look(server).agents} == {"alice": 20, "twin": 20}


def test_manifests_of_earlier_versions_are_read(server: RunningServer, client: redis.Redis, three: Engine) -> None:
    (key,) = client.keys("manifest:alice:*")
    raw = client.get(key)
    received = json.loads(raw[17:])
    older = {name: received[name] for name in ("format", "fingerprint", "tokens", "chain")}
    found = memory_by_agent.parse(key, b"0123456789abcdef " + json.dumps(older).encode())
    assert found is not None
    assert (found.tokens, len(found.blocks), found.model, found.saved_ms) == (52, 7, "", 0)
    assert found.block_tokens == 8
    assert ContextManifest.parse(raw, "alice", SPEC).tokens[:24] == tuple(SYSTEM)


def test_the_head_of_a_manifest_is_enough(three: Engine, client: redis.Redis) -> None:
    key = manifest_key("alice", SPEC.fingerprint).encode()
    raw = client.get(key)
    head = raw[: raw.index(b'"tokens"') + 20]
    assert memory_by_agent.parse(key, head) == memory_by_agent.parse(key, raw)


@pytest.mark.parametrize("raw", [b"", b"{", b"x" * 100, b'0123456789abcdef {"chain": 5}', b"[" * 100_000, b"\xff{}"])
def test_an_invalid_manifest_is_named_and_harmless(
    server: RunningServer, client: redis.Redis, three: Engine, raw: bytes
) -> None:
    client.set("manifest:<script>alert(1)</script>:0", raw)
    holdings = look(server)
    assert holdings.unreadable == (b"manifest:<script>alert(1)</script>:0",)
    assert len(holdings.agents) == 3


# -- servers side by side ----------------------------------------------------------------------------------------------


@pytest.fixture
def both(server: RunningServer, client: redis.Redis) -> Iterator[tuple[str, RunningServer, Engine]]:
    """The URL of two, the second of them, and an engine that has saved agents there."""
    with start_server() as second:
        url = f"{server.url},{second.url}"
        engine = Engine(url)
        engine.save("alice", [*SYSTEM, *TOOLS, *some_tokens(1, 22 * 8 + 4)])
        for i in range(40):  # ports determine the servers of keys: with so many agents, each server has some
            engine.save(f"bob-{i}", [*SYSTEM, *some_tokens(10 + i, 4 * 8)])
        yield url, second, engine
        engine.tier.close()


def test_servers_side_by_side_are_looked_into_as_one(both: tuple[str, RunningServer, Engine]) -> None:
    url, _, _ = both
    found = json.loads(kvpage("ls", "--json", url=url)[1])
    agents = [(agent["agent"], agent["blocks"], agent["missing_blocks"]) for agent in found["agents"]]
    assert sorted(agents) == sorted([("alice", 28, 0), *((f"bob-{i}", 7, 0) for i in range(40))])
    assert all(agent["idle_seconds"] is not None for agent in found["agents"])
    assert sorted((len(shared["agents"]), shared["blocks"]) for shared in found["shared"]) == [(41, 3)]
    assert (found["requests"], found["unreadable"], found["cut"]) == ([], [], [])
    assert "28 blocks, all stored" in kvpage("why", "alice", url=url)[1]
    (context,) = json.loads(kvpage("stat", "alice", "--json", url=url)[1])["contexts"]
    assert {place["tier"] for place in context["places"]} == {"memory"}
    block = context["places"][7]["block"]
    code, shown, errors = kvpage("verify", block, url=url)
    assert (code, errors) == (0, "")
    assert "all intact" in shown


def test_blocks_on_an_unavailable_server_are_missing_by_name(both: tuple[str, RunningServer, Engine]) -> None:
    url, second, _ = both
    second.stop()
    code, shown, errors = kvpage("ls", "--json", url=url)
    assert code == 2
    assert errors.count(f"cannot reach {second.url}") == 1
    agents = json.loads(shown)["agents"]
    assert 0 < len(agents) < 41
    assert any(agent["missing_blocks"] for agent in agents)
    for agent in agents[:2]:
        code, shown, errors = kvpage("why", agent["agent"], "--json", url=url)
        assert (code, errors.count("cannot reach")) == (2, 1)
        (context,) = json.loads(shown)["contexts"]
        assert {place["why"] for place in context["places"] if not place["there"]} <= {"gone"}
    code, _, errors = kvpage("ls", url=f"{second.url},redis://127.0.0.1:{free_port()}")
    assert code == 2
    assert "cannot reach" in errors


# -- in a terminal -----------------------------------------------------------------------------------------------------


def test_ls_shows_agents_and_shared_prefixes(server: RunningServer, client: redis.Redis, three: Engine) -> None:
    client.execute_command("KVPAGESET", "chat-7", 0, 0, 0, 0, 1, 4, 4, 0, bytes(32))
    code, shown, _ = kvpage("ls", url=server.url)
    assert code == 0
    agents, shared, others = shown.split("\n\n")
    assert agents.splitlines()[1].split()[0] == "alice"
    assert shared.splitlines()[1].startswith("alice, bob, carol  ")
    assert shared.splitlines()[1].split()[3:6] == ["3", "24", "3"]
    assert others.splitlines()[1].split()[:3] == ["chat-7", "1", "1"]
    found = json.loads(kvpage("ls", "--json", url=server.url)[1])
    assert [agent["agent"] for agent in found["agents"]] == ["alice", "bob", "carol"]
    assert found["shared"][0]["tokens"] == 24
    assert found["requests"][0]["request"] == "chat-7"


def test_stat_and_why_know_an_agent(server: RunningServer, client: redis.Redis, three: Engine) -> None:
    code, shown, _ = kvpage("stat", "alice", url=server.url)
    assert code == 0
    assert "52 tokens in 7 blocks" in shown
    assert "3 agents" in shown
    client.execute_command("KVPAGEDEL", look(server).agents[0].blocks[3].name)
    _, shown, _ = kvpage("why", "alice", url=server.url)
    assert "a load would find 24 tokens" in shown
    assert "stored by " in shown
    (context,) = json.loads(kvpage("why", "alice", "--json", url=server.url)[1])["contexts"]
    assert (context["found_tokens"], context["missing_blocks"]) == (24, 1)
    assert context["places"][3]["why"] == "deleted"
    code, _, errors = kvpage("stat", "nobody", url=server.url)
    assert code == 1
    assert "nobody is no agent" in errors
