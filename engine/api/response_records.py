"""Stored responses: the conversation that `previous_response_id` continues, at any engine with the same page server.

    turn:{tenant}:{response id}       JSON of a StoredTurn: the items of one turn, and the ids of the turns before it
    response:{tenant}:{response id}   JSON of the reply

A conversation is read with two requests, whatever its length, and its size is bounded by the model's context, because
replies, which have fields of any size, are not a part of it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import to_json

from ..chains import Chain, ContextNames
from .records import Records, parsed

MAX_TURNS = 4096  # of a conversation
_ID = re.compile(r"resp_[0-9a-f]{32}")
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn of a conversation."""

    input: list[dict[str, Any]]  # the items of the request
    output: list[dict[str, Any]]  # the items of the reply
    ancestors: list[str]  # ids of the turns before it, the first one first
    conversation: str | None = None  # the id of the conversation that has the items before it
    context: ContextNames | None = None


class ResponseRecords:
    """The stored responses of all tenants. Its methods run on the event loop of the API, and raise as `Records`."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def put(self, tenant: str, response: dict[str, Any], turn: StoredTurn) -> None:
        """Store a reply and its turn."""
        keys = _keys(tenant, response["id"])
        await self._records.put(dict(zip(keys, (to_json(asdict(turn)), to_json(response)), strict=True)))

    async def response(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """Return a stored reply; None if there is none of this tenant."""
        if not _ID.fullmatch(response_id):
            return None
        _, key = _keys(tenant, response_id)
        (raw,) = await self._records.get([key])
        found = parsed(raw)
        return found if found and found.get("id") == response_id else None

    async def turn(self, tenant: str, response_id: str) -> StoredTurn | None:
        """Return the turn of a stored response; None if there is none of this tenant."""
        if not _ID.fullmatch(response_id):
            return None
        (raw,) = await self._records.get([_keys(tenant, response_id)[0]])
        return _turn(raw)

    async def conversation(self, tenant: str, response_id: str) -> list[StoredTurn] | None:
        """Return the turns of a conversation up to a response, in order; None if one of them is missing."""
        last = await self.turn(tenant, response_id)
        if not last:
            return None
        values = await self._records.get([_keys(tenant, one)[0] for one in last.ancestors])
        earlier = await asyncio.to_thread(lambda: [_turn(value) for value in values])
        found = [turn for turn in earlier if turn]
        return [*found, last] if len(found) == len(earlier) else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a stored response. Return whether there was one."""
        return bool(_ID.fullmatch(response_id)) and await self._records.delete(_keys(tenant, response_id))


def _keys(tenant: str, response_id: str) -> tuple[str, str]:
    """Return the keys of a response's turn and of its reply."""
    return f"turn:{tenant}:{response_id}", f"response:{tenant}:{response_id}"


def _turn(raw: bytes | None) -> StoredTurn | None:
    """Return the turn in a value; None if it is none."""
    found = parsed(raw) or {}
    match found:
        case {"input": list(given), "output": list(made), "ancestors": list(ids)} if len(ids) <= MAX_TURNS:
            if all(isinstance(one, str) and _ID.fullmatch(one) for one in ids):
                return StoredTurn(given, made, ids, found.get("conversation"), _context(found.get("context")))
    return None


def _context(found: Any) -> ContextNames | None:
    """Return the names of a context in a turn; None if it has none."""
    match found:
        case {"blocks": list(blocks), "chain": {"root": str(root), "client": str(client), "shared": int(shared)}}:
            first = found.get("first")
            if isinstance(first, list) and all(isinstance(one, str) and _HASH.fullmatch(one) for one in blocks + first):
                return ContextNames(tuple(blocks), Chain(root, client, shared), tuple(first))
    return None
