"""What an engine tells whoever watches its page server: who it is, and what each tier has spared it.

It is a JSON object on a channel, every few seconds. Nothing is kept of it, and nobody waits for it. The channel is that
of the user as which it has logged in, who can be shown it as theirs; or else the one that all engines have in common.
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
    """All of it, as it is now."""
    room = 0 if pool.total_bytes == UNLIMITED else pool.total_bytes
    told = {"name": WRITER, "model": model_id[:MOST_LETTERS], "used": pool.used_bytes, "room": room}
    return json.dumps(told | tally.figures())


async def keep_telling(connection: ServerConnection, what: Callable[[], str]) -> None:
    """Every server, until the connection is closed or the user may use no channel for it."""
    for channel in (f"{CHANNEL}:{connection.user}", CHANNEL):
        with suppress(_NotAllowed):
            while True:
                if connection.breaker.state is State.CLOSED:
                    await _tell(connection, channel, what())
                await asyncio.sleep(EVERY_SECONDS)


class _NotAllowed(Exception):
    """Not to be tried again: each refusal stands in the server's ACL LOG."""


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
