"""PageClient: the client for threads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from typing_extensions import Buffer

from kvpage_server.client.calls import Call, Calls, count_misses
from kvpage_server.client.cluster.nodes import Nodes
from kvpage_server.client.cluster.plan import RAISES, Timed, present
from kvpage_server.client.cluster.store import PAUSE, several
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
from kvpage_server.client.wire.exchange import Request
from kvpage_server.page import BlockShape, PageKey
from kvpage_server.tracing import span

T = TypeVar("T")


class PageClient:
    """Client that stores and reads pages and blocks on kvpage-server, or blobs on any Redis or Valkey.

    It sends bodies from the caller's memory, and receives them into it. The memory may be a numpy array, an mx.array,
    or any other C-contiguous object with the buffer protocol.

    A page that is absent or invalid is a miss. `misses` counts misses by reason: ``absent``; ``size``, the page is
    longer or shorter than its buffer; ``shape``, the block has another shape; ``header``, its header names another
    page; ``checksum``, its bytes are damaged; ``code``, a block in the lossless code cannot be decoded; ``gone``, one
    of several servers did not answer. After a miss, the content of the buffer is undefined.

    Every call has a deadline in seconds, which includes connecting and retries. Calls raise the errors of
    `kvpage_server.client.errors`. Threads can share a client.
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
        """Create a client; it connects at its first call.

        `url` is a redis://, rediss:// or unix:// URL. `redis_options` are more options of redis-py's ConnectionPool.
        Large batches use up to `connections` connections in parallel. `deadline` is the default for calls without one,
        in seconds. With `verify`, the checksum of every received page is compared; the server then sends pages with
        their headers. Blocks on kvpage-server have no checksum of their own.

        `code` says whether blocks travel in the lossless code (docs/page-code.md): ``auto``, if that is faster by the
        measured rates of the link, the encoder and the decoder, and the server is a single one on another machine;
        ``always``, if the single server supports it; or ``never``.

        With `mapped`, blocks are read in the server's memory over its unix socket, if the URL or the server names one
        on this machine.

        A valkey-cluster://, redis-cluster:// or rediss-cluster:// URL names some nodes of a cluster: `docs/scaling.md`.
        Several URLs separated by commas name servers side by side. Both have the option `node_deadline`, the seconds in
        which a node must send or receive a byte. Clusters also have `read_from_replicas`. A cluster's URL may have both
        options.

        Raises ValueError for an invalid URL or option.
        """
        check_connections(connections)
        Deadline(deadline)
        self._verify = verify
        self._several = several(url, verify, redis_options)
        self._pool = None if self._several else page_pool(url, redis_options)
        self._maps = maps_of(self._pool) if mapped else None
        self._calls = (
            self._several.calls if self._several else Calls(connections=connections, verify=verify, maps=self._maps)
        )
        self.misses: Counter[str] = self._calls.misses  # missed pages and blocks by reason
        # Rates and bytes of blocks in the lossless code; None if all blocks travel raw.
        self.code: BlockCode | None = block_code(code, is_local=self._pool.is_local) if self._pool else None
        self._deadline = deadline
        self._dialect: BlobCommands | None = None
        self._threads = ThreadPoolExecutor(connections, "kvpage-client")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of blocks that were copied out of the server's memory so far, and not read over a connection."""
        return self._maps.read_bytes if self._maps else 0

    def close(self) -> None:
        """Close the connections. Calls in progress in other threads and all later calls raise Closed."""
        if self._several:
            self._several.peers.close()
        if self._pool:
            self._pool.close()
        self._threads.shutdown()
        if self._maps:
            self._maps.close()

    # -- pages -----------------------------------------------------------------------------------------------------

    def set_page(self, page: Page, *, ttl: int = 0, deadline: float | None = None) -> None:
        """Store a page. See `mset`."""
        self.mset([page], ttl=ttl, deadline=deadline)

    def mset(self, pages: Sequence[Page], *, ttl: int = 0, deadline: float | None = None) -> None:
        """Store pages; `ttl` is in seconds, 0 for none.

        A batch on one connection is stored as a whole or not at all. On a plain Redis, pages with a ttl are stored one
        by one. Raises BadBuffer if a body does not have the length of its shape, PageError for a value out of range.
        """
        self._do(self._calls.mset(pages, ttl), deadline)

    def get_page(self, key: PageKey, *, deadline: float | None = None) -> Page | None:
        """Return a page in new memory, or None for a miss."""
        return self.mget([key], deadline=deadline)[0]

    def mget(self, keys: Sequence[PageKey], *, deadline: float | None = None) -> list[Page | None]:
        """Return pages in new memory, with None for misses."""
        return self._do(self._calls.mget(check_keys(keys)), deadline)

    def get_page_into(self, key: PageKey, buffer: Buffer, *, deadline: float | None = None) -> bool:
        """Receive a page into a buffer of its size. Return whether it was found."""
        return self.mget_into([key], [buffer], deadline=deadline)[0]

    def mget_into(
        self, keys: Sequence[PageKey], buffers: Sequence[Buffer], *, deadline: float | None = None
    ) -> list[bool]:
        """Receive each page into its buffer, which has exactly the size of the page's body. Return for each whether it
        was found.

        Raises BadBuffer if a buffer is read-only or not contiguous.
        """
        return self._do(self._calls.mget_into(check_keys(keys), buffers), deadline)

    def exists(self, key: PageKey, *, deadline: float | None = None) -> bool:
        """Return whether a page exists. Another value under its key, such as a string, is no page."""
        return self.mexists([key], deadline=deadline)[0]

    def mexists(self, keys: Sequence[PageKey], *, deadline: float | None = None) -> list[bool]:
        """Return for each page whether it exists."""
        return self._do(self._calls.mexists(check_keys(keys)), deadline)

    def delete(self, keys: Sequence[PageKey], *, deadline: float | None = None) -> int:
        """Delete pages, and any other values under their keys. Return the number of pages that existed."""
        return self._do(self._calls.delete(check_keys(keys)), deadline)

    def delete_request(self, req_id: bytes, pages: Sequence[int] = (), *, deadline: float | None = None) -> int:
        """Delete a request, or its blocks with these page ids. Return the number of deleted pages.

        Raises Unsupported on a plain Redis, and on a cluster without page ids.
        """
        return self._do(self._calls.delete_request(req_id, pages), deadline)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def set_block(
        self, name: BlockName, shape: BlockShape, body: BlockBody, *, ttl: int = 0, deadline: float | None = None
    ) -> None:
        """Store a block. See `mset_blocks`."""
        self.mset_blocks([name], shape, [body], ttl=ttl, deadline=deadline)

    def mset_blocks(
        self,
        names: Sequence[BlockName],
        shape: BlockShape,
        bodies: Sequence[BlockBody],
        *,
        ttl: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Store blocks, named ``(req_id, page_id)``. The order of a body is layer, plane, head, token, dim.

        A body may be in several pieces: a list of consecutive buffers. `ttl` is in seconds, 0 for none. Raises
        BadBuffer for a body that is not `shape.nbytes` long.
        """
        self._do(self._calls.mset_blocks(names, shape, bodies, ttl), deadline)

    def get_block_into(
        self, name: BlockName, shape: BlockShape, buffer: Buffer, *, deadline: float | None = None
    ) -> bool:
        """Receive a block into a buffer of `shape.nbytes` bytes. Return whether it was found and complete."""
        return self.mget_blocks_into([name], shape, [buffer], deadline=deadline)[0]

    def mget_blocks_into(
        self,
        names: Sequence[BlockName],
        shape: BlockShape,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
    ) -> list[bool]:
        """Receive each block into its buffer. Return for each whether it was found and complete.

        Raises BadBuffer for a buffer that is read-only or not `shape.nbytes` long.
        """
        return [why is None for why in self.fetch_blocks_into(names, shape, buffers, deadline=deadline)]

    def fetch_blocks_into(
        self,
        names: Sequence[BlockName],
        shape: BlockShape,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
    ) -> list[str | None]:
        """Receive each block into its buffer. Return for each block the reason for its miss, as in `misses`, or None if
        it was found.

        Raises BadBuffer as `mget_blocks_into`.
        """
        return self._do(self._calls.fetch_blocks_into(names, shape, buffers), deadline)

    @contextmanager
    def blocks_in_place(
        self, names: Sequence[BlockName], shape: BlockShape, *, deadline: float | None = None
    ) -> Iterator[list[memoryview | None]]:
        """Return a context manager with blocks in the server's memory, as read-only memoryviews, without a copy. It
        needs the server's unix socket, and uses one connection. A block is None if it is absent or damaged, has another
        shape, or cannot be mapped by the client; `fetch_blocks_into` reads it then, or returns the reason.

        The ``with`` block must not use the bytes for anything that outlives an error: at its end, the server confirms
        that it has kept the bytes. Raises Disconnected if it does not, Unsupported without a unix socket.
        """
        check_names(names)
        end = Deadline(self._deadline if deadline is None else deadline)
        pool = self._socket(end)
        if self._maps is None or pool is None:
            raise Unsupported(NOT_IN_PLACE)
        to = self._server_commands(end)
        with pool.lent() as connection:
            found = _carry_out(borrow(self._maps, to, names, shape, self._verify), connection, end)
            count_misses(self.misses, found.missed.values(), lambda: (len(view) for view in found.views if view))
            try:
                yield found.views
            except BaseException:
                connection.close_unless(over=False)  # this ends the tickets
                raise
            end = Deadline(self._deadline if deadline is None else deadline)
            _carry_out(give_back(found.tickets), connection, end)

    def prefix(
        self, names: Sequence[BlockName], *, pages_per_block: int, lease_ms: int = 0, deadline: float | None = None
    ) -> int:
        """Return the number of complete blocks from the first name on. They are leased for `lease_ms` milliseconds, 0
        for no lease.

        `pages_per_block` is the number of pages of a complete block. With several servers, later blocks may be leased
        as well. Raises Unsupported on a plain Redis.
        """
        check_integers(pages_per_block=pages_per_block, lease_ms=lease_ms)
        return self._do(self._calls.prefix(names, pages_per_block, lease_ms), deadline)

    def lengths(
        self,
        names: Sequence[BlockName],
        states: Sequence[StateName],
        *,
        pages_per_block: int,
        lease_ms: int = 0,
        deadline: float | None = None,
    ) -> list[int]:
        """Return the lengths at which a model with states or windows can continue, in ascending order: numbers of
        complete blocks from the first name on, with all states that need as many. With `lease_ms`, exactly the blocks
        and states of the longest are leased, and lengths that cannot be leased are omitted.

        A state is (req_id, page_id, need), complete if it is a complete block of any shape. Several states may have the
        same need. Raises Unsupported on a plain Redis.
        """
        check_integers(pages_per_block=pages_per_block, lease_ms=lease_ms)
        return self._do(self._calls.lengths(names, states, pages_per_block, lease_ms), deadline)

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int] = (), *, deadline: float | None = None) -> int:
        """Protect a request, or its blocks with these page ids, from eviction for `lease_ms` milliseconds. Return the
        number of leased blocks.

        A cluster has its own eviction policy: there, the call counts as a use of the blocks, and extends a shorter TTL
        to `lease_ms`. It needs page ids. Raises Unsupported without them, and on a plain Redis.
        """
        check_integers(lease_ms=lease_ms)
        return self._do(self._calls.lease(req_id, lease_ms, pages), deadline)

    def keep(
        self,
        keys: Sequence[bytes],
        seconds: int,
        *,
        tenant: str = "",
        tenants: int = 1,
        deadline: float | None = None,
    ) -> Kept:
        """Give values a lifetime: protect them from eviction for at least `seconds`, also after a restart of the
        server. The key of a page, `bytes(PageKey(...))`, stands for its block.

        With 0 `seconds`, the lifetimes of these values begin anew. The bytes count for `tenant`. If there are several
        `tenants`, each may keep that part of the server's limit.
        Raises Unsupported on a plain Redis and in a cluster, which has its own eviction policy.
        """
        check_keep(keys, seconds, tenant, tenants)
        return self._do(self._calls.keep(keys, seconds, tenant, tenants), deadline)

    # -- anything else ---------------------------------------------------------------------------------------------

    def ask(
        self, raw_commands: Sequence[RawCommand], *, gone: Any = RAISES, deadline: float | None = None
    ) -> list[Any]:
        """Send several commands in a pipeline. Return the decoded replies, or raise Refused for the first error reply.
        A command is a `RawCommand`, such as ``RawCommand(["GET", b"key"])``.

        Without `gone`, a command is sent only once, since after a broken connection the server may have executed it.
        With several servers, a command is sent to the server of its key, which is its second word. If `gone` is given,
        commands are repeated, and `gone` replaces the replies of servers that do not answer.
        """
        check_raw_commands(raw_commands)
        end = Deadline(self._deadline if deadline is None else deadline)
        if not raw_commands:
            return []
        if self._several:
            return present(self._do(self._several.calls.ask(raw_commands, gone is not RAISES), end.left()), gone)
        assert self._pool
        with self._pool.lent() as connection:
            return connection.ask(ask(raw_commands), end)

    def transaction(
        self,
        keys: Sequence[Word],
        raw_command: RawCommand,
        change: Callable[[Any], Sequence[RawCommand]],
        *,
        deadline: float | None = None,
    ) -> list[Any]:
        """Read and change keys in an optimistic transaction: watch `keys`, send `raw_command`, pass its reply to
        `change`, and run the commands that `change` returns in MULTI and EXEC. Return their decoded replies.

        It starts again if another client has changed one of `keys` in between. All keys must be on the same server.
        While a cluster is changing, the transaction is tried again, even if an earlier attempt may have been executed.
        """
        check_raw_commands([raw_command])
        end = Deadline(self._deadline if deadline is None else deadline)
        if self._pool:
            return self._transact(self._pool, keys, raw_command, change, end)
        assert self._several
        while True:
            node = self._do(self._several.calls.home(encoded(keys[0]) if keys else key_of(raw_command)), end.left())
            with self._several.attempt(node, end):
                part = end.part(node, self._several.peers.silence(end))
                return self._transact(self._several.connections(node), keys, raw_command, change, part)
            time.sleep(min(PAUSE, end.left()))

    def _transact(
        self,
        pool: PagePool,
        keys: Sequence[Word],
        raw_command: RawCommand,
        change: Callable[[Any], Sequence[RawCommand]],
        end: Deadline,
    ) -> list[Any]:
        with pool.lent() as connection:
            try:
                while True:
                    found = connection.ask(watch(keys, raw_command), end)
                    answers = connection.converse(commit(change(found)), end)
                    if answers is not None:
                        return answers
            except BaseException:
                connection.close_unless(over=False)  # otherwise the server would watch keys for the next request
                raise

    # -- doing -----------------------------------------------------------------------------------------------------

    def _do(self, call: Call[T] | Timed[T], deadline: float | None) -> T:
        with span(f"kvpage.client.{call.what}", client=True):
            return self._done(call, Deadline(self._deadline if deadline is None else deadline))

    def _done(self, call: Call[T] | Timed[T], end: Deadline) -> T:
        if not isinstance(call, Call):
            assert self._several
            return Nodes(self._several.peers).do(call(end), end)
        if not call.parts:
            return call.read([])
        to = self._server_commands(end)
        try:
            return self._done_by(to, call, end)
        except Refused as error:
            again, self.code = after_refusal(call.what, error, self.code)
            if not again:
                raise
        self._dialect = None
        return self._done_by(self._server_commands(end), call, end)

    def _done_by(self, to: BlobCommands, call: Call[T], end: Deadline) -> T:
        first, *rest = [call.ask(to, part) for part in call.parts]
        if not rest:
            return call.read([self._converse(first, end)])
        others: list[Future[Any]] = []
        try:
            others.extend(self._begun(request, end) for request in rest)
            answers = [self._converse(first, end)]
        finally:
            wait(others)  # they use the caller's buffers
        while others:
            answers.append(others.pop(0).result())  # removed first, as its error will refer to this frame
        return call.read(answers)

    def _server_commands(self, end: Deadline) -> BlobCommands:
        """Return the commands that the server supports. The first call asks the server; later calls return the same."""
        if self._dialect is None:
            self._dialect = self._converse(ask_dialect(self.code), end)
        return self._dialect

    def _begun(self, request: Request[T] | Dialogue[T], end: Deadline) -> Future[T]:
        try:
            return self._threads.submit(self._converse, request, end)
        except RuntimeError as error:  # a ThreadPoolExecutor refuses work after its shutdown
            raise Closed from error

    def _socket(self, end: Deadline) -> PagePool | None:
        """Return the pool of connections to the server's unix socket, None if the client cannot map its memory."""
        if self._maps is None:
            return None
        if self._maps.has_to_ask:
            self._maps.found_socket(self._converse(ASK_SOCKET, end))
        return self._maps.socket

    def _converse(self, request: Request[T] | Dialogue[T], end: Deadline) -> T:
        assert self._pool
        for _ in range(2):  # once more if the server has restarted
            socket = self._socket(end) if isinstance(request, Dialogue) else None
            if not self._maps or not socket or socket is self._pool or not isinstance(request, Dialogue):
                break
            try:
                with socket.lent() as connection:
                    return _carry_out(request, connection, end)
            except PageClientError as error:
                self._maps.lose_socket(socket)
                if isinstance(error, DeadlineExceeded):
                    raise
        with self._pool.lent() as connection:
            failures = 0
            while True:
                try:
                    if isinstance(request, Dialogue):
                        return _carry_out(request, connection, end)
                    answer = connection.ask(request, end)
                    break
                except Disconnected as error:
                    failures += 1
                    time.sleep(pause_before_retry(connection, failures, end, error))
        return request.finish(answer) if request.finish else answer


def _carry_out(dialogue: Dialogue[T], connection: PageConnection, end: Deadline) -> T:
    """Carry out a dialogue on a connection, and return its result. Raises as `PageConnection.ask`."""
    steps = dialogue.steps(connection)
    try:
        step = next(steps)
        while True:
            if isinstance(step, Meanwhile):
                step = steps.send(connection.converse_while(step.request, step.work, end))
            else:
                step = steps.send(connection.ask(step, end) if isinstance(step, Request) else step())
    except StopIteration as over:
        result: T = over.value
        return result
    except BaseException:
        connection.close_unless(over=False)  # otherwise the server would keep its tickets
        raise
