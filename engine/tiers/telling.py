"""Statistics of this engine for the viewers of its page server: its name, and the tokens that each tier has spared it.

The engine publishes a JSON object every few seconds, which is not stored. The channel is that of the user as which the
engine has logged in, so that this user can read it; without a user, it is the channel of all engines. Each message is
also the heartbeat by which an idle engine notices that the server is away, or that it is back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from engine.pool import UNLIMITED, BlockPool
from engine.tiers.metrics import Tally
from engine.tiers.server.breaker import SHORTEST, State
from engine.tiers.server.connection import OUTAGES, ServerConnection
from engine.tiers.server.manifest import WRITER
from kvpage_server.client import Refused
from kvpage_server.client.questions import Question, integer

CHANNEL = "kvpage:engines"  # a user's own is followed by ":" and the user's name
EVERY_SECONDS = 5.0
MOST_LETTERS = 100  # of the model's name


def figures(model_id: str, pool: BlockPool, tally: Tally) -> str:
    """Return the current figures as JSON."""
    room = 0 if pool.total_bytes == UNLIMITED else pool.total_bytes
    told = {"name": WRITER, "model": model_id[:MOST_LETTERS], "used": pool.used_bytes, "room": room}
    return json.dumps(told | tally.figures())


async def keep_telling(connection: ServerConnection, what: Callable[[], str]) -> None:
    """Publish to every server, until the connection is closed. A user without a channel sends PING instead."""
    for channel in (f"{CHANNEL}:{connection.user}", CHANNEL):
        with suppress(_NotAllowed):
            await _repeat(connection, lambda channel=channel: _publish(connection, channel, what()))  # type: ignore[misc]
    await _repeat(connection, connection.check)


async def _repeat(connection: ServerConnection, message: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Send a message every few seconds, and sooner after a failure, until the circuit breaker opens."""
    while True:
        failures: list[str] = []
        await connection.attempt(message(), failures.append)
        soon = failures and connection.breaker.state is State.CLOSED
        await asyncio.sleep(SHORTEST if soon else EVERY_SECONDS)


class _NotAllowed(Exception):
    """Refusal of a channel, which is not tried again: each refusal is an entry in the server's ACL LOG."""


async def _publish(connection: ServerConnection, channel: str, message: str) -> None:
    """Publish to every server. Raises an outage if none of them answers, and _NotAllowed."""
    question, within = Question(["PUBLISH", channel, message], integer), connection.answer_within
    answered = False
    outage: BaseException | None = None
    for node in await connection.server.nodes(deadline=within):
        try:
            await connection.server.ask([question], of=node, deadline=within)
            answered = True
        except Refused as error:
            if error.code == "NOPERM":
                raise _NotAllowed from error
            outage = error
        except OUTAGES as error:
            outage = error
    if outage and not answered:
        try:
            raise outage
        finally:
            del outage  # it has this frame
