"""JSON values of tenants on the page server, which every engine of the server can read: responses, conversations.

A key is `{kind}:{tenant}:{...}`, and ends SECONDS after its last use. Without a page server, values are kept in memory,
up to MAX_BYTES; and so are values that could not be sent to it, until it answers again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from pydantic_core import from_json, to_json

from kvpage_server import bounded
from kvpage_server.client.raw_commands import RawCommand, integer, ok, text
from kvpage_server.system.text import plural

from ..chains import Chain, ContextNames
from ..tiers.pages import DEADLINE
from ..tiers.server.connection import ServerConnection
from .openai.errors import ApiError, invalid
from .openai.response_schema import item_owner

log = logging.getLogger(__name__)

SECONDS = 30 * 24 * 3600  # as OpenAI's API
MAX_BYTES = 16 << 20  # of the values in memory
BATCH_BYTES = 1 << 20  # of values that are sent together when the page server answers again
AT_ONCE = 64  # values that are read with a request
MOST_READ = 64 << 20  # bytes of a conversation, which may have items that no model has read
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # seconds between two attempts to send them
# Bounds of a value's JSON, which others may have written.
_CONTAINERS, _STRINGS, _VALUES = 65_536, 262_144, 524_288


class Records:
    """The values of all tenants. Its methods run on the event loop of the API.

    They raise ApiError (503) if the page server does not answer, and its values are needed.
    """

    def __init__(self, url: str | None, restore_within: float) -> None:
        """Store values on the page server at `url`, or in memory without one. `restore_within` is as for PageTier.

        Raises ValueError for an invalid URL.
        """
        deadline = min(DEADLINE, restore_within / 2)
        self._server = ServerConnection(url, "responses", deadline) if url else None
        self._kept: dict[str, bytes] = {}  # by key, the oldest first: values that are not on the page server
        self._bytes = 0
        self._lost: Counter[str] = Counter()  # values by kind that left memory before the page server had them
        self._failure = ""  # why the page server has not stored the values in memory
        self._writing_back: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # of a batch that is sent, or a deletion

    @property
    def waiting(self) -> int:
        """Number of values in memory that the page server has not stored; 0 without one."""
        return len(self._kept) if self._server else 0

    async def put(self, values: Mapping[str, bytes]) -> bool:
        """Store values, the last one last. If the page server does not answer, they are kept in memory. Return whether
        it answers, or there is none.
        """
        if self._server:
            raw_commands = [_set(key, value) for key, value in values.items()]
            if await self._ask(self._server, self._server.ask(raw_commands)) is not None:
                return True
        for key, value in values.items():
            self._keep(key, value)
        if self._server and not (self._writing_back and not self._writing_back.done()):
            log.warning("responses and conversations wait in memory for the page server (%s)", self._failure)
            self._writing_back = asyncio.create_task(self._write_back())
        return not self._server

    async def close(self) -> int:
        """Send the values in memory to the page server, if there is one and it answers. Log and return the number of
        responses, conversations and items of these that are lost.
        """
        if not (self._server and self._writing_back):
            return 0
        self._writing_back.cancel()
        await asyncio.wait([self._writing_back])
        self._server.breaker.retry()
        while self._kept and await self._send_kept():
            pass
        self._lost.update(map(_kind, self._kept))
        lost = {kind: self._lost[kind] for kind in ("response", "conversation", "item") if self._lost[kind]}
        if lost:
            counts = ", ".join(plural(count, kind) for kind, count in lost.items())
            log.error("%s could not be written to the page server (%s)", counts, self._failure or "no memory left")
        return sum(lost.values())

    async def _write_back(self) -> None:
        """Send the values in memory to the page server as soon as it answers."""
        pause = FIRST_PAUSE
        while self._kept:
            await asyncio.sleep(pause)
            pause = FIRST_PAUSE if await self._send_kept() else min(2 * pause, LAST_PAUSE)
        log.warning("the responses and conversations in memory are on the page server")

    async def _send_kept(self) -> bool:
        """Send the oldest values in memory to the page server, and remove them from memory. Return whether it has
        stored them.
        """
        assert self._server
        async with self._turn:
            sizes = accumulate(map(len, self._kept.values()), initial=0)
            batch = {
                key: self._kept[key] for key, before in zip(self._kept, sizes, strict=False) if before < BATCH_BYTES
            }
            if await self._ask(self._server, self._server.ask([_set(*item) for item in batch.items()])) is None:
                return False
            for key, value in batch.items():
                if self._kept.get(key) is value:  # it was not changed meanwhile
                    self._bytes -= len(self._kept.pop(key))
            return True

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys: those in memory, or else those of the page server."""
        absent = [key for key in keys if key not in self._kept]
        found: dict[str, bytes | None] = {}
        if self._server and absent:
            raw_commands = [RawCommand(["GETEX", key, "EX", str(SECONDS)], text) for key in absent]
            values = await self._ask(self._server, self._server.ask(raw_commands))
            if values is None:
                raise _away()
            found = dict(zip(absent, values, strict=True))
        return [self._kept.get(key) or found.get(key) for key in keys]

    async def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return values as `get`, AT_ONCE at a time. Raises ApiError (400) if they have more than MOST_READ bytes."""
        found, size = list[bytes | None](), 0
        for start in range(0, len(keys), AT_ONCE):
            some = await self.get(keys[start : start + AT_ONCE])
            size += sum(len(value or b"") for value in some)
            if size > MOST_READ:
                most = f"the conversation before it has more than {MOST_READ >> 20} MB"
                raise invalid(f"input: {most}", "input", "context_length_exceeded")
            found += some
        return found

    async def change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bool:
        """Replace a value by `change` of it, although other engines may change it, too. None stands for no value.
        Return whether there was one. `change` may be called again, and its exceptions are raised.
        """
        if self._server and key not in self._kept:
            known = False

            def changed(value: bytes | None) -> list[RawCommand]:
                nonlocal known
                known, after = value is not None, change(value)
                if after is not None:
                    return [_set(key, after)]
                return [RawCommand(["DEL", key], integer)] if known else []

            work = self._server.transaction([key], RawCommand(["GET", key], text), changed)
            if await self._ask(self._server, work) is None:
                raise _away()
            return known
        kept = self._kept.get(key)
        if (after := change(kept)) is not None:
            self._keep(key, after)
        elif kept is not None:
            self._bytes -= len(self._kept.pop(key))
        return kept is not None

    async def delete(self, keys: Sequence[str]) -> bool:
        """Delete values. Return whether there was one."""
        deleted: list[Any] | None = [0]
        async with self._turn:
            if self._server:
                raw_commands = [RawCommand(["DEL", key], integer) for key in keys]
                deleted = await self._ask(self._server, self._server.ask(raw_commands))
            if deleted is None:
                raise _away()
            kept = [self._kept.pop(key, b"") for key in keys]
        self._bytes -= sum(map(len, kept))
        return any(kept) or any(deleted)

    def _keep(self, key: str, value: bytes) -> None:
        """Keep a value in memory, in place of the oldest ones of the tenant whose values take most of it."""
        self._bytes += len(value) - len(self._kept.pop(key, b""))
        self._kept[key] = value
        while self._bytes > MAX_BYTES:
            sizes: Counter[str] = Counter()
            for other, held in self._kept.items():
                sizes[_tenant(other)] += len(held)
            ((largest, _),) = sizes.most_common(1)
            oldest = next(other for other in self._kept if _tenant(other) == largest)
            self._bytes -= len(self._kept.pop(oldest))
            if self._server:
                if not self._lost:
                    log.error("the memory for responses is full, and the page server does not answer: some are lost")
                self._lost[_kind(oldest)] += 1

    async def _ask(self, server: ServerConnection, work: Coroutine[Any, Any, list[Any]]) -> list[Any] | None:
        """Return the replies of the page server to `work`; None if it does not answer."""

        def failed(why: str) -> None:
            self._failure = why

        return await asyncio.wrap_future(server.loop.start(server.attempt(work, failed)))


def parsed(raw: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in a value; None if it is none."""
    if raw is None:
        return None
    try:
        bounded.check(raw, containers=_CONTAINERS, strings=_STRINGS, values=_VALUES)
        found = from_json(raw)
    except (bounded.TooMuchError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _set(key: str, value: bytes) -> RawCommand:
    return RawCommand(["SET", key, value, "EX", str(SECONDS)], ok)


def _kind(key: str) -> str:
    return key.partition(":")[0]


def _tenant(key: str) -> str:
    return key.split(":")[1]


def _away() -> ApiError:
    message = "the page server, which has the stored responses, does not answer: ask again when it is back"
    return ApiError(503, message, code="store_unavailable", retry_after=1)


Item = dict[str, Any]  # of a response or a conversation


# -- Stored responses --------------------------------------------------------------------------------------------------
#
# The conversation that `previous_response_id` continues, at any engine with the same page server.
#
#     turn:{tenant}:{response id}       JSON of a StoredTurn: the items of one turn, and the ids of the turns before it
#     response:{tenant}:{response id}   JSON of the reply
#     end:{tenant}:{chain hash}         JSON of a ContextEnd: how many of their contexts end with the block of this name
#
# A longer context takes the place of a shorter one with the same first tokens. Ends name the shorter ones, so that they
# are not freed with the longer one.
#
# A conversation is read without the replies, which have fields of any size.

MAX_TURNS = 4096  # of a conversation
MAX_LEFT = 16  # contexts of a ContextEnd
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn of a conversation."""

    input: list[dict[str, Any]]  # the items of the request
    output: list[dict[str, Any]]  # the items of the reply
    ancestors: list[str]  # ids of the turns before it, the first one first
    conversation: str | None = None  # the id of the conversation that has the items before it
    context: ContextNames | None = None


@dataclass(frozen=True, slots=True)
class ContextEnd:
    """The end of the contexts of stored responses, which have the same tokens."""

    responses: int = 0
    # contexts of deleted responses that begin with these tokens, and are to be freed when no stored response has them
    left: Sequence[ContextNames] = ()


class ResponseRecords:
    """The stored responses of all tenants. Its methods run on the event loop of the API, and raise as `Records`."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def put(self, tenant: str, response: dict[str, Any], turn: StoredTurn) -> None:
        """Store a reply and its turn, and count the end of its context."""
        keys = _keys(tenant, response["id"])
        stored = await self._records.put(dict(zip(keys, (to_json(asdict(turn)), to_json(response)), strict=True)))
        if turn.context and stored:
            with suppress(ApiError):  # without the end, the context may be freed with a longer one
                await self._change_end(
                    tenant, turn.context.blocks[-1], lambda end: replace(end, responses=end.responses + 1)
                )

    async def response(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """Return a stored reply; None if there is none of this tenant."""
        if not _RESPONSE_ID.fullmatch(response_id):
            return None
        _, key = _keys(tenant, response_id)
        (raw,) = await self._records.get([key])
        found = parsed(raw)
        return found if found and found.get("id") == response_id else None

    async def turn(self, tenant: str, response_id: str) -> StoredTurn | None:
        """Return the turn of a stored response; None if there is none of this tenant."""
        if not _RESPONSE_ID.fullmatch(response_id):
            return None
        (raw,) = await self._records.get([_keys(tenant, response_id)[0]])
        return _turn(raw)

    async def conversation(self, tenant: str, response_id: str) -> list[StoredTurn] | None:
        """Return the turns of a conversation up to a response, in order; None if one of them is missing."""
        last = await self.turn(tenant, response_id)
        if not last:
            return None
        values = await self._records.get_all([_keys(tenant, one)[0] for one in last.ancestors])
        earlier = await asyncio.to_thread(lambda: [_turn(value) for value in values])
        found = [turn for turn in earlier if turn]
        return [*found, last] if len(found) == len(earlier) else None

    async def items(self, tenant: str, ids: Collection[str]) -> dict[str, Item]:
        """Return the items of stored responses that have one of these ids, by id. Raises ApiError (400) if the turns of
        these responses are too large together.
        """
        owners = {item_owner(one) for one in ids}
        keys = [_keys(tenant, owner)[0] for owner in owners if _RESPONSE_ID.fullmatch(owner)]
        values = await self._records.get_all(keys)
        turns = await asyncio.to_thread(lambda: [_turn(value) for value in values])
        found = {item["id"]: item for turn in turns if turn for item in (*turn.input, *turn.output)}
        return {one: found[one] for one in ids if one in found}

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a stored response. Return whether there was one."""
        return bool(_RESPONSE_ID.fullmatch(response_id)) and await self._records.delete(_keys(tenant, response_id))

    async def last_end(self, tenant: str, ends: Sequence[str]) -> str | None:
        """Return the last of `ends`, names of blocks, with which the context of a stored response ends."""
        values = await self._records.get([_end_key(tenant, end) for end in ends])
        return next((end for end, raw in zip(ends[::-1], values[::-1], strict=True) if _end(raw).responses), None)

    async def leave(self, tenant: str, end: str, context: ContextNames) -> None:
        """Leave a deleted response's context for the responses whose contexts have this end."""
        await self._change_end(tenant, end, lambda found: replace(found, left=[*found.left, context][:MAX_LEFT]))

    async def release(self, tenant: str, context: ContextNames) -> Sequence[ContextNames]:
        """Count the end of a deleted response's context no more. Return the contexts to be freed that were left for the
        last response with this end.
        """
        left: Sequence[ContextNames] = ()

        def released(end: ContextEnd) -> ContextEnd:
            nonlocal left
            others = max(0, end.responses - 1)
            left = () if others else end.left
            return replace(end, responses=others)

        await self._change_end(tenant, context.blocks[-1], released)
        return left

    async def _change_end(self, tenant: str, end: str, change: Callable[[ContextEnd], ContextEnd]) -> None:
        def changed(raw: bytes | None) -> bytes | None:
            after = change(_end(raw))
            return to_json(asdict(after)) if after.responses else None

        await self._records.change(_end_key(tenant, end), changed)


def _keys(tenant: str, response_id: str) -> tuple[str, str]:
    """Return the keys of a response's turn and of its reply."""
    return f"turn:{tenant}:{response_id}", f"response:{tenant}:{response_id}"


def _end_key(tenant: str, end: str) -> str:
    return f"end:{tenant}:{end}"


def _end(raw: bytes | None) -> ContextEnd:
    """Return the end of contexts in a value; an end of none if it is none."""
    match parsed(raw):
        case {"responses": int(responses), "left": list(left)} if responses > 0 and len(left) <= MAX_LEFT:
            return ContextEnd(responses, [names for names in map(_context, left) if names])
    return ContextEnd()


def _turn(raw: bytes | None) -> StoredTurn | None:
    """Return the turn in a value; None if it is none."""
    found = parsed(raw) or {}
    match found:
        case {"input": list(given), "output": list(made), "ancestors": list(ids)} if len(ids) <= MAX_TURNS:
            if all(isinstance(one, str) and _RESPONSE_ID.fullmatch(one) for one in ids):
                return StoredTurn(given, made, ids, found.get("conversation"), _context(found.get("context")))
    return None


def _context(found: Any) -> ContextNames | None:
    """Return the names of a context in a turn; None if it has none."""
    match found:
        case {"blocks": [_, *_] as blocks, "chain": {"root": str(root), "client": str(client), "shared": int(shared)}}:
            first = found.get("first")
            if isinstance(first, list) and all(isinstance(one, str) and _HASH.fullmatch(one) for one in blocks + first):
                return ContextNames(tuple(blocks), Chain(root, client, shared), tuple(first))
    return None


# -- Conversations -----------------------------------------------------------------------------------------------------
#
# Lists of items that requests extend, at any engine with the same page server.
#
#     conversation:{tenant}:{conversation id}       JSON of a StoredConversation: its metadata, and the ids of its items
#     item:{tenant}:{conversation id}:{item id}     JSON of an item
#
# An item is written before the conversation names it, so a reader finds every item.

MAX_ITEMS = 4096  # of a conversation
_CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}")


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
        self, tenant: str, conversation_id: str, metadata: dict[str, str], items: Sequence[Item]
    ) -> StoredConversation:
        """Store a new conversation, and return it."""
        made = StoredConversation(int(time.time()), metadata, [item["id"] for item in items])
        values = self._values(tenant, conversation_id, items)
        await self._records.put({**values, _key(tenant, conversation_id): to_json(asdict(made))})
        return made

    async def find(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """Return a conversation; None if there is none of this tenant."""
        if not _CONVERSATION_ID.fullmatch(conversation_id):
            return None
        (raw,) = await self._records.get([_key(tenant, conversation_id)])
        return _conversation(raw)

    async def items(self, tenant: str, conversation_id: str, ids: Sequence[str]) -> list[Item]:
        """Return the items with these ids that are stored. Raises ApiError (400) if they are too large together."""
        values = await self._records.get_all([_item_key(tenant, conversation_id, one) for one in ids])
        found = await asyncio.to_thread(lambda: [parsed(value) for value in values])
        return [item for item in found if item]

    async def referenced(self, tenant: str, ids: Collection[str]) -> dict[str, Item]:
        """Return the items that conversations had first and have one of these ids, by id. Raises as `items`."""
        owners = {one: owner for one in ids if _CONVERSATION_ID.fullmatch(owner := item_owner(one))}
        values = await self._records.get_all([_item_key(tenant, owner, one) for one, owner in owners.items()])
        found = await asyncio.to_thread(lambda: [parsed(value) for value in values])
        return {one: item for one, item in zip(owners, found, strict=True) if item}

    async def page(self, tenant: str, conversation_id: str, ids: Sequence[str], most: int) -> tuple[list[Item], bool]:
        """Return the first items with these ids that have up to `most` bytes together, or only one that has more, and
        whether items are left. At most about twice as many bytes are in memory.
        """
        some, size = list[bytes](), 0
        for one in ids:
            (value,) = await self._records.get([_item_key(tenant, conversation_id, one)])
            size += len(value or b"")
            if some and size > most:
                break
            some += [value] if value else []
        else:
            most = size
        found = await asyncio.to_thread(lambda: [parsed(value) for value in some])
        return [item for item in found if item], size > most

    async def append(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> bool:
        """Add items to the end of a conversation. Return False if it does not exist. Raises ApiError (400) if it would
        have more than MAX_ITEMS.
        """
        values = self._values(tenant, conversation_id, items)
        await self._records.put(values)
        ids = [item["id"] for item in items]
        fits = True

        def extended(stored: StoredConversation) -> StoredConversation:
            nonlocal fits
            fits = len(stored.items) + len(ids) <= MAX_ITEMS
            return replace(stored, items=[*stored.items, *ids]) if fits else stored

        known = await self._change(tenant, conversation_id, extended)
        if not (known and fits):  # nobody could delete the items later
            await self._records.delete([*values])
        if not fits:
            raise invalid(f"items: a conversation has at most {MAX_ITEMS}", "items")
        return known

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
        def changed(raw: bytes | None) -> bytes | None:
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
