"""The HTTP process next to the server: /metrics shows INFO's values to every user, limited by its rights."""

from __future__ import annotations

import base64
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
from browsing import TOKEN, SeenServer, start_seen_server
from servers import free_port, start_server
from waiting import eventually, until

from kvpage_server.commands.access.users import FREE_FAILURES

BODY = bytes(8192)
QUOTA = 'kv:a"\\{x},y=z.*'


@pytest.fixture(scope="module")
def seen() -> Iterator[SeenServer]:
    users = ["--user", "admin on >open ~* &* +@all", "--user", "tenant on >sesame ~kv:tenant.* +@all"]
    words = [word for line in (users[1], users[3]) for word in ("--user", *line.split())]
    with start_seen_server("--requirepass", "secret", "--quota", QUOTA, "1mb", *words) as seen:
        yield seen


def work(seen: SeenServer) -> None:
    with seen.server.client(password="secret") as client:
        for page in range(4):
            client.execute_command("KVPAGESET", "chat", 0, 0, page, 0, 1, 64, 64, 0, BODY)
            client.execute_command("KVPAGEGET", "chat", 0, 0, page, 0)
        client.execute_command("KVPAGEGET", "chat", 0, 0, 9, 0)
        client.execute_command("KVPAGEDEL", "chat", 3)
        client.execute_command("KVPAGEGET", "chat", 0, 0, 3, 0)


