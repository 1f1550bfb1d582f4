"""The page server's page in a browser: it shows INFO's values and memory by agent, and never runs names as code."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import pytest
import redis
from browsers import CHROMIUM, NO_CHROMIUM, chromium, faults, fits_a_phone, says, shown, stays_fluid
from browsing import SeenServer, start_seen_server
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)]

LAYERS, HEADS, TOKENS = 3, 2, 16
BODY = bytes(range(256)) * (LAYERS * HEADS * 2 * TOKENS * 8 * 4 // 256)  # float32, 8 numbers a head
SCRIPT = "<img/src=x/onerror=alert(1)>"
TURNED = "\N{RIGHT-TO-LEFT OVERRIDE}gnp\N{LINE SEPARATOR}.exe"  # shown as exe.png


def remember(client: redis.Redis, agent: str, blocks: Sequence[str], fingerprint: str = "aa") -> None:
    planes = (0, 2, 8, 1, 2, 8)
    with client.pipeline(transaction=False) as pipeline:
        for name in blocks:
            pipeline.execute_command("KVBLOCKSET", name, 0, LAYERS, HEADS, TOKENS, 0, 2, *planes, BODY)
        pipeline.execute()
    manifest = {
        "agent_id": agent,
        "model": "tiny",
        "block_tokens": TOKENS,
        "chain": list(blocks),
        "count": TOKENS * len(blocks),
        "tokens": [1] * TOKENS * len(blocks),
    }
    received = json.dumps(manifest).encode()
    digest = blake2b(received, digest_size=8).hexdigest()  # readers that have read it before use it
    client.set(f"manifest:{agent}:00000000000000{fingerprint}", digest.encode() + received)


def tell(client: redis.Redis, name: str, channel: str = "kvpage:engines") -> int:
    """Publish an engine's statistics; return the number of recipients."""
    tier = {"hits": 2, "tokens": 300, "bytes": 1 << 20}
    none = dict.fromkeys(tier, 0)
    received = {"name": name, "model": "tiny", "answers": 4, "computed": 100, "used": 3 << 20, "room": 12 << 20}
    tiers = {"hot": none, "prefix": none, "page": tier, "cold": none}
    return int(client.publish(channel, json.dumps(received | {"tiers": tiers})))


def work(client: redis.Redis) -> None:
    """Alice has most blocks; she, bob and carol share a prefix, and one of bob's blocks is missing."""
    remember(client, "alice", ["same-0", "same-1", *(f"alice-{i}" for i in range(6))])
    remember(client, "bob", ["same-0", "same-1", "bob-0", "bob-1"])
    remember(client, "carol", ["same-0", "same-1", "carol-0"])
    client.execute_command("KVPAGEDEL", "bob-1")
    for layer in range(LAYERS):
        client.execute_command("KVPAGEGET", "alice-0", layer, 0, 0, 0)
    for page in range(5):
        client.execute_command("KVPAGEGET", "nobody", 0, 0, page, 0)
    client.execute_command("KVPAGESET", f"req{SCRIPT}", 0, 0, 0, 0, 1, 64, 64, 0, bytes(8192))
    for name in (b"\xff\xfe", TURNED.encode()):
        client.execute_command("KVPAGESET", name, 0, 0, 0, 0, 1, 64, 64, 0, bytes(8192))
    remember(client, f"eve{SCRIPT}", ["eve-0"])


@pytest.fixture(scope="module")
def seen() -> Iterator[SeenServer]:
    with start_seen_server() as seen:
        with seen.server.client() as client:
            work(client)
        yield seen


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def test_the_page_shows_the_values_of_info(seen: SeenServer, browser: Any) -> None:
    with seen.server.client() as client, shown(browser, seen.page) as page:

        def same_reads() -> bool:  # the page reads manifests itself while the test looks
            hits, misses = (client.info("stats")[f"keyspace_{name}"] for name in ("hits", "misses"))
            return f"{hits:,} of {hits + misses:,} reads" in page.locator("#hits-note").inner_text()

        until(same_reads, "the number of reads")
        info = client.info("everything")
        says(page, "#agents-note", f"{info['blocks']} blocks")
        says(page, "#why-legend", f"never stored{info['page_misses_never_stored']}")
        says(page, "#used", f"{info['used_memory'] / 1024:.1f} KiB")
        says(page, "#agents-count", "4")


