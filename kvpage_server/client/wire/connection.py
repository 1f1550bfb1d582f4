"""redis-py's connections, spoken over without waiting: they make the socket, TLS, HELLO, AUTH and SELECT as ever.

The pool lends a connection whether it is connected or not; `open` connects it, within the caller's deadline. From then
on its socket never blocks, and redis-py's handshake itself is sent and read by our own exchange, so no parser of
redis-py's holds back bytes that belong to a page.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
from collections.abc import Iterable
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from kvpage_server.client.errors import Disconnected, PageClientError, WrongReply
from kvpage_server.client.wire.deadline import Deadline
from kvpage_server.client.wire.exchange import Conversation, Request
from kvpage_server.client.wire.reply import Values, only

T = TypeVar("T")
NONSENSE = (AttributeError, LookupError, TypeError, ValueError)  # of redis-py's handshake, for what it can't read


class PageConnection(AbstractConnection):
    """What is different in all three of redis-py's connection classes."""

    _sock: socket.socket | None  # type: ignore[assignment]  # as redis-py uses it
    _deadline: Deadline
    _unsent: list[bytes]

    # -- what the pool asks for ------------------------------------------------------------------------------------

    def connect(self) -> None:
        """The pool connects what it lends. `open` does that here."""

    def can_read(self, timeout: float = 0) -> bool:
        """The pool asks whether bytes of an earlier answer are left. `is_ready` does that here."""
        return False

    # -- connecting ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether it is connected and nothing has come since its last answer. What has come makes it useless."""
        if self._sock is None:
            return False
        try:
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def open(self, deadline: Deadline) -> None:
        """Connect and authenticate, unless it is ready. Raises DeadlineExceeded, Disconnected, WrongReply, Refused."""
        if self.is_ready:
            return
        self.disconnect()  # type: ignore[no-untyped-call]
        self._deadline = deadline
        timeouts = self.socket_timeout, self.socket_connect_timeout
        try:
            self.socket_timeout = self.socket_connect_timeout = min(deadline.left(), timeouts[1] or math.inf)
            self.connect_check_health(check_health=False, retry_socket_connect=False)
        except PageClientError:
            raise
        except redis.RedisError as error:
            deadline.left()
            raise Disconnected(str(error)) from error
        except NONSENSE as error:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise WrongReply(f"the server's greeting makes no sense: {error!r}") from error
        finally:
            self.socket_timeout, self.socket_connect_timeout = timeouts

    def _connect(self) -> socket.socket:
        sock: socket.socket = super()._connect()  # type: ignore[safe-super, no-untyped-call]
        sock.setblocking(False)
        return sock

    def send_packed_command(self, command: bytes | Iterable[bytes], check_health: bool = True) -> None:
        """A part of the handshake; its answer is asked for next."""
        self._unsent = [command] if isinstance(command, bytes) else list(command)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """The answer to what was sent last."""
        return self.converse(Request(lambda: iter(self._unsent), Values, only), self._deadline)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, request: Request[T], deadline: Deadline) -> T:
        """What the server answers. Raises any PageClientError; after all but Refused the connection is closed."""
        self.open(deadline)
        return self.converse(request, deadline)

    def converse(self, request: Request[T], deadline: Deadline) -> T:
        """The same, on the connection as it is."""
        conversation = self.conversation(request)
        try:
            wait_through(conversation, deadline)
            return conversation.result()
        finally:
            self.close_unless(conversation.over)

    def conversation(self, request: Request[T]) -> Conversation[T]:
        """A request on the open connection."""
        assert self._sock is not None
        return Conversation(self._sock, request)

    def close_unless(self, over: bool) -> None:
        """Close the connection when a conversation was not over: what is still to come would be taken for an answer
        to the next question."""
        if not over:
            self.disconnect()  # type: ignore[no-untyped-call]


def wait_through(conversation: Conversation[Any], deadline: Deadline) -> None:
    """Drive a conversation to its end. Raises DeadlineExceeded, Disconnected, WrongReply."""
    poller = select.poll()
    poller.register(conversation.sock)
    steps = conversation.steps()
    events, ready = next(steps, None), 0
    while events is not None:
        left = deadline.left()
        if events:
            poller.modify(conversation.sock, events)
            found = poller.poll(math.ceil(left * 1000))
            ready = found[0][1] if found else 0
        try:
            events = steps.send(ready)
        except StopIteration:
            return


class PageTCPConnection(PageConnection, Connection):
    """redis://"""


class PageTLSConnection(PageConnection, SSLConnection):
    """rediss://"""


class PageUnixConnection(PageConnection, UnixDomainSocketConnection):
    """unix://"""


# Nothing may come uncalled for; and a server that knows no CLIENT MAINT_NOTIFICATIONS counts it as an error.
_QUIETLY: dict[str, Any] = {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
_CLASSES = {"rediss": PageTLSConnection, "unix": PageUnixConnection}


def page_pool(url: str, options: dict[str, Any]) -> ConnectionPool:
    """A pool for a redis://, rediss:// or unix:// URL; `options` as redis-py's ConnectionPool takes them.

    Raises ValueError for another URL.
    """
    options = {
        "retry": Retry(NoBackoff(), 1),  # a server that was restarted
        **_QUIETLY,
        **options,
    }
    return ConnectionPool.from_url(
        url, connection_class=_CLASSES.get(urlsplit(url).scheme, PageTCPConnection), **options
    )


def plain_client(url: str, **options: Any) -> redis.Redis:
    """A client of redis-py's own, which asks the server nothing by itself but how to speak with it."""
    return redis.Redis.from_url(url, **_QUIETLY, **options)


def lend(pool: ConnectionPool) -> PageConnection:
    """A connection of the pool, to be released. Raises Disconnected when it has no more."""
    try:
        return cast(PageConnection, pool.get_connection())
    except redis.ConnectionError as error:
        raise Disconnected(str(error)) from error


def pause_before_retry(connection: PageConnection, failures: int, deadline: Deadline, error: Disconnected) -> float:
    """Seconds to wait, as the connection's redis-py Retry says. Raises `error` when it was tried often enough, or when
    the deadline would pass meanwhile."""
    retry = connection.retry
    if 0 <= retry.get_retries() < failures:
        raise error
    pause: float = retry._backoff.compute(failures)  # Retry.call_with_retry would sleep past the deadline
    if pause >= deadline.left():
        raise error
    return pause