def test_metrics_equal_info(seen: SeenServer) -> None:
    work(seen)
    with seen.server.client(password="secret") as client:
        info = client.info("everything")
        received = seen.metrics()
        while (after := client.info("everything"))["total_commands_processed"] > info["total_commands_processed"] + 2:
            info, received = after, seen.metrics()
    for name, field in {
        "kvpage_memory_used_bytes": "used_memory",
        "kvpage_blocks": "blocks",
        "kvpage_requests": "requests",
        "kvpage_received_bytes_total": "total_net_input_bytes",
    }.items():
        assert received[(name,)] == pytest.approx(info[field], abs=2000), name
    assert received["kvpage_blocks",] == 3
    assert received["kvpage_reads_total", "hit"] == info["keyspace_hits"]
    assert received["kvpage_misses_total", "never stored"] == info["page_misses_never_stored"] == 1
    assert received["kvpage_misses_total", "deleted"] == info["page_misses_deleted"] == 1
    page = sum(info[f"cmdstat_{name}"]["calls"] for name in ("kvpageset", "kvpageget", "kvpagedel"))
    assert received["kvpage_command_duration_seconds_count", "page"] == page
    buckets = [received[key] for key in received if key[:2] == ("kvpage_command_duration_seconds_bucket", "page")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == page
    assert received["kvpage_memory_bytes", "live"] == info["arena_used"]
    assert received["kvpage_quota_limit_bytes", QUOTA.replace("\\", "\\\\").replace('"', '\\"')] == 1024**2


def test_evictions_are_labelled_by_policy_and_limit() -> None:
    with start_seen_server("--maxmemory", "4mb", "--quota", "kv:small.*", "64kb") as seen:
        with seen.server.client() as client:
            for page in range(1000):
                client.execute_command("KVPAGESET", "large", 0, 0, page, 0, 1, 64, 64, 0, BODY)
            for page in range(20):
                client.execute_command("KVPAGESET", "small.1", 0, 0, page, 0, 1, 64, 64, 0, BODY)
        received = seen.metrics()
    gone = {key[1:]: count for key, count in received.items() if key[0] == "kvpage_evicted_keys_total"}
    assert gone.keys() == {("allkeys-prefix", "memory"), ("allkeys-prefix", "quota")}
    assert gone["allkeys-prefix", "quota"] == received["kvpage_quota_evicted_keys_total", "kv:small.*"] > 0
    assert sum(gone.values()) == 1020 - received["kvpage_keys",]


def test_disk_metrics_have_the_queue_and_latency() -> None:
    with start_seen_server("--store", "tiered", "--appendfsync", "always") as seen:
        with seen.server.client() as client:
            client.execute_command("KVPAGESET", "chat", 0, 0, 0, 0, 1, 64, 64, 0, BODY)
        received = seen.metrics()
    assert received["kvpage_disk_commit_seconds_count",] >= 1
    assert received["kvpage_disk_commit_seconds_sum",] > 0
    assert received["kvpage_disk_values",] == 1
    assert received["kvpage_disk_queue_bytes",] == 0


# -- permitted users ---------------------------------------------------------------------------------------------------


def test_metrics_need_the_token_or_a_password(seen: SeenServer) -> None:
    with seen.stranger() as browser:
        refused = browser.get("/metrics")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
        assert browser.get("/metrics", auth=("admin", "wrong")).status_code == 401
        assert browser.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
        for allowed in ({"auth": ("admin", "open")}, {"headers": {"Authorization": f"Bearer {TOKEN}"}}):
            assert "kvpage_blocks" in browser.get("/metrics", **allowed).text
        assert browser.get("/page/events").status_code == 303
        browser.post("/login", data={"user": "admin", "password": "open"})
        assert "kvpage_blocks" in browser.get("/metrics").text


def test_a_tenant_sees_nothing_that_depends_on_others(seen: SeenServer) -> None:
    work(seen)
    received = seen.metrics(auth=("tenant", "sesame"))
    engines = {"kvpage_engines", "kvpage_prompt_tokens_total"}  # engines of the tenant's account: none
    assert {name for name, *_ in received} == {"kvpage_server_info", "kvpage_uptime_seconds", *engines}
    assert not any(count for (name, *_), count in received.items() if name in engines)


def test_info_suffices_for_metrics_and_no_right_is_an_error(seen: SeenServer) -> None:
    with seen.server.client(password="secret") as client, seen.stranger() as browser:
        client.execute_command("ACL", "SETUSER", "figures", "on", ">first", "-@all", "+info", "+ping")
        client.execute_command("ACL", "SETUSER", "nothing", "on", ">second", "-@all", "+ping")
        assert browser.get("/metrics", auth=("figures", "first")).status_code == 200
        login = browser.post("/login", data={"user": "figures", "password": "first"})
        assert (login.status_code, login.headers["location"]) == (303, "/")
        unseen = seen.event("holdings", browser)["unseen"]
        refused = browser.get("/metrics", auth=("nothing", "second"))
        browser.post("/login", data={"user": "nothing", "password": "second"})
        page = browser.get("/page/events")
    assert unseen == "User figures has no permissions to run the 'scan' command"
    assert (refused.status_code, "no permissions to run the 'info' command" in refused.text) == (403, True)
    assert (page.status_code, page.text) == (403, refused.text)


def test_metrics_are_readable_when_maxclients_is_reached(seen: SeenServer) -> None:
    with seen.server.client(password="secret") as client, seen.stranger() as browser:
        client.execute_command("ACL", "SETUSER", "scraper", "on", ">first", "-@all", "+info")
        most = client.config_get("maxclients")["maxclients"]
        client.config_set("maxclients", len(client.client_list()))
        with seen.server.connect() as refused:
            assert refused.recv(100) == b"-ERR max number of clients reached\r\n"
        scraped = browser.get("/metrics", auth=("scraper", "first"))
        client.config_set("maxclients", most)
    assert (scraped.status_code, "kvpage_rejected_connections_total 0.0" in scraped.text) == (200, False)


def test_a_password_that_was_changed_opens_no_more(seen: SeenServer) -> None:
    with seen.server.client(password="secret") as client, seen.browser() as browser:
        client.execute_command("ACL", "SETUSER", "brief", "on", ">first", "~*", "+@all")
        assert browser.get("/metrics", auth=("brief", "first")).status_code == 200
        client.execute_command("ACL", "DELUSER", "brief")
        assert eventually(lambda: browser.get("/metrics", auth=("brief", "first")).status_code == 401)


@pytest.mark.parametrize("change", ["DELUSER brief", "SETUSER brief off", "SETUSER brief resetpass >second"])
def test_revoked_user_is_refused_at_the_next_login(seen: SeenServer, change: str) -> None:
    with seen.server.client(password="secret") as client, seen.browser() as browser:
        client.execute_command("ACL", "SETUSER", "brief", "on", ">first", "~*", "+@all")
        login = {"user": "brief", "password": "first"}
        assert browser.post("/login", data=login).headers["location"] == "/"
        client.execute_command("ACL", *change.split())
        assert browser.post("/login", data=login).headers["location"] == "/login?wrong"
        with seen.stranger() as scraper:
            assert eventually(lambda: scraper.get("/metrics", auth=("brief", "first")).status_code == 401)
        client.execute_command("ACL", "DELUSER", "brief")


@pytest.mark.parametrize("change", ["DELUSER brief", "SETUSER brief off", "SETUSER brief resetpass >second"])
def test_a_cookie_without_access_is_not_used_to_log_in(seen: SeenServer, change: str) -> None:
    """Otherwise an open page would slow down all logins from its address."""
    with seen.server.client(password="secret") as client, seen.stranger() as browser, seen.stranger() as another:
        client.execute_command("ACL", "SETUSER", "brief", "on", ">first", "~*", "+@all")
        for each in (browser, another):
            each.post("/login", data={"user": "brief", "password": "first"})
            assert each.get("/").status_code == 200
        before = client.info("stats")["acl_access_denied_auth"]
        client.execute_command("ACL", *change.split())
        assert eventually(lambda: browser.get("/").status_code == 303)
        for _ in range(10):
            for each in (browser, another):
                assert each.get("/metrics").status_code == 401
                assert each.get("/").headers["location"] == "/login"
                assert each.get("/page/events").headers["location"] == "/login"
        assert client.info("stats")["acl_access_denied_auth"] - before == 1
        client.execute_command("ACL", "SETUSER", "brief", "reset", "on", ">first", "~*", "+@all")
        assert browser.get("/metrics").status_code == 401
        assert browser.post("/login", data={"user": "brief", "password": "first"}).headers["location"] == "/"
        assert browser.get("/metrics").status_code == 200
        client.execute_command("ACL", "DELUSER", "brief")


def test_wrong_passwords_over_http_have_their_own_count() -> None:
    with start_seen_server("--requirepass", "secret") as seen:
        with seen.stranger() as browser:
            for guess in range(FREE_FAILURES):
                assert browser.get("/metrics", auth=("default", f"{guess}")).status_code == 401
        until(lambda: f"127.0.0.1 (HTTP) sent a wrong password {FREE_FAILURES} times" in seen.server.log)


def test_a_login_cookie_is_hidden_from_scripts_and_other_sites(seen: SeenServer) -> None:
    with seen.browser() as browser:
        wrong = browser.post("/login", data={"user": "admin", "password": "guess"})
        assert (wrong.status_code, wrong.headers["location"]) == (303, "/login?wrong")
        right = browser.post("/login", data={"user": "admin", "password": "open"})
        assert (right.status_code, right.headers["location"]) == (303, "/")
        cookie = right.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert browser.post("/logout").status_code == 303


def test_metrics_use_a_user_that_no_client_can_become(seen: SeenServer) -> None:
    seen.metrics()
    with seen.server.client(password="secret") as client:
        assert "monitor" in {each["user"] for each in client.client_list()}
        assert "monitor" not in client.acl_users()
        assert not any(line.split()[1] == "monitor" for line in client.acl_list())


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:80@127.0.0.1"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    ],
)
def test_a_request_that_another_site_has_made_is_turned_away(
    seen: SeenServer, headers: dict[str, str], status: int
) -> None:
    with seen.browser() as browser:
        answer = browser.get("/metrics", headers=headers)
    assert answer.status_code == status
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_form_of_another_site_does_not_log_in(seen: SeenServer) -> None:
    with seen.browser() as browser:
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = browser.post("/login", data={"user": "admin", "password": "open"}, headers=headers)
            assert answer.status_code == 403
            assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b"Basic",
        b"Basic \xff\xfe",
        b"Basic !!!!",
        b"Basic " + base64.b64encode(b"nocolon"),
        b"Basic " + base64.b64encode(b"\xff\xfe:secret"),
        b"Bearer something",
    ],
)
def test_an_invalid_authorization_is_refused_and_not_logged(seen: SeenServer, received: bytes) -> None:
    before = len(seen.server.log)
    with seen.stranger() as browser:
        answer = browser.get("/metrics", headers={b"Authorization": received})
        twice = browser.get(
            "/metrics", headers=[(b"Authorization", b"Basic YWRtaW46b3Blbg=="), (b"Authorization", received)]
        )
    assert (answer.status_code, twice.status_code) == (401, 401)
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert seen.server.log[before:] == ""


