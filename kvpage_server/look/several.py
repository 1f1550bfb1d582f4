"""Servers side by side, looked into as one. Each key belongs to one of them, as for PageClient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import redis

from kvpage_server.address import shown
from kvpage_server.client.cluster.side_by_side import Rendezvous, ServerUrl, segment_of
from kvpage_server.client.questions import encoded
from kvpage_server.observe.asking import Command
from kvpage_server.system.program import say

_GONE = {b"KVPAGEWHY": {b"reason": b"gone"}}  # stands for the answer of a server that does not answer


class SideBySide:
    """Answers as `redis.Redis` does. The keys of an unreachable server look missing; a message says once that it is."""

    def __init__(self, stores: dict[ServerUrl, redis.Redis]) -> None:
        self._stores = stores
        self._servers = list(stores)
        self._rendezvous = Rendezvous(self._servers)
        self._gone: set[ServerUrl] = set()

    def execute_command(self, *words: Any) -> Any:
        """Asks the server that has the key, or, for CLIENT, all servers. Raises RedisError."""
        servers = self._servers if words[0] == "CLIENT" else [self._server(words)]
        answers = [self._answers(server, [words])[0] for server in servers]
        if refusal := next((answer for answer in answers if isinstance(answer, redis.ResponseError)), None):
            raise refusal
        return answers[0]

    def home(self, key: bytes) -> str:
        """The URL of the server that a key or a request belongs to."""
        return shown(self._rendezvous.server(segment_of(key)).url)

    @property
    def unreachable(self) -> list[str]:
        """The URLs of servers that gave no answer."""
        return sorted(shown(server.url) for server in self._gone)

    def pipeline(self, transaction: bool) -> _Pipeline:
        """Collects commands, and sends each to its server."""
        return _Pipeline(self)

    def answers(self, commands: Sequence[Command]) -> list[Any]:
        parts: dict[ServerUrl, list[int]] = defaultdict(list)
        asked = [*commands]
        for i, command in enumerate(commands):
            if command[0] == b"SCAN":  # the cursor modulo the number of servers is the server's number
                cursor, number = divmod(int(command[1]), len(self._servers))
                asked[i] = [b"SCAN", cursor, *command[2:]]
                parts[self._servers[number]].append(i)
            else:
                parts[self._server(command)].append(i)
        found: list[Any] = [None] * len(asked)
        for server, some in parts.items():
            for i, answer in zip(some, self._answers(server, [asked[i] for i in some]), strict=True):
                found[i] = self._scanned(server, answer) if asked[i][0] == b"SCAN" else answer
        return found

    def _server(self, command: Sequence[Any]) -> ServerUrl:
        return self._rendezvous.server(segment_of(encoded(command[2 if command[0] == b"OBJECT" else 1])))

    def _answers(self, server: ServerUrl, commands: Sequence[Sequence[Any]]) -> list[Any]:
        pipeline = self._stores[server].pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        try:
            return pipeline.execute(raise_on_error=False)
        except redis.AuthenticationError:
            raise
        except redis.ConnectionError as error:
            if len(self._gone | {server}) == len(self._servers):
                raise
            if server not in self._gone:
                self._gone.add(server)
                say("kvpage", f"cannot reach {shown(server.url)}: {error}", 0)
            return [_GONE.get(encoded(command[0]), redis.ResponseError(f"{server} is gone")) for command in commands]

    def _scanned(self, server: ServerUrl, answer: Any) -> Any:
        """SCAN's answer with our cursor, which goes on to the next server when this one has no more keys."""
        if isinstance(answer, redis.ResponseError) and server not in self._gone:
            return answer
        cursor, keys = (0, []) if server in self._gone else answer
        number, count = self._servers.index(server), len(self._servers)
        upcoming = int(cursor) * count + number if int(cursor) else (number + 1) % count
        return [b"%d" % upcoming, keys]


class _Pipeline:
    def __init__(self, several: SideBySide) -> None:
        self._several = several
        self._commands: list[Command] = []

    def execute_command(self, *words: bytes | int) -> None:
        self._commands.append(words)

    def execute(self, raise_on_error: bool) -> list[Any]:
        return self._several.answers(self._commands)
