"""Bearer tokens and their tenants.

Agents of different tenants are different agents, even if they have the same name. They share no blocks, because the
hashes of each tenant's blocks begin with another root (`engine.chains.root_of`). Without a file of tokens, every
request is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from kvpage_server.bounded import read_regular

from ..chains import is_agent_id
from ..memory.blocks import BlockError, check_agent_id
from .openai.errors import ApiError, invalid

_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
_MOST_BYTES = 16 << 20  # bytes of a file of tokens
WATCHER = "*"  # the tenant's name of a token that may read the metrics of all tenants, and nothing else
AGENT_HEADER = "X-Agent-Id"
KEY_HEADER = "X-Api-Key"


class TokenFileError(ValueError):
    """Error: a file of tokens cannot be read or has an invalid line. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant of a request: its name, "" if the engine needs no tokens, or WATCHER."""

    name: str = ""

    def agent(self, given: str, param: str) -> str:
        """Return the engine's id of the tenant's agent with the name `given`: NAME@TENANT, or NAME without tenants.

        Raises ApiError (400) for an invalid name. `param` is the field of the request that the error names.
        """
        agent_id = f"{given}@{self.name}" if self.name else given
        try:
            if "@" in given or not given:
                raise BlockError(given)
            return check_agent_id(agent_id)
        except BlockError:
            longest = 128 - len(agent_id) + len(given)
            raise invalid(
                f"{param} must be 1 to {longest} of A-Z a-z 0-9 . _ + = - and must not start with a dot",
                param,
                "invalid_agent_id",
            ) from None

    def agent_of_user(self, user: str) -> str:
        """Return the engine's id of the agent that OpenAI's field `user` names, which may be any text.

        A text that is no valid name of an agent, such as an e-mail address, is replaced by its hash.
        """
        if "@" not in user and is_agent_id(f"{user}@{self.name}" if self.name else user):
            return user
        return f"user-{hashlib.blake2b(user.encode(), digest_size=16).hexdigest()}"

    def given(self, agent_id: str) -> str | None:
        """Return the tenant's name for the agent with this id; None if the agent belongs to another tenant."""
        return agent_id.rpartition("@")[0] or agent_id if tenant_of(agent_id) == self.name else None


def tenant_of(agent_id: str) -> str:
    """Return the name of the tenant in an agent's id; "" if the id has none."""
    return agent_id.rpartition("@")[2] if "@" in agent_id else ""


class Tokens:
    """The valid tokens and their tenants. Tokens are stored as digests, which are compared in constant time."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """Accept these tokens: `tenants` has the tenant's name by token. If it is empty, requests need no token."""
        self._tenants = {_digest(token): Tenant(name) for token, name in tenants.items()}

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Read a file with lines "NAME TOKEN", where NAME may be WATCHER. Empty lines and lines that begin with # are
        skipped.

        Raises TokenFileError.
        """
        tenants: dict[str, str] = {}
        try:
            lines = read_regular(path, _MOST_BYTES).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not in UTF-8"
            raise TokenFileError(f"cannot read the tokens in {path}: {why or error}") from error
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or not (words[0] == WATCHER or _NAME.fullmatch(words[0])):
                raise TokenFileError(
                    f'{path}, line {number}: expected "NAME TOKEN", the name 1 to 32 of A-Z a-z 0-9 . _ - or *'
                )
            name, token = words
            if token in tenants:
                raise TokenFileError(f"{path}, line {number}: the token of {tenants[token]!r} is used again")
            tenants[token] = name
        if not tenants:
            raise TokenFileError(f"{path} has no tokens")
        return cls(tenants)

    def share(self, places: int) -> int:
        """Return the share of `places`, such as the places of the queue, that is guaranteed to each tenant: an equal
        share, and at least one place.
        """
        return max(1, places // self.count)

    @property
    def count(self) -> int:
        """The number of tenants; 1 without a file of tokens."""
        return max(1, len({tenant.name for tenant in self._tenants.values()} - {WATCHER}))

    def tenant(self, request: Request) -> Tenant:
        """Return the tenant of a request. Raises ApiError: 401 as `who`, 403 for the token of WATCHER."""
        tenant = self.who(request)
        if tenant.name == WATCHER:
            raise ApiError(403, "this token is for /metrics only", code="metrics_only")
        return tenant

    def who(self, request: Request) -> Tenant:
        """Return the tenant of a request for metrics, where WATCHER is permitted. Raises ApiError (401) for a missing
        or unknown token, and for two different ones.
        """
        if not self._tenants:
            return Tenant()
        scheme, _, token = credential(request).partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise ApiError(
                401, "a token is needed: Authorization: Bearer TOKEN, or X-Api-Key: TOKEN", code="invalid_api_key"
            )
        headers = request.headers
        given = [value.partition(" ")[2] for value in headers.getlist("Authorization")] + headers.getlist(KEY_HEADER)
        if any(other.strip() != token.strip() for other in given):
            raise ApiError(401, "the headers Authorization and X-Api-Key have different tokens", code="invalid_api_key")
        asked = _digest(token.strip())
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, asked):
                return tenant
        raise ApiError(401, "the token is not known", code="invalid_api_key")


def credential(request: Request) -> str:
    """Return the value of the header Authorization; without it, the key of X-Api-Key, Anthropic's header, as a bearer
    token; "" if a request has neither.
    """
    key = request.headers.get(KEY_HEADER)
    return request.headers.get("Authorization") or (f"Bearer {key}" if key else "")


def _digest(token: str) -> bytes:
    return hashlib.blake2b(token.encode("utf-8", "surrogateescape"), digest_size=32).digest()
