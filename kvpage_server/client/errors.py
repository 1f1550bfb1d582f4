"""The errors of a page client. Those with a redis-py counterpart are also instances of it."""

from __future__ import annotations

from typing import Self, TypeVar

import redis


class PageClientError(Exception):
    """The base class of all errors of a page client."""

    def again(self) -> Self:
        """Return a copy without a traceback, to be kept or raised again. The frames of a traceback would keep a call's
        arguments in memory, and the error itself where a frame refers to it.
        """
        fresh = type(self).__new__(type(self), *self.args)
        vars(fresh).update(vars(self))
        return fresh


E = TypeVar("E", bound=BaseException)


def bare(error: E) -> E:
    """Remove the tracebacks of an error and of its causes, and return the error.

    Some of the tracebacks' frames refer to the error, which makes a reference cycle.
    """
    one: BaseException | None = error
    while one:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


class DeadlineExceeded(PageClientError, redis.TimeoutError):
    """A call that took too long. Its connection is closed. The server may have executed the request."""


class Disconnected(PageClientError, redis.ConnectionError):
    """A connection that could not be made, or that broke. The server may have executed the request."""


class Closed(Disconnected):
    """A call on a closed client, or on one that was closed during the call."""

    def __init__(self) -> None:
        super().__init__("the client was closed")


class WrongReply(PageClientError, redis.InvalidResponse):
    """A reply that is not RESP, or does not fit the request. Its connection is closed."""


class Refused(PageClientError, redis.ResponseError):
    """An error reply of the server. `code` is its first word, such as ERR, OOM or NOPERM."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


class BadBuffer(PageClientError, ValueError):
    """Memory of the caller that can't be used: it has the wrong size, is read-only, or is not contiguous."""


class Unsupported(PageClientError):
    """A call that this kind of store does not support, for example a lease on a plain Redis."""