@pytest.mark.parametrize(
    ("path", "methods"), [("/metrics", "GET, HEAD"), ("/login", "GET, HEAD, POST"), ("/page/store.js", "GET, HEAD")]
)
def test_a_refused_method_is_reported_with_those_allowed(seen: SeenServer, path: str, methods: str) -> None:
    with seen.browser() as browser:
        answer = browser.delete(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
    assert answer.text == f"there is no DELETE {path} here, only {methods}\n"


def test_a_login_with_too_many_fields_is_refused(seen: SeenServer) -> None:
    with seen.browser() as browser:
        assert browser.post("/login", content="a&" * 20).status_code == 400


def test_a_login_that_is_too_long_is_not_read(seen: SeenServer) -> None:
    with seen.browser() as browser:
        assert browser.post("/login", content=b"x" * 100_000).status_code == 413
    with socket.create_connection(("127.0.0.1", seen.http), timeout=60) as sock:
        sock.sendall(b"POST /login HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 999999999\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 413"), "it is not told to send it"


def test_a_refused_body_is_discarded_so_that_the_reply_arrives(seen: SeenServer) -> None:
    """The client sends all of it before it reads, which takes more than the buffers of the sockets hold."""
    with socket.create_connection(("127.0.0.1", seen.http), timeout=60) as sock:
        sock.sendall(b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n")
        sock.sendall(bytes(8_000_000))
        assert sock.recv(1000).startswith(b"HTTP/1.1 413")


def test_silent_connections_take_no_place_from_others(seen: SeenServer) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", seen.http), timeout=60)) for _ in range(100)
        ]
        assert seen.metrics()["kvpage_uptime_seconds",] >= 0
        silent[0].settimeout(60)
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
    assert seen.metrics()["kvpage_http_connections_closed_total", "crowded"] >= 30


def test_logins_that_are_never_sent_keep_prometheus_from_nothing(seen: SeenServer) -> None:
    """No password is needed for the half of a login."""
    with ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", seen.http), timeout=60))
            sock.sendall(b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Length: 40\r\n\r\nuser=")
        for _ in range(10):
            assert seen.metrics()["kvpage_uptime_seconds",] >= 0


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"PING\r\n\r\n", b"GET /metrics HTTP/1.1\r\n" * 600]
)
def test_noise_is_refused_and_the_next_is_answered(seen: SeenServer, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", seen.http), timeout=60) as sock:
        sock.sendall(noise + b"\r\n\r\n")
        with suppress(ConnectionResetError):
            assert sock.recv(1000).startswith((b"HTTP/1.1 400", b""))
    assert seen.answers()


def test_noise_is_not_logged(seen: SeenServer) -> None:
    before = len(seen.server.log)
    for noise in (
        b"PING\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", seen.http), timeout=60) as sock:
            sock.sendall(noise)
            while sock.recv(1000):
                pass
    assert seen.metrics()["kvpage_uptime_seconds",] >= 0
    assert seen.server.log[before:] == ""


