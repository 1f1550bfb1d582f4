"""The errors of a page client. Where redis-py has an equivalent error, they are also subclasses of that."""

from __future__ import annotations

from typing import Self, TypeVar

import redis


class PageClientError(Exception):
    """The base class of all errors of a page client."""

    def again(self) -> Self:
        """Return a copy of the error without a traceback, to be stored or raised again.

        The frames of a traceback would keep the arguments of the call in memory.
        """
        fresh = type(self).__new__(type(self), *self.args)
        vars(fresh).update(vars(self))
        return fresh


E = TypeVar("E", bound=BaseException)


def bare(error: E) -> E:
    """Remove the tracebacks of an error and of its chain of causes or contexts, in place. Return the same error.

    Some of the tracebacks' frames refer to the error, which makes a reference cycle.
    """
    one: BaseException | None = error
    while one:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


class DeadlineExceeded(PageClientError, redis.TimeoutError):
    """Error: a call took too long. Its connection is closed. The server may have executed the request."""


class Disconnected(PageClientError, redis.ConnectionError):
    """Error: a connection could not be made, or broke. The server may have executed the request."""


class Closed(Disconnected):
    """Error: a method was called on a closed client, or the client was closed during the call."""

    def __init__(self) -> None:
        super().__init__("the client was closed")


class WrongReply(PageClientError, redis.InvalidResponse):
    """Error: a reply is not RESP, or does not fit the request. The connection is closed."""

    @classmethod
    def instead_of(cls, expected: str, found: object) -> WrongReply:
        """Return the error for another reply than the expected one, with the beginning of the found one."""
        return cls(f"instead of {expected} came {_beginning(found)!r:.80}")


def _beginning(value: object) -> object:
    """Return the beginning of a reply, with bytes in place of memory."""
    if isinstance(value, memoryview):
        return bytes(value[:80])
    return [*map(_beginning, value[:10])] if isinstance(value, list) else value


class Refused(PageClientError, redis.ResponseError):
    """Error: the server sent an error reply. `code` is its first word, such as ERR, OOM or NOPERM."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]

    @property
    def of_login(self) -> bool:
        """Whether the server sends this error in reply to every command until a login succeeds."""
        return self.code in ("WRONGPASS", "NOAUTH")


class BadBuffer(PageClientError, ValueError):
    """Error: memory of the caller cannot be used, because it has the wrong size, is read-only, or is not contiguous."""


class Unsupported(PageClientError):
    """Error: this kind of store does not support the call, for example a lease on a plain Redis."""
