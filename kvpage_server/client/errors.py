"""What can go wrong between a page client and its server. Each error is also the redis-py error that means the same."""

from __future__ import annotations

import redis


class PageClientError(Exception):
    """The root of them all."""


class DeadlineExceeded(PageClientError, redis.TimeoutError):
    """The call was not over in time. Its connection is closed; what was sent may have been done."""


class Disconnected(PageClientError, redis.ConnectionError):
    """No connection, or none any more. What was sent may have been done."""


class Closed(Disconnected):
    """The client was closed, before the call or while it was under way."""

    def __init__(self) -> None:
        super().__init__("the client was closed")


class WrongReply(PageClientError, redis.InvalidResponse):
    """The server's answer is not RESP, or not an answer to what was asked. Its connection is closed."""


class Refused(PageClientError, redis.ResponseError):
    """The server answered with an error. `code` is its first word, such as ERR, OOM or NOPERM."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


class BadBuffer(PageClientError, ValueError):
    """Memory given by the caller can't be sent or received into: wrong size, read-only, not contiguous."""


class Unsupported(PageClientError):
    """A plain Redis or Valkey can't do this, only kvpage-server can."""
