"""AsyncPageClient: PageClient for an event loop, asyncio's or uvloop's.

It uses the same connections and `Conversation`s as PageClient, but the event loop waits for the sockets. Connects run
on threads, because redis-py's connections block while they connect.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

from typing_extensions import Buffer

from kvpage_server.client.calls import Call, Calls, count_misses
from kvpage_server.client.cluster.nodes import Peers
from kvpage_server.client.cluster.plan import RAISES, Failed, NodeRequest, Plan, Timed, present
from kvpage_server.client.cluster.store import PAUSE, ClusterCalls, several
from kvpage_server.client.commands import BlobCommands, BlockCode, Coding, after_refusal, ask_dialect, block_code
from kvpage_server.client.errors import Closed, DeadlineExceeded, Disconnected, PageClientError, Refused, Unsupported
from kvpage_server.client.mapped import ASK_SOCKET, NOT_IN_PLACE, Dialogue, Meanwhile, borrow, give_back, maps_of
from kvpage_server.client.page import (
    BlockBody,
    BlockName,
    Page,
    StateName,
    check_connections,
    check_integers,
    check_keep,
    check_keys,
    check_names,
)
from kvpage_server.client.raw_commands import (
    BlockCommands,
    Kept,
    RawCommand,
    Word,
    ask,
    check_raw_commands,
    commit,
    encoded,
    key_of,
    watch,
)
from kvpage_server.client.wire.connection import Deadline, PageConnection, PagePool, page_pool, pause_before_retry
from kvpage_server.client.wire.exchange import READ, WRITE, Conversation, Request
from kvpage_server.page import BlockShape, PageKey
from kvpage_server.tracing import span

# -- Conversations on an event loop ------------------------------------------------------------------------------------

T = TypeVar("T")


async def converse(
    connection: PageConnection, request: Request[T], end: Deadline, silence: float = math.inf, node: Hashable = None
) -> T:
    """Send a request on an open connection, and return its decoded reply.

    Raises DeadlineExceeded at the deadline `end`, or after `silence` seconds in which no byte was sent or received; its
    message names the `node` if one is given. Raises Disconnected and WrongReply as `Conversation.steps`, and Refused
    for an error reply.
    """
    conversation, loop = connection.conversation(request), asyncio.get_running_loop()
    began = loop.time()
    try:
        over = began + end.left()
        async with asyncio.timeout_at(min(over, loop.time() + silence)) as limit:
            moved = partial(_extend_timeout, limit, over, silence) if silence < math.inf else None
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


async def _converse_while(connection: PageConnection, step: Meanwhile, end: Deadline) -> tuple[Any, Any]:
    """Send a request on an open connection, and do the work in a thread until the reply is there. Return the decoded
    reply and the result of the work.
    """
    asked = asyncio.create_task(converse(connection, step.request, end))
    try:
        done = await _in_thread(step.work)
    except BaseException:
        asked.cancel()
        await asyncio.wait([asked])
        raise
    return await asked, done


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result. It is complete when this ends, also after a cancellation, because
    it uses the caller's memory.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        working.exception()  # asyncio would log an exception that was not retrieved
        raise


def _extend_timeout(limit: asyncio.Timeout, over: float, silence: float) -> None:
    """Move the timeout `limit` to `silence` seconds from now, or to `over` if that is earlier, by the loop's clock.

    Called when bytes were sent or received.
    """
    if limit.when() is not None:
        limit.reschedule(min(over, asyncio.get_running_loop().time() + silence))


async def _pass_through(conversation: Conversation[Any], moved: Callable[[], None] | None = None) -> None:
    """Wait until a conversation has ended. Call `moved` before each of its steps. Raises Disconnected, WrongReply."""
    drive = _Drive(conversation, moved)
    try:
        await drive.over
    finally:
        drive.close()
        del drive  # break the reference cycle: its error has this frame in its traceback


class _Drive:
    """Driver of one conversation: the event loop continues it whenever its socket is ready. The future `over` is set at
    its end.
    """

    def __init__(self, conversation: Conversation[Any], moved: Callable[[], None] | None) -> None:
        self._moved = moved
        self._loop = asyncio.get_running_loop()
        self._sock = conversation.sock
        self._steps = conversation.steps()
        self._watched = 0  # poll events for which the loop watches the socket
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._advance(None)

    def close(self) -> None:
        self._watch_for(0)
        self._steps.close()

    def _advance(self, ready: int | None) -> None:
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
        except Exception as error:  # noqa: BLE001 - passed to the waiting task
            self.over.set_exception(error)
        else:
            if not events:
                self._loop.call_soon(self._advance, 0)
            self._watch_for(events)

    def _watch_for(self, events: int) -> None:
        """Watch the socket for exactly these poll events, 0 for none. Usually they are watched already."""
        changed = events ^ self._watched
        self._watched = events
        if changed & READ:
            if events & READ:
                self._loop.add_reader(self._sock, self._advance, READ)
            else:
                self._loop.remove_reader(self._sock)
        if changed & WRITE:
            if events & WRITE:
                self._loop.add_writer(self._sock, self._advance, WRITE)
            else:
                self._loop.remove_writer(self._sock)


CONNECT_THREADS = 128  # threads for connects: many, because the deadline of a call includes its wait for a free thread


class AsyncPageClient:
    """`PageClient` for one event loop. Its methods are coroutines; those of `PageClient` describe them.

    If a call is cancelled, its connection is closed, and its buffers are not written to any more.
    """

    def __init__(
        self,
        url: str,
        *,
        connections: int = 1,
        deadline: float = 5.0,
        verify: bool = True,
        code: Coding = "auto",
        mapped: bool = True,
        **redis_options: Any,
    ) -> None:
        """Create a client with the arguments of `PageClient`."""
        check_connections(connections)
        Deadline(deadline)
        self._verify = verify
        self._several = several(url, verify, redis_options)
        self._pool = None if self._several else page_pool(url, redis_options)
        self._maps = maps_of(self._pool) if mapped else None
        self._calls = (
            self._several.calls if self._several else Calls(connections=connections, verify=verify, maps=self._maps)
        )
        self.misses: Counter[str] = self._calls.misses
        self.code: BlockCode | None = block_code(code, is_local=self._pool.is_local) if self._pool else None
        self._deadline = deadline
        self._dialect: BlobCommands | None = None
        self._openers: ThreadPoolExecutor | None = None  # the threads, which exist while connects run
        self._connects = 0  # number of connects that run on threads
        self._openings: dict[PageConnection, asyncio.Future[None]] = {}  # connects for which a call waits
        self._closed: asyncio.Future[None] | None = None  # set when the last of these threads has ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def mapped_bytes(self) -> int:
        return self._maps.read_bytes if self._maps else 0

    @property
    def cluster(self) -> ClusterCalls:
        """The methods of a cluster client as plans, for `carry_out`. Raises Unsupported if the store is not a
        cluster.
        """
        if not isinstance(self._calls, ClusterCalls):
            raise Unsupported("this is no cluster")
        return self._calls

    async def carry_out(self, plan: Timed[T]) -> T:
        """Execute a plan with the client's default deadline, and return its result. Requests to several nodes run at
        the same time.
        """
        return await self._do(plan, None)

    async def close(self) -> None:
        """Close the connections. Calls in progress in other tasks and all later calls raise Closed."""
        if self._several:
            self._several.peers.close()
        if self._pool:
            self._pool.close()
        if self._closed and not self._closed.done():
            self._closed.set_result(None)
        if self._openers:
            self._openers.shutdown(wait=False, cancel_futures=True)
        if self._maps:
            self._maps.close()

    # -- pages -----------------------------------------------------------------------------------------------------

    async def set_page(self, page: Page, *, ttl: int = 0, deadline: float | None = None) -> None:
        await self.mset([page], ttl=ttl, deadline=deadline)

    async def mset(self, pages: Sequence[Page], *, ttl: int = 0, deadline: float | None = None) -> None:
        await self._do(self._calls.mset(pages, ttl), deadline)

    async def get_page(self, key: PageKey, *, deadline: float | None = None) -> Page | None:
        return (await self.mget([key], deadline=deadline))[0]

    async def mget(self, keys: Sequence[PageKey], *, deadline: float | None = None) -> list[Page | None]:
        return await self._do(self._calls.mget(check_keys(keys)), deadline)

    async def get_page_into(self, key: PageKey, buffer: Buffer, *, deadline: float | None = None) -> bool:
        return (await self.mget_into([key], [buffer], deadline=deadline))[0]

    async def mget_into(
        self, keys: Sequence[PageKey], buffers: Sequence[Buffer], *, deadline: float | None = None
    ) -> list[bool]:
        return await self._do(self._calls.mget_into(check_keys(keys), buffers), deadline)

    async def exists(self, key: PageKey, *, deadline: float | None = None) -> bool:
        return (await self.mexists([key], deadline=deadline))[0]

    async def mexists(self, keys: Sequence[PageKey], *, deadline: float | None = None) -> list[bool]:
        return await self._do(self._calls.mexists(check_keys(keys)), deadline)

    async def delete(self, keys: Sequence[PageKey], *, deadline: float | None = None) -> int:
        return await self._do(self._calls.delete(check_keys(keys)), deadline)

    async def delete_request(self, req_id: bytes, pages: Sequence[int] = (), *, deadline: float | None = None) -> int:
        return await self._do(self._calls.delete_request(req_id, pages), deadline)

    # -- blocks ----------------------------------------------------------------------------------------------------

    async def set_block(
        self, name: BlockName, shape: BlockShape, body: BlockBody, *, ttl: int = 0, deadline: float | None = None
    ) -> None:
        await self.mset_blocks([name], shape, [body], ttl=ttl, deadline=deadline)

    async def mset_blocks(
        self,
        names: Sequence[BlockName],
        shape: BlockShape,
        bodies: Sequence[BlockBody],
        *,
        ttl: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Store blocks, named ``(req_id, page_id)``. The order of a body is layer, plane, head, token, dim.

        A body may be in several pieces: a list of consecutive buffers. `ttl` is in seconds, 0 for none.
        """
        await self._do(self._calls.mset_blocks(names, shape, bodies, ttl), deadline)

    async def get_block_into(
        self, name: BlockName, shape: BlockShape, buffer: Buffer, *, deadline: float | None = None
    ) -> bool:
        return (await self.mget_blocks_into([name], shape, [buffer], deadline=deadline))[0]

    async def mget_blocks_into(
        self,
        names: Sequence[BlockName],
        shape: BlockShape,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
    ) -> list[bool]:
        return [why is None for why in await self.fetch_blocks_into(names, shape, buffers, deadline=deadline)]

    async def fetch_blocks_into(
        self,
        names: Sequence[BlockName],
        shape: BlockShape,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
    ) -> list[str | None]:
        return await self._do(self._calls.fetch_blocks_into(names, shape, buffers), deadline)

    @asynccontextmanager
    async def blocks_in_place(
        self, names: Sequence[BlockName], shape: BlockShape, *, deadline: float | None = None
    ) -> AsyncIterator[list[memoryview | None]]:
        check_names(names)
        end = Deadline(self._deadline if deadline is None else deadline)
        pool = await self._socket(end)
        if self._maps is None or pool is None:
            raise Unsupported(NOT_IN_PLACE)
        to = await self._server_commands(end)
        async with self._lent(pool) as connection:
            await self._open(connection, end)
            found = await self._go_through(borrow(self._maps, to, names, shape, self._verify), connection, end)
            count_misses(self.misses, found.missed.values(), lambda: (len(view) for view in found.views if view))
            try:
                yield found.views
            except BaseException:
                connection.close_unless(over=False)  # this ends the tickets
                raise
            end = Deadline(self._deadline if deadline is None else deadline)
            await self._open(connection, end)
            await self._go_through(give_back(found.tickets), connection, end)

    async def prefix(
        self, names: Sequence[BlockName], *, pages_per_block: int, lease_ms: int = 0, deadline: float | None = None
    ) -> int:
        check_integers(pages_per_block=pages_per_block, lease_ms=lease_ms)
        return await self._do(self._calls.prefix(names, pages_per_block, lease_ms), deadline)

    async def lengths(
        self,
        names: Sequence[BlockName],
        states: Sequence[StateName],
        *,
        pages_per_block: int,
        lease_ms: int = 0,
        deadline: float | None = None,
    ) -> list[int]:
        check_integers(pages_per_block=pages_per_block, lease_ms=lease_ms)
        return await self._do(self._calls.lengths(names, states, pages_per_block, lease_ms), deadline)

    async def lease(
        self, req_id: bytes, lease_ms: int, pages: Sequence[int] = (), *, deadline: float | None = None
    ) -> int:
        check_integers(lease_ms=lease_ms)
        return await self._do(self._calls.lease(req_id, lease_ms, pages), deadline)

    async def keep(
        self,
        keys: Sequence[bytes],
        seconds: int,
        *,
        tenant: str = "",
        tenants: int = 1,
        deadline: float | None = None,
    ) -> Kept:
        check_keep(keys, seconds, tenant, tenants)
        return await self._do(self._calls.keep(keys, seconds, tenant, tenants), deadline)

    # -- anything else ---------------------------------------------------------------------------------------------

    @property
    def words(self) -> type[BlockCommands]:
        """Builder of the store's requests about blocks."""
        return self._several.calls.words if self._several else BlockCommands

    async def nodes(self, *, deadline: float | None = None) -> list[Hashable]:
        """Return the nodes that store keys, as values of the argument `of` of `ask`; ``[None]`` for a single server."""
        return list(await self._do(self._several.calls.nodes(), deadline)) if self._several else [None]

    async def ask(
        self,
        raw_commands: Sequence[RawCommand],
        *,
        gone: Any = RAISES,
        of: Hashable = None,
        deadline: float | None = None,
    ) -> list[Any]:
        """Send several commands, and return their decoded replies, as `PageClient.ask`. With `of`, send all of them to
        that node.
        """
        check_raw_commands(raw_commands)
        end = Deadline(self._deadline if deadline is None else deadline)
        if not raw_commands:
            return []
        if self._several and of is None:
            again = gone is not RAISES
            return present(await self._do(self._several.calls.ask(raw_commands, again), end.left()), gone)
        if self._several:
            asked = NodeRequest(of, ask(raw_commands))
            (answer,) = present([await self._run(self._several.peers, asked, end, end.left())], RAISES)
            return list(answer)
        async with self._lent() as connection:
            await self._open(connection, end)
            return await converse(connection, ask(raw_commands), end)

    async def transaction(
        self,
        keys: Sequence[Word],
        raw_command: RawCommand,
        change: Callable[[Any], Sequence[RawCommand]],
        *,
        deadline: float | None = None,
    ) -> list[Any]:
        """Read and change keys in an optimistic transaction, as `PageClient.transaction`."""
        check_raw_commands([raw_command])
        end = Deadline(self._deadline if deadline is None else deadline)
        if self._pool:
            return await self._transact(self._pool, keys, raw_command, change, end)
        assert self._several
        while True:
            node = await self._do(
                self._several.calls.home(encoded(keys[0]) if keys else key_of(raw_command)), end.left()
            )
            with self._several.attempt(node, end):
                part = end.part(node, self._several.peers.silence(end))
                return await self._transact(self._several.connections(node), keys, raw_command, change, part)
            await asyncio.sleep(min(PAUSE, end.left()))

    async def _transact(
        self,
        pool: PagePool,
        keys: Sequence[Word],
        raw_command: RawCommand,
        change: Callable[[Any], Sequence[RawCommand]],
        end: Deadline,
    ) -> list[Any]:
        async with self._lent(pool) as connection:
            await self._open(connection, end)
            try:
                while True:
                    found = await converse(connection, watch(keys, raw_command), end)
                    answers = await converse(connection, commit(change(found)), end)
                    if answers is not None:
                        return answers
            except BaseException:
                connection.close_unless(over=False)  # otherwise the server would watch keys for the next request
                raise

    # -- doing -----------------------------------------------------------------------------------------------------

    async def _do(self, call: Call[T] | Timed[T], deadline: float | None) -> T:
        with span(f"kvpage.client.{call.what}", client=True):
            return await self._done(call, Deadline(self._deadline if deadline is None else deadline))

    async def _done(self, call: Call[T] | Timed[T], end: Deadline) -> T:
        if not isinstance(call, Call):
            return await self._carry_out(call(end), end)
        if not call.parts:
            return call.read([])
        to = await self._server_commands(end)
        try:
            return await self._done_by(to, call, end)
        except Refused as error:
            again, self.code = after_refusal(call.what, error, self.code)
            if not again:
                raise
        self._dialect = None
        return await self._done_by(await self._server_commands(end), call, end)

    async def _done_by(self, to: BlobCommands, call: Call[T], end: Deadline) -> T:
        requests = [call.ask(to, part) for part in call.parts]
        if len(requests) == 1:
            return call.read([await self._converse(requests[0], end)])
        failures: list[Any] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._converse(request, end)) for request in requests]
        except* PageClientError as failed:
            failures += failed.exceptions
        if failures:  # outside of the except* clause, in which Python 3.11.2 would wrap the error in a group again
            raise failures[0].again() from None
        return call.read([task.result() for task in tasks])

    async def _server_commands(self, end: Deadline) -> BlobCommands:
        """Return the commands that the server supports. The first call asks the server; later calls return the same."""
        if self._dialect is None:
            self._dialect = await self._converse(ask_dialect(self.code), end)
        return self._dialect

    async def _socket(self, end: Deadline) -> PagePool | None:
        """Return the pool of connections to the server's unix socket, None if the client cannot map its memory."""
        if self._maps is None:
            return None
        if self._maps.has_to_ask:
            self._maps.found_socket(await self._converse(ASK_SOCKET, end))
        return self._maps.socket

    async def _converse(self, request: Request[T] | Dialogue[T], end: Deadline) -> T:
        if isinstance(request, Request) and request.prepare:
            await _in_thread(request.prepare)
        for _ in range(2):  # once more if the server has restarted
            socket = await self._socket(end) if isinstance(request, Dialogue) else None
            if not self._maps or not socket or socket is self._pool or not isinstance(request, Dialogue):
                break
            try:
                async with self._lent(socket) as connection:
                    await self._open(connection, end)
                    return await self._go_through(request, connection, end)
            except PageClientError as error:
                self._maps.lose_socket(socket)
                if isinstance(error, DeadlineExceeded):
                    raise
        async with self._lent() as connection:
            failures = 0
            while True:
                try:
                    await self._open(connection, end)
                    if isinstance(request, Dialogue):
                        return await self._go_through(request, connection, end)
                    answer = await converse(connection, request, end)
                    break
                except Disconnected as error:
                    failures += 1
                    await asyncio.sleep(pause_before_retry(connection, failures, end, error))
        return await _in_thread(partial(request.finish, answer)) if request.finish else answer

    async def _go_through(self, dialogue: Dialogue[T], connection: PageConnection, end: Deadline) -> T:
        """Carry out a dialogue on an open connection, and return its result."""
        steps = dialogue.steps(connection)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Meanwhile):
                    answer: Any = await _converse_while(connection, step, end)
                elif isinstance(step, Request):
                    answer = await converse(connection, step, end)
                else:
                    answer = await _in_thread(step)
                step = steps.send(answer)
        except StopIteration as over:
            result: T = over.value
            return result
        except BaseException:
            connection.close_unless(over=False)  # otherwise the server would keep its tickets
            raise

    async def _carry_out(self, plan: Plan[T], end: Deadline) -> T:
        """Execute a plan on several servers, and return its result. The requests of a round run at the same time."""
        assert self._several
        silence = self._several.peers.silence(end)
        try:
            asked = next(plan)
            while True:
                if asked.pause:
                    await asyncio.sleep(min(asked.pause, end.left()))
                requests = [
                    self._run(self._several.peers, node_request, end, silence) for node_request in asked.requests
                ]
                asked = plan.send(self._several.peers.unless_closed(await asyncio.gather(*requests)))
        except StopIteration as over:
            result: T = over.value
            return result

    async def _run(self, peers: Peers, node_request: NodeRequest, end: Deadline, silence: float) -> Any | Failed:
        peers.round_trips += 1
        try:
            peers.check(node_request.node)
            async with self._lent(peers.pool(node_request.node, node_request.replica)) as connection:
                await self._open(connection, end.part(node_request.node, silence))
                answer = await converse(connection, node_request.request, end, silence, node_request.node)
        except PageClientError as error:
            peers.remember(node_request.node, error)
            return Failed(error)
        peers.remember(node_request.node, None)  # not after a cancellation, which says nothing about the node
        return answer

    @asynccontextmanager
    async def _lent(self, pool: PagePool | None = None) -> AsyncIterator[PageConnection]:
        """Yield a connection of the pool, and release it afterwards.

        If the caller ends while a thread is still connecting it, the connection is released when the thread has
        finished: a thread cannot be interrupted, and no task should wait for it.
        """
        pool = pool or self._pool
        assert pool
        connection = pool.lend()
        try:
            with pool.in_use():
                yield connection
        finally:
            if opening := self._openings.pop(connection, None):
                opening.add_done_callback(partial(self._close_late_connection, pool, connection))
            else:
                pool.release(connection)

    async def _open(self, connection: PageConnection, end: Deadline) -> None:
        """Connect on a thread, unless the connection is ready. Raises Closed if the client is closed before it is
        connected.
        """
        if connection.is_ready:
            return
        if connection.interrupted:
            raise Closed
        loop = asyncio.get_running_loop()
        self._closed = closed = self._closed or loop.create_future()
        self._openers = self._openers or ThreadPoolExecutor(CONNECT_THREADS, "kvpage-connect")
        self._connects += 1
        self._openings[connection] = opening = loop.run_in_executor(self._openers, connection.open, end)
        opening.add_done_callback(self._connect_ended)
        await asyncio.wait((opening, closed), return_when=asyncio.FIRST_COMPLETED)
        if closed.done():
            raise Closed
        del self._openings[connection]
        try:
            await opening
        finally:
            del opening  # break the reference cycle: its error has this frame in its traceback

    def _connect_ended(self, _: asyncio.Future[None]) -> None:
        """End the threads for connects when all connects have ended."""
        self._connects -= 1
        if not self._connects and self._openers:
            self._openers.shutdown(wait=False)
            self._openers = None

    def _close_late_connection(self, pool: PagePool, connection: PageConnection, opening: asyncio.Future[None]) -> None:
        if not opening.cancelled():
            opening.exception()  # asyncio would log an exception that was not retrieved
        connection.close_unless(over=False)
        pool.release(connection)
