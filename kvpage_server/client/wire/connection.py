"""redis-py's connections, used without blocking. redis-py still makes the socket, TLS, HELLO, AUTH and SELECT.

The pool returns a connection whether it is connected or not, and `open` connects it within the caller's deadline. From
then on its socket never blocks. `Conversation` also sends redis-py's handshake and reads its replies, so that no parser
of redis-py buffers bytes that belong to a page.

A socket is closed only by its user, the thread or task that has taken its connection. After a close by another thread,
the system may give the descriptor to another file, and the user would read that file's bytes as a reply. So closing a
pool only shuts down the sockets in use, and their users read the end of the stream.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from numbers import Real
from typing import Any, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import MaxConnectionsError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from kvpage_server.address import shown
from kvpage_server.client.errors import Closed, DeadlineExceeded, Disconnected, PageClientError, WrongReply, bare
from kvpage_server.client.wire.exchange import Conversation, Request
from kvpage_server.client.wire.reply import Values, only

# -- Deadlines ---------------------------------------------------------------------------------------------------------


_LONGEST = 1_000_000.0  # seconds; system calls do not accept all longer times


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class Deadline:
    """The time by which a call must end, `seconds` after the creation of the object, _LONGEST at most. It includes
    connects, sends, receives and retries.

    `error` returns the exception for an exceeded deadline, in place of the default one.
    """

    def __init__(self, seconds: float, error: Callable[[], DeadlineExceeded] | None = None) -> None:
        if not _is_number(seconds):
            raise TypeError(f"a deadline must be a number of seconds, got {type(seconds).__name__}")
        if not seconds > 0:
            raise ValueError(f"a deadline is a positive number of seconds, got {seconds}")
        self._seconds, self._error = seconds, error
        self._end = time.monotonic() + min(seconds, _LONGEST)

    def part(self, node: Hashable, seconds: float) -> Deadline:
        """Return a deadline for the request to `node`: `seconds` from now, or this deadline if that is earlier. Its
        error names the node.
        """
        seconds = min(seconds, self.left())
        return Deadline(seconds, lambda: self.late(node, f"did not answer within {seconds:.3g} s"))

    def left(self) -> float:
        """Return the seconds left, more than 0. Raises DeadlineExceeded if no time is left."""
        left = self.seconds_left()
        if left <= 0:
            raise self.exceeded()
        return left

    def seconds_left(self) -> float:
        """Return the seconds left, 0 or less after the deadline."""
        return self._end - time.monotonic()

    def exceeded(self) -> DeadlineExceeded:
        """Return the error for an exceeded deadline."""
        return self._error() if self._error else DeadlineExceeded(f"not done within {self._seconds:g} s")

    def late(self, node: Hashable, why: str) -> DeadlineExceeded:
        """Return the error for the server `node`, which is late for the reason `why`. The error has the time left of
        this deadline.
        """
        left = max(self.seconds_left(), 0)
        return DeadlineExceeded(f"{node} {why}; {left:.3g} of the call's {self._seconds:g} s left")

    def spent(self) -> str:
        """Return the elapsed time as text, for error messages."""
        return f"{self._seconds - max(self.seconds_left(), 0):.3g} of {self._seconds:g} s"


T = TypeVar("T")
U = TypeVar("U")


@contextmanager
def sensible(reply: str) -> Iterator[None]:
    """Raise WrongReply if redis-py cannot read a reply. Within, only redis-py is called."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise WrongReply(f"the server's {reply} makes no sense: {error!r}") from bare(error)


def greet(connection: AbstractConnection) -> None:
    """Log in, as redis-py does. Raises WrongReply for a greeting that redis-py cannot read."""
    with sensible("greeting"):
        connection.on_connect()  # type: ignore[no-untyped-call]


