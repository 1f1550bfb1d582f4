"""The routes outside the web page: metrics for Prometheus, health, login and logout."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import parse_qs

import redis
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from kvpage_server.http import Guards, own_names
from kvpage_server.monitor.logins import (
    DEFAULT,
    IDLE_SECONDS,
    Login,
    Logins,
    Malformed,
    address_of,
    cookie_name,
    credentials,
)
from kvpage_server.observe.engines import EnginesSeen
from kvpage_server.observe.observer import Observer
from kvpage_server.observe.overview import BOUNDS, CallFigures, DiskFigures, Overview

# -- exposition --------------------------------------------------------------------------------------------------------
#
# The store's figures for Prometheus. docs/monitoring/ explains them, and has alerts and a dashboard.
#
# The server chooses most labels, and they have few values each. Labels with values that an operator chooses are limited
# in number.

MOST_LABELS = 100  # quotas, or error codes, with a label of their own; the others are counted together
OTHERS = "(others)"


def exposition(overview: Overview, closed: Mapping[str, int], engines: EnginesSeen) -> bytes:
    """Return the metrics in Prometheus's text format. `closed` are numbers of closed HTTP connections, by reason."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(overview, closed, engines))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, overview: Overview, closed: Mapping[str, int], engines: EnginesSeen) -> None:
        self._overview = overview
        self._closed = closed
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        overview = self._overview
        yield _info(overview)
        yield _gauge("uptime_seconds", "Since the server was started", overview.server.uptime)
        yield _counter("http_connections_closed", "HTTP connections closed on their clients", "reason", self._closed)
        yield _gauge("engines", "Engines that report their state", len(self._engines.connected))
        help = "Tokens of the engines' prompts, by the tier that had them; none: they were computed"
        yield _counter("prompt_tokens", help, "tier", self._engines.tokens)
        if not overview.everything:
            return
        yield from _memory(overview)
        yield from _contents(overview)
        yield from _traffic(overview)
        yield from _commands(overview)
        yield from _quotas(overview)
        if overview.disk is not None:
            yield from _disk(overview.disk)


def _info(overview: Overview) -> Metric:
    server = overview.server
    info = InfoMetricFamily("kvpage_server", "Which server this is")
    info.add_metric([], {"version": server.version, "core": server.core, "policy": overview.memory.policy})
    return info


def _memory(overview: Overview) -> Iterator[Metric]:
    memory = overview.memory
    yield _gauge("memory_used_bytes", "Memory that counts against maxmemory", memory.used)
    yield _gauge("memory_limit_bytes", "maxmemory; 0 is none", memory.limit)
    yield _gauge("resident_memory_bytes", "What the process has of the machine's memory", memory.resident)
    yield _gauges(
        "memory_bytes",
        "Memory by what it is for: live is in use, spare is kept for the next values, fragmentation is free between "
        "values, in_flight is held by connections",
        "class",
        {
            "live": memory.live,
            "spare": memory.spare,
            "fragmentation": memory.fragmentation,
            "in_flight": memory.in_flight,
        },
    )


def _contents(overview: Overview) -> Iterator[Metric]:
    contents = overview.contents
    yield _gauge("requests", "Requests that have pages", contents.requests)
    yield _gauge("blocks", "Blocks of pages", contents.blocks)
    yield _gauge("keys", "Keys: pages and strings", contents.keys)
    yield _gauge("expiring_keys", "Keys with a time to live", contents.expiring)
    yield _gauge("protected_blocks", "Blocks leased or pinned", contents.protected)
    yield _gauge("protected_bytes", "Their bytes", contents.protected_bytes)


def _traffic(overview: Overview) -> Iterator[Metric]:
    traffic, connections = overview.traffic, overview.connections
    yield _counter("received_bytes", "Bytes from clients", "", {"": traffic.bytes_in})
    yield _counter("sent_bytes", "Bytes to clients", "", {"": traffic.bytes_out})
    yield _counter("reads", "Reads of keys", "result", {"hit": traffic.hits, "miss": traffic.misses})
    yield _counter(
        "misses", "Reads of pages, blocks and strings that found nothing, by reason", "reason", overview.misses
    )
    yield _counter("expired_keys", "Expired keys", "", {"": traffic.expired})
    evicted = CounterMetricFamily(
        "kvpage_evicted_keys",
        "Evicted keys, by policy and exceeded limit",
        labels=["policy", "reason"],
    )
    for eviction in overview.evictions:
        evicted.add_metric([eviction.policy, eviction.reason], eviction.keys)
    yield evicted
    yield _gauge("connected_clients", "Connections", connections.now)
    yield _gauge("max_clients", "How many there may be", connections.limit)
    yield _gauge("blocked_clients", "Connections that wait for the end of CLIENT PAUSE", connections.blocked)
    yield _counter("connections", "Connections taken", "", {"": connections.so_far})
    yield _counter("rejected_connections", "Connections turned away", "", {"": connections.rejected})
    yield _counter("closed_connections", "Connections ended by the server, by reason", "reason", connections.closed)
    yield _counter("denied", "What the ACL refused, by kind", "kind", connections.denied)
    yield _counter("errors", "Error replies, by code", "code", _few(overview.errors))


