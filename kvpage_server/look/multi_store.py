"""Several servers, or the primaries of a cluster, as one store. Each key belongs to one server."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.exceptions import AskError, ClusterDownError, TryAgainError

from kvpage_server.address import shown
from kvpage_server.client.cluster.commands import block_key
from kvpage_server.client.cluster.side_by_side import Rendezvous, ServerUrl, servers_of
from kvpage_server.client.cluster.topology import SCHEMES, SLOTS, Address, Node, SlotMap, ranges_of, slot_of
from kvpage_server.client.raw_commands import encoded
from kvpage_server.look.output import LookError, connected
from kvpage_server.observe.asking import Command
from kvpage_server.observe.memory_by_agent import PREFIX
from kvpage_server.page import segment_of
from kvpage_server.system.program import say
from kvpage_server.system.text import name_as_text

NO_ANSWER = redis.ConnectionError, redis.TimeoutError
_PAUSE_SECONDS = 60.0  # seconds without commands to a server that timed out, because each command would wait again
_SLOTS_CHANGING = AskError, ClusterDownError, TryAgainError  # while slots move; MovedError is a subclass of AskError
_UNREACHABLE_REPLIES = {b"KVPAGEWHY": {b"reason": b"gone"}}  # reply in place of an unreachable server's, by command


class Unavailable(redis.ResponseError):
    """Error in place of a reply, because the server is unreachable. The message has the reason."""


class SlotsMoved(Exception):
    """Signal that slots of the cluster have moved to other primaries, so that the connections must be made again."""


class MultiStore:
    """Several servers with `execute_command` and `pipeline` of `redis.Redis`.

    Keys of an unreachable server seem to be absent. A message on stderr reports each server that becomes unreachable.
    If all of them are, methods raise the error of the last one.
    """

    def __init__(self, stores: dict[ServerUrl, redis.Redis], server_of: Callable[[bytes], ServerUrl]) -> None:
        """Create a store from a client for each server. `server_of` returns the server of a key or a request id."""
        self.stores = stores
        self._servers = list(stores)
        self._server_of = server_of
        self._unreachable: dict[ServerUrl, str] = {}  # the last error of each unreachable server
        self._ever_unreachable: set[ServerUrl] = set()  # servers that were unreachable at least once
        self._reported: set[ServerUrl] = set()  # servers with misplaced requests that were reported
        self._paused_until: dict[ServerUrl, float] = {}  # end of the time without commands, in monotonic seconds

    def execute_command(self, *words: Any) -> Any:
        """Send a command to its key's server, or CLIENT to all servers, and return the reply, or the first one.

        Raises ResponseError if a server refuses it, Unavailable if the server is unreachable, LookError while slots of
        the cluster move.
        """
        servers = self._servers if encoded(words[0]) == b"CLIENT" else [self._server(words)]
        answers = [self._answers(server, [words])[0] for server in servers]
        if refusal := next((answer for answer in answers if isinstance(answer, redis.ResponseError)), None):
            raise refusal
        return answers[0]

    def home(self, key: bytes) -> str:
        """Return the URL of the server of a key or a request id, without its password."""
        return shown(self._server_of(key).url)

    @property
    def unreachable(self) -> list[str]:
        """URLs of servers that were unreachable at least once."""
        return sorted(shown(server.url) for server in self._ever_unreachable)

    def of_each(self, *words: Any) -> dict[ServerUrl, Any]:
        """Return each server's reply to a command: Unavailable for an unreachable server, an error for a refusal."""
        return {server: self._answers(server, [words])[0] for server in self._servers}

    def pipeline(self, transaction: bool) -> Pipeline:
        """Return a pipeline that sends each command to its server."""
        return Pipeline(self.answers)

    def answers(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to commands in their order. Each server gets one pipeline."""
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
                found[i] = self._scan_reply(server, answer) if asked[i][0] == b"SCAN" else answer
        return found

    def _server(self, command: Sequence[Any]) -> ServerUrl:
        """Return the server of a command's key: the second argument of OBJECT, and the first of other commands."""
        return self._server_of(encoded(command[2 if command[0] == b"OBJECT" else 1]))

    def _answers(self, server: ServerUrl, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Return a server's replies to commands, with errors among them; Unavailable for each if it is unreachable.

        After a timeout, it gets no commands for `_PAUSE_SECONDS`. Raises ConnectionError or TimeoutError if all servers
        are unreachable, LookError while slots move, AuthenticationError for a wrong password.
        """
        if self._paused_until.get(server, 0.0) > monotonic():
            return self._unavailable_replies(server, commands)
        pipeline = self.stores[server].pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        try:
            answers = pipeline.execute(raise_on_error=False)
            if changing := next((answer for answer in answers if isinstance(answer, _SLOTS_CHANGING)), None):
                raise LookError(f"the cluster is changing, try again: {changing}")
            self._unreachable.pop(server, None)
            return answers
        except redis.AuthenticationError:
            raise
        except NO_ANSWER as error:
            if len(self._unreachable.keys() | {server}) == len(self._servers):
                raise
            if server not in self._unreachable:
                say("kvpage", f"cannot reach {shown(server.url)}: {error}", 0)
            self._unreachable[server] = str(error)
            self._ever_unreachable.add(server)
            if isinstance(error, redis.TimeoutError):
                self._paused_until[server] = monotonic() + _PAUSE_SECONDS
            return self._unavailable_replies(server, commands)

    def _unavailable_replies(self, server: ServerUrl, commands: Sequence[Sequence[Any]]) -> list[Any]:
        gone = Unavailable(f"{server} is gone: {self._unreachable[server]}")
        return [_UNREACHABLE_REPLIES.get(encoded(command[0]), gone) for command in commands]

    def _scan_reply(self, server: ServerUrl, answer: Any) -> Any:
        """Return a server's reply to SCAN with its cursor replaced by one for all servers.

        The new cursor is `cursor * servers + number of the server`. After a server's last key it is the start of the
        next server, and after the last server 0. An unreachable server counts as finished. An error is returned
        unchanged.
        """
        if isinstance(answer, redis.ResponseError) and not isinstance(answer, Unavailable):
            return answer
        cursor, keys = (0, []) if isinstance(answer, Unavailable) else answer
        self._report_misplaced(server, keys)
        number, count = self._servers.index(server), len(self._servers)
        upcoming = int(cursor) * count + number if int(cursor) else (number + 1) % count
        return [b"%d" % upcoming, keys]

    def _report_misplaced(self, server: ServerUrl, keys: Sequence[bytes]) -> None:
        """Print a message, once for each server, if it has requests that belong to another server of the list.

        That happens after a change of the list. `keys` are index keys from SCAN.
        """
        requests = [key[len(b"kv:") : -len(b":index")] for key in keys if key.endswith(b":index")]
        stray = next((name for name in requests if self._server_of(name) != server), None)
        if stray is not None and server not in self._reported:
            self._reported.add(server)
            where = f"{shown(server.url)} has requests that belong to others of the list, as {name_as_text(stray)} to"
            say("kvpage", f"{where} {self.home(stray)}: they are left out. Do the engines have this list?", 0)


class Pipeline:
    """Commands that are sent together, with `execute_command` and `execute` of redis-py's pipeline; for one `execute`.

    `execute` returns the replies in order. Errors are among them, whatever `raise_on_error` is.
    """

    def __init__(self, answers: Callable[[Sequence[Command]], list[Any]]) -> None:
        self._answers = answers
        self._commands: list[Command] = []

    def execute_command(self, *words: bytes | int) -> None:
        self._commands.append(words)

    def execute(self, raise_on_error: bool) -> list[Any]:
        return self._answers(self._commands)


# -- Connections to all servers of a URL -------------------------------------------------------------------------------


@contextmanager
def servers_as_one(args: argparse.Namespace) -> Iterator[MultiStore]:
    """Yield the servers of a URL as one store, with a connection to each. Sets functions in `args`, as
    `cluster_as_one`.
    """
    with ExitStack() as stack:
        stores = {server: stack.enter_context(connected(server.url)) for server in servers_of(args.url)}
        rendezvous = Rendezvous([*stores])
        as_one = MultiStore(stores, lambda key: rendezvous.server(segment_of(key)))  # as in PageClient
        args.home, args.unreachable, args.changed = as_one.home, lambda: as_one.unreachable, lambda: False
        yield as_one


def is_cluster(url: str) -> bool:
    """Return whether a URL lists nodes of a cluster."""
    return urlsplit(url).scheme in SCHEMES


@contextmanager
def cluster_as_one(args: argparse.Namespace) -> Iterator[MultiStore]:
    """Yield the primaries of a cluster as one store, with a connection to each.

    Sets three functions in `args`: `home(key)` returns the URL of the server of a key, `unreachable()` the URLs of
    servers that did not answer, and `changed()` whether slots have other primaries than at the start. Raises RedisError
    if no node answers, ValueError for an invalid URL, LookError if a slot has no primary.
    """
    address = Address(args.url)
    slots = _slots(address)

    def server_of(key: bytes) -> ServerUrl:
        shard = slots.shard(slot_of(key))
        if shard is None:
            raise LookError(f"no node of the cluster has slot {slot_of(key)}")
        return ServerUrl(address.url(shard.primary))

    def home(key: bytes) -> str:
        """Return the URL of the server of a manifest, named by its key, or of a request's blocks, named by its id."""
        return shown(server_of(key if key.startswith(PREFIX) else block_key((key, 0))).url)

    with ExitStack() as stack:
        masters = {ServerUrl(address.url(node)): node for node in slots.primaries()}
        stores = {server: stack.enter_context(_client(address, node)) for server, node in masters.items()}
        as_one = MultiStore(stores, server_of)

        def changed() -> bool:
            """Return whether slots have other primaries now, according to the first primary that answers."""
            received = as_one.of_each(b"CLUSTER", b"SLOTS").items()
            answers = [(server, answer) for server, answer in received if not isinstance(answer, redis.ResponseError)]
            if not answers:
                return False
            server, answer = answers[0]
            return _primaries(SlotMap(ranges_of(answer, masters[server]))) != _primaries(slots)

        args.home, args.unreachable, args.changed = home, lambda: as_one.unreachable, changed
        yield as_one


def _primaries(slots: SlotMap) -> list[Node | None]:
    """Return the primary of each of the 16,384 slots; None for a slot without one."""
    return [shard.primary if shard else None for shard in map(slots.shard, range(SLOTS))]


def _client(address: Address, node: Node) -> redis.Redis:
    tls = {name: value for name, value in address.options.items() if name.startswith("ssl_")}
    return connected(address.url(node), socket_timeout=10, **tls)


def _slots(address: Address) -> SlotMap:
    """Return the slot map from the first node of the URL that answers. Raises RedisError if none does, LookError if the
    URL has no node.
    """
    failure: redis.RedisError | None = None
    for seed in address.seeds:
        try:
            with _client(address, seed) as store:
                slots = store.execute_command(b"CLUSTER", b"SLOTS")
        except (redis.ConnectionError, redis.TimeoutError) as error:
            failure = error
            continue
        return SlotMap(ranges_of(slots, seed))
    raise failure or LookError("no node of the cluster is named")
