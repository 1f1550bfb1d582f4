"""Logins of viewers as users of the store's ACL, and their connections to the store.

Each user has a connection to the store, so that the store limits the data to the user's keys. All viewers with the same
name and password share one connection, which queries the store once a second.

A user without a password needs the token: `web-token`, or the one that the server prints when it starts. `web-token` is
the credential of Prometheus, too: it opens /metrics also if the default user has a password. Requests from this machine
need the token, too: behind a reverse proxy, the requests of all clients come from this machine, and may have no header
that shows the client's address (nginx adds none by default).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from starlette.requests import Request

from kvpage_server.observe.engines import Engines
from kvpage_server.observe.observer import ANSWER_SECONDS, Observer
from kvpage_server.system.process import send_socket

T = TypeVar("T")

# -- Connections to the store ------------------------------------------------------------------------------------------
#
# They are socket pairs, which only this process can open: it passes one end to the server over the channel that the
# server has created, with a text that states the purpose. For MONITOR, the server logs the connection in as the user of
# metrics. Other connections have to authenticate, and the server records the viewer's address as theirs.

CLIENT_NAME = "kvpage-monitor"
MONITOR = "monitor"  # the text with a socket for metrics
CONFIGURED = "configured"  # the first word from the server if the token is `web-token`
WITH_TOKEN = "token "  # before the address, if the viewer has logged in with the token
REPLY_SECONDS = 10.0  # timeout of a single reply of the store


class StoreConnector:
    """Opens connections to the store. `channel` is the socket over which the server receives their other ends."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def open(self, words: str) -> socket.socket:
        """Return a new connection to the store, a non-blocking socket. `words` is as for `store`.

        Raises TimeoutError if the server cannot receive it: the channel is full while the server hangs.
        """
        ours, theirs = socket.socketpair()
        try:
            send_socket(self._channel, theirs, words)
            ours.setblocking(False)
        except OSError as error:
            ours.close()
            raise TimeoutError("the server receives no connection") from error
        finally:
            theirs.close()
        return ours

    def store(self, words: str, user: str = "", password: str = "") -> redis.asyncio.Redis:
        """Return a client of the store with one connection, which is opened for the first command.

        `words` is MONITOR, or the address of the viewer, with WITH_TOKEN before it if the viewer has used the token.
        """
        options: dict[str, Any] = {"username": user, "password": password} if user or password else {}
        pool = redis.asyncio.BlockingConnectionPool(
            connection_class=SocketPairConnection,
            max_connections=1,
            timeout=REPLY_SECONDS,
            connector=self,
            words=words,
            protocol=3,
            socket_timeout=REPLY_SECONDS,
            retry=_RetryOnce(NoBackoff(), 1, (redis.ConnectionError,)),
            **options,
        )
        return redis.asyncio.Redis(connection_pool=pool)


class _Refused(Exception):
    """Error: the store has refused a login, with `error`."""

    def __init__(self, error: redis.AuthenticationError) -> None:
        super().__init__(str(error))
        self.error = error


class _RetryOnce(Retry):
    """One retry after a lost connection. A refused login is not repeated, because the store counts wrong passwords."""

    async def call_with_retry(self, do: Callable[[], Awaitable[T]], *rest: Any, **options: Any) -> T:
        async def attempt() -> T:
            try:
                return await do()
            except redis.AuthenticationError as error:
                raise _Refused(error) from None

        try:
            return await super().call_with_retry(attempt, *rest, **options)
        except _Refused as refused:
            raise refused.error from None


