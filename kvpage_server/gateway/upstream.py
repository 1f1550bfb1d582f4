"""The cluster behind a gateway: calls of the client as steps of commands, and the errors when the cluster fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvpage_server.client import (
    AsyncPageClient,
    BadBuffer,
    BlockName,
    DeadlineExceeded,
    Disconnected,
    PageClientError,
    Refused,
    Unsupported,
    WrongReply,
)
from kvpage_server.client.cluster import commands
from kvpage_server.client.cluster.commands import (
    OPENING_SIZE,
    Command,
    block_key,
    get_opening,
    get_range,
    head_size,
    ranges_of_page,
    shape_of,
    simple,
)
from kvpage_server.client.cluster.plan import GONE, Failed, Plan, Timed, timed
from kvpage_server.client.cluster.store import ClusterCalls
from kvpage_server.client.cluster.topology import SCHEMES, Address
from kvpage_server.client.page import header_of, mismatch
from kvpage_server.client.wire.connection import Deadline
from kvpage_server.client.wire.reply import Answer
from kvpage_server.commands.context import Client
from kvpage_server.commands.steps import Steps
from kvpage_server.page import HEADER_SIZE, PageError, PageHeader, PageKey
from kvpage_server.resp import Raw, Reply, ReplyError, Wait
from kvpage_server.system import malloc

# -- Plans of a gateway in addition to those of `ClusterCalls`: values of any kind, unchanged --------------------------

Value = tuple[memoryview, ...]  # a string in one piece or two
NO_PAGE: Value = ()  # stands for a string under a page's key that is no page


@dataclass(frozen=True, slots=True)
class Standing:
    """A page's header, and its TTL in milliseconds."""

    header: PageHeader
    ttl_left_ms: int


@dataclass(frozen=True)
class Plans:
    """Plans of requests to a cluster. `AsyncPageClient.carry_out` of the client that has `calls` executes them."""

    calls: ClusterCalls

    @timed
    def ask(self, end: Deadline, commands: Sequence[Command]) -> Plan[list[Answer | Failed]]:
        """Return the replies to commands for one key each, Failed for reads that no node answered."""
        return (yield from self.calls.router.ask(commands, end))

    @timed
    def values(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[Value | None]]:
        """Return the values under pages' keys, as strings or in blocks."""
        names = [*dict.fromkeys((key.req_id, key.page) for key in keys)]
        asked = [*(simple(b"GET", bytes(key)) for key in keys), *map(get_opening, names)]
        answers = yield from self.calls.router.ask(asked, end)
        openings = dict(zip(names, answers[len(keys) :], strict=True))
        found: list[Value | None] = [
            (answer,) if isinstance(answer, memoryview) else None for answer in answers[: len(keys)]
        ]
        self._count_unavailable(answers[: len(keys)])
        wanted = {i: ranges for i, key in enumerate(keys) if (ranges := _ranges(key, openings[key.req_id, key.page]))}
        parts = [
            get_range(block_key((keys[i].req_id, keys[i].page)), *part) for i, both in wanted.items() for part in both
        ]
        pieces = yield from self.calls.router.ask(parts, end)
        for i, header, body in zip(wanted, pieces[::2], pieces[1::2], strict=True):
            found[i] = None
            if isinstance(header, memoryview) and isinstance(body, memoryview):
                found[i] = header, body
            self._count_unavailable([header] if isinstance(header, Failed) else [body])
        return found

    @timed
    def of_keys(self, end: Deadline, keys: Sequence[PageKey | bytes]) -> Plan[list[Value | None]]:
        """Return the values of keys. Pages are found as strings or in blocks."""
        pages = [key for key in keys if isinstance(key, PageKey)]
        values = iter((yield from self.values(pages)(end)) if pages else ())
        others = [simple(b"GET", key) for key in keys if not isinstance(key, PageKey)]
        answers = iter((yield from self.calls.router.ask(others, end)) if others else ())
        found: list[Value | None] = []
        for key in keys:
            if isinstance(key, PageKey):
                found.append(next(values))
            else:
                answer = next(answers)
                found.append((answer,) if isinstance(answer, memoryview) else None)
        return found

    @timed
    def pages(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[Value | None]]:
        """Return pages' bodies; None for absent and damaged ones."""
        values = yield from self.values(keys)(end)
        found: list[Value | None] = []
        for key, value in zip(keys, values, strict=True):
            header = header_of(key, value[0]) if value else None
            if value is None:
                found.append(None)
            elif header is None:
                self.calls.misses["header"] += 1
                found.append(None if len(value) > 1 else NO_PAGE)
            else:
                body = value[1] if len(value) > 1 else value[0][HEADER_SIZE:]
                reason = mismatch(header, body, verify=self.calls.verify)
                self.calls.misses.update([reason] if reason else [])
                found.append(None if reason else (body,))
        return found

    @timed
    def blocks(self, end: Deadline, names: Sequence[BlockName]) -> Plan[list[Value | None]]:
        """Return blocks' bodies; None for absent and damaged ones."""
        answers = yield from self.calls.router.ask([simple(b"GET", block_key(name)) for name in names], end)
        self._count_unavailable(answers)
        return [self._body(name, answer) for name, answer in zip(names, answers, strict=True)]

    @timed
    def standing(self, end: Deadline, key: PageKey) -> Plan[Standing | Value | None]:
        """Return the known metadata of a page; None if it is absent."""
        name = key.req_id, key.page
        keys = bytes(key), block_key(name)
        asked = [get_opening(name), get_range(keys[0], 0, HEADER_SIZE - 1), *(simple(b"PTTL", one) for one in keys)]
        opening, header, alone, in_block = yield from self.calls.router.ask(asked, end)
        ranges = _ranges(key, opening)
        if ranges:
            [header] = yield from self.calls.router.ask([get_range(keys[1], *ranges[0])], end)
        ttl_left = in_block if ranges else alone
        if not header or isinstance(header, Failed) or isinstance(ttl_left, Failed):
            return None
        known = header_of(key, header)
        return Standing(known, ttl_left) if known else NO_PAGE

    @timed
    def in_block(self, end: Deadline, key: PageKey) -> Plan[bool]:
        """Return whether a page is in a block."""
        [opening] = yield from self.calls.router.ask([get_opening((key.req_id, key.page))], end)
        return _ranges(key, opening) is not None

    def _body(self, name: BlockName, value: Answer | Failed) -> Value | None:
        if not isinstance(value, memoryview):
            return None
        shape = shape_of(value[:OPENING_SIZE])
        before = head_size(shape) if shape else 0
        if shape is None or len(value) != before + shape.nbytes:
            reason: str | None = "header"
        else:
            reason = commands.mismatch(name[1], shape, value[:before], value[before:], verify=self.calls.verify)
        if reason:
            self.calls.misses[reason] += 1
            return None
        return (value[before:],)

    def _count_unavailable(self, answers: Sequence[Answer | Failed]) -> None:
        self.calls.misses[GONE] += sum(isinstance(answer, Failed) for answer in answers)