def test_the_page_shows_holders_shared_prefixes_and_misses(seen: SeenServer, browser: Any) -> None:
    with shown(browser, seen.page) as page:
        says(page, "#summary", "alice uses most memory")
        says(page, "#summary", f"3 agents share their first {2 * TOKENS} tokens")
        says(page, "#summary", "the keys were never stored")
        assert page.locator("#memory .tile").first.get_attribute("aria-label").startswith("alice: ")
        assert page.locator("#memory .tile.shared").count() == 1
        buttons = [each.get_attribute("aria-label") for each in page.locator("#memory [role=button]").all()]
        # buttons that open details
        assert {label.split(":")[0] for label in buttons} == {"alice", "bob", "carol", f"eve{SCRIPT}"}
        says(page, "#shared", "alice, bob, carol")
        says(page, "#saved", "KiB")
        says(page, "#lost", "bob")
        says(page, "#lost", "deleted")
        assert page.locator("#agents td").first.inner_text().splitlines() == ["alice", "tiny"]


SUMMARIES: list[tuple[dict[str, Any], str]] = [
    (
        {"misses": {"never stored": 1, "evicted": 0}, "ratio": 0.5},
        "ann uses most memory, 2.0 KiB of 3.0 KiB. Hit ratio 50 %; 1 read missed, because the keys were never stored.",
    ),
    ({"misses": {"evicted": 2000, "deleted": 1}, "ratio": 0.5}, "2,001 reads missed, 2,000 of them because the keys"),
    ({"misses": {"evicted": 0}, "ratio": 1}, "3.0 KiB. Hit ratio 100 %."),
    ({"misses": {}, "ratio": 0.9}, "Hit ratio 90 %."),
    (
        {"engines": [{"computed": 1, "tiers": {name: {"tokens": 1} for name in ("hot", "prefix", "page", "cold")}}]},
        "80 % of the engines' prompt tokens were reused.",
    ),
    (
        {"agents": [["ann", 2048, 14], ["bob", 1024, 0]]},
        "ann has the largest context: 2.0 KiB of 3.0 KiB stored, 14 B in memory.",
    ),
    ({"agents": [["ann", 1024, 1100], ["bob", 1024, 1100]]}, "The 2 largest contexts use 1.0 KiB of 2.0 KiB each."),
    ({"agents": [["ann", 0, 0]]}, "No block of any agent is stored."),
    (
        {"agents": [["ann", 2048, 2100, 512]]},
        "ann uses most memory, 2.0 KiB of 2.0 KiB; 512 B of it unshared.",
    ),
    (
        {"agents": [], "ratio": 0.5, "misses": {"over quota": 3}},
        "4 keys, none of them a page. Hit ratio 50 %; 3 reads missed, because the keys were evicted for a quota.",
    ),
    ({"agents": [], "everything": False, "requests": 29}, "29 requests without an agent, 4.0 KiB."),
    ({"agents": [], "unseen": "This is a gateway."}, "This is a gateway."),
]
SUMMARIZE = """async (made) => (await import("/page/summary.js")).summary(
    {contents: {blocks: 0, keys: 4}, engines: made.engines ?? [], everything: made.everything ?? true,
     misses: made.misses, traffic: {hit_ratio: made.ratio}},
    {
        agents: made.agents.map(([id, bytes, memory, own]) => ({id, bytes, memory, own: own ?? bytes, missing: 0})),
        agent_bytes: made.agents.reduce((sum, agent) => sum + agent[1], 0), prefixes: [],
        request_count: made.requests ?? 0, request_bytes: 4096, unseen: made.unseen ?? "",
    })"""


def test_the_first_sentence_matches_the_values(seen: SeenServer, browser: Any) -> None:
    usual = {"misses": {}, "ratio": None, "agents": [["ann", 2048, 2100], ["bob", 1024, 1100]]}
    with shown(browser, seen.page) as page:
        for made, sentence in SUMMARIES:
            assert sentence in page.evaluate(SUMMARIZE, usual | made)


