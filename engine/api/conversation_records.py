"""Conversations: lists of items that requests extend, at any engine with the same page server.

    conversation:{tenant}:{conversation id}       JSON of a StoredConversation: its metadata, and the ids of its items
    item:{tenant}:{conversation id}:{item id}     JSON of an item

An item is written before the conversation names it, so a reader finds every item. A conversation is read with two
requests, whatever its length.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from uuid import uuid4

from pydantic_core import to_json

from .openai.errors import invalid
from .records import Records, parsed

MAX_ITEMS = 4096  # of a conversation
_ID = re.compile(r"conv_[0-9a-f]{32}")

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation without the texts of its items."""

    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[str] = field(default_factory=list)  # ids, in order


class ConversationRecords:
    """The conversations of all tenants. Its methods run on the event loop of the API, and raise as `Records`."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def create(
        self, tenant: str, metadata: dict[str, str], items: Sequence[Item]
    ) -> tuple[str, StoredConversation]:
        """Store a new conversation, and return it with its id."""
        conversation_id = f"conv_{uuid4().hex}"
        made = StoredConversation(int(time.time()), metadata, [item["id"] for item in items])
        values = self._values(tenant, conversation_id, items)
        await self._records.put({**values, _key(tenant, conversation_id): to_json(asdict(made))})
        return conversation_id, made

    async def find(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """Return a conversation; None if there is none of this tenant."""
        if not _ID.fullmatch(conversation_id):
            return None
        (raw,) = await self._records.get([_key(tenant, conversation_id)])
        return _conversation(raw)

    async def items(self, tenant: str, conversation_id: str, ids: Sequence[str]) -> list[Item]:
        """Return the items with these ids that are stored."""
        values = await self._records.get([_item_key(tenant, conversation_id, one) for one in ids])
        found = await asyncio.to_thread(lambda: [parsed(value) for value in values])
        return [item for item in found if item]

    async def append(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> bool:
        """Add items to the end of a conversation. Return False if it does not exist. Raises ApiError (400) if it would
        have more than MAX_ITEMS.
        """
        await self._records.put(self._values(tenant, conversation_id, items))
        ids = [item["id"] for item in items]

        def extended(stored: StoredConversation) -> StoredConversation:
            if len(stored.items) + len(ids) > MAX_ITEMS:
                raise invalid(f"items: a conversation has at most {MAX_ITEMS}", "items")
            return replace(stored, items=[*stored.items, *ids])

        return await self._change(tenant, conversation_id, extended)

    async def remove(self, tenant: str, conversation_id: str, item_id: str) -> bool:
        """Delete an item of a conversation. Return whether there was one."""
        deleted = await self._records.delete([_item_key(tenant, conversation_id, item_id)])
        await self._change(
            tenant,
            conversation_id,
            lambda stored: replace(stored, items=[one for one in stored.items if one != item_id]),
        )
        return deleted

    async def describe(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> None:
        """Replace the metadata of a conversation."""
        await self._change(tenant, conversation_id, lambda stored: replace(stored, metadata=metadata))

    async def delete(self, tenant: str, conversation_id: str) -> bool:
        """Delete a conversation and its items. Return whether there was one."""
        stored = await self.find(tenant, conversation_id)
        if not stored:
            return False
        items = [_item_key(tenant, conversation_id, one) for one in stored.items]
        return await self._records.delete([_key(tenant, conversation_id), *items])

    async def _change(
        self, tenant: str, conversation_id: str, change: Callable[[StoredConversation], StoredConversation]
    ) -> bool:
        def changed(raw: bytes) -> bytes:
            stored = _conversation(raw)
            return to_json(asdict(change(stored))) if stored else raw

        return await self._records.change(_key(tenant, conversation_id), changed)

    def _values(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> dict[str, bytes]:
        return {_item_key(tenant, conversation_id, item["id"]): to_json(item) for item in items}


def _key(tenant: str, conversation_id: str) -> str:
    return f"conversation:{tenant}:{conversation_id}"


def _item_key(tenant: str, conversation_id: str, item_id: str) -> str:
    return f"item:{tenant}:{conversation_id}:{item_id}"


def _conversation(raw: bytes | None) -> StoredConversation | None:
    """Return the conversation in a value; None if it is none."""
    match parsed(raw):
        case {"created_at": int(created), "metadata": dict(metadata), "items": list(ids)} if len(ids) <= MAX_ITEMS:
            if all(isinstance(one, str) for one in (*ids, *metadata, *metadata.values())):
                return StoredConversation(created, metadata, ids)
    return None
