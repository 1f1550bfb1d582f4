"""OpenAI's JavaScript client in a browser: a page of another site uses the API if the engine allows the site."""

from __future__ import annotations

import http.server
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from api_engines import RunningEngine, start_engine, write_caller
from browsers import CHROMIUM, NO_CHROMIUM, chromium
from node_packages import installed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)]
ASK = """
async ([url, key, change]) => {
  const { default: OpenAI } = await import("/openai/index.mjs");
  const client = new OpenAI({ baseURL: url + "/v1", apiKey: key, dangerouslyAllowBrowser: true, maxRetries: 0 });
  const request = { model: "caller", messages: [{ role: "user", content: "Hello" }], max_tokens: 8, ...change };
  try {
    const models = (await client.models.list()).data.map((model) => model.id);
    const whole = await client.chat.completions.create(request, { headers: { "X-Agent-Id": "page" } });
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
      text += chunk.choices[0]?.delta.content ?? "";
    }
    return { models, text: whole.choices[0].message.content, streamed: text, agent: whole.kvpage.agent_id };
  } catch (error) {
    return { error: error.constructor.name, status: error.status, param: error.param };
  }
}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of another site, which has the client's modules."""
    root = tmp_path_factory.mktemp("site")
    (root / "openai").symlink_to(installed() / "node_modules" / "openai")
    (root / "index.html").write_text("<!doctype html><title>Chat</title>", encoding="utf-8")
    handler: Callable[..., Any] = partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_caller(tmp_path_factory.mktemp("models") / "caller")


@pytest.fixture(scope="module")
def engine(model: Path, site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("acme sesame\n", encoding="utf-8")
    with start_engine(model, "--allow-origin", site, "--token-file", str(tokens)) as engine:
        yield engine


@pytest.fixture(scope="module")
def page(site: str) -> Iterator[Any]:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(site)
        yield page


def test_the_client_asks_and_streams(engine: RunningEngine, page: Any) -> None:
    found = page.evaluate(ASK, [engine.url, "sesame", {}])
    assert (found["models"], found["agent"]) == (["caller"], "page")
    assert found["text"] == found["streamed"]
    assert "weather" in found["text"]


def test_the_client_gets_errors_of_the_api(engine: RunningEngine, page: Any) -> None:
    assert page.evaluate(ASK, [engine.url, "wrong", {}]) == {
        "error": "AuthenticationError",
        "status": 401,
        "param": None,
    }
    refused = {"error": "BadRequestError", "status": 400, "param": "audio"}
    assert page.evaluate(ASK, [engine.url, "sesame", {"audio": {"voice": "a"}}]) == refused


def test_without_the_option_no_page_of_another_site_may_ask(model: Path, page: Any) -> None:
    with start_engine(model) as engine:
        found = page.evaluate(ASK, [engine.url, "none", {}])
        assert found["error"] == "APIConnectionError"
        assert engine.metric("answers_total") == 0