def _commands(overview: Overview) -> Iterator[Metric]:
    families = overview.families
    yield _histogram("command_duration_seconds", "Time that commands took, by family", "family", families)
    failed = {name: calls.failed for name, calls in families.items()}
    rejected = {name: calls.rejected for name, calls in families.items()}
    yield _counter("commands_failed", "Commands answered with an error", "family", failed)
    yield _counter("commands_rejected", "Commands refused before they ran", "family", rejected)


def _quotas(overview: Overview) -> Iterator[Metric]:
    for name, help, of in (
        ("bytes", "Bytes that the keys of a quota hold", {quota.pattern: quota.bytes for quota in overview.quotas}),
        ("limit_bytes", "Bytes that they may hold; 0 is no limit", {q.pattern: q.limit for q in overview.quotas}),
    ):
        yield _gauges(f"quota_{name}", help, "quota", _few(of))
    evicted = {quota.pattern: quota.evicted for quota in overview.quotas}
    yield _counter("quota_evicted_keys", "Keys evicted by the limit of a quota", "quota", _few(evicted))


def _disk(disk: DiskFigures) -> Iterator[Metric]:
    yield _gauge("disk_values", "Values on disk", disk.values)
    yield _gauge("disk_used_bytes", "Their bytes", disk.bytes)
    yield _gauge("disk_file_bytes", "Bytes of the database's file", disk.file_bytes)
    yield _gauge("disk_limit_bytes", "maxdisk; 0 is none", disk.limit)
    yield _gauge("disk_full", "1 while values take nearly all that maxdisk has for them", disk.is_full)
    yield _gauge("disk_queue_bytes", "Bytes that wait to be written", disk.waiting_bytes)
    yield _gauge("disk_unsaved_changes", "Changes that a crash would cost", disk.unsaved)
    yield _gauge("disk_failing", "1 while writes fail", bool(disk.failing))
    yield _histogram("disk_commit_seconds", "Time that commits took", "", {"": disk.commits})
    yield _histogram(
        "disk_fetch_seconds", "Time from asking the disk for values to having them", "", {"": disk.fetches}
    )
    for name, help, count in (
        ("write_errors", "Writes that failed", disk.write_errors),
        ("fetched_values", "Values read from disk", disk.fetched),
        ("dropped_values", "Values that left memory and stay on disk", disk.dropped),
        ("evicted_values", "Values evicted from disk", disk.evicted),
        ("corrupt_values", "Values found damaged", disk.corrupt),
        ("repaired_values", "Damaged values that memory still had", disk.repaired),
        ("quarantined_records", "Records that could not be read, and were put aside", disk.quarantined),
        ("scrubbed_bytes", "Bytes looked through for damage", disk.scrubbed_bytes),
        ("scrub_rounds", "Times that all of it was looked through", disk.scrub_rounds),
    ):
        yield _counter(f"disk_{name}", help, "", {"": count})


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvpage_{name}", help, value)