def _ranges(key: PageKey, opening: Answer | Failed) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the position of a page in the block with this opening, or None."""
    shape = shape_of(opening) if isinstance(opening, memoryview) else None
    return ranges_of_page(key, shape) if shape else None


T = TypeVar("T")
U = TypeVar("U")

logger = logging.getLogger("kvpage")

_CALLS = 64  # concurrent calls; each may use a connection to every node
FIRST, MOST = 8, 256  # items that are requested at once: at first, and at most
_KEPT = 64 * 1024**2  # bytes of freed memory that glibc keeps
_OUR_RIGHTS = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})
_OF_THE_CLUSTER = frozenset({"NOAUTH", "WRONGPASS", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"})


def keep_memory() -> None:
    """Make glibc keep freed memory for the next allocations.

    Fresh memory from the system costs a third of a second of CPU time per GB.
    """
    malloc.tune({malloc.MMAP_THRESHOLD: _KEPT // 2, malloc.TRIM_THRESHOLD: _KEPT})


def cluster_url(nodes: str) -> str:
    """Return the URL for `cluster-nodes`, which is a URL or a list of nodes. Raises ValueError."""
    url = nodes if "://" in nodes else f"{next(iter(SCHEMES))}://{nodes}"
    Address(url)
    return url


class _Counted:
    """Bytes that count against a client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.nbytes = 0

    def set(self, nbytes: int) -> None:
        self.client.keep(nbytes - self.nbytes)
        self.nbytes = nbytes


class _PendingBlocks(_Counted):
    """The batch of values that was requested. It counts with its expected size until it has arrived."""

    task: asyncio.Task[list[Value | None]] | None = None
    count = 0  # number of values

    def begin(self, task: asyncio.Task[list[Value | None]], count: int, nbytes: int) -> None:
        self.task, self.count = task, count
        self.set(nbytes)
        task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[list[Value | None]]) -> None:
        if task is self.task and not task.cancelled() and not task.exception():
            self.set(sum(map(_size, task.result())))

    def end(self) -> None:
        """End the request, because its values were taken or are not needed any more."""
        if self.task is not None:
            _cancel(self.task)
        self.task = None
        self.set(0)


