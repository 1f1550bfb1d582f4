"""A process of the server: the real one, from its configuration to its last word, on a loop of the world's."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

from kvpage_server import app
from kvpage_server.app import DiskError, Server, apply, from_arguments
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.connections import transaction
from kvpage_server.commands.notifying.tracking import _NOTE, _SHARE
from kvpage_server.core import Caller, NewPages, Parser
from kvpage_server.core.python import calls
from kvpage_server.net import replies
from kvpage_server.store.contents import unit_on_disk
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.index import Block, OnDisk
from tests.simulation.programs.seed import Seed
from tests.simulation.world.clock import real_monotonic_ns
from tests.simulation.world.machine import Machine, ServerDied
from tests.simulation.world.threads import SERVER

SOCKET = "socket"
Ran = Callable[[Client, Any, Any], Any]  # client, words, reply; returns the sent reply

calls.monotonic_ns = real_monotonic_ns  # see `_OneByOne`
_execute, _caller_of, _came_of = replies.execute, replies.caller_of, replies.finish_call
_after_freeing = transaction._after_freeing
_graveyard: list[Any] = []  # processes that died: nobody tidies up after them


class Process:
    """One life. `ran` is called with every command when it has run, with the server's reply."""

    def __init__(self, machine: Machine, directory: Path, seed: Seed, ran: Ran) -> None:
        self.machine = machine
        self.directory = directory
        self.seed = seed
        self.ready = False
        self.over = False
        self.ending = False  # it was asked to end, and does
        self.lost = ""  # values that could not be written at the end
        self.broke: Callable[[str], None] = lambda text: None  # called with unexpected exceptions
        # called with keys that are removed without a command, and whether they are evicted
        self.leaves: Callable[[list[bytes], bool], None]
        self.stored: list[list[bytes]] = []  # keys of pages that became visible together, for the judge to take
        self.lost_notes: list[tuple[Any, bytes]] = []  # client and key: notes of CLIENT TRACKING beyond its limits
        self.later: list[bytes] = []  # of the last reply to EXEC that follows when values are freed
        self._ran = ran

    def live(self) -> None:
        """Run until it ends in order, or dies."""
        os.chdir(self.directory)
        seed = self.seed
        words = [word for name, value in seed.options.items() for word in (f"--{name}", *value.split())]
        words += [word for user in seed.users for word in ("--user", *user.split())]
        config = from_arguments([*words, "--unixsocket", SOCKET, "--port", "0"])
        self.loop = self.machine.new_loop()
        self.loop.set_exception_handler(lambda _, context: self.broke(_described(context)))
        _listen(self.broke)
        self.server = Server(config, app._open_store(config))
        if self.server.tiered is not None:
            self.server.tiered.stored.maxdisk = seed.maxdisk
            self.machine.disk.map_size = seed.maxdisk
        app._load_users(self.server)
        apply(self.server, (name for name in config.parameters() if name != "requirepass"))
        replies.execute, replies.finish_call = self._execute, self._came_of
        replies.caller_of = _OneByOne  # type: ignore[assignment]
        transaction._after_freeing = self._follows
        self._attend()
        gc.freeze()  # a server that starts looks through all that is not
        self.ready = True
        try:
            self.loop.run_until_complete(app.serve(self.server, None))
        except ServerDied:
            self._die()
            return
        except DiskError as error:
            self.lost = str(error)
        self.over = True
        self._close()

    def _attend(self) -> None:
        """Report each key before the server removes it by itself; note visible pages and lost notes."""
        contents, tiered, keyspace = self.server.keyspace.contents, self.server.tiered, self.server.keyspace
        evict: Callable[..., None] = contents.evict

        def note_eviction(unit: Unit, *args: Any, **options: Any) -> None:
            self.leaves(_keys_in(unit), True)
            evict(unit, *args, **options)

        set_pages, tracking = keyspace.contents.set_pages, self.server.events.tracking
        take_oldest = tracking._take_oldest

        def noted_loss(reader: Any) -> None:
            self.lost_notes.append((reader.client, next(iter(reader.keys))))
            if not _exceeds(tracking, reader):
                self.broke(f"the note of {self.lost_notes[-1][1]!r} was lost, and no limit is exceeded")
            take_oldest(reader)

        def noted(pages: NewPages) -> None:
            set_pages(pages)
            self.stored.append(list(pages.keys))

        vars(contents).update(evict=note_eviction, set_pages=noted)
        vars(tracking).update(_take_oldest=noted_loss)
        if tiered is None:
            return
        lose = tiered.fetching.lose

        def note_loss(value: OnDisk, outcome: Any) -> None:
            if tiered.fetching._place_of(value) is not None:
                self.leaves([value.name[1:]] if value.name[:1] == b"k" else _keys_in(unit_on_disk(value)), False)
            lose(value, outcome)

        vars(tiered.fetching).update(lose=note_loss)

    def _execute(self, client: Client, words: Any) -> Any:
        return self._ran(client, words, _execute(client, words))

    def _came_of(self, client: Client, spec: Any, words: Any, reply: Any, error: Exception | None) -> Any:
        return self._ran(client, words, _came_of(client, spec, words, reply, error))

    def _follows(self, contents: Any, pieces: list[Any]) -> Any:
        self.later = [piece for piece in pieces if type(piece) is bytes]  # others keep values in memory
        return _after_freeing(contents, pieces)

    def end(self) -> None:
        """Somebody asks it to end, as `kill` does."""
        self.ending = True
        self.loop.on_signal[signal.SIGTERM]()

    def _die(self) -> None:
        self.over = True
        self.machine.turns.kill(SERVER)
        _graveyard.append((self, self.server, self.loop, asyncio.all_tasks(self.loop)))
        selector: Any = self.loop._selector
        clients = [client for client in self.server.clients.values() if not client.gone]
        open_ones = {client.descriptor for client in clients} | {key.fd for key in selector.get_map().values()}
        for descriptor in sorted(open_ones):
            os.close(descriptor)
        asyncio.set_event_loop(None)

    def _close(self) -> None:
        self.machine.turns.kill(SERVER)
        self.loop.close()

    @property
    def maxdisk(self) -> int:
        """Return the limit of values on its disk, 0 for none."""
        tiered = self.server.tiered
        return 0 if tiered is None else tiered.stored.maxdisk

    @property
    def may_refuse(self) -> bool:
        """Whether a value may be refused that memory has room for."""
        return self.maxdisk > 0 or self.server.keyspace.eviction_order.quotas is not None

    @property
    def tasks(self) -> list[str]:
        """Return its running tasks."""
        return sorted(str(task.get_coro()) for task in asyncio.all_tasks(self.loop))

    @property
    def timers(self) -> list[str]:
        """Return its timers."""
        scheduled: list[asyncio.TimerHandle] = self.loop._scheduled  # type: ignore[attr-defined]
        return sorted(str(timer) for timer in scheduled if not timer.cancelled())