def test_a_context_is_a_strip_of_blocks_of_layers_by_heads(seen: SeenServer, browser: Any) -> None:
    with shown(browser, seen.page) as page:
        page.locator("#agents button", has_text="bob").click()
        page.locator("#contexts .block").first.wait_for()
        assert page.locator("#contexts .block").count() == 4
        assert page.locator("#contexts .block.common").count() == 2
        painted = "all => all.map(one => getComputedStyle(one).backgroundColor)"
        colours = page.locator("#contexts .block").evaluate_all(painted)
        assert len(set(colours)) == 2  # in memory, and missing
        assert "missing: deleted" in page.locator("#contexts .block.missing").get_attribute("title")
        page.locator("#contexts .block").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        says(page, "#block", f"{LAYERS} layers, {HEADS} heads: K float32, 512 B a page")
        assert page.locator("#block figure").count() == 2


def test_a_lifetime_that_ends_tomorrow_has_a_date(browser: Any) -> None:
    with start_seen_server() as seen, seen.server.client() as client:
        remember(client, "ann", ["kept"])
        client.execute_command("KVPAGEKEEP", "alice", 1, 86400, "kv:kept:0:0:0:0")
        with shown(browser, seen.page) as page:
            page.locator("#agents button", has_text="ann").click()
            page.locator("#contexts .block.leased").first.wait_for()
            title = page.locator("#contexts .block").first.get_attribute("title")
            assert re.search(r"kept until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d for alice", title)


def test_contexts_of_two_models_of_one_name_are_two_rows(browser: Any) -> None:
    with start_seen_server() as seen, seen.server.client() as client:
        for model in ("aa", "bb"):
            remember(client, "ann", [f"{model}-0"], model)
        with shown(browser, seen.page) as page:
            page.locator("#agents tr").nth(1).wait_for()
            remember(client, "ann", ["aa-0", "aa-1"])
            says(page, "#agents", f"{2 * TOKENS}")
            assert page.locator("#agents tr").count() == 2
            page.locator("#agents button").first.click()
            page.locator("#contexts .blocks").nth(1).wait_for()
            assert page.locator("#contexts .block").count() == 3


def test_the_page_shows_tokens_not_computed_by_engines(seen: SeenServer, browser: Any) -> None:
    with seen.server.client() as client, shown(browser, seen.page) as page:
        until(lambda: tell(client, f"host:1{SCRIPT}"), "somebody who listens")
        says(page, "#engines", f"host:1{SCRIPT}")
        says(page, "#engines", "75 % of 400 tokens")
        says(page, "#engines", "3.0 MiB of 12.0 MiB")
        says(page, "#spared", "75 %")
        says(page, "#spared-note", "300 of 400 tokens, 1 engine")
        assert faults(page) == []


def test_an_unavailable_server_is_retried_without_long_pauses(browser: Any) -> None:
    with start_seen_server() as seen, shown(browser, seen.page) as page:
        tries: list[float] = []
        page.on("request", lambda _: tries.append(time.monotonic()))
        seen.server.stop()
        says(page, "#status", "disconnected, reconnecting")
        while len(tries) < 5:
            page.wait_for_timeout(100)
        assert max(after - before for before, after in pairwise(tries)) < 5  # seconds; one is usual


def test_nothing_is_wider_than_a_phone(seen: SeenServer, browser: Any) -> None:
    with seen.server.client() as client, shown(browser, seen.page) as page:
        until(lambda: tell(client, "a-machine-with-a-long-name.example:1"), "somebody who listens")
        says(page, "#engines", "a-machine")
        page.locator("#agents button", has_text="alice").click()
        page.locator("#contexts .block").first.click()
        page.locator("#block figure").first.wait_for()
        fits_a_phone(page)