# -- its life ----------------------------------------------------------------------------------------------------------


def test_it_is_begun_anew_when_it_dies_and_ends_with_the_server() -> None:
    with start_seen_server(killed=True) as seen:
        first = seen.companion()
        os.kill(first, signal.SIGKILL)
        until(lambda: "the process that answers HTTP has ended" in seen.server.log)
        until(seen.answers, "an answer of the next one")
        second = seen.companion()
        assert second != first
        os.kill(second, signal.SIGTERM)  # it is for the server to end it
        assert seen.answers()
        seen.server.stop(signal.SIGKILL)
        assert eventually(lambda: not _lives(second))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not kill a process with its parent")
def test_one_that_hangs_ends_with_the_server() -> None:
    with start_seen_server(killed=True) as seen:
        pid = seen.companion()
        os.kill(pid, signal.SIGSTOP)
        try:
            seen.server.stop(signal.SIGKILL)
            assert eventually(lambda: not _lives(pid))
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
def test_without_descriptors_its_log_has_a_line_and_no_traceback() -> None:
    with start_seen_server() as seen, ExitStack() as stack:
        pid = seen.companion()
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, used + 2))
        for _ in range(20):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", seen.http)))
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: "Too many open files" in seen.server.log)
        time.sleep(0.1)
        assert [line for line in seen.server.log.splitlines() if "Traceback" in line or "Logging error" in line] == []


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_port_in_use_is_reported_before_the_start() -> None:
    with start_server() as other:
        command = [sys.executable, "-m", "kvpage_server.app", "--port", str(free_port()), "--store", "memory"]
        done = subprocess.run(
            [*command, "--metrics-port", str(other.port)], capture_output=True, encoding="utf-8", timeout=100
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{other.port}" in done.stderr


def test_without_the_extra_the_error_names_it() -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None; from kvpage_server.app import main; main(['--metrics-port', '1'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=100)
    assert done.returncode == 1
    assert (
        done.stderr
        == "kvpage-server: metrics-port: uvicorn is not installed: pip install '.[web]' in a checkout of kvpage\n"
    )


@contextmanager
def stopped(seen: SeenServer) -> Iterator[None]:
    os.kill(seen.server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(seen.server.pid, signal.SIGCONT)
        until(seen.answers, "the store's answer")


def test_a_store_that_does_not_answer_is_reported(seen: SeenServer) -> None:
    with stopped(seen), seen.stranger() as stranger:
        until(lambda: stranger.get("/health").status_code == 503, "the report")
        assert stranger.get("/health").text == "the store does not answer\n"
    assert seen.metrics()["kvpage_uptime_seconds",] >= 0


def test_all_requests_end_in_time_while_the_store_hangs(seen: SeenServer) -> None:
    """Health, figures by token and by password, and pages: 3 seconds each, though all share a connection."""

    def ask(path: str) -> tuple[int, float]:
        auth = ("admin", "open") if path == "/metrics?" else None
        with seen.browser() if path == "/metrics" else seen.stranger(cookies=cookies) as client:
            began = time.monotonic()
            return client.get(path, auth=auth).status_code, time.monotonic() - began

    pages = ["/page/events", "/page/agent?id=a", "/page/block?name=61"]
    paths = ["/health", "/metrics", "/metrics", "/metrics?", "/metrics", *pages, "/health"]
    seen.metrics()
    with ThreadPoolExecutor(len(paths)) as pool, seen.stranger() as stranger:
        stranger.post("/login", data={"user": "admin", "password": "open"})
        cookies = stranger.cookies
        with stopped(seen):
            time.sleep(1.1)  # figures of the last second are used again
            for _ in range(2):
                replies = dict(zip(paths, pool.map(ask, paths), strict=True))
                assert {status for status, _ in replies.values()} == {503}, replies
                assert max(seconds for _, seconds in replies.values()) < 6, replies


def test_a_long_hang_leaves_health_answering(seen: SeenServer) -> None:
    """The channel to a stopped server is full after some 300 checks of passwords."""

    def check(number: int) -> int:
        with seen.stranger() as client:
            return client.get("/metrics", auth=("admin", f"wrong{number}")).status_code

    with ThreadPoolExecutor(40) as pool, stopped(seen):
        assert set(pool.map(check, range(400))) == {503}
        with seen.stranger() as stranger:
            assert stranger.get("/health").status_code == 503
    assert seen.metrics()["kvpage_uptime_seconds",] >= 0
