"""The engine's page in a browser: reused tokens of each answer, a chat, tokens, and protection from other sites."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_engines import RunningEngine, start_engine, write_tiny
from browsers import CHROMIUM, NO_CHROMIUM, chromium, faults, fits_a_phone, says, shown, stays_fluid
from servers import RunningServer, free_port

from engine.api.watching import LATELY

pytestmark = pytest.mark.slow
in_chromium = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)
FRIEND = "https://chat.example"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny: Path, server: RunningServer) -> Iterator[RunningEngine]:
    with server.client() as client:
        client.flushall()
    with start_engine(tiny, "--store", server.url, "--max-tokens", "8") as engine:
        yield engine


@pytest.fixture(scope="module")
def tenants(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("acme sesame\nother open\n", encoding="utf-8")
    options = ("--token-file", str(tokens), "--allow-origin", FRIEND)
    with start_engine(tiny, *options, "--max-tokens", "8") as engine:
        yield engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def ask(
    engine: RunningEngine, agent: str | None, text: str, token: str = "none", model: str = "tiny"
) -> dict[str, Any]:
    body = {"model": model, "agent_id": agent, "messages": [{"role": "user", "content": text}], "temperature": 0}
    headers = {"Authorization": f"Bearer {token}"}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def first_events(engine: RunningEngine, token: str) -> dict[str, Any]:
    """Return the first events of a page."""
    received: dict[str, Any] = {}
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.stream("GET", f"{engine.url}/page/events", headers=headers, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                received[name] = json.loads(line.removeprefix("data: "))
            if {"state", "answers"} <= received.keys() and received.get("agents", {}).get("count"):
                break
    return received


@in_chromium
def test_a_chat_shows_the_reused_tokens_of_each_turn(engine: RunningEngine, browser: Any) -> None:
    with shown(browser, engine.url) as page:
        page.locator("#agent").fill("alice")
        for turn in range(2):
            page.locator("#question").fill("Who lit the lamp, and when was it put out?")
            page.keyboard.press("Enter")
            page.locator(".reuse .bar").nth(turn).wait_for()
        reuse = page.locator(".reuse").nth(3).inner_text()
        assert "0 of " in page.locator(".reuse").nth(1).inner_text()
        says(page, "#answers", "memory")
        shown_there = page.locator("#answers tr").first.inner_text()
        reused = reuse.split(" of ")[0]
        assert int(reused.replace(",", "")) > 0
        assert f"{reused} of " in shown_there
        says(page, "#agents", "alice")
        says(page, "#share-note", "prompt tokens")


@in_chromium
def test_the_page_shows_the_values_of_the_metrics(engine: RunningEngine, browser: Any) -> None:
    for _ in range(2):
        ask(engine, "bob", "How many steps has the tower?")
    prompt, reused = engine.metric("prompt_tokens_total"), engine.metric("reused_tokens_total")
    with shown(browser, engine.url) as page:
        says(page, "#share-note", f"of {prompt:,.0f} prompt tokens")
        says(page, "#share", f"{100 * reused / prompt:.1f}".removesuffix(".0"))


@in_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_engines_page(engine: RunningEngine, browser: Any, theme: str) -> None:
    ask(engine, "carol", "Hello")
    with shown(browser, engine.url, color_scheme=theme) as page:
        says(page, "#agents", "carol")
        assert faults(page) == []


@in_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_shows_that_the_store_cannot_be_reached(tiny: Path, browser: Any, theme: str) -> None:
    with start_engine(tiny, "--store", f"redis://127.0.0.1:{free_port()}", code=1) as engine:
        ask(engine, "carol", "Hello")
        with shown(browser, engine.url, color_scheme=theme) as page:
            says(page, "#alarm", "The page server cannot be reached since")
            says(page, "#agents", "not saved")
            assert faults(page) == []
            fits_a_phone(page)


@in_chromium
def test_nothing_of_the_engines_page_is_wider_than_a_phone(engine: RunningEngine, browser: Any) -> None:
    ask(engine, "a-name-that-is-longer-than-most-others", "Hello")
    with shown(browser, engine.url) as page:
        says(page, "#agents", "a-name-that")
        says(page, "#answers", "a-name-that")
        fits_a_phone(page)


@in_chromium
def test_the_page_stays_fluid_with_five_hundred_agents(engine: RunningEngine, browser: Any) -> None:
    ask(engine, "many", "Hello")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    with httpx.Client(base_url=f"{engine.url}/v1", timeout=60) as client:
        for number in range(500):
            assert client.post("/agents/many/fork", json={"to": f"agent-{number}"}).status_code == 201
        with ThreadPoolExecutor(8) as askers:  # several in a batch
            list(askers.map(lambda _: client.post("/chat/completions", json=body), range(LATELY)))

        def look() -> None:
            for wanted in ("agent-4", "agent-", ""):
                page.locator("#agents-find").fill(wanted)
            client.post("/chat/completions", json=body)
            page.wait_for_timeout(3000)

        with shown(browser, engine.url) as page:
            assert stays_fluid(page, look)
            says(page, "#agents-note", "50")
            assert page.locator("*").count() < 3000


@in_chromium
def test_a_token_opens_the_page_of_its_tenant(tenants: RunningEngine, browser: Any) -> None:
    ask(tenants, "theirs", "Hello", token="open")
    ask(tenants, "ours", "Hello", token="sesame")
    with shown(browser, tenants.url, status="") as page:
        page.locator("#token").fill("guess")
        page.keyboard.press("Enter")
        says(page, "#login-error", "Unknown token")
        page.locator("#token").fill("sesame")
        page.keyboard.press("Enter")
        says(page, "#agents", "ours")
        assert "theirs" not in page.locator("main").inner_text()
        assert page.locator("#memory-box").is_hidden()


@in_chromium
def test_agents_of_several_models_are_distinguished(tiny: Path, browser: Any) -> None:
    with start_engine(tiny, "--model", f"other={tiny}", "--max-tokens", "8") as engine:
        for model in ("tiny", "other"):
            ask(engine, "anne", "Hello", model=model)
        with shown(browser, engine.url) as page:
            says(page, "#model", "tiny, other")
            says(page, "#agents", "anne tiny")
            says(page, "#agents", "anne other")


@in_chromium
def test_an_anonymous_answer_is_labelled_by_its_first_words(tenants: RunningEngine, browser: Any) -> None:
    ask(tenants, None, "<b>What</b>  is the\ncapital of France? " + "x" * 100, token="sesame")
    ask(tenants, "ours", "Named", token="sesame")
    received = first_events(tenants, "sesame")
    labels = {answer["agent"]: answer["label"] for answer in received["answers"]}
    assert labels[None] == "<b>What</b> is the capital of France? " + "x" * 22
    assert labels["ours"] == ""
    with shown(browser, tenants.url, status="") as page:
        page.locator("#token").fill("sesame")
        page.keyboard.press("Enter")
        says(page, "#answers", "<b>What</b> is the capital")


def test_a_tenant_sees_its_own_agents_only(tenants: RunningEngine) -> None:
    ask(tenants, "theirs", "Hello", token="open")
    ask(tenants, "ours", "Hello", token="sesame")
    received = first_events(tenants, "sesame")
    assert "theirs" not in json.dumps(received)
    assert {answer["agent"] for answer in received["answers"]} <= {"ours", None}
    assert received["state"]["totals"]["answers"] == len(received["answers"])
    assert [answer["number"] for answer in received["answers"]] == list(range(1, len(received["answers"]) + 1))
    assert received["state"]["memory"] is None
    assert httpx.get(f"{tenants.url}/page/events").status_code == 401


def test_pages_of_other_sites_may_ask_when_they_are_allowed_to(engine: RunningEngine, tenants: RunningEngine) -> None:
    asks = {
        "Origin": FRIEND,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    allowed = httpx.options(f"{tenants.url}/v1/chat/completions", headers=asks)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, FRIEND)
    models = httpx.get(f"{tenants.url}/v1/models", headers={"Origin": FRIEND, "Authorization": "Bearer open"})
    assert models.headers["access-control-allow-origin"] == FRIEND
    assert httpx.options(f"{engine.url}/v1/chat/completions", headers=asks).status_code == 403
    assert "access-control-allow-origin" not in httpx.get(f"{engine.url}/v1/models", headers={"Origin": FRIEND}).headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Host": "engine:8000"}, 200),
    ],
)
def test_requests_from_other_sites_are_refused(engine: RunningEngine, headers: dict[str, str], status: int) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == status


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "ftp://chat.example", "https://"])
def test_an_origin_that_is_none_is_refused(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    from engine import cli

    with pytest.raises(SystemExit):
        cli.main(["serve", "--allow-origin", origin])
    assert "an origin is http:// or https:// and a name" in capsys.readouterr().err


@in_chromium
def test_the_list_of_routes_can_be_read_by_anyone(engine: RunningEngine, browser: Any) -> None:
    with shown(browser, f"{engine.url}/docs", status="") as page:
        says(page, "#Routes", "/v1/chat/completions")
        assert faults(page) == []
        fits_a_phone(page)


def test_no_script_but_our_own_runs(engine: RunningEngine) -> None:
    policy = httpx.get(engine.url).headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
