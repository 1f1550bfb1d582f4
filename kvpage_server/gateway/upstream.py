"""The cluster behind a gateway: calls of the client as steps of commands, and the errors when the cluster fails."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from kvpage_server.client.cluster.commands import (
    Command,
    block_key,
    checked_block,
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
from kvpage_server.page import HEADER_SIZE, BlockShape, PageError, PageHeader, PageKey
from kvpage_server.resp import Raw, Reply, ReplyError, Wait
from kvpage_server.system.process import MMAP_THRESHOLD, TRIM_THRESHOLD, tune_malloc

# -- Plans of a gateway, in addition to those of `ClusterCalls`: reads of strings, pages and blocks without copies -----

Value = tuple[memoryview, ...]  # the bytes of a value, in one piece or two
NO_PAGE: Value = ()  # in place of a string under a page's key that is no page


@dataclass(frozen=True, slots=True)
class PageMetadata:
    """A page's header, and the remaining milliseconds of its TTL."""

    header: PageHeader
    ttl_left_ms: int  # -1 without a TTL, as in PTTL


@dataclass(frozen=True)
class Plans:
    """Plans of requests to a cluster. `AsyncPageClient.carry_out` of the client that has `calls` executes them.

    A plan for several keys returns a result for each, in their order. `unavailable` is called with the error of a read
    that no node answered, and whose result is missing among others.
    """

    calls: ClusterCalls
    unavailable: Callable[[PageClientError], object]

    @timed
    def ask(self, end: Deadline, commands: Sequence[Command]) -> Plan[list[Answer | Failed]]:
        """Return the replies to commands with one key each; Failed for a read that no node answered."""
        return (yield from self.calls.router.ask(commands, end))

    @timed
    def values(self, end: Deadline, keys: Sequence[PageKey], skips_types: bool = False) -> Plan[list[Value | None]]:
        """Return pages with their headers, as strings or as header and body in their block; None for absent ones, and
        with `skips_types` for values of other types than strings. Otherwise those raise Refused.
        """
        names = [*dict.fromkeys((key.req_id, key.page) for key in keys)]
        openings = (replace(get_opening(name), skips_types=skips_types) for name in names)
        asked = [*(_get(bytes(key), skips_types) for key in keys), *openings]
        answers = yield from self.calls.router.ask(asked, end)
        shapes = dict(zip(names, map(shape_of, answers[len(keys) :]), strict=True))
        found: list[Value | None] = [
            (answer,) if isinstance(answer, memoryview) else None for answer in answers[: len(keys)]
        ]
        self._count_unavailable(answers[: len(keys)])
        spans = {
            i: ranges for i, key in enumerate(keys) if (ranges := ranges_of_page(key, shapes[key.req_id, key.page]))
        }
        parts = [
            get_range(block_key((keys[i].req_id, keys[i].page)), *part) for i, both in spans.items() for part in both
        ]
        pieces = yield from self.calls.router.ask(parts, end)
        for i, header, body in zip(spans, pieces[::2], pieces[1::2], strict=True):
            found[i] = None
            if isinstance(header, memoryview) and isinstance(body, memoryview):
                found[i] = header, body
            self._count_unavailable([header] if isinstance(header, Failed) else [body])
        return found

    @timed
    def strings_and_pages(
        self, end: Deadline, keys: Sequence[PageKey | bytes], skips_types: bool = False
    ) -> Plan[list[Value | None]]:
        """Return the values of keys, as `values`. A page may be a string, or a part of its block's string."""
        pages = [key for key in keys if isinstance(key, PageKey)]
        values = iter((yield from self.values(pages, skips_types)(end)) if pages else ())
        others = [_get(key, skips_types) for key in keys if not isinstance(key, PageKey)]
        answers = iter((yield from self.calls.router.ask(others, end)) if others else ())
        found: list[Value | None] = []
        for key in keys:
            if isinstance(key, PageKey):
                found.append(next(values))
            else:
                answer = next(answers)
                self._count_unavailable([answer])
                found.append((answer,) if isinstance(answer, memoryview) else None)
        return found

    @timed
    def pages(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[Value | None]]:
        """Return pages' bodies; None for absent and corrupt ones, NO_PAGE for a string that is no page.

        Counts the reasons of misses.
        """
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
    def blocks(
        self, end: Deadline, names: Sequence[BlockName], expected: BlockShape | None
    ) -> Plan[list[Value | None]]:
        """Return blocks' bodies; None for absent and corrupt ones, no byte for blocks that do not have the expected
        shape. Counts the reasons of misses.
        """
        answers = yield from self.calls.router.ask([simple(b"GET", block_key(name)) for name in names], end)
        self._count_unavailable(answers)
        return [self._body(name, answer, expected) for name, answer in zip(names, answers, strict=True)]

    @timed
    def metadata(self, end: Deadline, key: PageKey) -> Plan[PageMetadata | Value | None]:
        """Return the header and TTL of a page; NO_PAGE if its key has another string, None if it is absent."""
        name = key.req_id, key.page
        keys = bytes(key), block_key(name)
        asked = [get_opening(name), get_range(keys[0], 0, HEADER_SIZE - 1), *(simple(b"PTTL", one) for one in keys)]
        opening, header, alone, in_block = yield from self.calls.router.ask(asked, end)
        ranges = ranges_of_page(key, shape_of(opening))
        if ranges:
            [header] = yield from self.calls.router.ask([get_range(keys[1], *ranges[0])], end)
        ttl_left = in_block if ranges else alone
        if not header or isinstance(header, Failed) or isinstance(ttl_left, Failed):
            return None
        known = header_of(key, header)
        return PageMetadata(known, ttl_left) if known else NO_PAGE

    @timed
    def in_block(self, end: Deadline, key: PageKey) -> Plan[bool]:
        """Return whether a page is a part of its block's string."""
        [opening] = yield from self.calls.router.ask([get_opening((key.req_id, key.page))], end)
        return ranges_of_page(key, shape_of(opening)) is not None

    def _body(self, name: BlockName, value: Answer | Failed, expected: BlockShape | None) -> Value | None:
        """Return the body in a block's string; None if the string is absent or corrupt, no byte if the block has
        another shape than the expected one. The last two are counted.
        """
        if not isinstance(value, memoryview):
            return None
        shape, reason = checked_block(name[1], value, verify=self.calls.verify)
        if reason:
            self.calls.misses[reason] += 1
            return None
        assert shape is not None
        if expected is not None and shape != expected:
            self.calls.misses["shape"] += 1
            return (memoryview(b""),)
        return (value[head_size(shape) :],)

    def _count_unavailable(self, answers: Sequence[Answer | Failed]) -> None:
        for failed in (answer for answer in answers if isinstance(answer, Failed)):
            self.calls.misses[GONE] += 1
            self.unavailable(failed.error)


