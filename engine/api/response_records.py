"""Stored responses: the conversation that `previous_response_id` continues, at any engine with the same page server.

    response:{tenant}:{response id}   JSON of a Record, which ends after SECONDS

A record has the items of one turn, and the ids of the turns before it, so that a conversation is read with two requests
whatever its length. Without a page server, or while it does not answer, records are kept in memory, up to MAX_BYTES.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpage_server import bounded
from kvpage_server.client.questions import Question, integer, ok, text

from ..tiers.pages import PageTier

SECONDS = 30 * 24 * 3600  # as OpenAI's API
MAX_BYTES = 16 << 20  # of the records in memory
MAX_TURNS = 4096  # of a conversation
_ID = re.compile(r"resp_[0-9a-f]{32}")
# Bounds of a record's JSON, which others may have written.
_CONTAINERS, _STRINGS, _VALUES = 65_536, 262_144, 524_288


@dataclass(frozen=True, slots=True)
class Record:
    """One turn of a conversation."""

    response: dict[str, Any]  # the reply
    input: list[dict[str, Any]]  # the items of the request
    ancestors: list[str]  # ids of the turns before it, the first one first


class ResponseRecords:
    """The stored responses of all tenants. Its methods run on the event loop of the API."""

    def __init__(self) -> None:
        self.pages: PageTier | None = None  # set when the engine is loaded
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    async def put(self, tenant: str, record: Record) -> None:
        """Store a record. It is also kept in memory, where this engine finds it if the page server does not answer."""
        key, value = _key(tenant, record.response["id"]), json.dumps(asdict(record)).encode()
        self._kept[key] = value
        self._bytes += len(value)
        while self._bytes > MAX_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        await self._ask([Question(["SET", key, value, "EX", str(SECONDS)], ok)])

    async def get(self, tenant: str, response_id: str) -> Record | None:
        """Return the record of a response; None if there is none of this tenant."""
        (found,) = await self._get(tenant, [response_id]) if _ID.fullmatch(response_id) else [None]
        return found

    async def conversation(self, tenant: str, response_id: str) -> list[Record] | None:
        """Return the records of a conversation up to a response, in order; None if one of them is missing."""
        last = await self.get(tenant, response_id)
        if not last:
            return None
        earlier = await self._get(tenant, last.ancestors)
        found = [record for record in earlier if record]
        return [*found, last] if len(found) == len(earlier) else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete the record of a response. Return whether there was one."""
        if not _ID.fullmatch(response_id):
            return False
        key = _key(tenant, response_id)
        kept = self._kept.pop(key, None)
        self._bytes -= len(kept or b"")
        deleted = await self._ask([Question(["DEL", key], integer)])
        return kept is not None or deleted == [1]

    async def _get(self, tenant: str, ids: Sequence[str]) -> list[Record | None]:
        """Return the records of responses, in order, from memory or the page server."""
        keys = [_key(tenant, one) for one in ids]
        absent = [key for key in keys if key not in self._kept]
        values = dict(
            zip(absent, await self._ask([Question(["GET", key], text) for key in absent]) or (), strict=False)
        )
        return [_parsed(self._kept.get(key) or values.get(key)) for key in keys]

    async def _ask(self, questions: Sequence[Question]) -> list[Any] | None:
        """Return the replies of the page server; None if there is none, or it does not answer."""
        if not self.pages or not questions:
            return None
        return await asyncio.wrap_future(self.pages.ask(questions))


def _key(tenant: str, response_id: str) -> str:
    return f"response:{tenant}:{response_id}"


def _parsed(raw: bytes | str | None) -> Record | None:
    """Return the record in a value; None if it is no record."""
    if raw is None:
        return None
    encoded = raw if isinstance(raw, bytes) else raw.encode()
    try:
        bounded.check(encoded, containers=_CONTAINERS, strings=_STRINGS, values=_VALUES)
        fields = json.loads(encoded)
        record = Record(fields["response"], fields["input"], fields["ancestors"])
        shaped = isinstance(record.response["output"], list) and isinstance(record.input, list)
        ids = all(isinstance(one, str) and _ID.fullmatch(one) for one in record.ancestors[: MAX_TURNS + 1])
    except (bounded.TooMuchError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if shaped and ids and len(record.ancestors) <= MAX_TURNS else None
