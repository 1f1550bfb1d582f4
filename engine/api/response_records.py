"""Stored responses: the conversation that `previous_response_id` continues, at any engine with the same page server.

    turn:{tenant}:{response id}       JSON of a StoredTurn: the items of one turn, and the ids of the turns before it
    response:{tenant}:{response id}   JSON of the reply

Both end after SECONDS. A conversation is read with two requests, whatever its length, and its size is bounded by the
model's context, because replies, which have fields of any size, are not a part of it. Without a page server, values are
kept in memory, up to MAX_BYTES; and so are values that could not be sent to it, until they are found there.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import from_json, to_json

from kvpage_server import bounded
from kvpage_server.client.questions import Question, integer, ok, text

from ..tiers.pages import PageTier
from .openai.errors import ApiError

SECONDS = 30 * 24 * 3600  # as OpenAI's API
MAX_BYTES = 16 << 20  # of the records in memory
MAX_TURNS = 4096  # of a conversation
_ID = re.compile(r"resp_[0-9a-f]{32}")
# Bounds of a record's JSON, which others may have written.
_CONTAINERS, _STRINGS, _VALUES = 65_536, 262_144, 524_288


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn of a conversation."""

    input: list[dict[str, Any]]  # the items of the request
    output: list[dict[str, Any]]  # the items of the reply
    ancestors: list[str]  # ids of the turns before it, the first one first


class ResponseRecords:
    """The stored responses of all tenants. Its methods run on the event loop of the API.

    They raise ApiError (503) if the page server does not answer, and its values are needed.
    """

    def __init__(self) -> None:
        self.pages: PageTier | None = None  # set when the engine is loaded
        self._kept: dict[str, bytes] = {}  # by key, the oldest first: values that are not on the page server
        self._bytes = 0

    async def put(self, tenant: str, response: dict[str, Any], turn: StoredTurn) -> None:
        """Store a reply and its turn. If the page server does not answer, they are kept in memory."""
        keys = _keys(tenant, response["id"])
        values = dict(zip(keys, (to_json(asdict(turn)), to_json(response)), strict=True))
        commands = [Question(["SET", key, value, "EX", str(SECONDS)], ok) for key, value in values.items()]
        if self.pages and await self._ask(self.pages, commands) is not None:
            return
        for key, value in values.items():
            self._kept[key] = value
            self._bytes += len(value)
        while self._bytes > MAX_BYTES:
            self._bytes -= len(self._kept.pop(self._oldest_of_the_largest()))

    async def response(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """Return a stored reply; None if there is none of this tenant."""
        if not _ID.fullmatch(response_id):
            return None
        _, key = _keys(tenant, response_id)
        (raw,) = await self._get([key])
        found = _parsed(raw)
        return found if found and found.get("id") == response_id else None

    async def turn(self, tenant: str, response_id: str) -> StoredTurn | None:
        """Return the turn of a stored response; None if there is none of this tenant."""
        if not _ID.fullmatch(response_id):
            return None
        (raw,) = await self._get([_keys(tenant, response_id)[0]])
        return _turn(raw)

    async def conversation(self, tenant: str, response_id: str) -> list[StoredTurn] | None:
        """Return the turns of a conversation up to a response, in order; None if one of them is missing."""
        last = await self.turn(tenant, response_id)
        if not last:
            return None
        values = await self._get([_keys(tenant, one)[0] for one in last.ancestors])
        earlier = await asyncio.to_thread(lambda: [_turn(value) for value in values])
        found = [turn for turn in earlier if turn]
        return [*found, last] if len(found) == len(earlier) else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a stored response. Return whether there was one."""
        if not _ID.fullmatch(response_id):
            return False
        keys = _keys(tenant, response_id)
        deleted = await self._ask(self.pages, [Question(["DEL", key], integer) for key in keys]) if self.pages else [0]
        if deleted is None:
            raise _away()
        kept = [self._kept.pop(key, b"") for key in keys]
        self._bytes -= sum(map(len, kept))
        return any(kept) or any(deleted)

    def _oldest_of_the_largest(self) -> str:
        """Return the oldest key of the tenant whose values take most of the memory."""
        sizes: Counter[str] = Counter()
        for key, value in self._kept.items():
            sizes[_tenant(key)] += len(value)
        ((largest, _),) = sizes.most_common(1)
        return next(key for key in self._kept if _tenant(key) == largest)

    async def _get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys: those of the page server, or else those in memory."""
        absent = [key for key in keys if key not in self._kept]
        found: dict[str, bytes | None] = {}
        if self.pages and absent:
            # A conversation that continues is kept for SECONDS again.
            values = await self._ask(self.pages, [Question(["GETEX", key, "EX", str(SECONDS)], text) for key in absent])
            if values is None:
                raise _away()
            found = dict(zip(absent, values, strict=True))
        return [self._kept.get(key) or found.get(key) for key in keys]

    async def _ask(self, pages: PageTier, questions: Sequence[Question]) -> list[Any] | None:
        """Return the replies of the page server; None if it does not answer."""
        return await asyncio.wrap_future(pages.ask(questions))


def _keys(tenant: str, response_id: str) -> tuple[str, str]:
    """Return the keys of a response's turn and of its reply."""
    return f"turn:{tenant}:{response_id}", f"response:{tenant}:{response_id}"


def _tenant(key: str) -> str:
    return key.split(":")[1]


def _away() -> ApiError:
    message = "the page server, which has the stored responses, does not answer: ask again when it is back"
    return ApiError(503, message, code="store_unavailable", retry_after=1)


def _parsed(raw: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in a value; None if it is none."""
    if raw is None:
        return None
    try:
        bounded.check(raw, containers=_CONTAINERS, strings=_STRINGS, values=_VALUES)
        found = from_json(raw)
    except (bounded.TooMuchError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _turn(raw: bytes | None) -> StoredTurn | None:
    """Return the turn in a value; None if it is none."""
    match _parsed(raw):
        case {"input": list(given), "output": list(made), "ancestors": list(ids)} if len(ids) <= MAX_TURNS:
            if all(isinstance(one, str) and _ID.fullmatch(one) for one in ids):
                return StoredTurn(given, made, ids)
    return None