def _gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"kvpage_{name}", help, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _counter(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with a value for each label. Without a label, `label` and the only key of `values` are ""."""
    family = CounterMetricFamily(f"kvpage_{name}", help, labels=_labels(label))
    for each, value in values.items():
        family.add_metric(_labels(each), value)
    return family


def _histogram(name: str, help: str, label: str, values: Mapping[str, CallFigures]) -> Metric:
    family = HistogramMetricFamily(f"kvpage_{name}", help, labels=_labels(label))
    for each, calls in values.items():
        if calls.within:
            family.add_metric(_labels(each), [*_buckets(calls)], calls.seconds)
    return family


def _buckets(calls: CallFigures) -> Iterable[tuple[str, float]]:
    yield from ((str(bound), count) for bound, count in zip(BOUNDS, calls.within, strict=True))
    yield "+Inf", calls.count


def _labels(label: str) -> list[str]:
    return [label] if label else []


def _few(counts: Mapping[str, int]) -> Mapping[str, int]:
    """Return the largest counts, and the sum of the others under OTHERS."""
    if len(counts) <= MOST_LABELS:
        return counts
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return dict(ordered[:MOST_LABELS]) | {OTHERS: sum(count for _, count in ordered[MOST_LABELS:])}


HEALTH = "/health"
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
MOST_BODY = 4096  # bytes of a login form
BODY_SECONDS = 10.0
NO_CREDENTIALS = (
    "log in: Authorization: Bearer and the token (web-token, or the one that kvpage-server prints when it starts), or "
    "Basic and a user of the store\n"
)
NO_ANSWER = "the store does not answer; without a password it accepts connections from its own machine only\n"
ASK = {"WWW-Authenticate": 'Basic realm="kvpage", charset="UTF-8"'}


class NotLoggedIn(Exception):
    """Error: the user has to log in first."""


def make_app(
    logins: Logins, closed: Counter[str], pages: Sequence[BaseRoute], origins: Sequence[str] = ()
) -> Starlette:
    """Return the application. `closed` counts closed connections by reason. `pages` are further routes.

    `origins` are the sites under which proxies serve the page. A route calls `login_of(request)` for its user. The page
    at /login has a form, which is sent to /login with POST.
    """
    app = Starlette(
        routes=[
            Route("/metrics", _metrics),
            Route(HEALTH, _health),
            Route("/login", _log_in, methods=["POST"]),
            Route("/logout", _log_out, methods=["POST"]),
            *pages,
        ],
        middleware=[Middleware(Guards, names=own_names(), origins=origins)],
        exception_handlers={
            NotLoggedIn: _to_login,
            Malformed: _malformed,
            redis.AuthenticationError: _to_login,
            redis.exceptions.NoPermissionError: _not_allowed,
            redis.ResponseError: _refused,
            redis.RedisError: _no_answer,
            ClientDisconnect: _gone,
        },
    )
    app.state.logins, app.state.closed = logins, closed
    return app


async def login_of(request: Request) -> Login:
    """Return the login of a request, by its cookie or by the token in its Authorization header.

    A user and a password in that header may be intended for a proxy, so they are not tried. Raises NotLoggedIn, or
    RedisError if the store refuses or does not answer.
    """
    logins: Logins = request.app.state.logins
    login = logins.of_cookie(request.cookies.get(cookie_name(request), ""))
    if login is not None:
        return login
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not logins.is_token(token.strip()):
        raise NotLoggedIn
    return await logins.of_password(DEFAULT, token.strip(), address_of(request))


async def _metrics(request: Request) -> Response:
    """Return the metrics: all for the token; for a user and password, or the cookie of a login, those of that user."""
    logins: Logins = request.app.state.logins
    who = credentials(request)
    observer: Observer | None = None
    try:
        if who is None:
            observer = (await login_of(request)).observer
        elif not who[0]:
            observer = logins.figures if logins.is_token(who[1]) else None
        else:
            observer = (await logins.of_password(*who, address_of(request))).observer
        overview = await observer.overview() if observer is not None else None
    except NotLoggedIn:
        return PlainTextResponse(NO_CREDENTIALS, 401, ASK)
    except redis.AuthenticationError:
        overview = None
    if observer is None or overview is None:
        return PlainTextResponse("the store does not take this password or token\n", 401, ASK)
    closed, engines = dict(request.app.state.closed), await observer.engines()
    text = await asyncio.to_thread(exposition, overview, closed, engines)
    return Response(text, media_type=EXPOSITION)


async def _health(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _log_in(request: Request) -> Response:
    """Log in with a form of `user` and `password`. Redirect to the first page, or back to the form with ?wrong."""
    try:
        form = parse_qs(await _body(request), keep_blank_values=True, max_num_fields=8)
    except ValueError as error:
        raise HTTPException(400, "a form of user and password has no more than 8 fields") from error
    user, password = (form.get(name, [""])[0] for name in ("user", "password"))
    return await log_in(request, user or DEFAULT, password)


async def log_in(request: Request, user: str, password: str) -> Response:
    """Log a browser in. Redirect it to the first page, or to the form if the store refuses the password."""
    logins: Logins = request.app.state.logins
    try:
        cookie = await logins.log_in(user, password, address_of(request))
    except redis.AuthenticationError:
        return RedirectResponse("/login?wrong", 303)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(cookie_name(request), cookie, max_age=int(IDLE_SECONDS), httponly=True, samesite="strict")
    return answer


async def _body(request: Request) -> str:
    """Return the request's body. Raises HTTPException if it is too long or too slow."""
    if int(request.headers.get("content-length", 0)) > MOST_BODY:  # reject before 100 Continue
        raise HTTPException(413, headers={"Connection": "close"})
    raw = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > MOST_BODY:
                    raise HTTPException(413, headers={"Connection": "close"})
            return raw.decode("utf-8", "replace")
    raise HTTPException(408, headers={"Connection": "close"})


async def _log_out(request: Request) -> Response:
    logins: Logins = request.app.state.logins
    logins.log_out(request.cookies.get(cookie_name(request), ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(cookie_name(request), httponly=True, samesite="strict")
    return answer


async def _to_login(request: Request, error: Exception) -> Response:
    if request.headers.get("sec-fetch-mode", "navigate") == "navigate" and request.method == "GET":
        return RedirectResponse("/login", 303)
    return PlainTextResponse("log in first\n", 401)


async def _malformed(request: Request, error: Exception) -> Response:
    expected = "expected Authorization: Basic, then USER:PASSWORD in base64, or Bearer, then the token\n"
    return PlainTextResponse(expected, 401, ASK)


async def _not_allowed(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 403)


async def _refused(request: Request, error: Exception) -> Response:
    if str(error).startswith("DENIED"):  # in protected mode
        return await _no_answer(request, error)
    return PlainTextResponse(f"the store answered: {error}\n", 502)


async def _no_answer(request: Request, error: Exception) -> Response:
    return PlainTextResponse(NO_ANSWER, 503, {"Retry-After": "1"})


async def _gone(request: Request, error: Exception) -> Response:
    return PlainTextResponse("", 400)
