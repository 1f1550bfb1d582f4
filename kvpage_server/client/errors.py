"""The errors of a page client. Each is also the redis-py error that means the same."""

from __future__ import annotations

from typing import Self, TypeVar

import redis


class PageClientError(Exception):
    """The root of them all."""

    def again(self) -> Self:
        """Return the same error, to be kept or to be raised once more. It has no traceback: its frames keep the
        arguments of a call in memory, and the error itself if it is a value in one of them.
        """
        fresh = type(self).__new__(type(self), *self.args)
        vars(fresh).update(vars(self))
        return fresh


E = TypeVar("E", bound=BaseException)


def bare(error: E) -> E:
    """Return an error of redis-py and its causes without tracebacks. In some of those frames it is a value."""
    one: BaseException | None = error
    while one:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


class DeadlineExceeded(PageClientError, redis.TimeoutError):
    """The call took too long. Its connection is closed. The server may have executed the request."""


class Disconnected(PageClientError, redis.ConnectionError):
    """There is no connection, or it broke. The server may have executed the request."""


class Closed(Disconnected):
    """The client was closed, before the call or while it was under way."""

    def __init__(self) -> None:
        super().__init__("the client was closed")


class WrongReply(PageClientError, redis.InvalidResponse):
    """The server's answer is not RESP, or does not fit the question. Its connection is closed."""


class Refused(PageClientError, redis.ResponseError):
    """The server answered with an error. `code` is its first word, such as ERR, OOM or NOPERM."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


class BadBuffer(PageClientError, ValueError):
    """The caller's memory can't be used: it has the wrong size, is read-only, or is not contiguous."""


class Unsupported(PageClientError):
    """A plain Redis or Valkey can't do this, only kvpage-server can."""
