"""Debian's Chromium, headless, and queries of a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "chromium is not installed (Debian: chromium)"
FRAME = 50.0  # milliseconds that a task may take: more is felt
DRIVEN = "blink.mojom.DevToolsSession"  # by which Playwright drives a page
WITHIN = 60_000  # milliseconds, for elements that will be shown
SERIOUS = ("serious", "critical")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Only one test module has it at a time: its loop would stand in the way of others."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*root, "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@contextmanager
def shown(browser: Any, url: str, *, status: str = "live", **options: Any) -> Iterator[Any]:
    """A page, once it is live. It must have had no error, and asked for nothing that its policy forbids."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(WITHIN)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on(
        "console", lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None
    )
    page.goto(url)
    if status:
        page.locator(f"#status[data-state={status}]").wait_for()
    yield page
    context.close()
    assert wrong == []


def says(page: Any, selector: str, text: str) -> None:
    """Wait until something on the page has that text."""
    sync_api.expect(page.locator(selector).first).to_contain_text(text, timeout=WITHIN)


def faults(page: Any) -> list[str]:
    """Return the serious faults that axe-core finds."""
    found = axe.Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in SERIOUS]


def fits_a_phone(page: Any) -> None:
    """Whether nobody has to scroll the page sideways."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth", timeout=10_000)


def stays_fluid(page: Any, work: Callable[[], object]) -> bool:
    """Whether no task takes longer than a frame. Other processes can only increase the time of a task, so the best of
    three times counts.
    """

    def longest() -> float:
        with busy(page) as tasks:
            work()
        return max(tasks)

    return any(longest() < FRAME for _ in range(3))


@contextmanager
def busy(page: Any) -> Iterator[list[float]]:
    """Milliseconds of processor time that each task of a page's main thread takes meanwhile: scripts, style, layout and
    painting. What Playwright itself does in the page is left out."""
    tracing = page.context.browser.new_browser_cdp_session()
    events: list[dict[str, Any]] = []
    ended: list[bool] = []
    tracing.on("Tracing.dataCollected", lambda received: events.extend(received["value"]))
    tracing.on("Tracing.tracingComplete", lambda _: ended.append(True))
    config = {"includedCategories": ["toplevel", "blink.user_timing"]}
    tracing.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": config})
    page.evaluate("() => { performance.mark('this page') }")
    took: list[float] = []
    yield took
    tracing.send("Tracing.end")
    while not ended:
        page.wait_for_timeout(50)
    tracing.detach()
    (main,) = {(each["pid"], each["tid"]) for each in events if each["name"] == "this page"}
    on_main = [each for each in events if (each["pid"], each["tid"]) == main and "tdur" in each]
    ours = [each["ts"] for each in on_main if DRIVEN in str(each.get("args"))]
    tasks = [each for each in on_main if each["name"] == "ThreadControllerImpl::RunTask"]
    took += [
        task["tdur"] / 1000 for task in tasks if not any(task["ts"] <= at <= task["ts"] + task["dur"] for at in ours)
    ]
