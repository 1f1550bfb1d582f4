"""Blocks that a client writes one after the other, without waiting for each answer, are written together.

While some blocks are on their way to the cluster, the next ones are received, and then they go together, in one round
trip a node. The answers keep their order. Every other command waits until the client's writes before it are done, so
that it finds what they wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvpage_server.client import BlockName
from kvpage_server.client.cluster.commands import Write
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.disk import Postponed
from kvpage_server.commands.families.pages.request import block_names
from kvpage_server.commands.steps import Steps
from kvpage_server.commands.table.spec import Spec
from kvpage_server.core import Command
from kvpage_server.gateway.upstream import Upstream, waited_for
from kvpage_server.resp.reply import ReplyError, Wait

OVERLAP = frozenset({"kvblockset"})
_BLOCKS, _BYTES = 16, 64 * 1024**2  # that are written at once: blocks of one client, and bytes of all clients
_AT_ONCE = 2  # batches of a client


_Block = tuple[list[Write], asyncio.Future[None]]  # and when it is done


@dataclass(slots=True)
class _OfClient:
    """What one client is writing."""

    names: set[BlockName] = field(default_factory=set)
    next: list[_Block] = field(default_factory=list)  # to be sent when those on their way are done
    under_way: int = 0  # batches
    waiting: list[Callable[[], None]] = field(default_factory=list)  # for a block to be done

    def take(self) -> list[_Block]:
        """The next ones."""
        some, self.next = self.next, []
        return some


class Overlap:
    """The blocks that are being written, by client."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._of: dict[Client, _OfClient] = {}
        self._bytes = 0

    def check(self, client: Client, spec: Spec, words: Command) -> None:
        """Raises Postponed if a command has to wait for what its client is writing."""
        theirs = self._of.get(client)
        if theirs and not (spec.name in OVERLAP and self._has_room(theirs) and theirs.names.isdisjoint(_named(words))):
            raise Postponed(Wait(theirs.waiting.append))

    def _has_room(self, theirs: _OfClient) -> bool:
        return len(theirs.names) < _BLOCKS and self._bytes < _BYTES

    def write(self, client: Client, name: BlockName, nbytes: int, block: list[Write]) -> Steps[None]:
        """Steps until a block is written. Raises ReplyError."""
        theirs = self._of.setdefault(client, _OfClient())
        done = asyncio.get_running_loop().create_future()
        theirs.names.add(name)
        theirs.next.append((block, done))
        if theirs.under_way < _AT_ONCE:
            self._send(theirs, theirs.take())
        self._bytes += nbytes
        client.keep(nbytes)
        try:
            yield from waited_for(done)
        finally:
            self._bytes -= nbytes
            client.keep(-nbytes)
            theirs.names.discard(name)
            if not theirs.names:
                del self._of[client]
            waiting, theirs.waiting = theirs.waiting, []
            for then in waiting:
                then()

    def _send(self, theirs: _OfClient, some: Sequence[_Block]) -> None:
        theirs.under_way += 1
        task = self._upstream.start(self._upstream.plans.calls.write([one for block, _ in some for one in block]))
        task.add_done_callback(partial(self._sent, theirs, some))

    def _sent(self, theirs: _OfClient, some: Sequence[_Block], task: asyncio.Task[None]) -> None:
        """Tell those who wait for these blocks, and write those that came meanwhile."""
        theirs.under_way -= 1
        if task.cancelled():
            return
        error = task.exception()
        if error and len(some) > 1:
            for one in some:  # each alone, since the others may have nothing to do with it
                self._send(theirs, [one])
            return
        for _, done in some:
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)
        if theirs.next:
            self._send(theirs, theirs.take())


def _named(words: Command) -> list[BlockName]:
    """The block that KVBLOCKSET writes; none if it will be refused."""
    try:
        return block_names(words[1:3])
    except ReplyError:
        return []