def _exceeds(tracking: Any, reader: Any) -> bool:
    """Return whether a client that loses a note, or all clients together, have more notes than the limits allow."""
    own, every = (
        sum(len(key) + _NOTE for one in readers for key in one.keys)
        for readers in ([reader], tracking.clients.values())
    )
    most, most_keys = tracking._most_bytes(), tracking._most_keys()
    return 0 < most < max(_SHARE * own, every) or 0 < most_keys < tracking.keys


def _keys_in(unit: Unit) -> list[bytes]:
    return list(unit.page_keys()) if isinstance(unit, Block) else [unit]


def _described(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return context["message"] + ("" if error is None else "".join(traceback.format_exception(error)))


class _Broken(logging.Handler):
    """Exceptions that the server logs: it goes on, but they are not meant to be."""

    def __init__(self, received: Callable[[str], None]) -> None:
        super().__init__()
        self._told = received

    def emit(self, record: logging.LogRecord) -> None:
        """Pass them on."""
        if record.exc_info and record.exc_info[1] is not None:
            self._told(record.getMessage() + "\n" + "".join(traceback.format_exception(record.exc_info[1])))


def _listen(received: Callable[[str], None]) -> None:
    log = logging.getLogger("kvpage")
    log.handlers[:] = [_Broken(received)]
    log.propagate = False


class _OneByOne:
    """Caller that makes single calls, and returns every reply as if a push were to follow.

    The compiled core asks the system for the time, past the world. So does the other core here, and the cost of a call
    is computed afterwards: a run is the same on both.
    """

    def __init__(self, client: Client, parser: Parser) -> None:
        self._client = client
        self._caller: Caller = _caller_of(client, parser)

    def make(self, pieces: Any, pushed: Any, counts_of: Any, *, left: int, deadline: int, **how: Any) -> Any:
        """Call as the core does."""
        made = self._caller.make(pieces, [None], counts_of, left=1, deadline=deadline, **how)
        if made is None:
            return None
        _, words, row, reply, error = made
        if row is not None:
            monotonic_ns()
            self._client.finished = monotonic_ns()
        in_time = row is None or self._client.finished <= deadline
        return left - (row is not None) if in_time else 0, words, row, reply, error