class SocketPairConnection(AbstractConnection):
    """A connection of redis-py over a socket pair. The server has the other end."""

    def __init__(self, *, connector: StoreConnector, words: str, **options: Any) -> None:
        super().__init__(**options)
        self._connector = connector
        self._words = words

    def repr_pieces(self) -> list[tuple[str, Any]]:
        return [("words", self._words)]

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and set the connection's name if the user may call CLIENT SETNAME.

        With redis-py's option `client_name`, users without that right could not connect.
        """
        await super().on_connect_check_health(check_health)
        with contextlib.suppress(NoPermissionError):
            await self.send_command("CLIENT", "SETNAME", CLIENT_NAME)
            await self.read_response()

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connector.open(self._words))

    def _host_error(self) -> str:
        return "the server"


# -- Logins ------------------------------------------------------------------------------------------------------------

MOST_USERS = 64  # logged in, each with a connection to the store
MOST_SESSIONS = 1024  # browsers that are logged in
IDLE_SECONDS = 12 * 3600.0  # a browser has to log in again after this time without a request
CHECKED_SECONDS = 1.0  # a password that is sent with each request is checked again after this time
DEFAULT = "default"


class Malformed(ValueError):
    """Error: the Authorization header is neither `Basic` with a user and a password nor `Bearer` with a token."""


@dataclass(slots=True)
class Login:
    """A logged-in user of the store, and the observer that reads the store as this user."""

    user: str
    observer: Observer
    checked: float  # when the store last accepted the password, in monotonic seconds


@dataclass(slots=True)
class _Session:
    """A browser with a cookie."""

    login: bytes  # its key in `Logins`
    used: float  # time of the last request, in monotonic seconds


class Logins:
    """Logged-in users by name and password, and browsers by cookie. Beyond the limits, the least recently used one is
    removed.
    """

    def __init__(self, connector: StoreConnector, token: str, *, configured: bool) -> None:
        self._token = token.encode()
        self._is_configured = configured
        self.engines = Engines()
        self.figures = Observer(connector.store(MONITOR), MONITOR, self.engines)
        self._connector = connector
        self._logins: OrderedDict[bytes, Login] = OrderedDict()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    async def log_in(self, user: str, password: str, address: str) -> str:
        """Log a browser in, and return its new cookie. `password` may be the token, for a user without a password.

        Raises AuthenticationError for a wrong password, RedisError if the store does not answer.
        """
        key = await self._enter(user, password, address, checked_since=time.monotonic())
        cookie = secrets.token_urlsafe(32)
        self._sessions[_digest(cookie)] = _Session(key, time.monotonic())
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return cookie

    def log_out(self, cookie: str) -> None:
        """Log a browser out. The user's connection stays open for its other browsers."""
        self._sessions.pop(_digest(cookie), None)

    async def of_password(self, user: str, password: str, address: str) -> Login:
        """Return the login for a password that is sent with each request. Raises as `log_in`."""
        return self._logins[await self._enter(user, password, address, time.monotonic() - CHECKED_SECONDS)]

    async def figures_of_token(self, word: str, address: str) -> Observer | None:
        """Return the observer of all figures if `word` is the token, else None.

        Raises as `log_in` if the server has made the token, and the default user has a password now.
        """
        if not self.is_token(word):
            return None
        if not self._is_configured:
            await self.of_password(DEFAULT, word, address)
        return self.figures

    def is_token(self, word: str) -> bool:
        """Return whether `word` is the token. The comparison takes the same time for all words, so nobody can guess it
        by measuring.
        """
        return hmac.compare_digest(self._token, word.encode("utf-8", "surrogateescape"))

    async def of_cookie(self, cookie: str) -> Login | None:
        """Return the login of a browser, or None if it has to log in first.

        A login that the store has refused since is removed.
        """
        digest, now = _digest(cookie), time.monotonic()
        session = self._sessions.get(digest)
        if session is None:
            return None
        if now - session.used > IDLE_SECONDS or session.login not in self._logins:
            del self._sessions[digest]
            return None
        login = self._logins[session.login]
        if login.observer.revoked:
            await self._forget(session.login)
            return None
        session.used = now
        self._sessions.move_to_end(digest)
        self._logins.move_to_end(session.login)
        return login

    async def _forget(self, key: bytes) -> None:
        """Remove a login and its browsers, and close its connection, because the store does not accept its password any
        more.
        """
        login = self._logins.pop(key)
        for digest in [digest for digest, session in self._sessions.items() if session.login == key]:
            del self._sessions[digest]
        await login.observer.close()

    async def _enter(self, user: str, password: str, address: str, checked_since: float) -> bytes:
        """Return the key of a login whose password the store has accepted at `checked_since` (monotonic seconds) or
        later.

        Otherwise open a connection to check the password now. Raises as `log_in`.
        """
        key = hashlib.blake2b(f"{user}\0{password}".encode("utf-8", "surrogateescape"), digest_size=16).digest()
        known = self._logins.get(key)
        if known is not None and known.observer.revoked:
            await self._forget(key)
            known = None
        if known is not None and known.checked >= checked_since:
            self._logins.move_to_end(key)
            return key
        words = WITH_TOKEN + address if self.is_token(password) else address
        store = self._connector.store(words, user, password)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await store.connection_pool.get_connection()  # type: ignore[no-untyped-call]
            await store.connection_pool.release(connection)
        except TimeoutError as error:
            await store.aclose()
            raise redis.TimeoutError("the store does not answer") from error
        except redis.RedisError as error:
            await store.aclose()
            if isinstance(error, redis.AuthenticationError) and key in self._logins:
                await self._forget(key)
            raise
        if known := self._logins.get(key):
            known.checked = time.monotonic()
            await store.aclose()
            return key
        self._logins[key] = Login(user, Observer(store, user, self.engines), time.monotonic())
        while len(self._logins) > MOST_USERS:
            _, oldest = self._logins.popitem(last=False)
            await oldest.observer.close()
        return key


def address_of(request: Request) -> str:
    """Return the address of the viewer as HOST:PORT, with brackets around an IPv6 address."""
    host, port = request.client or ("", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cookie_name(request: Request) -> str:
    """Return the name of the cookie. It has the port, because a browser sends cookies to all ports of a machine."""
    return f"kvpage-{(request.scope.get('server') or ('', 0))[1]}"


def credentials(request: Request) -> tuple[str, str] | None:
    """Return the user and password of HTTP basic authentication, or "" and a bearer token; None without the header.

    Raises Malformed for any other content of `Authorization`.
    """
    received = request.headers.getlist("authorization")
    if not received:
        return None
    scheme, _, encoded = received[0].partition(" ")
    if len(received) == 1 and scheme.lower() == "bearer" and encoded.strip():
        return "", encoded.strip()
    try:
        raw = base64.b64decode(encoded.strip().encode("latin-1"), validate=True)
        user, colon, password = raw.decode().partition(":")
    except ValueError as error:  # malformed base64 or UTF-8
        raise Malformed from error
    if len(received) > 1 or scheme.lower() != "basic" or not colon:
        raise Malformed
    return user or DEFAULT, password


def _digest(cookie: str) -> str:
    return hashlib.blake2b(cookie.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
