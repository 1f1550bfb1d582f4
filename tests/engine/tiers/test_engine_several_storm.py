"""Engines that save and load while everything happens to the servers at once: no wrong byte, and no wait without end.

In `make test` it is short. `make soak` does the same for longer.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from contexts import BLOCK, SPEC, is_true, some_tokens
from homes import home_of
from pools import pool_of
from proxy import Weather, start_proxy
from servers import start_server
from test_cluster_faults import announce
from test_engine_several import TOKENS, found, save
from waiting import eventually, until

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import Cluster, Node
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from kvpage_server.client.cluster.topology import slot_of

LONG = pytest.param(20, marks=pytest.mark.soak, id="long")
AGENTS = {f"agent{i}": some_tokens(i, (3 + 4 * i) * BLOCK + i) for i in range(4)}
LOST = {"absent", "evicted", "gap", "gone"}
OF_LOADS = LOST | {"shape", "checksum", "slow", "late", "down", "garbled", "refused", "manifest"}
OF_SAVES = {"gone", "slow", "down", "garbled", "refused"}


pool = pool_of(512)


# -- a storm -----------------------------------------------------------------------------------------------------------


def an_engine(url: str, pool: BlockPool, over: threading.Event, seed: int) -> Counter[str]:
    """Save and load until the end; return the counts of results."""
    chance, came = random.Random(seed), Counter[str]()
    tier = PageTier(url, SPEC, pool, deadline=4)
    while not over.is_set():
        agent, tokens = chance.choice(list(AGENTS.items()))
        begun = time.monotonic()
        if chance.random() < 0.5:
            saved = save(tier, agent, tokens)
            came["saved" if saved and saved.whole else "not saved"] += 1
        else:
            came["found" if found(tier, agent, tokens) else "missed"] += 1
        assert time.monotonic() - begun < 60  # all deadlines together are less than a fifth of that
        over.wait(0.2)
    assert set(tier.misses) <= OF_LOADS
    assert set(tier.unsaved) <= OF_SAVES
    assert bool(tier.misses) >= bool(came["missed"])
    assert bool(tier.unsaved) == bool(came["not saved"])
    tier.close()
    return came


def some_slot(cluster: Cluster) -> tuple[int, Node, Node]:
    """One that has keys, who serves it, and another master."""
    for agent in AGENTS:
        slot = slot_of(f"manifest:{agent}:{SPEC.fingerprint:016x}".encode())
        source = cluster.master_of(slot)
        if source.ask("CLUSTER", "COUNTKEYSINSLOT", slot):
            return slot, source, next(node for node in masters_of(cluster) if node is not source)
    raise LookupError("there are no keys")


def masters_of(cluster: Cluster) -> list[Node]:
    alive = [node for node in cluster.nodes if node.process.poll() is None]
    return [node for node in alive if node.info_of("INFO", "replication")["role"] == "master"]


def serves(node: Node, slot: int) -> bool:
    time.sleep(0.1)
    name = node.ask("CLUSTER", "MYID")
    return any(first <= slot <= last and of[2] == name for first, last, of, *_ in node.ask("CLUSTER", "SLOTS"))


def the_old_way(cluster: Cluster) -> None:
    """A slot is moved key by key."""
    slot, source, target = some_slot(cluster)
    ids = {node.port: node.ask("CLUSTER", "MYID").decode() for node in (source, target)}
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
    while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 2):
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *keys)
        time.sleep(0.02)
    for node in (target, source):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
    until(lambda: serves(target, slot))


def at_once(cluster: Cluster) -> None:
    """A range of slots is moved by Valkey itself."""
    slot, source, target = some_slot(cluster)
    name, own = target.ask("CLUSTER", "MYID"), source.ask("CLUSTER", "MYID").decode()
    slots = {at for at, who in source.slots().items() if who == own}
    last = next(at for at in range(slot, slot + 100) if at + 1 not in slots or at == slot + 99)
    source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, last, "NODE", name)
    until(lambda: serves(target, slot))


def stopped(cluster: Cluster, seconds: float) -> None:
    node = masters_of(cluster)[0]
    node.signal(signal.SIGSTOP)
    time.sleep(seconds)
    node.signal(signal.SIGCONT)
    settled(cluster)


def killed(cluster: Cluster) -> None:
    node = masters_of(cluster)[0]
    node.signal(signal.SIGKILL)
    node.process.wait()
    settled(cluster)


def settled(cluster: Cluster) -> None:
    """There are three masters, who have all slots."""

    def whole() -> bool:
        time.sleep(0.2)
        received = [node.info_of("CLUSTER", "INFO") for node in masters_of(cluster)]
        return len(received) == 3 and all(one["cluster_state"] == "ok" for one in received)

    until(whole)


def in_bad_weather(cluster: Cluster, seconds: float) -> None:
    """Before one node connections break, bytes are lost and late, and bits turn over."""
    node = cluster.masters[2]
    with start_proxy(node.port) as proxy:
        proxy.weather = Weather(flips=60, cuts=30, truncations=30, delays=60, random=random.Random(24))
        announce(node, proxy.port, Cluster(masters_of(cluster), len(masters_of(cluster))))
        time.sleep(seconds)
        proxy.weather = None
        announce(node, 0, Cluster(masters_of(cluster), len(masters_of(cluster))))


def replicas_of(cluster: Cluster) -> list[Node]:
    return [node for node in cluster.nodes if node not in masters_of(cluster) and node.process.poll() is None]


def all_behind(cluster: Cluster, seconds: float) -> None:
    """Wait until the replicas answer, and receive nothing new from their masters."""
    replicas = replicas_of(cluster)
    for node in replicas:
        node.ask("CONFIG", "SET", "masteruser", "nobody", "masterauth", "nothing")
        node.ask("CLIENT", "KILL", "TYPE", "master")
    time.sleep(seconds)
    for node in replicas:
        node.ask("CONFIG", "SET", "masteruser", "", "masterauth", "")
    for node in replicas:
        until(lambda node=node: node.info_of("INFO", "replication")["master_link_status"] == "up")


@pytest.mark.parametrize("seconds", [pytest.param(1, id="short"), LONG])
def test_three_engines_in_a_cluster_storm_find_no_wrong_byte(pool: BlockPool, seconds: float) -> None:
    over = threading.Event()
    with valkey_cluster.run() as cluster, ThreadPoolExecutor(3) as threads:
        before = PageTier(cluster.url, SPEC, pool, deadline=40)
        for agent, tokens in AGENTS.items():
            assert save(before, agent, tokens)
        urls = [cluster.url, cluster.url, f"{cluster.url}?read_from_replicas=true"]
        engines = [threads.submit(an_engine, url, pool, over, seed) for seed, url in enumerate(urls)]
        try:
            the_old_way(cluster)
            at_once(cluster)
            all_behind(cluster, seconds)
            in_bad_weather(cluster, seconds)
            stopped(cluster, seconds)
            killed(cluster)
        finally:
            over.set()
        came = sum((engine.result() for engine in engines), Counter())
        assert came["saved"]
        assert came["found"]

        def whole() -> bool:
            saved = [save(before, agent, tokens) for agent, tokens in AGENTS.items()]
            return all(one and one.whole for one in saved)

        assert eventually(whole)
        assert {agent: found(before, agent) for agent in AGENTS} == {a: len(tokens) for a, tokens in AGENTS.items()}
        before.close()


# -- a model -----------------------------------------------------------------------------------------------------------

Context = tuple[int, ...] | None


class Model:
    """Permitted contexts of every agent: one, or one of several if a save may have failed."""

    def __init__(self, tiers: list[PageTier], seed: int) -> None:
        self.tiers = tiers
        self.kept: dict[str, set[Context]] = {agent: {None} for agent in AGENTS}
        self.chance = random.Random(seed)
        self.contexts = [TOKENS[: n * BLOCK + 3] for n in (0, 3, 9, 14)] + [TOKENS[::-1][: 7 * BLOCK]]

    def step(self) -> None:
        tier = self.chance.choice(self.tiers)
        agent, other = self.chance.sample(sorted(self.kept), 2)
        match self.chance.choice(["save", "save", "fork", "delete", "load", "load"]):
            case "save":
                tokens = self.chance.choice(self.contexts)
                saved = save(tier, agent, tokens)
                self.may_have(agent, {tokens}, sure=bool(saved and saved.whole))
            case "fork":
                self.may_have(other, self.kept[agent] - {None}, sure=tier.fork(agent, other))
            case "delete":
                self.may_have(agent, {None}, sure=tier.delete(agent))
            case "load":
                self.check(tier, agent)

    def may_have(self, agent: str, contexts: set[Context], *, sure: bool) -> None:
        self.kept[agent] = contexts if sure else self.kept[agent] | contexts

    def check(self, tier: PageTier, agent: str) -> None:
        """Check that a loaded context is permitted, or a prefix of a permitted one."""
        loaded = tier.load(agent)
        if loaded is None:
            return
        assert is_true(loaded)
        possible = [tokens for tokens in self.kept[agent] if tokens is not None]
        assert any(tokens[: len(loaded)] == loaded.tokens for tokens in possible), agent
        tier._remote.pool.free(loaded.block_ids, agent)


@pytest.mark.parametrize("steps", [pytest.param(80, id="short"), pytest.param(1500, marks=pytest.mark.soak, id="long")])
@pytest.mark.parametrize("kind", ["side by side", "cluster"])
def test_blocks_of_a_manifest_are_right_after_any_server_deaths(
    request: pytest.FixtureRequest, pool: BlockPool, kind: str, steps: int
) -> None:
    """A killed server restarts empty, or a server was only silent for a while."""
    with ExitStack() as stack:
        stop: list[Callable[[signal.Signals], Any]]
        if kind == "cluster":
            cluster = request.getfixturevalue("masters")
            home, stop = stack.enter_context(home_of(cluster=cluster)), [node.signal for node in cluster.masters]
        else:
            servers = [stack.enter_context(start_server()) for _ in range(3)]
            home, stop = stack.enter_context(home_of(servers)), [one.process.send_signal for one in servers]
        home.flush()
        tiers = [PageTier(home.url, SPEC, pool, deadline=1) for _ in range(2)]
        model, silent = Model(tiers, seed=steps), None
        try:
            for step in range(steps):
                if step % 16 == 4:
                    home.clients[model.chance.randrange(3)].flushall()
                if step % 32 == 12:
                    silent = model.chance.choice(stop)
                    silent(signal.SIGSTOP)
                if step % 32 == 18 and silent:
                    silent(signal.SIGCONT)
                    silent = None
                model.step()
        finally:
            if silent:
                silent(signal.SIGCONT)
        for agent in model.kept:
            model.check(tiers[0], agent)
            assert eventually(lambda agent=agent: (saved := save(tiers[0], agent, TOKENS)) and saved.whole)
            assert eventually(lambda agent=agent: found(tiers[1], agent) == len(TOKENS))
        assert set(tiers[0].misses) | set(tiers[1].misses) <= OF_LOADS
        for tier in tiers:
            tier.close()