def _get(key: bytes, skips_types: bool) -> Command:
    return replace(simple(b"GET", key), skips_types=skips_types)


T = TypeVar("T")
U = TypeVar("U")

logger = logging.getLogger("kvpage")

_CONCURRENT_CALLS = 64  # each may use a connection to every node
_UNKNOWN_SIZE = 1 << 20  # bytes of a value, before any has arrived
FIRST, MOST = 8, 256  # items of a request: in the first one of a reply, and at most
_RECOVERY_SECONDS = 10.0  # without a failure, after which a cluster answers again; more than the deadline of a call
_KEPT_BYTES = 64 * 1024**2  # of freed memory, which glibc keeps
_ACL_ERROR_CODES = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})
_CLUSTER_FAILURE_CODES = frozenset({"NOAUTH", "WRONGPASS", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"})


def keep_memory() -> None:
    """Configure glibc to keep freed memory for the next allocations.

    The page faults of new memory cost a third of a second of CPU time per GB.
    """
    tune_malloc({MMAP_THRESHOLD: _KEPT_BYTES // 2, TRIM_THRESHOLD: _KEPT_BYTES})


def cluster_url(nodes: str) -> str:
    """Return the URL for `cluster-nodes`, which is a URL or a list of nodes. Raises ValueError."""
    url = nodes if "://" in nodes else f"{next(iter(SCHEMES))}://{nodes}"
    Address(url)
    return url


class _ClientBytes:
    """Bytes that count against a client's memory limit."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.nbytes = 0

    def set(self, nbytes: int) -> None:
        """Count `nbytes` instead of the bytes so far."""
        self.client.keep(nbytes - self.nbytes)
        self.nbytes = nbytes


class _PendingBlocks(_ClientBytes):
    """The next values of a reply, which were requested. They count with their expected size until they have arrived.
    `expect` is called with each change of the expected bytes that have not arrived.
    """

    task: asyncio.Task[list[Value | None]] | None = None
    count = 0  # number of values

    def __init__(self, client: Client, expect: Callable[[int], None]) -> None:
        super().__init__(client)
        self._expect = expect
        self._expected = 0

    def begin(self, task: asyncio.Task[list[Value | None]], count: int, nbytes: int) -> None:
        """Begin with the request in `task` for `count` values, of `nbytes` bytes as estimated."""
        self.task, self.count = task, count
        self._set_expected(nbytes)
        self.set(nbytes)
        task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[list[Value | None]]) -> None:
        if task is self.task:
            failed = task.cancelled() or task.exception() is not None
            self._set_expected(0)
            self.set(0 if failed else sum(map(_size, task.result())))

    def _set_expected(self, nbytes: int) -> None:
        self._expect(nbytes - self._expected)
        self._expected = nbytes

    def end(self) -> None:
        """Forget the values, and cancel the request if it has not ended."""
        if self.task is not None:
            _cancel(self.task)
        self.task = None
        self._set_expected(0)
        self.set(0)


class Upstream:
    """The connection to the cluster behind a gateway, for one event loop."""

    def __init__(self, nodes: str) -> None:
        """Create the client of a cluster. `nodes` is the value of `cluster-nodes`. Raises ValueError."""
        self.client = AsyncPageClient(cluster_url(nodes))
        self.plans = Plans(self.client.cluster, self._report_error)
        self._turns = asyncio.Semaphore(_CONCURRENT_CALLS)
        self._is_failing = False  # whether the log says that the cluster fails
        self._recovery: asyncio.TimerHandle | None = None  # logs the end of a failure
        self._usual_size = _UNKNOWN_SIZE  # bytes of a value in recent batches
        self._expected = 0  # bytes that were requested for long replies and have not arrived, as estimated
        self._waiting: list[Callable[[], None]] = []  # replies that request nothing while too much is expected

    async def begin(self) -> None:
        """Send a command to the cluster, and log a warning if that fails. Commands of clients try again themselves."""
        try:
            await self._done(self.plans.ask([simple(b"EXISTS", b"kv:")]))
        except ReplyError as error:
            logger.warning("the cluster can't be used yet: %s", error)

    def do(self, plan: Timed[T]) -> Steps[T]:
        """Start a plan. Return steps that wait for its end and return its result. The steps raise ReplyError."""
        return wait_for(self.start(plan))

    def each(self, items: Sequence[T], plan: Callable[[Sequence[T]], Timed[list[U]]]) -> Steps[list[U]]:
        """Carry out a plan for all items, MOST at a time, in steps. Return the results in order. Raises ReplyError."""
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
        """Yield the reply to a read of several items, in steps: an array with `encode(value)` for each item.

        The next values are fetched while the current ones are sent, unless the server is short of memory. Values count
        against the client's memory until they are yielded. Raises ReplyError if the first request fails. When a later
        one fails, its items are missing, because the reply has begun already.
        """
        pending, here, at = _PendingBlocks(client, self._expect), _ClientBytes(client), 0
        most = client.server.config.client_memory // 4 or sys.maxsize
        try:
            while at < len(items):
                if pending.task is None:
                    while self._expected > most:
                        yield Wait(self._waiting.append)
                    self._begin(pending, items, at, plan)
                assert pending.task is not None
                try:
                    found = yield from wait_for(pending.task)
                except ReplyError:
                    if not at:
                        raise
                    found = [None] * pending.count
                    self.plans.calls.misses[GONE] += pending.count
                if not at:
                    yield Raw(b"*%d\r\n" % len(items))
                at += pending.count
                here.set(sum(map(_size, found)))
                self._usual_size = max(here.nbytes // len(found), self._usual_size * 7 // 8, 1)
                pending.end()
                if at < len(items) and 2 * here.nbytes <= client.server.lookup_bytes and self._expected <= most:
                    self._begin(pending, items, at, plan)
                for i, value in enumerate(found):
                    found[i] = None
                    here.set(here.nbytes - _size(value))
                    yield encode(value)
        finally:
            pending.end()
            here.set(0)

    def _expect(self, change: int) -> None:
        """Change the number of expected bytes, and let the waiting replies try again when it falls."""
        self._expected += change
        if change < 0:
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()

    def _begin(
        self,
        pending: _PendingBlocks,
        items: Sequence[T],
        at: int,
        plan: Callable[[Sequence[T]], Timed[list[Value | None]]],
    ) -> None:
        """Request the next values from item `at` on, as many as should fit into memory by the size of the last ones."""
        most = pending.client.server.lookup_bytes
        some = items[at : at + min(max(most // self._usual_size, 1), MOST if at else FIRST)]
        pending.begin(self.start(plan(some)), len(some), min(self._usual_size * len(some), most))

    def start(self, plan: Timed[T]) -> asyncio.Task[T]:
        """Start a plan, and return its task. The task raises ReplyError."""
        return asyncio.get_running_loop().create_task(self._done(plan))

    async def _done(self, plan: Timed[T]) -> T:
        """Carry out a plan, and return its result. Raises ReplyError. Logs the start and the end of a cluster's
        failure.
        """
        try:
            async with self._turns:
                found = await self.client.carry_out(plan)
        except (BadBuffer, PageError) as error:
            raise ReplyError(f"ERR {error}") from None
        except PageClientError as error:
            raise self._report_error(error) from None
        self._log_success()
        return found

    def _report_error(self, error: PageClientError) -> ReplyError:
        """Return the error reply for a client of the gateway, and log it if the cluster has begun to fail.

        The caller raises it without a variable for it: a frame that has the error in a variable, and is in its
        traceback, would be a reference cycle.
        """
        refusal = _reply_error(error)
        if _is_cluster_failure(error):
            self._log_failure(str(refusal))
        elif isinstance(error, Refused):
            self._log_success()
        return refusal

    def _log_failure(self, error: str) -> None:
        """Log the first failure of the cluster. While one node fails, calls to the others succeed."""
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None
        if not self._is_failing:
            self._is_failing = True
            logger.warning("the cluster fails: %s", error)

    def _log_success(self) -> None:
        """Log that the cluster answers again if no call fails for `_RECOVERY_SECONDS` from now on."""
        if self._is_failing and self._recovery is None:
            self._recovery = asyncio.get_running_loop().call_later(_RECOVERY_SECONDS, self._log_recovery)

    def _log_recovery(self) -> None:
        self._is_failing, self._recovery = False, None
        logger.warning("the cluster answers again")


def _is_cluster_failure(error: PageClientError) -> bool:
    """Return whether an error concerns all commands, such as a lost connection, and not only its own."""
    if isinstance(error, Refused):
        return error.code in _CLUSTER_FAILURE_CODES
    return isinstance(error, Disconnected | DeadlineExceeded | WrongReply)


def _reply_error(error: PageClientError) -> ReplyError:
    """Return the error reply for a client of the gateway."""
    if isinstance(error, Refused) and error.code in _ACL_ERROR_CODES:
        return ReplyError(f"ERR the cluster refuses this gateway's user: {error}")
    if isinstance(error, Refused):
        return ReplyError(str(error))
    if isinstance(error, Disconnected | DeadlineExceeded):
        return ReplyError(f"CLUSTERDOWN {error}")
    return ReplyError(f"ERR {error}" if isinstance(error, Unsupported) else f"ERR the cluster: {error}")


def _size(value: Value | None) -> int:
    return sum(map(len, value or ()))


def wait_for(task: asyncio.Future[T]) -> Steps[T]:
    """Wait for a task, in steps. Return its result, or raise its exception.

    Closing the steps before the end cancels the task.
    """
    try:
        while not task.done():
            yield Wait(partial(_when_done, task))
        return task.result()
    finally:
        _cancel(task)
        del task  # break the reference cycle: the task's error has this frame in its traceback


def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.get_loop().is_closed():  # it is closed when the gateway has ended
        task.cancel()


def _when_done(task: asyncio.Future[Any], then: Callable[[], None]) -> None:
    task.add_done_callback(lambda _: then())
