"""The engines that tell a store what they do, as `kvpage top` shows them."""

from __future__ import annotations

from collections.abc import Sequence

import redis
from rich.table import Table

from kvpage_server.address import user_of
from kvpage_server.observe.engines import ALL_CHANNELS, CHANNEL, TIERS, EngineFigures, Engines
from kvpage_server.system.plurals import as_size
from kvpage_server.system.terminal import readable, table_of

_DROP = "memory", "files", "shared", "own memory", "this store", "model"  # columns, in a narrow terminal
_MOST_MESSAGES = 1000  # that are read in one go


class HeardEngines:
    """Those that the user may hear: all of them, or else those that have logged in as this user."""

    def __init__(self, store: redis.Redis, url: str) -> None:
        """Raises RedisError when the store does not answer."""
        self._engines = Engines()
        self._channel = store.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._listens = self._subscribed(ALL_CHANNELS) or self._subscribed(b"%b:%b" % (CHANNEL, user_of(url).encode()))

    def _subscribed(self, channel: bytes) -> bool:
        """Whether the user may listen to a channel, or to all that match a pattern."""
        try:
            (self._channel.psubscribe if channel == ALL_CHANNELS else self._channel.subscribe)(channel)
            self._channel.get_message(timeout=1.0)  # the confirmation, or the refusal
        except redis.ResponseError:
            self._channel.reset()
            return False
        return True

    def connected(self) -> list[EngineFigures]:
        """By name, as far as they have told something since this listens. Raises RedisError."""
        if self._listens:
            for _ in range(_MOST_MESSAGES):
                message = self._channel.get_message(timeout=0)
                if message is None:
                    break
                self._engines.heard(message["channel"], message["data"])
        return self._engines.seen().connected


def engines_table(engines: Sequence[EngineFigures]) -> Table:
    """What of their prompts each engine did not compute, and where it was found."""
    places = "own memory", "shared", "this store", "files"
    table = table_of("engine", "model", "prompts", "not computed", *places, "memory", numbers_from=2, drop=_DROP)
    for engine in engines:
        tokens = engine.tokens
        every, found = sum(tokens.values()), sum(tokens[tier] for tier in TIERS)
        room = f" of {as_size(engine.room)}" if engine.room else ""
        table.add_row(
            readable(engine.name),
            readable(engine.model),
            f"{every:,}",
            f"{found / every:.1%}" if every else "",
            *(f"{tokens[tier]:,}" for tier in TIERS),
            as_size(engine.used) + room,
        )
    return table
