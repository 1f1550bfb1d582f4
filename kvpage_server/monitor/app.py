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

from kvpage_server.http import Guards, RefusalReplies, Unanswered, allowed_methods, discard_body, own_names
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
from kvpage_server.observe.overview import BOUNDS, CallFigures, DiskFigures, MemoryFigures, Overview

# -- exposition --------------------------------------------------------------------------------------------------------
#
# The store's statistics as metrics for Prometheus. docs/monitoring/ explains them, and has alerts and a dashboard.
#
# Most labels have a few values, which the server defines. The number of values that a user or an operator can choose,
# such as patterns of quotas, is limited to MOST_LABELS.

MOST_LABELS = 100  # quotas, or error codes, with a label of their own; the others are summed under OTHERS
OTHERS = "(others)"


def exposition(overview: Overview, closed: Mapping[str, int], engines: EnginesSeen) -> bytes:
    """Return the metrics in Prometheus's text format. `closed` has the number of closed HTTP connections by reason."""
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
        yield _gauge("uptime_seconds", "Seconds since the start of the server", overview.server.uptime)
        yield _counter(
            "http_connections_closed", "HTTP connections closed by the server, by reason", "reason", self._closed
        )
        yield _gauge("engines", "Connected engines that publish statistics", len(self._engines.connected))
        help = "Prompt tokens of the engines, by the tier that supplied them; none: computed"
        yield _counter("prompt_tokens", help, "tier", self._engines.tokens)
        if not overview.everything:
            return
        yield from _memory(overview)
        yield from _contents(overview)
        yield from _traffic(overview)
        yield from _commands(overview)
        yield from _quotas(overview)
        if overview.disk is not None:
            yield from _disk(overview.disk, overview.memory)


def _info(overview: Overview) -> Metric:
    server = overview.server
    info = InfoMetricFamily("kvpage_server", "Version, core and eviction policy of the server")
    info.add_metric([], {"version": server.version, "core": server.core, "policy": overview.memory.policy})
    return info


