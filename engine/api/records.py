"""JSON values of tenants on the page server, such as stored responses, which every engine of the server can read.

A key is `{kind}:{tenant}:{...}`, and ends SECONDS after its last use. Without a page server, values are kept in memory,
up to MAX_BYTES; and so are values that could not be sent to it, until they are found there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from kvpage_server import bounded
from kvpage_server.client.questions import Question, integer, ok, text

from ..tiers.pages import DEADLINE
from ..tiers.server.connection import ServerConnection
from .openai.errors import ApiError

SECONDS = 30 * 24 * 3600  # as OpenAI's API
MAX_BYTES = 16 << 20  # of the values in memory
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
        self._server = ServerConnection(url, min(DEADLINE, restore_within / 2), 1) if url else None
        self._kept: dict[str, bytes] = {}  # by key, the oldest first: values that are not on the page server
        self._bytes = 0

    async def put(self, values: Mapping[str, bytes]) -> None:
        """Store values, the last one last. If the page server does not answer, they are kept in memory."""
        if self._server:
            questions = [_set(key, value) for key, value in values.items()]
            if await self._ask(self._server, self._server.ask(questions)) is not None:
                return
        for key, value in values.items():
            self._keep(key, value)

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys: those in memory, or else those of the page server."""
        absent = [key for key in keys if key not in self._kept]
        found: dict[str, bytes | None] = {}
        if self._server and absent:
            questions = [Question(["GETEX", key, "EX", str(SECONDS)], text) for key in absent]
            values = await self._ask(self._server, self._server.ask(questions))
            if values is None:
                raise _away()
            found = dict(zip(absent, values, strict=True))
        return [self._kept.get(key) or found.get(key) for key in keys]

    async def change(self, key: str, change: Callable[[bytes], bytes]) -> bool:
        """Replace a value by `change` of it, although other engines may change it, too. Return False if there is none.
        `change` may be called again, and its exceptions are raised.
        """
        if self._server and key not in self._kept:
            known = False

            def changed(value: bytes | None) -> list[Question]:
                nonlocal known
                known = value is not None
                return [] if value is None else [_set(key, change(value))]

            work = self._server.transaction([key], Question(["GET", key], text), changed)
            if await self._ask(self._server, work) is None:
                raise _away()
            return known
        if (kept := self._kept.get(key)) is None:
            return False
        self._keep(key, change(kept))
        return True

    async def delete(self, keys: Sequence[str]) -> bool:
        """Delete values. Return whether there was one."""
        deleted: list[Any] | None = [0]
        if self._server:
            deleted = await self._ask(self._server, self._server.ask([Question(["DEL", key], integer) for key in keys]))
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
            self._bytes -= len(self._kept.pop(next(other for other in self._kept if _tenant(other) == largest)))

    async def _ask(self, server: ServerConnection, work: Coroutine[Any, Any, list[Any]]) -> list[Any] | None:
        """Return the replies of the page server to `work`; None if it does not answer."""
        return await asyncio.wrap_future(server.loop.start(server.attempt(work, lambda _: None)))


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


def _set(key: str, value: bytes) -> Question:
    return Question(["SET", key, value, "EX", str(SECONDS)], ok)


def _tenant(key: str) -> str:
    return key.split(":")[1]


def _away() -> ApiError:
    message = "the page server, which has the stored responses, does not answer: ask again when it is back"
    return ApiError(503, message, code="store_unavailable", retry_after=1)
