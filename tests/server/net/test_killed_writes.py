"""Writes in steps whose client is killed between two steps: the rest of the steps runs, as in Redis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stored_pages import Here

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.execute import execute
from kvpage_server.commands.dispatch.run import run
from kvpage_server.commands.specs import WORDS_PER_STEP, find
from kvpage_server.commands.steps import in_thread
from kvpage_server.core import Command
from kvpage_server.net.replies import Replies
from kvpage_server.net.run_queue import RunQueue
from kvpage_server.resp import Reply, Stream, Wait

MB = 1 << 20
USERS = 100  # connections of a user, more than one step examines
PAGES = 12  # pages of 1 MB that were not hashed on arrival: three steps


def page(number: int, req: str = "r", body: bytes = b"abcd") -> tuple[Any, ...]:
    return (req, 0, 0, number, 0, 8, 1, len(body), 0, body)


def set_block(here: Here, number: int) -> None:
    """A block of two pages that is stored whole."""
    assert here.call("KVBLOCKSET", "r", number, 1, 2, 1, 0, 1, 0, 8, 100, bytes(200)) == b"+OK\r\n"


def begin(here: Here, *words: Any) -> Replies:
    """Begin a command that runs in steps, and return its replies."""
    encoded: Command = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    reply = run(here.client, find(encoded), encoded)
    assert type(reply) is Stream
    replies = Replies(here.client, lambda: None)
    replies.add(reply)
    return replies


def kill_after_steps(here: Here, words: tuple[Any, ...], stop: Callable[[], bool]) -> None:
    """Run a command until `stop` returns True after a step, kill its client, and run the steps that have to run."""
    replies = begin(here, *words)
    while not stop():
        assert replies.step(0) is False
    for step in replies.drop() or ():
        assert step in ((), b"+OK\r\n") or isinstance(step, int)


@pytest.fixture
def here() -> Here:
    return Here()


def test_a_killed_clients_pages_of_several_parts_are_stored(here: Here) -> None:
    batch = [word for number in range(PAGES) for word in page(number, body=bytes(MB))]
    kill_after_steps(here, ("KvPageMSet", PAGES, *batch), lambda: len(here.keyspace) > 0)
    assert len(here.keyspace) == PAGES


def test_a_killed_clients_pages_in_a_split_block_are_stored(here: Here) -> None:
    set_block(here, 0)
    batch = (*page(0), *page(0, "other"))
    kill_after_steps(here, ("KVPAGEMSET", 2, *batch), lambda: here.keyspace.contents.catalogue.in_extents == 0)
    assert here.call("KVPAGEGET", "r", 0, 0, 0, 0) == here.call("KVPAGEGET", "other", 0, 0, 0, 0) == b"$4\r\nabcd\r\n"


def test_a_killed_clients_request_is_deleted(here: Here) -> None:
    for number in range(200):
        set_block(here, number)
    kill_after_steps(here, ("KVPAGEDEL", "r"), lambda: len(here.keyspace) < 400)
    assert len(here.keyspace) == 0


def test_a_killed_clients_pins_are_all_added_or_removed(here: Here) -> None:
    for number in range(2000):  # more blocks than one step handles
        here.call("KVPAGESET", *page(number))
    leases = here.keyspace.leases.by_unit
    kill_after_steps(here, ("KVPAGEPIN", "r"), lambda: len(leases) > 0)
    assert len(leases) == 2000
    kill_after_steps(here, ("KVPAGEUNPIN", "r"), lambda: len(leases) < 2000)
    assert len(leases) == 0


def test_values_flushed_by_a_killed_client_are_freed_in_steps(here: Here) -> None:
    for number in range(3000):
        here.call("KVPAGESET", *page(number))
    replies = begin(here, "FLUSHALL")
    assert replies.step(0) is False
    assert sum(1 for _ in replies.drop() or ()) > 1


def test_a_step_after_a_kill_still_waits_for_its_thread() -> None:
    ready, results = threading.Event(), list[bool]()

    def steps() -> Iterator[Reply]:
        results.append((yield from in_thread(lambda: ready.wait(30))))

    async def kill() -> None:
        run_queue, rest = RunQueue(asyncio.get_running_loop()), steps()
        wait = next(rest)
        assert isinstance(wait, Wait)
        wait.start(lambda: None)
        run_queue.finish(rest)
        await asyncio.sleep(0)  # the run queue takes the next step
        await asyncio.sleep(0)
        ready.set()
        await run_queue.completed(30)

    asyncio.run(kill())
    assert results == [True]


def test_a_killed_clients_verification_ends(here: Here) -> None:
    set_block(here, 0)
    replies = begin(here, "KVPAGEVERIFY", "r")
    assert replies.step(0) is False
    assert replies.drop() is None


class Link:
    """The connection of a client that is only closed."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self, error: str = "") -> None:
        self.aborted = True

    def trust(self, trusted: bool) -> None:
        pass


def listeners(here: Here) -> list[Client]:
    """Clients of a user "t" that listen to a channel."""
    here.client.user = here.server.users.default
    here.call("ACL", "SETUSER", "t", "on", "nopass", "+@all", "~a*", "&c")
    clients = [Client(here.server, "test", "test", connection=Link(), id=number) for number in range(USERS)]  # type: ignore[arg-type]
    for client in clients:
        here.server.clients[client.id] = client
        client.become(here.server.users.by_name[b"t"])
        client.channels[b"c"] = None
    return clients


def closed(clients: list[Client]) -> list[bool]:
    return [isinstance(client.connection, Link) and client.connection.aborted for client in clients]


def forget(here: Here, client: Client) -> None:
    """Forget a client as a session does after its connection is closed."""
    client.gone = True
    here.server.forget(client)
    del client.connection


def test_rights_that_a_killed_client_takes_end_subscriptions(here: Here) -> None:
    clients = listeners(here)
    kill_after_steps(here, ("ACL", "SETUSER", "t", "resetchannels"), lambda: any(closed(clients)))
    assert all(closed(clients))


def test_a_killed_connection_does_not_end_the_removal_of_a_user(here: Here) -> None:
    clients = listeners(here)
    replies = begin(here, "ACL", "DELUSER", "t")
    while not any(closed(clients)):
        replies.step(0)
    forget(here, clients.pop())
    for _ in replies.drop() or ():
        pass
    assert all(closed(clients))


@pytest.mark.parametrize("patterns", [1, 200])
def test_a_killed_client_without_rights_runs_nothing(here: Here, patterns: int) -> None:
    client = listeners(here)[0]
    here.call("ACL", "SETUSER", "t", *(f"~?{number}*z" for number in range(patterns)))
    client.channels.clear()
    assert here.call("MSET", "a", 1, "b", 1) == b"+OK\r\n"
    keys = [b"a%d" % number for number in range(2 * WORDS_PER_STEP if patterns == 1 else 900)]
    reply = execute(client, [b"DEL", b"a", *keys, b"b"])
    assert type(reply) is Stream
    replies = Replies(client, lambda: None)
    replies.add(reply)
    assert replies.step(0) is False
    rest = replies.drop()
    forget(here, client)
    assert [step for step in rest or () if step != ()] == []
    assert here.call("EXISTS", "a", "b") == b":2\r\n"
    assert not here.server.refusals.entries