class Upstream:
    """The cluster behind a gateway, for one event loop."""

    def __init__(self, nodes: str) -> None:
        """Create the client of a cluster. `nodes` is the value of `cluster-nodes`. Raises ValueError."""
        self.client = AsyncPageClient(cluster_url(nodes))
        self.plans = Plans(self.client.cluster)
        self._turns = asyncio.Semaphore(_CALLS)
        self._failing = ""  # the last error, if the last call failed
        self._usual_size = 1  # bytes of a value in the last batch

    async def begin(self) -> None:
        """Log a warning if the cluster cannot be used. Commands fail until it can."""
        try:
            await self._done(self.plans.ask([simple(b"EXISTS", b"kv:")]))
        except ReplyError as error:
            logger.warning("the cluster can't be used yet: %s", error)

    def do(self, plan: Timed[T]) -> Steps[T]:
        """Carry out a plan, and return the steps until it is done, which return its result. Raises ReplyError."""
        return waited_for(self.start(plan))

    def each(self, items: Sequence[T], plan: Callable[[Sequence[T]], Timed[list[U]]]) -> Steps[list[U]]:
        """Carry out a plan for all items, MOST at a time, in steps, and return the results. Raises ReplyError."""
        found: list[U] = []
        for start in range(0, len(items), MOST):
            found += yield from self.do(plan(items[start : start + MOST]))
        return found

    def fetch(
        self,
        client: Client,
        items: Sequence[T],
        plan: Callable[[Sequence[T]], Timed[list[Value | None]]],
        encode: Callable[[Value | None], Reply],
    ) -> Iterator[Reply]:
        """Yield an array of the values of all items, in steps.

        The next values are fetched while the current ones are sent, unless the server is tight. Values count against
        the client until they are yielded. Raises ReplyError if the first values can't be fetched. Later ones count as
        missing.
        """
        coming, here, at = _PendingBlocks(client), _Counted(client), 0
        try:
            while at < len(items):
                if coming.task is None:
                    self._begin(coming, items, at, plan)
                assert coming.task is not None
                try:
                    found = yield from waited_for(coming.task)
                except ReplyError:
                    if not at:
                        raise
                    found = [None] * coming.count
                    self.plans.calls.misses[GONE] += coming.count
                if not at:
                    yield Raw(b"*%d\r\n" % len(items))
                at += coming.count
                here.set(sum(map(_size, found)))
                self._usual_size = max(here.nbytes // len(found), 1)
                coming.end()
                if at < len(items) and not client.server.is_tight:
                    self._begin(coming, items, at, plan)
                for i, value in enumerate(found):
                    found[i] = None
                    here.set(here.nbytes - _size(value))
                    yield encode(value)
        finally:
            coming.end()
            here.set(0)

    def _begin(
        self,
        coming: _PendingBlocks,
        items: Sequence[T],
        at: int,
        plan: Callable[[Sequence[T]], Timed[list[Value | None]]],
    ) -> None:
        """Request the next values, as many as should fit into memory."""
        room = coming.client.server.found_at_once // self._usual_size
        some = items[at : at + min(max(room, 1), MOST if at else FIRST)]
        coming.begin(self.start(plan(some)), len(some), self._usual_size * len(some))

    def start(self, plan: Timed[T]) -> asyncio.Task[T]:
        """Carry out a plan in a task, and return the task. The task raises ReplyError."""
        return asyncio.get_running_loop().create_task(self._done(plan))

    async def _done(self, plan: Timed[T]) -> T:
        """Return the result of a plan. Raises ReplyError."""
        try:
            async with self._turns:
                found = await self.client.carry_out(plan)
        except (BadBuffer, PageError) as error:
            raise ReplyError(f"ERR {error}") from None
        except PageClientError as error:
            raise self._refusal(error) from None
        self._note("")
        return found

    def _refusal(self, error: PageClientError) -> ReplyError:
        """Return the error that a client of the gateway gets.

        No frame through which it is raised may have it in a variable, because that is a reference cycle.
        """
        refusal = _refusal_of(error)
        if _is_of_the_cluster(error):
            self._note(str(refusal))
        elif isinstance(error, Refused):
            self._note("")
        return refusal

    def _note(self, failing: str) -> None:
        """Log when the cluster begins to fail, and when it works again."""
        if failing and not self._failing:
            logger.warning("the cluster fails: %s", failing)
        elif self._failing and not failing:
            logger.warning("the cluster answers again")
        self._failing = failing


def _is_of_the_cluster(error: PageClientError) -> bool:
    """Return whether the cluster has failed, and not only one command."""
    if isinstance(error, Refused):
        return error.code in _OF_THE_CLUSTER
    return isinstance(error, Disconnected | DeadlineExceeded | WrongReply)


def _refusal_of(error: PageClientError) -> ReplyError:
    """Return the error that a client of the gateway gets."""
    if isinstance(error, Refused) and error.code in _OUR_RIGHTS:
        return ReplyError(f"ERR the cluster refuses this gateway's user: {error}")
    if isinstance(error, Refused):
        return ReplyError(str(error))
    if isinstance(error, Disconnected | DeadlineExceeded):
        return ReplyError(f"CLUSTERDOWN {error}")
    return ReplyError(f"ERR {error}" if isinstance(error, Unsupported) else f"ERR the cluster: {error}")


def _size(value: Value | None) -> int:
    return sum(map(len, value or ()))


def waited_for(task: asyncio.Future[T]) -> Steps[T]:
    """Wait for a task, in steps, and return its result or raise its exception.

    The task is cancelled if the steps end before it is done.
    """
    try:
        while not task.done():
            yield Wait(partial(_when_done, task))
        return task.result()
    finally:
        _cancel(task)
        del task  # its error refers to this frame


def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.get_loop().is_closed():  # it is closed when the gateway has ended
        task.cancel()


def _when_done(task: asyncio.Future[Any], then: Callable[[], None]) -> None:
    task.add_done_callback(lambda _: then())
