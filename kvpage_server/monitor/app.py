"""The routes besides the web page: figures for Prometheus, health, login and logout."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from urllib.parse import parse_qs

import redis
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from kvpage_server.http.guards import Guards, own_names
from kvpage_server.monitor.exposition import exposition
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
from kvpage_server.observe.observer import Observer

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
    """The user has to log in first."""


def make_app(
    logins: Logins, closed: Counter[str], pages: Sequence[BaseRoute], origins: Sequence[str] = ()
) -> Starlette:
    """The application. `closed` counts closed connections by reason. `pages` are further routes.
    `origins` are the sites under which proxies offer the page.

    A page calls `login_of(request)` for its user. The page at /login has a form, which is sent back to /login.
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
    """The login of a request, by its cookie or by the token in its Authorization header. Raises NotLoggedIn, or
    RedisError if the store refuses or does not answer. A user and a password in that header may be meant for a proxy,
    so they are not tried."""
    logins: Logins = request.app.state.logins
    login = logins.of_cookie(request.cookies.get(cookie_name(request), ""))
    if login is not None:
        return login
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not logins.is_token(token.strip()):
        raise NotLoggedIn
    return await logins.of_password(DEFAULT, token.strip(), address_of(request))


async def _metrics(request: Request) -> Response:
    """All figures for the token. A user and a password, or the cookie of a login, give the figures of that user."""
    logins: Logins = request.app.state.logins
    who = credentials(request)
    observer: Observer | None
    try:
        if who is None:
            observer = (await login_of(request)).observer
        elif not who[0]:
            observer = logins.figures if logins.is_token(who[1]) else None
        else:
            observer = (await logins.of_password(*who, address_of(request))).observer
    except NotLoggedIn:
        return PlainTextResponse(NO_CREDENTIALS, 401, ASK)
    except redis.AuthenticationError:
        observer = None
    if observer is None:
        return PlainTextResponse("the store does not take this password or token\n", 401, ASK)
    closed, overview, engines = dict(request.app.state.closed), await observer.overview(), await observer.engines()
    told = await asyncio.to_thread(exposition, overview, closed, engines)
    return Response(told, media_type=EXPOSITION)


async def _health(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _log_in(request: Request) -> Response:
    """Takes a form of `user` and `password`. Redirects to the first page, or back to the form with ?wrong."""
    try:
        told = parse_qs(await _body(request), keep_blank_values=True, max_num_fields=8)
    except ValueError as error:
        raise HTTPException(400, "a form of user and password has no more than 8 fields") from error
    user, password = (told.get(name, [""])[0] for name in ("user", "password"))
    return await log_in(request, user or DEFAULT, password)


async def log_in(request: Request, user: str, password: str) -> Response:
    """Log a browser in, and send it to the first page, or to the form if the store refuses."""
    logins: Logins = request.app.state.logins
    try:
        cookie = await logins.log_in(user, password, address_of(request))
    except redis.AuthenticationError:
        return RedirectResponse("/login?wrong", 303)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(cookie_name(request), cookie, max_age=int(IDLE_SECONDS), httponly=True, samesite="strict")
    return answer


async def _body(request: Request) -> str:
    """The request's body. Raises HTTPException if it is too long or too slow."""
    if int(request.headers.get("content-length", 0)) > MOST_BODY:  # known before who asks is told to send it
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
