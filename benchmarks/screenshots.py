"""The pictures of docs/images: both pages in both themes, while six agents talk to two engines on one store.

    python -m benchmarks.screenshots docs/images

It takes a few minutes, with the real small model. The store is small enough that something has to go.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.watchers import TOKEN
from engine.demo.story import EngineProcess, Messages, _running, running_engine

MODEL = "models/smollm2"
WORDS = files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8").split()
HANDBOOK = {"role": "system", "content": "Answer from this handbook.\n\n" + " ".join(WORDS[:620])}
STORIES = {"role": "system", "content": "You tell stories."}
TURNS = (  # agent, engine, prompt
    ("alice", 0, "How long did the longest fog on record last?"),
    ("bob", 0, "What are the words that every keeper says?"),
    ("carol", 1, "What is the name of the supply boat?"),
    ("alice", 1, "And when was that? " + " ".join(WORDS[620:])),
    ("dave", 0, "How many steps has the tower?"),
    ("alice", 0, "Who wrote it down?"),
    ("dave", 1, "And who counted them?"),
    ("erin", 0, "Tell me a short story about a lighthouse. " + " ".join(WORDS[100:300])),
    ("frank", 0, "What is the capital of France?"),
    ("erin", 1, "Go on."),
    ("frank", 1, "And of Italy?"),
    ("carol", 0, "And its captain?"),
)


def ask(engine: EngineProcess, agent: str, messages: Messages) -> None:
    body = {"model": "smollm2", "agent_id": agent, "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=600).json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    httpx.post(f"{engine.url}/v1/agents/{agent}/save", timeout=60)
    print(agent, answer["kvpage"], flush=True)


def opened(browser: Browser, url: str, **options: Any) -> Page:
    page = browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **options})
    page.goto(url)
    page.locator("#status[data-state=live]").wait_for(timeout=60_000)
    return page


def main(target: Path) -> None:
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory())
        options = ["--store", "memory", "--port", "9721", "--metrics-port", "9722", "--maxmemory", "92mb"]
        options += ["--web-token", TOKEN]
        stack.enter_context(_running("the store", "-m", "kvpage_server.app", *options, "--dir", directory))
        store = "redis://127.0.0.1:9721"
        engines = [stack.enter_context(running_engine(name, MODEL, store)) for name in ("engine A", "engine B")]
        urls = {"engine": engines[0].url, "store": f"http://127.0.0.1:9722/?token={TOKEN}"}
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened(browser, urls["store"])
        histories: dict[str, Messages] = {}
        for agent, engine, question in TURNS:
            messages = histories.setdefault(agent, [STORIES if agent == "erin" else HANDBOOK][: agent != "frank"])
            messages.append({"role": "user", "content": question})
            ask(engines[engine], agent, messages)
        for name, url in urls.items():
            for theme in ("light", "dark"):
                page = opened(browser, url, color_scheme=theme)
                if name == "engine":
                    chat(page)
                else:
                    page.locator("#agents button", has_text="alice").click()
                    page.locator("#contexts .block").first.click()
                    page.locator("#block figure").first.wait_for()
                    page.wait_for_timeout(1500)
                    page.evaluate("scrollTo(0, 0)")
                page.screenshot(path=target / f"{name}_{theme}.png", full_page=True)
                page.set_viewport_size({"width": 390, "height": 844})
                page.wait_for_timeout(1000)
                page.screenshot(path=target / f"{name}_{theme}_phone.png", full_page=True)
        browser.close()


def chat(page: Page) -> None:
    """Send two questions in the chat of the page."""
    for turn, question in enumerate(("What is the capital of France?", "And of Italy?")):
        page.locator("#agent").fill("visitor")
        page.locator("#question").fill(question)
        page.keyboard.press("Enter")
        page.locator(".reuse .bar").nth(turn).wait_for(timeout=60_000)
    page.wait_for_timeout(1500)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