def test_names_by_users_are_shown_and_never_run(seen: SeenServer, browser: Any) -> None:
    with seen.server.client() as client, shown(browser, seen.page) as page:
        client.client_setname(f"<script>alert(2)</script>{'x' * 900}")
        says(page, "#agents", SCRIPT)
        says(page, "#requests", SCRIPT)
        says(page, "#requests", "\\xff\\xfe")
        page.locator("#agents button", has_text="eve").click()
        says(page, "#context-title", SCRIPT)
        says(page, "#clients", "<script>alert(2)</script>")
        client_name = page.locator("#clients span", has_text="alert(2)")
        assert len(client_name.get_attribute("title")) == 80
        assert client_name.bounding_box()["width"] < 400
        says(page, "#requests", "\\u202egnp\\u2028.exe")
        assert not [letter for letter in page.content() if letter in TURNED[0] + TURNED[4]]
        assert page.locator("img[src=x]").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(seen: SeenServer, browser: Any, theme: str) -> None:
    with shown(browser, seen.page, color_scheme=theme) as page:
        page.locator("#agents button", has_text="alice").click()
        page.locator("#contexts .block").first.click()
        page.locator("#block figure").first.wait_for()
        assert faults(page) == []
    with shown(browser, f"{seen.url}/login", status="", color_scheme=theme) as page:
        assert faults(page) == []


def test_a_user_logs_in_and_sees_its_permitted_data(browser: Any) -> None:
    tenant = ["--user", "tenant", "on", ">sesame", "~kv:own*", "~manifest:own*", "+@all"]
    with start_seen_server("--requirepass", "secret", *tenant) as seen:
        with seen.server.client(password="secret") as client:
            remember(client, "own", ["own-0"])
            remember(client, "other", ["other-0"])
        with shown(browser, seen.url, status="") as page:
            page.locator("#password").fill("guess")
            page.locator("button").click()
            says(page, "#wrong", "Wrong user name")
            page.locator("#user").fill("tenant")
            page.locator("#password").fill("sesame")
            page.locator("button").click()
            says(page, "#agents", "own")
            assert page.locator("#engines-card").is_hidden()
            with seen.server.client(password="secret") as client:
                tell(client, "other:1")
                tell(client, "own:1", "kvpage:engines:tenant")
            says(page, "#engines", "own:1")
            says(page, "#used-note", "in keys that this user may access")
            assert page.locator("#engines tr").count() == 1
            says(page, "#hits-note", "needs a user with access to every key")  # and not 0 of 0 reads
            assert page.locator("#agents tr").count() == 1
            assert "other" not in page.locator("main").inner_text().replace("no other", "")
            page.locator("#leave").click()
            page.locator("#password").wait_for()
            page.locator("#password").fill("secret")
            page.locator("button").click()
            page.locator("#leave").wait_for()  # who logged in can log out, the default user too


def test_omissions_are_reported_and_junk_hides_no_agent(browser: Any) -> None:
    with start_seen_server() as seen, seen.server.client() as client:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(2100):
                pipeline.set(f"manifest:junk-{number}:0", f"{number:016}junk")
            for number in range(1100):
                pipeline.execute_command("KVPAGESET", f"request-{number}", 0, 0, 0, 0, 1, 8, 8, 0, bytes(128))
            pipeline.execute()
        remember(client, "zoe", ["zoe-0"])
        with shown(browser, seen.page) as page:
            says(page, "#agents", "zoe")
            says(page, "#agents-count", "1")
            says(page, "#memory-note", "2,100 manifests cannot be read; incomplete: there are more requests")
            says(page, "#requests-note", "at least 1,000 requests")


def test_ten_thousand_requests_and_many_agents_stay_fluid(browser: Any) -> None:
    with start_seen_server() as seen, seen.server.client() as client:
        remember(client, "long", [f"long-{i}" for i in range(600)])
        for number in range(500):
            remember(client, f"agent-{number}", ["same-0", f"agent-{number}-0"])
        with client.pipeline(transaction=False) as pipeline:
            for number in range(10_000):
                pipeline.execute_command("KVPAGESET", f"request-{number}", 0, 0, 0, 0, 1, 8, 8, 0, bytes(128))
            pipeline.execute()

        def look() -> None:
            says(page, "#agents-count", "501")
            for wanted in ("agent-4", "agent-", ""):
                page.locator("#find").fill(wanted)
            for kind in ("tier", "tenant", "agent"):
                page.locator("#by").select_option(kind)
            page.locator("#agents button", has_text="long").click()
            page.locator("#contexts .block").nth(599).wait_for()
            page.wait_for_timeout(6000)  # the time in which all of it is sent again

        with shown(browser, seen.page) as page:
            assert stays_fluid(page, look)
            assert page.locator("*").count() < 2500