class PageConnection(AbstractConnection):
    """Mixin that makes a connection class of redis-py non-blocking. One user at a time sends requests on it."""

    _sock: socket.socket | None  # type: ignore[assignment]  # as redis-py uses it
    _deadline: Deadline
    _unsent: list[bytes]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.interrupted = False
        self.area: memoryview | None = None  # memory into which the server copies blocks, mapped; see `client.mapped`
        self._ending = threading.Lock()  # held by a close and by a shutdown, which may be on different threads
        super().__init__(*args, **options)

    # -- interface for redis-py's pool ---------------------------------------------------------------------------------

    def connect(self) -> None:
        """Do nothing: redis-py's pool calls this when a connection is taken from it. `open` connects instead."""

    def can_read(self, timeout: float = 0) -> bool:
        """Return False: redis-py's pool calls this to find bytes of an earlier reply. `is_ready` checks for them
        instead.
        """
        return False

    # -- connecting ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the connection is open, and no byte has arrived since its last reply. Otherwise `open` has to connect
        it again.
        """
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
        """Connect and authenticate until the deadline, unless the connection is ready.

        Raises DeadlineExceeded, Disconnected, WrongReply for an invalid handshake, Refused, for example for a wrong
        password, and Closed after `interrupt`.
        """
        if self.is_ready:
            return
        if self.interrupted:
            raise Closed
        self.disconnect()
        self._deadline = deadline
        timeouts = self.socket_timeout, self.socket_connect_timeout
        try:
            self.socket_timeout = self.socket_connect_timeout = min(deadline.left(), timeouts[1] or math.inf)
            with sensible("greeting"):
                self.connect_check_health(check_health=False, retry_socket_connect=False)
        except PageClientError as error:
            self.disconnect()
            raise bare(error).again() from None
        except redis.RedisError as error:
            deadline.left()
            raise Disconnected(str(error)) from bare(error)
        finally:
            self.socket_timeout, self.socket_connect_timeout = timeouts

    def _connect(self) -> socket.socket:
        sock: socket.socket = super()._connect()  # type: ignore[safe-super, no-untyped-call]
        sock.setblocking(False)
        with self._ending:
            if self.interrupted:
                sock.close()
                raise Closed
            self._sock = sock
        return sock

    def send_packed_command(self, command: bytes | Iterable[bytes], check_health: bool = True) -> None:
        """Keep a command of redis-py's handshake. `read_response`, which redis-py calls next, sends it."""
        self._unsent = [command] if isinstance(command, bytes) else list(command)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Send the command that `send_packed_command` has kept, and return its reply."""
        return self.converse(Request(lambda: iter(self._unsent), Values, only), self._deadline)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, request: Request[T], deadline: Deadline) -> T:
        """Connect if necessary, send a request, and return its decoded reply.

        Raises any PageClientError. Each of them closes the connection, except for Refused.
        """
        self.open(deadline)
        return self.converse(request, deadline)

    def converse(self, request: Request[T], deadline: Deadline) -> T:
        """Send a request and return its decoded reply, as `ask`, on a connection that is open already."""
        conversation = self.conversation(request)
        try:
            wait_through(conversation, deadline)
            return conversation.result()
        finally:
            self.close_unless(conversation.over)

    def converse_while(self, request: Request[T], work: Callable[[], U], deadline: Deadline) -> tuple[T, U]:
        """Send a request, do `work`, and receive the reply, as `ask`. Return the decoded reply and the result of the
        work.
        """
        self.open(deadline)
        conversation = self.conversation(request)
        try:
            next(conversation.steps(), None)  # this sends the request
            done = work()
            wait_through(conversation, deadline)
            return conversation.result(), done
        finally:
            self.close_unless(conversation.over)

    def conversation(self, request: Request[T]) -> Conversation[T]:
        """Return the conversation of a request on the open connection."""
        assert self._sock is not None
        return Conversation(self._sock, request)

    def interrupt(self) -> None:
        """Shut the socket down from another thread or task. Its user gets an error, and the connection cannot be used
        afterwards.
        """
        with self._ending:
            self.interrupted = True
            if self._sock is not None:
                with suppress(OSError):
                    # SSLSocket.shutdown would also drop the TLS state, which the user's thread may be using
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def disconnect(self, *args: Any, **options: Any) -> None:
        """Close the socket. A lock keeps `interrupt` from using it at the same time."""
        self.area = None
        with self._ending:
            super().disconnect(*args, **options)  # type: ignore[no-untyped-call]

    def close_unless(self, over: bool) -> None:
        """Close the connection unless its conversation is `over`, because the next request would read the rest of this
        one's reply.
        """
        if not over:
            self.disconnect()


def wait_through(conversation: Conversation[Any], deadline: Deadline) -> None:
    """Send and receive until a conversation has ended. Raises DeadlineExceeded, Disconnected, WrongReply."""
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
    """A connection of a redis:// URL."""


