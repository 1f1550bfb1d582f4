"""Drives conversations with an event loop, which waits for their sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from kvpage_server.client.errors import PageClientError
from kvpage_server.client.wire.connection import PageConnection
from kvpage_server.client.wire.deadline import Deadline
from kvpage_server.client.wire.exchange import READ, WRITE, Conversation, Request

T = TypeVar("T")


async def converse(
    connection: PageConnection, request: Request[T], end: Deadline, silence: float = math.inf, node: Hashable = None
) -> T:
    """The server's answer. If it is a `node` of several, DeadlineExceeded is raised after `silence` seconds without a
    byte, too."""
    conversation, loop = connection.conversation(request), asyncio.get_running_loop()
    began = loop.time()
    try:
        over = began + end.left()
        async with asyncio.timeout_at(min(over, loop.time() + silence)) as limit:
            moved = partial(_wait_longer, limit, over, silence) if silence < math.inf else None
            await _pass_through(conversation, moved)
        return conversation.result()
    except TimeoutError:
        if node is None:
            raise end.exceeded() from None
        now = loop.time()
        why = f"was silent for {silence:.3g} s" if now < over else f"was not done after {now - began:.3g} s"
        raise end.late(node, why) from None
    finally:
        connection.close_unless(conversation.over)


def _wait_longer(limit: asyncio.Timeout, over: float, silence: float) -> None:
    """Extend the deadline for silence, as bytes have moved."""
    if limit.when() is not None:
        limit.reschedule(min(over, asyncio.get_running_loop().time() + silence))


async def _pass_through(conversation: Conversation[Any], moved: Callable[[], None] | None = None) -> None:
    """Drive a conversation to its end; `moved` is called when bytes do. Raises Disconnected, WrongReply."""
    drive = _Drive(conversation, moved)
    try:
        await drive.over
    finally:
        drive.close()
        del drive  # its error has this frame


class _Drive:
    """A conversation that the loop continues when its socket is ready. It wakes the waiting task at the end."""

    def __init__(self, conversation: Conversation[Any], moved: Callable[[], None] | None) -> None:
        self._moved = moved
        self._loop = asyncio.get_running_loop()
        self._sock = conversation.sock
        self._steps = conversation.steps()
        self._watched = 0  # events
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._go_on(None)

    def close(self) -> None:
        self._watch_for(0)
        self._steps.close()

    def _go_on(self, ready: int | None) -> None:
        if self.over.done():
            return
        if self._moved:
            self._moved()
        try:
            events = self._steps.send(ready)
        except StopIteration:
            self.over.set_result(None)
        except PageClientError as error:
            self.over.set_exception(error.again())
        except Exception as error:  # noqa: BLE001 - whoever waits for the end gets it
            self.over.set_exception(error)
        else:
            if not events:
                self._loop.call_soon(self._go_on, 0)
            self._watch_for(events)

    def _watch_for(self, events: int) -> None:
        """Watch for these events; usually they are watched for already."""
        changed = events ^ self._watched
        self._watched = events
        if changed & READ:
            if events & READ:
                self._loop.add_reader(self._sock, self._go_on, READ)
            else:
                self._loop.remove_reader(self._sock)
        if changed & WRITE:
            if events & WRITE:
                self._loop.add_writer(self._sock, self._go_on, WRITE)
            else:
                self._loop.remove_writer(self._sock)