def _memory(overview: Overview) -> Iterator[Metric]:
    memory = overview.memory
    yield _gauge("memory_used_bytes", "Memory that counts against maxmemory", memory.used)
    yield _gauge("memory_limit_bytes", "maxmemory; 0: no limit", memory.limit)
    yield _gauge("resident_memory_bytes", "Resident memory (RSS) of the process", memory.resident)
    yield _gauges(
        "memory_bytes",
        "Memory by use: live is values, spare is allocated and free, fragmentation is free slots between values, "
        "in_flight is buffers of clients",
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
    yield _gauge("blocks", "Stored blocks", contents.blocks)
    yield _gauge("keys", "Keys of pages and strings", contents.keys)
    yield _gauge("expiring_keys", "Keys with a TTL", contents.expiring)
    yield _gauge("protected_blocks", "Leased, pinned or kept values", contents.protected)
    yield _gauge("protected_bytes", "Bytes of leased, pinned or kept values", contents.protected_bytes)
    yield _gauge("kept_values", "Values with a lifetime", contents.kept)
    yield _gauge("kept_bytes", "Bytes of values with a lifetime", contents.kept_bytes)


def _traffic(overview: Overview) -> Iterator[Metric]:
    traffic, connections = overview.traffic, overview.connections
    yield _counter("received_bytes", "Bytes received from clients", "", {"": traffic.bytes_in})
    yield _counter("sent_bytes", "Bytes sent to clients", "", {"": traffic.bytes_out})
    yield _counter("reads", "Reads of keys, by result", "result", {"hit": traffic.hits, "miss": traffic.misses})
    yield _counter("misses", "Missed reads of pages, blocks and strings, by reason", "reason", overview.misses)
    yield _counter("expired_keys", "Expired keys", "", {"": traffic.expired})
    evicted = CounterMetricFamily(
        "kvpage_evicted_keys",
        "Evicted keys, by policy and exceeded limit",
        labels=["policy", "reason"],
    )
    for eviction in overview.evictions:
        evicted.add_metric([eviction.policy, eviction.reason], eviction.keys)
    yield evicted
    yield _gauge("connected_clients", "Connected clients", connections.now)
    yield _gauge("max_clients", "maxclients: limit of connected clients", connections.limit)
    yield _gauge("blocked_clients", "Clients that wait for the end of CLIENT PAUSE", connections.blocked)
    yield _counter("connections", "Accepted connections", "", {"": connections.so_far})
    yield _counter(
        "rejected_connections", "Connections refused by maxclients or protected mode", "", {"": connections.rejected}
    )
    yield _counter("closed_connections", "Connections closed by the server, by reason", "reason", connections.closed)
    yield _counter("denied", "Logins and commands denied by the ACL, by kind", "kind", connections.denied)
    yield _counter("errors", "Error replies, by code", "code", _few(overview.errors))


def _commands(overview: Overview) -> Iterator[Metric]:
    families = overview.families
    yield _histogram("command_duration_seconds", "Duration of commands, by family", "family", families)
    failed = {name: calls.failed for name, calls in families.items()}
    rejected = {name: calls.rejected for name, calls in families.items()}
    yield _counter("commands_failed", "Commands that returned an error", "family", failed)
    yield _counter("commands_rejected", "Commands rejected before their execution", "family", rejected)


def _quotas(overview: Overview) -> Iterator[Metric]:
    for name, help, of in (
        ("bytes", "Bytes of the keys of a quota", {quota.pattern: quota.bytes for quota in overview.quotas}),
        ("limit_bytes", "Limit of a quota; 0: no limit", {q.pattern: q.limit for q in overview.quotas}),
    ):
        yield _gauges(f"quota_{name}", help, "quota", _few(of))
    evicted = {quota.pattern: quota.evicted for quota in overview.quotas}
    yield _counter("quota_evicted_keys", "Keys evicted because of the limit of a quota", "quota", _few(evicted))


def _disk(disk: DiskFigures, memory: MemoryFigures) -> Iterator[Metric]:
    yield _gauge("disk_values", "Values on disk", disk.values)
    yield _gauge("disk_used_bytes", "Bytes of values on disk", disk.bytes)
    yield _gauge("disk_file_bytes", "Size of the database file", disk.file_bytes)
    yield _gauge("memory_coded_bytes", "Bytes of the lossless codes of values in memory", memory.coded)
    yield _gauge("memory_coded_raw_bytes", "Bytes of the values coded in memory without the code", memory.coded_raw)
    yield _gauge("disk_coded_bytes", "Bytes of the lossless codes of values on disk", disk.coded_bytes)
    yield _gauge("disk_coded_raw_bytes", "Bytes of the coded values without the code", disk.coded_raw_bytes)
    yield _gauge("disk_limit_bytes", "maxdisk; 0: no limit", disk.limit)
    yield _gauge("disk_full", "1 if values use at least 95 % of their space under maxdisk", disk.is_full)
    yield _gauge("disk_queue_bytes", "Bytes in the write queue", disk.waiting_bytes)
    yield _gauge("disk_unsaved_changes", "Changes that a crash would lose", disk.unsaved)
    yield _gauge("disk_failing", "1 while writes fail", bool(disk.failing))
    yield _histogram("disk_commit_seconds", "Duration of commits", "", {"": disk.commits})
    yield _histogram("disk_fetch_seconds", "Duration of fetches of values from disk", "", {"": disk.fetches})
    for name, help, count in (
        ("write_errors", "Failed writes", disk.write_errors),
        ("fetched_values", "Values read from disk", disk.fetched),
        ("dropped_values", "Values dropped from memory and kept on disk", disk.dropped),
        ("evicted_values", "Values evicted from disk", disk.evicted),
        ("corrupt_values", "Values with a wrong checksum", disk.corrupt),
        ("repaired_values", "Corrupt values that were written again from memory", disk.repaired),
        ("quarantined_records", "Unreadable records that were moved to the quarantine", disk.quarantined),
        ("scrubbed_bytes", "Bytes read by the scrubber", disk.scrubbed_bytes),
        ("scrub_rounds", "Complete passes of the scrubber", disk.scrub_rounds),
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
    """Return a counter with `values` by value of the label. Without a label, `label` and the only key are ""."""
    family = CounterMetricFamily(f"kvpage_{name}", help, labels=_labels(label))
    for each, value in values.items():
        family.add_metric(_labels(each), value)
    return family


def _histogram(name: str, help: str, label: str, values: Mapping[str, CallFigures]) -> Metric:
    """Return a histogram of durations in seconds, with `values` by value of the label, as `_counter`."""
    family = HistogramMetricFamily(f"kvpage_{name}", help, labels=_labels(label))
    for each, calls in values.items():
        if calls.within:
            family.add_metric(_labels(each), [*_buckets(calls)], calls.seconds)
    return family


def _buckets(calls: CallFigures) -> Iterable[tuple[str, float]]:
    """Yield the upper bound of each bucket in seconds, and the number of calls up to it."""
    yield from ((str(bound), count) for bound, count in zip(BOUNDS, calls.within, strict=True))
    yield "+Inf", calls.count


def _labels(label: str) -> list[str]:
    return [label] if label else []


def _few(counts: Mapping[str, int]) -> Mapping[str, int]:
    """Return the MOST_LABELS largest counts, and the sum of the others under OTHERS."""
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
SILENT = "the store does not answer\n"
NO_ANSWER = (
    "the store does not answer, or refuses the connection: maxclients is reached, or it has no password and accepts "
    "connections from its own machine only\n"
)
ASK = {"WWW-Authenticate": 'Basic realm="kvpage", charset="UTF-8"'}


class NotLoggedIn(Exception):
    """Error: the request has neither the cookie of a login nor the token."""


def make_app(
    logins: Logins, closed: Counter[str], pages: Sequence[BaseRoute], origins: Sequence[str] = ()
) -> Starlette:
    """Return the application of the HTTP process, with the routes of this module and `pages`.

    `closed` counts closed HTTP connections by reason. `origins` are the sites under which proxies serve the page. A
    route gets the user of its request from `login_of`. One of `pages` is the form at /login, which is sent to /login
    with POST.
    """
    app = Starlette(
        routes=[
            Route("/metrics", _metrics),
            Route(HEALTH, _health),
            Route("/login", _log_in, methods=["POST"]),
            Route("/logout", _log_out, methods=["POST"]),
            *pages,
        ],
        middleware=[
            Middleware(Guards, names=own_names(), origins=origins),
            Middleware(RefusalReplies, reply=_too_many),
        ],
        exception_handlers={
            NotLoggedIn: _to_login,
            Malformed: _malformed,
            redis.AuthenticationError: _to_login,
            redis.exceptions.NoPermissionError: _not_allowed,
            redis.ResponseError: _refused,
            redis.RedisError: _no_answer,
            ClientDisconnect: _disconnected,
            405: _other_method,
        },
    )
    app.state.logins, app.state.closed = logins, closed
    return app


async def login_of(request: Request) -> Login:
    """Return the login of a request, by its cookie or by the token in its Authorization header.

    A user and password in that header are ignored, because they may be intended for a proxy. Raises NotLoggedIn, and
    RedisError if the store refuses the login or does not answer.
    """
    logins: Logins = request.app.state.logins
    login = await logins.of_cookie(request.cookies.get(cookie_name(request), ""))
    if login is not None:
        return login
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not logins.is_token(token.strip()):
        raise NotLoggedIn
    return await logins.of_password(DEFAULT, token.strip(), address_of(request))


async def _metrics(request: Request) -> Response:
    """Return the metrics: all with the token; with a user and password, or a cookie, the metrics of that user."""
    logins: Logins = request.app.state.logins
    who = credentials(request)
    observer: Observer | None = None
    try:
        if who is None:
            observer = (await login_of(request)).observer
        elif not who[0]:
            observer = await logins.figures_of_token(who[1], address_of(request))
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
    """Return 200 if the store answers in time, otherwise 503. A refusal is an answer, too.

    The store is read at most once a second, however many clients ask, because they need no credentials.
    """
    logins: Logins = request.app.state.logins
    try:
        await logins.figures.overview()
    except redis.TimeoutError:
        return PlainTextResponse(SILENT, 503)
    except redis.RedisError:
        pass
    return PlainTextResponse("ok\n")


async def _log_in(request: Request) -> Response:
    """Log in with the fields `user` and `password` of the form. Redirect to the page, or to the form with ?wrong."""
    try:
        form = parse_qs(await _body(request), keep_blank_values=True, max_num_fields=8)
    except ValueError as error:
        raise HTTPException(400, "a form of user and password has no more than 8 fields") from error
    user, password = (form.get(name, [""])[0] for name in ("user", "password"))
    return await log_in(request, user or DEFAULT, password)


async def log_in(request: Request, user: str, password: str) -> Response:
    """Log a browser in with a cookie, and redirect it to the page; to the form with ?wrong if the password is wrong."""
    logins: Logins = request.app.state.logins
    try:
        cookie = await logins.log_in(user, password, address_of(request))
    except redis.AuthenticationError:
        return RedirectResponse("/login?wrong", 303)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(cookie_name(request), cookie, max_age=int(IDLE_SECONDS), httponly=True, samesite="strict")
    return answer


async def _body(request: Request) -> str:
    """Return the request's body. Raises HTTPException: 413 above MOST_BODY bytes, 408 after BODY_SECONDS."""
    if int(request.headers.get("content-length", 0)) > MOST_BODY:  # reject before 100 Continue
        await discard_body(request)
        raise HTTPException(413, headers={"Connection": "close"})
    raw = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > MOST_BODY:
                    await discard_body(request)
                    raise HTTPException(413, headers={"Connection": "close"})
            return raw.decode("utf-8", "replace")
    raise HTTPException(408, headers={"Connection": "close"})


async def _log_out(request: Request) -> Response:
    """Delete the login of the request's cookie, and the cookie."""
    logins: Logins = request.app.state.logins
    logins.log_out(request.cookies.get(cookie_name(request), ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(cookie_name(request), httponly=True, samesite="strict")
    return answer


async def _to_login(request: Request, error: Exception) -> Response:
    """Redirect a navigation to the login form. Reply to other requests, as of scripts, with 401."""
    if request.headers.get("sec-fetch-mode", "navigate") == "navigate" and request.method == "GET":
        return RedirectResponse("/login", 303)
    return PlainTextResponse("log in first\n", 401)


async def _malformed(request: Request, error: Exception) -> Response:
    expected = "expected Authorization: Basic, then USER:PASSWORD in base64, or Bearer, then the token\n"
    return PlainTextResponse(expected, 401, ASK)


async def _not_allowed(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 403)


def _too_many(request: Request, refusal: Unanswered) -> Response:
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    return PlainTextResponse(f"{refusal.message}\n", refusal.status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    if str(error).startswith("DENIED"):  # in protected mode
        return await _no_answer(request, error)
    return PlainTextResponse(f"the store answered: {error}\n", 502)


async def _no_answer(request: Request, error: Exception) -> Response:
    return PlainTextResponse(NO_ANSWER, 503, {"Retry-After": "1"})


async def _other_method(request: Request, error: Exception) -> Response:
    methods = allowed_methods(request)
    text = f"there is no {request.method} {request.url.path} here, only {methods}\n"
    return PlainTextResponse(text, 405, {"Allow": methods})


async def _disconnected(request: Request, error: Exception) -> Response:
    return PlainTextResponse("", 400)
