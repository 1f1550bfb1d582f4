"""The built site in a browser without a network: themes, a phone, search, and its only own files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import CHROMIUM, NO_CHROMIUM, chromium, faults, fits_a_phone
from documents import HANGS, ROOT

pytest.importorskip("sphinx", reason="the extra `docs` is not installed; `make test-site` installs it")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)

PAGES = ("index", "start", "client", "python", "commands", "configuration", "how-it-works", "troubleshooting", "json")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A warning is an error, also for a link or an anchor that leads nowhere."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(built)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def opened(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    """Return a page without a network, and the list of its requests that are no files."""
    context = browser.new_context(offline=True, **options)
    page, foreign = context.new_page(), []
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or foreign.append(request.url))
    page.goto(url)
    return page, foreign


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone_and_axe_finds_no_fault(site: Path, browser: Any, name: str) -> None:
    page, foreign = opened(browser, f"{site.as_uri()}/{name}.html")
    fits_a_phone(page)
    for image in page.locator("article img").all():
        image.scroll_into_view_if_needed()
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    found = faults(page)
    page.context.close()
    assert (foreign, found) == ([], [])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_are_readable(site: Path, browser: Any, theme: str) -> None:
    page, _ = opened(browser, f"{site.as_uri()}/client.html", color_scheme=theme)
    shown = (
        "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    assert (page.evaluate(shown) < 200) == (theme == "dark")
    found = faults(page)
    page.context.close()
    assert found == []


def test_the_search_works_without_a_network(site: Path, browser: Any) -> None:
    page, foreign = opened(browser, f"{site.as_uri()}/search.html?q=KVPAGEPREFIX")
    page.locator("#search-results li a").first.wait_for()
    titles = page.locator("#search-results li a").all_inner_texts()
    page.context.close()
    assert any("Commands" in title or "KVPAGEPREFIX" in title for title in titles)
    assert foreign == []
