"""Errors of the API in the format of OpenAI's error object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.responses import JSONResponse

SHOWN = 100  # characters of a value in an error message; the rest is cut


@dataclass(slots=True)
class ApiError(Exception):
    """Error that becomes the reply: a request was refused or has failed.

    `status` is the HTTP status, `param` the name of the wrong field.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, object]:
        """The error in OpenAI's format."""
        return {"error": {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}}

    def response(self, body: Mapping[str, object]) -> JSONResponse:
        """Return the reply with this error, which `body` contains in the format of an API."""
        headers: Mapping[str, str] = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        if self.status in (408, 413):
            headers = {"Connection": "close"}  # the rest of the body is not read
        return JSONResponse(body, self.status, headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error (400) for an invalid request. `param` is the name of the wrong field."""
    return ApiError(400, message, param, code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error of a chat for an API that is converted to chats. `names` has that API's paths of fields, if they
    differ, by regular expressions of the chat's paths.
    """
    for path, name in names.items():
        if error.param and (found := re.fullmatch(path, error.param)):
            name = found.expand(name)
            return replace(error, message=error.message.replace(error.param, name, 1), param=name)
    return error


def shortened(value: object) -> str:
    """Return a value of a request for an error message, cut after SHOWN characters."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN else value[:SHOWN] + "...")
    plain = value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64)
    return repr(value) if plain else f"a {type(value).__name__}"


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
