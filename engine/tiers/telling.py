"""Tells those who watch a page server about this engine: who it is, and what each tier has spared it.

It publishes a JSON object every few seconds, which is not stored. The channel is that of the user as which the engine
has logged in, so that this user can be shown it; without a user, it is the channel of all engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

from engine.pool import UNLIMITED, BlockPool
from engine.tiers.metrics import Tally
from engine.tiers.server.breaker import State
from engine.tiers.server.connection import OUTAGES, ServerConnection
from engine.tiers.server.manifest import WRITER
from kvpage_server.client import Refused
from kvpage_server.client.questions import Question, integer

CHANNEL = "kvpage:engines"  # a user's own is followed by ":" and the user's name
EVERY_SECONDS = 5.0
MOST_LETTERS = 100  # of the model's name


def figures(model_id: str, pool: BlockPool, tally: Tally) -> str:
    """All figures at this moment."""
    room = 0 if pool.total_bytes == UNLIMITED else pool.total_bytes
    told = {"name": WRITER, "model": model_id[:MOST_LETTERS], "used": pool.used_bytes, "room": room}
    return json.dumps(told | tally.figures())


async def keep_telling(connection: ServerConnection, what: Callable[[], str]) -> None:
    """Publish to every server, until the connection is closed or the user may not use a channel."""
    for channel in (f"{CHANNEL}:{connection.user}", CHANNEL):
        with suppress(_NotAllowed):
            while True:
                if connection.breaker.state is State.CLOSED:
                    await _tell(connection, channel, what())
                await asyncio.sleep(EVERY_SECONDS)


class _NotAllowed(Exception):
    """Do not try again: each refusal is an entry in the server's ACL LOG."""


async def _tell(connection: ServerConnection, channel: str, told: str) -> None:
    question = Question(["PUBLISH", channel, told], integer)
    within = connection.answer_within
    with suppress(*OUTAGES):
        for node in await connection.server.nodes(deadline=within):
            try:
                await connection.server.ask([question], of=node, deadline=within)
            except Refused as error:
                if error.code == "NOPERM":
                    raise _NotAllowed from error
