"""Engines publish the tokens that their tiers supplied on their page server, and only authorised users receive them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from browsing import SeenServer, start_seen_server
from rich.console import Console
from test_agent_engine import SYSTEM, Bench
from waiting import eventually, until

from engine.tiers import metrics
from kvpage_server.look.top import _View

TENANT = ("--user", "tenant", "on", ">sesame", "~*:*", "&kvpage:engines:tenant", "+@all")
OTHER = ("--user", "other", "on", ">sesame", "~*:*", "&kvpage:engines", "+@all")
FIGURES = ("--user", "figures", "on", ">open", "%R~*", "+@all")


@pytest.fixture(scope="module")
def seen() -> Iterator[SeenServer]:
    with start_seen_server(*TENANT, *OTHER, *FIGURES) as seen:
        yield seen


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "EVERY_SECONDS", 0.1)


def tokens(seen: SeenServer, **options: object) -> dict[str, float]:
    """By where they were found."""
    received = seen.metrics(**options)
    return {key[1]: count for key, count in received.items() if key[0] == "kvpage_prompt_tokens_total"}


def test_the_store_counts_prompt_tokens_not_computed(seen: SeenServer) -> None:
    bench = Bench(seen.server.url)
    bench.store.publish_statistics()
    until(lambda: seen.metrics()["kvpage_engines",] == 1, "the engine")
    bench.ask("alice", SYSTEM)
    bench.ask("alice", SYSTEM)
    spared = len(SYSTEM) - 1
    wanted = {"none": len(SYSTEM) + 1, "hot": spared, "prefix": 0, "page": 0, "cold": 0}
    until(lambda: tokens(seen) == wanted, f"{wanted}, got {tokens(seen)}")
    with seen.server.client() as client:
        names = {each["lib-name"] for each in client.client_list()}
    assert "kvpage-engine" in names
    bench.store.close()
    assert seen.server.log == "" or "Traceback" not in seen.server.log


def test_several_answers_count_their_prompt_once(seen: SeenServer) -> None:
    bench = Bench(seen.server.url)
    prompt = SYSTEM[::-1]  # one that no other test has stored
    first = bench.submit("alice", prompt)
    others = [bench.submit(f"{i}", prompt, keep=False, leader=first) for i in range(3)]
    bench.run()
    assert [bench.answers[uid].shares_prompt for uid in (first, *others)] == [False, True, True, True]
    figures = bench.store._tally.figures()
    assert (figures["answers"], figures["computed"]) == (4, len(prompt))
    assert not any(tier["tokens"] for tier in figures["tiers"].values())
    bench.store.close()


def test_a_tenant_sees_engines_of_the_same_account(seen: SeenServer) -> None:
    def engines(**options: object) -> float:
        return seen.metrics(**options)["kvpage_engines",]

    benches = [Bench(seen.server.url.replace("//", f"//{user}:sesame@")) for user in ("tenant", "other")]
    for bench in benches:
        bench.store.publish_statistics()
    until(lambda: engines(auth=("figures", "open")) >= 2, "both, of one name")
    until(lambda: engines(auth=("tenant", "sesame")) == 1, "the tenant's engine")
    spared = sum(tokens(seen, auth=("tenant", "sesame")).values())
    benches[0].ask("alice", SYSTEM)
    until(lambda: sum(tokens(seen, auth=("tenant", "sesame")).values()) == spared + len(SYSTEM), "its tokens")
    assert engines(auth=("other", "sesame")) == 0  # it publishes on the common channel
    assert sum(tokens(seen, auth=("other", "sesame")).values()) == 0
    for bench in benches:
        bench.store.close()


@pytest.mark.parametrize(("user", "shown"), [("tenant", True), ("other", False)])
def test_top_shows_the_engines_visible_to_its_user(seen: SeenServer, user: str, shown: bool) -> None:
    url = seen.server.url.replace("//", f"//{user}:sesame@")
    bench = Bench(url)
    bench.store.publish_statistics()
    with seen.server.client(username=user, password="sesame", protocol=3) as client:
        top = _View(client, url)
        assert eventually(lambda: top.as_json()["engines"], within=30.0 if shown else 1.0) is shown
        drawn = Console(width=200, record=True, file=StringIO())
        drawn.print(top.frame())
    assert ("reused" in drawn.export_text()) is shown
    bench.store.close()


def test_an_engine_that_may_not_publish_tries_once_and_works(seen: SeenServer) -> None:
    """Each refusal would be one more in the server's ACL LOG."""
    with seen.server.client() as client:
        client.acl_log_reset()
        client.execute_command("ACL", "SETUSER", "quiet", "on", ">still", "~*", "+@all")
        bench = Bench(seen.server.url.replace("redis://", "redis://quiet:still@"))
        bench.store.publish_statistics()
        until(lambda: client.acl_log(), "a refusal")
        for agent in ("alice", "bob"):
            bench.ask(agent, SYSTEM[:20])
        bench.store.flush_dirty()
        assert not eventually(lambda: client.acl_log()[0]["count"] > 1, within=1.0)
        assert client.keys("manifest:bob:*")
        bench.store.close()


def test_statistics_are_short_and_name_no_agent(seen: SeenServer) -> None:
    bench = Bench(seen.server.url)
    with seen.server.client() as client, client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"{metrics.CHANNEL}:default")
        bench.ask("alice", SYSTEM[:20])
        bench.store.publish_statistics()
        messages: list[Any] = []
        until(lambda: messages.append(channel.get_message(timeout=1.0)) or messages[-1], "a message")
    bench.store.close()
    received = json.loads(messages[-1]["data"])
    assert received.keys() == {"name", "model", "answers", "computed", "used", "room", "tiers", "prefill_rate"}
    assert received["answers"] == 1
    assert received["computed"] + sum(tier["tokens"] for tier in received["tiers"].values()) == 20
    assert "alice" not in json.dumps(received)