class PageTLSConnection(PageConnection, SSLConnection):
    """A connection of a rediss:// URL."""


class PageUnixConnection(PageConnection, UnixDomainSocketConnection):
    """A connection of a unix:// URL."""


# Without this, redis-py sends CLIENT MAINT_NOTIFICATIONS, which other servers count as an error, and gets push
# messages.
QUIETLY: dict[str, Any] = {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
_OF_TCP_ALONE = ("host", "port", "socket_keepalive", "socket_keepalive_options", "socket_type")
_CLASSES: dict[str, Any] = {"rediss": PageTLSConnection, "unix": PageUnixConnection}


class PagePool(ConnectionPool):
    """redis-py's connection pool for `PageConnection`. It can be closed while its connections are in use."""

    closed = False

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine: at a loopback address, or behind a Unix socket."""
        options = self.connection_kwargs
        host = str(options.get("host", "localhost"))
        return "path" in options or host in ("localhost", "::1") or host.startswith("127.")

    @property
    def has_tls(self) -> bool:
        """Whether connections use TLS."""
        return issubclass(self.connection_class, SSLConnection)

    def at_socket(self, path: str, check: Callable[[PageConnection, Deadline], None]) -> PagePool:
        """Return a pool for a unix socket, with the user and the other options of this one. `check` is called with each
        new connection and its deadline, before it is used.
        """

        def begin(connection: PageConnection) -> None:
            connection.on_connect()  # type: ignore[no-untyped-call]
            check(connection, connection._deadline)

        options = {name: value for name, value in self.connection_kwargs.items() if name not in _OF_TCP_ALONE}
        options = {**options, "path": path, "redis_connect_func": begin}
        return PagePool(connection_class=PageUnixConnection, max_connections=self.max_connections, **options)

    def lend(self) -> PageConnection:
        """Return a connection of the pool, which the caller has to `release`.

        Raises Closed after `close`, Disconnected if all connections are in use.
        """
        try:
            connection = cast(PageConnection, self.get_connection())
        except MaxConnectionsError as error:
            raise Disconnected(f"Too many connections: max_connections is {self.max_connections}") from error
        except redis.ConnectionError as error:
            raise Disconnected(str(error)) from error
        if self.closed:
            self.release(connection)
            raise Closed
        return connection

    @contextmanager
    def lent(self) -> Iterator[PageConnection]:
        """Yield a connection of the pool, and release it afterwards. Raises as `lend` and `in_use`."""
        connection = self.lend()
        try:
            with self.in_use():
                yield connection
        finally:
            self.release(connection)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the caller's ``with`` block. Raises Closed instead of a Disconnected of the block if the pool was
        closed.
        """
        try:
            yield
        except Disconnected as error:
            if self.closed and not isinstance(error, Closed):
                raise Closed from error
            raise

    def release(self, connection: Any) -> None:
        """Take a connection back. A closed pool closes it."""
        super().release(connection)
        if self.closed:
            connection.disconnect()

    def close(self) -> None:
        """Close the connections. Those in use are only shut down: their users get an error, and release them."""
        self.closed = True
        with self._lock:
            for connection in self._in_use_connections:
                connection.interrupt()
            for connection in self._available_connections:
                connection.disconnect()


_OPTIONS = (  # of redis-py, in a URL
    "client_name", "db", "decode_responses", "encoding", "encoding_errors", "health_check_interval", "max_connections",
    "password", "protocol", "retry_on_timeout", "socket_connect_timeout", "socket_read_size", "socket_timeout",
    "username",
)  # fmt: skip
_OF_TCP = ("socket_keepalive",)
_OF_TLS = (
    "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_ciphers",
    "ssl_keyfile", "ssl_min_version", "ssl_password",
)  # fmt: skip
_ALLOWED = {
    "redis": {*_OPTIONS, *_OF_TCP},
    "rediss": {*_OPTIONS, *_OF_TCP, *_OF_TLS},
    "unix": {*_OPTIONS},
}


def check_url(url: str) -> None:
    """Raise ValueError if the URL is not redis://, rediss:// or unix://, or has an invalid port or unknown option.

    redis-py itself raises TypeError for an unknown option, when it connects for the first time.
    """
    parts = urlsplit(url)
    allowed = _ALLOWED.get(parts.scheme) if url.startswith(f"{parts.scheme}://") else None
    if allowed is None:
        schemes = "redis://, rediss:// or unix://, and that of a cluster with valkey-cluster://"
        raise ValueError(f"a server's URL begins with {schemes}, got {shown(url)!r}")
    try:
        parts.port  # noqa: B018  urlsplit checks it when it is read
    except ValueError as error:
        raise ValueError(f"{error}, got {shown(url)!r}") from None
    for name in parse_qs(parts.query, keep_blank_values=True).keys() - allowed:
        if name in _OF_TLS:
            raise ValueError(f"the option {name} of a server's URL needs rediss://")
        raise ValueError(f"unknown option {name!r:.60} in a server's URL; allowed: {', '.join(sorted(allowed))}")


def check_options(names: Iterable[str], *kinds: type) -> None:
    """Raise ValueError if no constructor of the classes, nor of PagePool, has an option. redis-py itself raises
    TypeError for it at the first connection.
    """
    classes = {base for kind in (*kinds, PagePool) for base in kind.__mro__ if "__init__" in vars(base)}
    allowed = {name for one in classes - {object} for name in signature(one.__init__).parameters}  # type: ignore[misc]
    if unknown := sorted({*names} - allowed):
        raise ValueError(f"unknown option {unknown[0]!r:.60} of a client")


_NO_LIMIT = 2**31


def page_pool(url: str, options: dict[str, Any]) -> PagePool:
    """Return a pool for a redis://, rediss:// or unix:// URL. `options` are those of redis-py's ConnectionPool.

    Raises ValueError for another URL, or one with an unknown option.
    """
    check_url(url)
    kind = _CLASSES.get(urlsplit(url).scheme, PageTCPConnection)
    check_options(options, kind)
    options = {
        "max_connections": _NO_LIMIT,  # redis-py 8 has 100
        "retry": Retry(NoBackoff(), 1),  # one retry, because a restarted server has closed the pool's connections
        **QUIETLY,
        **options,
    }
    return PagePool.from_url(url, connection_class=kind, **options)


def pause_before_retry(connection: PageConnection, failures: int, deadline: Deadline, error: Disconnected) -> float:
    """Return the seconds to wait before retry number `failures`, by the redis-py Retry of the connection.

    Raises `error` if no retry is left, if the deadline would pass during the wait, or if the connection was
    interrupted.
    """
    retry = connection.retry
    pause: float = retry._backoff.compute(failures)  # Retry.call_with_retry would sleep past the deadline
    if connection.interrupted or 0 <= retry.get_retries() < failures or pause >= deadline.left():
        raise error.again() from error.__cause__
    return pause
