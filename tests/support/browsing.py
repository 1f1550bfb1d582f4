"""A kvpage-server that answers HTTP, and its clients."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from servers import RunningServer, free_port, start_server
from waiting import until

SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
TOKEN = "the-token-of-the-tests"
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class SeenServer:
    """The server, and where it answers HTTP."""

    server: RunningServer
    http: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    @property
    def page(self) -> str:
        """The URL that logs a browser in, where the store needs no password."""
        return f"{self.url}/?token={TOKEN}"

    def browser(self, *, headers: Any = (), **options: Any) -> httpx.Client:
        """A client that sends the token, keeps cookies, and follows no redirections."""
        headers = {"Authorization": f"Bearer {TOKEN}"} | dict(headers)
        return httpx.Client(base_url=self.url, timeout=60, headers=headers, **options)

    def stranger(self, **options: Any) -> httpx.Client:
        """A client without the token."""
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def metrics(self, **options: Any) -> dict[tuple[str, ...], float]:
        """The samples of /metrics, by name and the values of their labels."""
        with self.browser(**options) as browser:
            answer = browser.get("/metrics")
        assert answer.status_code == 200, answer.text
        return samples(answer.text)

    def event(self, name: str, browser: httpx.Client) -> Any:
        """Return the data of the first event of that name that the page receives."""
        with browser.stream("GET", "/page/events") as reply:
            assert reply.status_code == 200, reply.read()
            lines = reply.iter_lines()
            return next(json.loads(next(lines).removeprefix("data: ")) for line in lines if line == f"event: {name}")

    def companion(self) -> int:
        children = subprocess.run(
            ["pgrep", "-P", str(self.server.pid)], capture_output=True, encoding="utf-8", check=False
        ).stdout.split()
        assert len(children) == 1, children
        return int(children[0])

    def answers(self) -> bool:
        return self._has("/health")

    def shows_form(self) -> bool:
        """Whether the HTTP process answers. It does not read the store for the form."""
        return self._has("/login")

    def _has(self, path: str) -> bool:
        try:
            return httpx.get(f"{self.url}{path}", timeout=60).status_code == 200
        except httpx.TransportError:
            return False


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (name, *(value for _, value in LABEL.findall(labels or ""))): float(value)
        for name, labels, value in SAMPLE.findall(text)
    }


@contextmanager
def start_seen_server(*options: str, **how: Any) -> Iterator[SeenServer]:
    """Start a server as `start_server` does, with its process for HTTP."""
    http = free_port()
    with start_server("--metrics-port", str(http), "--web-token", TOKEN, *options, **how) as server:
        seen = SeenServer(server, http)
        until(seen.shows_form, "an answer over HTTP")
        yield seen
