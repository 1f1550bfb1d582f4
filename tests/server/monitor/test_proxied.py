"""The web page behind a reverse proxy that adds no header: without the token, a stranger sees nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from browsing import TOKEN, SeenServer, start_seen_server
from servers import free_port, start_server, with_constants
from waiting import until

from kvpage_server.configuration.config import ConfigError, from_arguments

SECRET = "kv:secret.agent:0:0:0:0"
PATHS = ("/", "/metrics", "/page/events", "/page/agent?id=secret", "/page/block?name=00")
REPLACED = ("host", "connection")  # headers
GUEST = ("--user", "guest", "on", "nopass", "~*", "+@all")


@contextmanager
def proxied(port: int, version: str) -> Iterator[str]:
    """The URL of a proxy that does what `proxy_pass http://127.0.0.1:PORT;` does in nginx: its requests have `Host:
    127.0.0.1:PORT`, the browser's other headers, and no other header. `version` is that of HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            passed = [f"{name}: {value}" for name, value in self.headers.items() if name.lower() not in REPLACED]
            head = [f"{self.command} {self.path} {version}", f"Host: 127.0.0.1:{port}", "Connection: close", *passed]
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with socket.create_connection(("127.0.0.1", port), timeout=60) as onward:
                onward.sendall("\r\n".join([*head, "", ""]).encode() + body)
                with suppress(BrokenPipeError, ConnectionResetError):  # the browser has read enough
                    while part := onward.recv(1 << 16):
                        self.wfile.write(part)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def seen() -> Iterator[SeenServer]:
    with start_seen_server(*GUEST) as seen:
        with seen.server.client() as client:
            client.set(SECRET, "x")
        yield seen


def shown_nothing(client: httpx.Client, path: str) -> bool:
    """Whether a request is sent to the login or refused."""
    reply = client.get(path)
    refused = reply.status_code == 401 or (reply.status_code, reply.headers.get("location")) == (303, "/login")
    return refused and "kvpage_blocks" not in reply.text


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_a_stranger_behind_a_plain_proxy_sees_nothing(seen: SeenServer, version: str) -> None:
    with proxied(seen.http, version) as url, httpx.Client(base_url=url, timeout=60) as stranger:
        for path in PATHS:
            assert shown_nothing(stranger, path), path
        for user in ("default", "guest"):
            reply = stranger.post("/login", data={"user": user, "password": "anything"})
            assert (reply.status_code, reply.headers["location"]) == (303, "/login?wrong")
            assert stranger.get("/metrics", auth=(user, "anything")).status_code == 401
            assert shown_nothing(stranger, "/page/events")
        assert stranger.get("/", params={"token": "a-guess-of-the-token"}).headers["location"] == "/login?wrong"
        assert shown_nothing(stranger, "/")


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_the_token_logs_in_through_a_proxy(seen: SeenServer, version: str) -> None:
    with proxied(seen.http, version) as url, httpx.Client(base_url=url, timeout=60) as browser:
        reply = browser.get("/", params={"token": TOKEN})
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert browser.get("/").status_code == 200
        assert "kvpage_blocks" in browser.get("/metrics").text
        with browser.stream("GET", "/page/events") as events:
            assert next(events.iter_lines()) == "event: overview"


def test_the_page_answers_under_the_name_of_its_proxy() -> None:
    site = "https://store.example"
    with start_seen_server("--web-origin", f"{site} https://other.example:8443") as seen:
        with proxied(seen.http, "HTTP/1.1") as url, httpx.Client(base_url=url, timeout=60) as browser:
            login = {"data": {"user": "default", "password": TOKEN}, "headers": {"Origin": site}}
            assert browser.post("/login", **login).headers["location"] == "/"
            foreign = login | {"headers": {"Origin": "https://foreign.example"}}
            assert browser.post("/login", **foreign).status_code == 403
        with httpx.Client(base_url=f"http://127.0.0.1:{seen.http}", timeout=60) as browser:
            assert browser.get("/login", headers={"Host": "store.example"}).status_code == 200
            assert browser.get("/login", headers={"Host": "foreign.example"}).status_code == 421


@pytest.mark.parametrize("site", ["store.example", "https://store.example/", "ftp://store.example", "https://"])
def test_a_web_origin_that_is_no_site_is_refused(site: str) -> None:
    with pytest.raises(ConfigError, match=r"web-origin takes sites such as https://store\.example"):
        from_arguments(["--web-origin", site])


def test_this_machine_needs_the_token_too(seen: SeenServer) -> None:
    with seen.stranger() as browser:
        for path in PATHS:
            assert shown_nothing(browser, path), path
        reply = browser.post("/login", data={"user": "guest", "password": TOKEN})
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert browser.get("/").status_code == 200


def test_the_printed_url_logs_a_browser_in() -> None:
    port = free_port()
    with start_server("--metrics-port", str(port)) as server:
        found = re.search(rf"page +(http://127\.0\.0\.1:{port}/\?token=\S{{32}})$", server.log, re.MULTILINE)
        assert found, server.log
        with httpx.Client(timeout=60, follow_redirects=True) as browser:
            until(lambda: answers(port), "an answer over HTTP")
            assert "kvpage store" in browser.get(found[1]).text
            assert [cookie.name for cookie in browser.cookies.jar] == [f"kvpage-{port}"]


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_no_secret_is_printed_or_an_argument_of_the_process(seen: SeenServer) -> None:
    assert TOKEN not in seen.server.log
    assert TOKEN.encode() not in Path(f"/proc/{seen.companion()}/cmdline").read_bytes()
    with start_seen_server("--requirepass", "secret") as locked, locked.stranger() as browser:
        assert "token" not in locked.server.log
        assert browser.get("/", params={"token": TOKEN}).headers["location"] == "/login?wrong"


def test_web_token_opens_only_metrics_beside_passwords() -> None:
    with start_seen_server("--requirepass", "secret") as locked, locked.stranger() as browser:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert "kvpage_blocks" in browser.get("/metrics", headers=bearer).text
        assert browser.get("/page/events", headers=bearer).status_code == 303
        assert browser.post("/login", data={"password": TOKEN}).headers["location"] == "/login?wrong"


def test_the_printed_token_opens_nothing_beside_passwords() -> None:
    port = free_port()
    with start_server("--metrics-port", str(port)) as server, server.client() as client:
        until(lambda: answers(port), "an answer over HTTP")
        found = re.search(r"token=(\S{32})$", server.log, re.MULTILINE)
        assert found, server.log
        bearer = {"Authorization": f"Bearer {found[1]}"}

        def status() -> int:
            return httpx.get(f"http://127.0.0.1:{port}/metrics", headers=bearer, timeout=60).status_code

        assert status() == 200
        client.config_set("requirepass", "secret")
        until(lambda: status() == 401, "a refusal")


def test_a_short_token_is_refused() -> None:
    refusal = "must be empty, or 16 to 512 of A-Z a-z 0-9"
    with pytest.raises(RuntimeError, match=refusal), start_server("--web-token", "guess-me"):
        raise AssertionError


def test_a_process_that_hangs_delays_no_last_save(tmp_path: Path) -> None:
    patient = with_constants("kvpage_server.net.companion", _LAST_SECONDS=600.0)
    with start_seen_server("--store", "tiered", directory=tmp_path, program=patient) as seen:
        with seen.server.client() as client:
            client.set("a", "b" * 1000)
        companion = seen.companion()
        os.kill(companion, signal.SIGSTOP)
        try:
            seen.server.process.send_signal(signal.SIGTERM)
            until(lambda: "the last save" in seen.server.log, "the last save")
        finally:
            os.kill(companion, signal.SIGCONT)
